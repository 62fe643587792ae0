"""A user's own parts in a rank: they are imported, inserted, and tested before the first step."""
