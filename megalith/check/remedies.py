"""The cheapest change with which a run needs less memory. Memory is estimated by arithmetic; `megalith dryrun` counts it."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from megalith.spec.numbers import BF16, PRECISIONS
from megalith.spec.plan import Action, PartActions
from megalith.spec.problem import Problem
from megalith.spec.run import RunSpec
from megalith.spec.sites import outer_slots
from megalith.spec.state import MASTER
from megalith.spec.toml import literal

ROUNDS = frozenset(("train.gradients", "optimizer.moments", 'optimizer.master = "split8"', "precision.kept", "plan.retain.parts"))
"""Settings that round numbers, so that results change."""


class Change(NamedTuple):
    """Values of a run file that save memory together."""

    values: dict[str, Any]
    cost: int
    """Combinations of changes with a lower sum of costs are preferred. Roughly, free changes have the lowest costs, followed by changes
    that cost time, changes that cost accuracy, and changes that move state or activations to host or disk."""


NONE = Change({}, 0)


def changes(spec: RunSpec) -> Iterator[list[Change]]:
    """Yield the alternatives of each kind of change; the first alternative changes nothing."""
    plan, narrow = spec.plan, PRECISIONS[spec.train.precision].compute.name != MASTER.number
    more = range(plan.zero + 1, 4) if plan.dp_size > 1 else ()
    yield [NONE, *(Change({"plan.zero": zero}, zero) for zero in more)]
    yield [NONE, *_activations(spec)]
    if plan.microbatch > 1:
        yield [NONE, Change({"plan.microbatch": 1}, 4)]
    if narrow and spec.optimizer.master == "fp32":
        yield [NONE, Change({"optimizer.master": "split16"}, 2), Change({"optimizer.master": "split8"}, 9)]
    if narrow and spec.train.gradients == "fp32":
        yield [NONE, Change({"train.gradients": "bf16"}, 8)]
    if spec.optimizer.moments != "fp8":
        yield [NONE, Change({"optimizer.moments": "fp8"}, 7)]
    if plan.state.optimizer == "device":
        yield [NONE, *_elsewhere()]
    if outer_slots(spec.sites, on_device=True):
        yield [NONE, Change({"sites.place": "host"}, 6)]


def _activations(spec: RunSpec) -> Iterator[Change]:
    """Yield ways to keep fewer activations on the device: recomputation, 8 bits, or offloading."""
    plan, light = spec.plan, ("full", "sqrt")
    again = light[light.index(plan.recompute) + 1 :] if plan.recompute in light else light
    for policy in again:
        yield Change({"plan.recompute": policy}, {"full": 5, "sqrt": 12}[policy])
    if spec.train.precision == BF16.name and spec.precision.kept == "wide":
        short: dict[str, Any] = {"precision.kept": "fp8"}
        yield Change(short, 10)
        if plan.recompute in ("none", "selective"):
            compressed: dict[str, Action] = {"attention.core": "compress"}
            yield Change(short | {"plan.retain.parts": PartActions(plan.retain.parts | compressed)}, 11)
        for policy in again:  # the block that runs again holds less
            yield Change({"plan.recompute": policy} | short, {"full": 14, "sqrt": 18}[policy])
    if plan.retain.away:
        return
    less = {} if plan.recompute == "full" else {"plan.recompute": "full"}
    yield Change({"plan.retain.blocks": "host"}, 20)
    if less:
        yield Change(less | {"plan.retain.blocks": "host"}, 21)
    yield Change(less | {"plan.retain.blocks": "disk"}, 26)


def _elsewhere() -> Iterator[Change]:
    """Yield ways to keep state outside of the device."""
    weights = {"plan.zero": 3, "plan.state.weights": "disk"}
    for cost, place, others in (
        (30, "host", {}),
        (35, "disk", {}),
        (38, "disk", {"plan.state.release": True}),
        (40, "host", weights | {"plan.state.weights": "host"}),
        (45, "disk", weights),
        (48, "disk", weights | {"plan.state.release": True}),
    ):
        yield Change({"plan.state.optimizer": place, **others}, cost)


def cheapest(spec: RunSpec, fits: Callable[[RunSpec], bool], *, host: bool = True) -> str:
    """Return, as a sentence, the cheapest change with which the run fits and passes `megalith check`; empty if there is none. `host`:
    False if the host's memory is too small, so that changes must not use it. Errors that the run has anyway refuse no change."""
    from megalith.check.rules import check  # whose rules ask for this

    before = {(problem.key, problem.reason) for problem in check(spec, files=False, remedies=False)}
    for some in sorted(product(*changes(spec)), key=lambda some: (sum(one.cost for one in some), len(some))):
        values = {key: value for one in some for key, value in one.values.items()}
        if not values or (not host and "host" in values.values()):
            continue
        changed = changed_by(spec, values)
        if not fits(changed):
            continue
        caused = (one for one in check(changed, files=False, remedies=False) if (one.key, one.reason) not in before)
        if not any(_concerns(problem) for problem in caused):
            return _sentence(values)
    return ""


def _concerns(problem: Problem) -> bool:
    """True for an error that a change of this module may have caused."""
    return problem.severity == "error" and problem.key.startswith(("plan.", "optimizer.", "train.", "precision."))


def changed_by(spec: RunSpec, values: dict[str, Any]) -> RunSpec:
    """Return the run with other values; `values` maps keys of a run file to them."""
    found = spec
    for key, value in values.items():
        table, *names = key.split(".")
        part = getattr(found, table)
        if len(names) == 2:
            value = getattr(part, names[0]).model_copy(update={names[1]: value})
        found = found.model_copy(update={table: part.model_copy(update={names[0]: value})})
    return found


def _sentence(values: dict[str, Any]) -> str:
    words = [f"{key} = {literal(value)}" for key, value in values.items()]
    rounding = [word.partition(" ")[0] for word in words if word in ROUNDS or word.partition(" ")[0] in ROUNDS]
    note = f" ({_listed(rounding)} round{'s' * (len(rounding) == 1)}, so results change)" if rounding else ""
    return f"The cheapest change that fits: {_listed(words)}{note}. "


def _listed(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last
