"""What a plan costs: blocks are traced, and the trace is turned into memory and time on a given cluster."""
