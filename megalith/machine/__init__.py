"""One machine: its GPUs, memory, network interfaces and health, whether it may join a run; processes that die with their parent."""
