"""The optimizers' update rules, one per module, and the learning-rate schedule."""
