"""One machine: its GPUs, its network interfaces, its health, whether it may join a run, and processes that die with their parent."""
