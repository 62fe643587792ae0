"""Offloading of the optimizer's state and the master weights: to the host's memory, or to a file on its disk."""
