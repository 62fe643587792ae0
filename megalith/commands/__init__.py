"""Each command is one file: its arguments, its work and its output. `megalith.cli` combines them into the program.

Modules import at their top only what is quick, and the rest in the functions that need it: `megalith --help` reads all of them.
"""
