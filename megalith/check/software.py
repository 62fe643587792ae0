"""Rules about what is installed: the compiler, and packages that are extras."""

from importlib.metadata import version
from importlib.util import find_spec

from megalith.check.case import Case, Found, error

COMPILES_COLLECTIVES = (2, 15)
"""The first PyTorch that is shown to compile blocks that are split among ranks to the right gradients; 2.11 was seen not to."""


def journeys_can_hide(case: Case) -> Found:
    """What travels in pieces is started and awaited between products, which a compiler would have to see through."""
    plan = case.plan
    if plan.overlap_tensor > 1 and plan.compile:
        reason = "with compile = true, whose blocks are compiled whole"
        yield error("plan.overlap_tensor", plan.overlap_tensor, reason, "Use one or the other.")


def compiler_keeps_collectives(case: Case) -> Found:
    """Older compilers leave out of backward what tensor ranks add up there, and say nothing (tests/promises/test_any_plan.py)."""
    plan = case.plan
    split = next((axis for axis in ("tensor", "context", "expert") if getattr(plan, axis) > 1), None)
    if not plan.compile or split is None:
        return
    installed = version("torch")  # read from disk
    if tuple(map(int, installed.split(".")[:2])) < COMPILES_COLLECTIVES:
        reason = (
            f"with plan.{split} = {getattr(plan, split)} on torch {installed}, seen to compile such blocks to wrong gradients"
        )
        yield error("plan.compile", True, reason, f"Use torch {'.'.join(map(str, COMPILES_COLLECTIVES))}, or compile = false.")


def tensorboard_is_there(case: Case) -> Found:
    """An extra that is asked for is installed."""
    if case.files and case.spec.log.tensorboard and find_spec("tensorboard") is None:
        way_out = 'Install the extra "tensorboard" (uv sync --extra tensorboard), or set log.tensorboard = false.'
        yield error("log.tensorboard", True, "the package tensorboard is not installed", way_out)
