"""Code shared by the commands: their arguments, the run they name, its ranks, and their output."""
