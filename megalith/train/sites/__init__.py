"""Training across sites: the arithmetic of a merge, and the messages that sites exchange for it."""
