"""Published measurements of training speed and memory, each with its source, and how their rows are expressed as workloads."""
