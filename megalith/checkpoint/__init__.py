"""A run's state on disk. State saved under one plan loads bitwise equal under any other, and loading executes no code from a
file."""
