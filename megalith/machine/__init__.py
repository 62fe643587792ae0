"""The state of one machine: its GPUs, its health, and whether it may join a run."""
