"""A run's state on disk: saved by any plan, loaded by any plan, bit for bit, without ever executing code from a file."""
