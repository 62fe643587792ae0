"""The cheapest change with which a run needs less memory. Memory is estimated by arithmetic; `megalith dryrun` counts it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from megalith.spec.numbers import BF16, PRECISIONS
from megalith.spec.plan import OUTSIDE, Action, PartActions, Plan, RetainSpec, StateSpec
from megalith.spec.problem import Problem
from megalith.spec.run import RunSpec
from megalith.spec.sites import outer_slots
from megalith.spec.state import MASTER
from megalith.spec.toml import literal

ROUNDS = ("train.gradients", "optimizer.moments", 'optimizer.master = "split8"', "precision.kept", "plan.retain.parts = { ")
"""Beginnings of settings that round numbers, so that results change."""


class Change(NamedTuple):
    """Values of a run file that save memory together."""

    values: dict[str, Any]
    cost: int
    """Combinations of changes with a lower sum of costs are preferred. Roughly, free changes have the lowest costs, followed by changes
    that cost time, changes that cost accuracy, and changes that move state or activations to host or disk."""


NONE = Change({}, 0)
MAX_REFUSED = 50
"""How many changes that fit, but that `check` refuses, are tried before the search ends without an answer."""


def changes(spec: RunSpec) -> Iterator[list[Change]]:
    """Yield the alternatives of each kind of change; the first alternative changes nothing."""
    plan, narrow = spec.plan, PRECISIONS[spec.train.precision].compute.name != MASTER.number
    more = range(plan.zero + 1, 4) if plan.dp_size > 1 else ()
    yield [NONE, *(Change({"plan.zero": zero}, zero) for zero in more)]
    yield [NONE, *_activations(spec)]
    if plan.microbatch > 1:
        yield [NONE, Change({"plan.microbatch": 1}, 4)]
    if narrow:
        forms = {"split16": 2, "fp32": 3, "split8": 9}  # fp32 has more bytes, but weights elsewhere need it, and release to undo
        yield [NONE, *(Change({"optimizer.master": form}, cost) for form, cost in forms.items() if form != spec.optimizer.master)]
    if narrow and spec.train.gradients == "fp32":
        yield [NONE, Change({"train.gradients": "bf16"}, 8)]
    if spec.optimizer.moments != "fp8":
        yield [NONE, Change({"optimizer.moments": "fp8"}, 7)]
    yield [NONE, *_elsewhere(spec)]
    if outer_slots(spec.sites, on_device=True):
        yield [NONE, Change({"sites.place": "host"}, 6)]


def combinations(spec: RunSpec) -> Iterator[dict[str, Any]]:
    """Yield the values of each combination of changes, the cheapest first."""
    for some in sorted(product(*changes(spec)), key=lambda some: (sum(one.cost for one in some), len(some))):
        if values := {key: value for one in some for key, value in one.values.items()}:
            yield values


def _activations(spec: RunSpec) -> Iterator[Change]:
    """Yield ways to keep fewer activations on the device: recomputation, 8 bits, or offloading."""
    plan = spec.plan
    again = _recomputed(plan)
    for policy, values in again.items():
        yield Change(values, {"full": 5, "sqrt": 12}[policy])
    if spec.train.precision == BF16.name:
        short: dict[str, Any] = {"precision.kept": "fp8"} if spec.precision.kept == "wide" else {}
        if short:
            yield Change(short, 10)
        if plan.recompute in ("none", "selective") and "attention.core" not in plan.retain.parts:
            compressed: dict[str, Action] = {"attention.core": "compress"}
            yield Change(short | {"plan.retain.parts": PartActions(plan.retain.parts | compressed)}, 11)
        for policy, values in again.items() if short else ():  # the block that runs again holds less
            yield Change(values | short, {"full": 14, "sqrt": 18}[policy])
    less = list(again.values())
    for place, cost, forms in (("host", 20, [{}, *less]), ("disk", 26, less or [{}])):
        moved = _farther(plan.retain, {"blocks": place, "share": 1.0})
        for more, values in enumerate(forms if moved else ()):
            yield Change(values | {f"plan.retain.{name}": value for name, value in moved.items()}, cost + more)


def _recomputed(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return the values that set each policy that keeps less than the plan's. Under these policies, blocks keep only inputs, so parts of
    blocks have no actions."""
    light = ("full", "sqrt")
    again = light[light.index(plan.recompute) + 1 :] if plan.recompute in light else light
    parts: dict[str, Any] = {"plan.retain.parts": PartActions()} if plan.retain.parts else {}
    return {policy: {"plan.recompute": policy} | parts for policy in again}


def _elsewhere(spec: RunSpec) -> Iterator[Change]:
    """Yield ways to keep more state outside of the device than the plan does."""
    plan, rounds = spec.plan, spec.microbatches
    for cost, place, weights, release in (
        (30, "host", "device", False),
        (35, "disk", "device", False),
        (38, "disk", "device", True),
        (40, "host", "host", False),
        (45, "disk", "disk", False),
        (48, "disk", "disk", True),
        (50, "device", "device", True),  # each step is computed twice
        (51, "host", "device", True),
        (52, "host", "host", True),
    ):
        moved = _farther(plan.state, {"optimizer": place, "weights": weights, "release": release, "share": 1.0})
        others = {"plan.zero": 3} if weights != "device" and plan.zero != 3 else {}
        if release and rounds > 1:
            others["plan.microbatch"] = rounds * plan.microbatch
        if moved:
            yield Change({f"plan.state.{name}": value for name, value in moved.items()} | others, cost)


def _farther(now: StateSpec | RetainSpec, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the wanted values that the table does not have; none if one of them would bring something back to the device, or
    from disk to the host."""
    order: tuple[Any, ...] = ("device", *OUTSIDE)
    for name, value in wanted.items():
        had = getattr(now, name)
        if order.index(value) < order.index(had) if value in order else value < had:
            return {}
    return {name: value for name, value in wanted.items() if value != getattr(now, name)}


def cheapest(spec: RunSpec, fits: Callable[[RunSpec], bool], *, host: bool = True) -> str:
    """Return, as a sentence, the cheapest change with which the run fits and passes `megalith check`; empty if there is none. `host`:
    False if the host's memory is too small, so that changes must not use it. Errors that the run has anyway refuse no change."""
    from megalith.check.rules import check  # whose rules ask for this

    before = {(problem.key, problem.reason) for problem in check(spec, files=False, remedies=False)}
    refused = 0
    for values in combinations(spec):
        if not host and "host" in values.values():
            continue
        changed = changed_by(spec, values)
        if not fits(changed):
            continue
        caused = (one for one in check(changed, files=False, remedies=False) if (one.key, one.reason) not in before)
        if not any(_concerns(problem) for problem in caused):
            return f"The cheapest change that fits: {as_words(values)}. "
        refused += 1
        if refused == MAX_REFUSED:
            break
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


def rounding(values: Mapping[str, Any]) -> list[str]:
    """Return the keys of those values that round numbers, so that results change."""
    return [key for key, value in values.items() if f"{key} = {literal(value)}".startswith(ROUNDS)]


def as_words(values: Mapping[str, Any]) -> str:
    """Return values of a run file as text, with a note on those that round."""
    keys = rounding(values)
    note = f" ({_listed(keys)} round{'s' * (len(keys) == 1)}, so results change)" if keys else ""
    return _listed([f"{key} = {literal(value)}" for key, value in values.items()]) + note


def _listed(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last
