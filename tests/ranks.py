"""Ranks for tests: forked from this process, which computes on one thread."""

from collections.abc import Callable
from typing import Any

import torch

from megalith.prove import worlds
from tests.patience import PATIENCE

torch.set_num_threads(1)  # a forked child hangs in OpenMP if its parent ever used more than one thread


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """`worlds.run_ranks`, with the patience of a test."""
    return worlds.run_ranks(function, ranks, *args, timeout=PATIENCE)
