"""A plan applied to plain modules: splits, gathers, reductions and the execution of a pipeline program."""
