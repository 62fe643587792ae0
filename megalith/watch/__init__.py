"""A live page of runs, which follows their logs, compares measurements with predictions, and names slow ranks. No torch."""
