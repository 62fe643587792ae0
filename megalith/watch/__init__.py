"""A live page of runs: it follows their logs, compares measurements with predictions, and names slow ranks. No torch."""
