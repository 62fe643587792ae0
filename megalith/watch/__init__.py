"""A live page of runs: follows their logs, predicts beside what was measured, says which rank is to blame. No torch."""
