"""The live control loop: what is seen of a run's ranks and nodes, what is decided, what is ordered."""
