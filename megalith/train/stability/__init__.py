"""How a run notices that its numbers have left their bands, finds out why, and goes back to a good state."""
