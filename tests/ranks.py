"""Ranks for tests, forked from this process, which computes with one thread."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megalith.prove import worlds
from tests.patience import PATIENCE

torch.set_num_threads(1)  # a forked child hangs in OpenMP if its parent has used more than one thread


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Call `worlds.run_ranks` with the timeout of tests."""
    return worlds.run_ranks(function, ranks, *args, timeout=PATIENCE)


def everyone() -> dist.ProcessGroup:
    """Return the group of all ranks, when called on one of them."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD
