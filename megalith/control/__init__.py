"""The live control loop: observe a run's ranks and nodes, decide, and give commands."""
