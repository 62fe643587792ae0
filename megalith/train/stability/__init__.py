"""Detection of numbers outside their bands, search for the cause, and return to a good state."""
