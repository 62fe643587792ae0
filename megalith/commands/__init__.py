"""Each command is one file: its arguments, its work and its output. `megalith.cli` combines the commands into the program.

Modules import slow packages in the functions that need them, because `megalith --help` imports all commands.
"""
