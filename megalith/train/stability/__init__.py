"""Training stability: detect numbers outside their usual bands, find the cause, and return to a good state."""
