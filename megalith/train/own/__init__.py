"""A user's own parts in a rank: imported for its run, put in their places, and tried before the first step."""
