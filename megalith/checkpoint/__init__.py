"""A run's state on disk: saved under any plan, loaded under any other, bitwise equal, without executing code from a file."""
