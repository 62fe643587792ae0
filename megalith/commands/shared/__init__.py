"""Shared by the commands: their arguments, the run they name, its ranks, and what they print."""
