"""Rules about a user's own parts: they can be imported, have the required type, and support the plan."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from megalith import own
from megalith.check.case import Case, Found, error
from megalith.spec import files, parts
from megalith.spec.base import AbsentError
from megalith.spec.files import ResolvedRun
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.optimizers import admit as admit_optimizer
from megalith.spec.problem import Problem, SpecErrors
from megalith.spec.run import RunSpec

WAY_OUT = (
    "Correct the name of your own part, or its code. Megalith imports parts from Python's module search path and the "
    "current directory."
)


def admit(spec: RunSpec, provenance: Mapping[str, str]) -> tuple[list[Problem], dict[str, str]]:
    """Import the user's own parts that a command's run names. Return the problems, and the digest of each part's source by its key.

    Commands import the user's own parts only in this function. If the spec lacks required values, nothing is imported."""
    try:
        named = spec.own_parts
    except AbsentError:
        return [], {}
    problems, sources = list[Problem](), dict[str, str]()
    for key, name in named.items():
        try:
            if key.startswith("optimizer."):
                admit_optimizer(name)
            elif key.startswith("model."):
                admit_part(spec, key, name)
            elif not (callable(found := own.load(name)) or hasattr(found, "after_step")):
                raise own.OwnPartError(f"the object is a {type(found).__name__}, which cannot be called")
            sources[f"{key}.source"] = f"sha256 {own.digest(name)}"
        except own.OwnPartError as fault:
            source = provenance.get(key) or provenance.get(key.rpartition(".")[0], "")
            problems.append(Problem("error", key, name, str(fault), WAY_OUT, source))
    return problems, sources


def load_admitted(path: Path, overrides: Sequence[str], problems: list[Problem]) -> ResolvedRun | None:
    """Load a command's run file, and import the user's own parts that the file names. If there are problems, append them to `problems`
    and return None."""
    try:
        found = files.load(path, overrides=overrides)
    except SpecErrors as errors:
        problems += errors.problems
        return None
    unfit, _ = admit(found.spec, found.provenance)
    problems += unfit
    return None if unfit else found


def admit_part(spec: RunSpec, key: str, name: str) -> None:
    """Import a user's own part of the model, and check that the part declares its parameters for this model's sizes. Raises
    own.OwnPartError."""
    parts.admit(name, key.removeprefix("model."))
    try:
        with suppress(ValidationError):  # sizes that make no model: other rules say why
            model = spec.model.build()
            for block in dict.fromkeys(model.blocks):
                parts.declared(name, model.dim, getattr(block, parts.PARTS[name].kind))
    except own.OwnPartError:
        parts.PARTS.pop(name)
        raise


def own_parts_fit_the_plan(case: Case) -> Found:
    """A user's own attention that declares no core needs whole sequences, and has no core to recompute."""
    name = getattr(case.spec.model, "attention", None)
    if name is None or parts.PARTS[name].core:
        return
    if case.plan.context > 1:
        reason = f"splits sequences, but {name} does not declare (core = True) that tokens interact only through self.core"
        yield error("plan.context", case.plan.context, reason, "Use context = 1, or an attention that declares core = True.")
    if "attention.core" in case.plan.actions:
        key = "plan.retain.parts" if "attention.core" in case.plan.retain.parts else "plan.recompute_parts"
        reason = f"names attention.core, but {name} does not declare a core"
        yield error(key, ["attention.core"], reason, 'Name "attention".')


def state_is_at_hand(case: Case) -> Found:
    """State in host memory or on disk is updated in pieces of a rank's share, so a user's own optimizer must update each element on its
    own."""
    kind = case.spec.optimizer.kind
    kinds = [kind, *(group.kind for group in case.spec.optimizer.groups if group.kind)]
    mine = next((each for each in kinds if own.is_own(each) and OPTIMIZERS[each].unit != "element"), None)
    where = case.plan.state.optimizer
    if mine is not None and where != "device":
        reason = f"updates state piece by piece, but your optimizer {mine} needs each whole {OPTIMIZERS[mine].unit}"
        yield error("plan.state.optimizer", where, reason, 'Use "device", or an optimizer whose unit is "element".')


def callbacks_are_listed_once(case: Case) -> Found:
    """Each callback is listed once."""
    callbacks = case.spec.train.callbacks
    twice = [name for name, count in Counter(callbacks).items() if count > 1]
    if twice:
        yield error("train.callbacks", list(callbacks), f"names {twice[0]} more than once", "Name each callback once.")
