"""The control loop of a live run: observe its ranks and nodes, decide, and carry out commands."""
