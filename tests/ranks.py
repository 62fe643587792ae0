"""Ranks for tests: forked from this process, which computes on one thread."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megalith.prove import worlds
from tests.patience import PATIENCE

torch.set_num_threads(1)  # a forked child hangs in OpenMP if its parent ever used more than one thread


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """`worlds.run_ranks`, with the patience of a test."""
    return worlds.run_ranks(function, ranks, *args, timeout=PATIENCE)


def everyone() -> dist.ProcessGroup:
    """The group of all ranks, in one of them."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD
