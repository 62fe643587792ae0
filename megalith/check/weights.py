"""The rule about a checkpoint that gives a run its first weights."""

from pathlib import Path

from pydantic import ValidationError

from megalith.check.case import Case, Found, error
from megalith.checkpoint import folder as checkpoints
from megalith.spec import families
from megalith.spec.model import ModelSpec
from megalith.spec.sizes import block_parameters
from megalith.spec.toml import dotted, literal
from megalith.spec.validate import leaves


def first_weights_exist(case: Case) -> Found:
    """The checkpoint to start from is there, and of a model of the same sizes."""
    start = case.spec.train.init_from
    if not case.files or start is None or case.begun:
        return
    if not Path(start).exists():
        reason = f"no such checkpoint (looked for {Path(start).absolute()}; relative paths start at the current directory)"
        yield error("train.init_from", start, reason, "Give a checkpoint folder, or leave it out.")
        return
    try:
        found = checkpoints.find_complete(Path(start))
    except (FileNotFoundError, checkpoints.DamagedCheckpointError) as fault:
        yield error(
            "train.init_from", start, f"no checkpoint to start from: {str(fault).rstrip('.')}", "Give another, or leave it out."
        )
        return
    try:
        theirs = families.read(found.meta["spec"]["model"])
        fits = case.model is None or _holds(theirs.build(), case.model)
    except (KeyError, TypeError, ValidationError):
        return  # nothing is said of sizes
    if not fits:
        yield from _other_sizes(theirs, case.spec.model, start)


def _holds(theirs: ModelSpec, ours: ModelSpec) -> bool:
    """Return True if the weights of one model can begin the other's training. The one may have more blocks."""
    sizes = [[block_parameters(block, model.dim) for block in model.blocks] for model in (theirs, ours)]
    return (theirs.dim, theirs.head.vocab) == (ours.dim, ours.head.vocab) and sizes[0][: len(sizes[1])] == sizes[1]


def _other_sizes(theirs: families.Model, ours: families.Model, start: str) -> Found:
    before = {dotted(leaf.path): leaf.value for leaf in leaves(theirs)}
    now = {dotted(leaf.path): leaf.value for leaf in leaves(ours)}
    changed = [name for name in dict.fromkeys([*now, *before]) if name != "name" and now.get(name) != before.get(name)]
    has, wants = (", ".join(f"{name} = {literal(one[name])}" for name in changed if name in one) for one in (before, now))
    way_out = "Give the run's [model] the checkpoint's sizes, or start from another."
    yield error("train.init_from", start, f"holds weights of a model with {has}, and the run's has {wants}", way_out)
