"""One rank of a dry run in a process of its own, since a process can be a rank of one fake world only."""

import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import torch

from megalith.prove import dryrun
from megalith.prove.dryrun import RankCounts
from megalith.spec.run import RunSpec
from tests.ranks import run_ranks

torch.set_num_threads(1)


def dry(spec: RunSpec, rank: int) -> RankCounts:
    """Return the counts of rank `rank` in a dry run. Raises RuntimeError with the child's traceback."""
    return in_a_child(lambda: dryrun.dryrun(spec, rank=rank).counted)


def real(spec: RunSpec) -> list[RankCounts]:
    """Return the counts of all ranks in a real run."""
    return run_ranks(_count, spec.plan.ranks, spec)


def _count(rank: int, spec: RunSpec) -> RankCounts:
    return dryrun.count(spec, [dryrun.single_documents(spec)] * spec.microbatches, fake_tensors=False)


def in_a_child(function: Callable[[], Any]) -> Any:
    """Call `function` in a process forked from this one. Raises RuntimeError with its traceback.

    A backward of fake tensors starts a thread, after which a process and those forked from it can run no other backward.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # create the thread pool now: the threads of backward would all do so at once and abort
        try:
            outcome = function(), ""
        except BaseException:
            outcome = None, traceback.format_exc()
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(outcome, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found, error = pickle.load(pipe)
    os.waitpid(child, 0)
    if error:
        raise RuntimeError(error)
    return found
