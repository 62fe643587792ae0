"""The optimizer's state and the master weights away from the device: in the host's memory, or in a file on its disk."""
