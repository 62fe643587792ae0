"""A live page of runs. It follows the runs' logs, compares measurements with predictions, and names slow ranks. No torch."""
