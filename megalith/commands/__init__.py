"""One file a command: its arguments, its work and what it prints. `megalith.cli` makes the program of them.

Modules import at their top only what is quick, and the rest in the functions that need it: `megalith --help` reads all of them.
"""
