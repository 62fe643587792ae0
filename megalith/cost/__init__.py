"""Cost of a plan: blocks are traced, and the trace is turned into memory and time on a given cluster."""
