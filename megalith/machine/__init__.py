"""One machine: its GPUs, memory, network interfaces and health, and its admission to a run; processes that die with their parent."""
