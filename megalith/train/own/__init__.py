"""A user's own classes and functions in a rank: their import, insertion, and test before the first step."""
