"""Ranks for tests: forked from this process, which computes on one thread."""

import torch

from megalith.train.worlds import run_ranks

__all__ = ["run_ranks"]

torch.set_num_threads(1)  # a forked child hangs in OpenMP if its parent ever used more than one thread
