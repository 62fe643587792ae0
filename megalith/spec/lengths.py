"""Conversion of the lengths in a run file, such as "500M tokens", to steps or samples, without torch."""

from collections.abc import Iterator, MutableMapping
from typing import Any

from megalith.spec.base import Spec
from megalith.spec.phases import DATA, RAMP, Phase, Phases, Point
from megalith.spec.quantity import Amount, Thousand, whole
from megalith.spec.run import OptimizerSpec, PhaseSpec, RampSpec, TrainSpec
from megalith.spec.toml import literal

Tree = dict[str, Any]

DECAYING = ("wsd", "1-sqrt")
"""Schedules of the learning rate that end in a decay phase."""


def convert(tree: Tree, sources: MutableMapping[str, str]) -> None:
    """Replace texts such as "500M tokens" in a run file's values by numbers. The begin of a phase or batch change becomes a number of
    samples, because the data order depends on samples. Every other length becomes a number of steps, assuming that no update is
    skipped. The original text is added to `sources`. A text that cannot be converted, because it is no length or because another value
    is invalid, stays unchanged; `spec.validate` refuses it."""
    train, optimizer = _table(tree, "train"), _table(tree, "optimizer")
    length, batch = (_number(TrainSpec, name, train.get(name)) for name in ("seq_len", "global_batch"))
    if not _whole(length) or not _whole(batch):
        return
    phases = _points(tree, Phase(0, 0, 0, 0, length, batch, None), sources)
    if phases is None:
        return
    for table, name in ((train, "steps"), (optimizer, "warmup")):
        if amount := Amount.read(table.get(name)):
            _note(sources, f"{'train' if table is train else 'optimizer'}.{name}", table[name])
            table[name] = phases.steps_to(amount)
    amount, steps = Amount.read(optimizer.get("decay")), _number(TrainSpec, "steps", train.get("steps"))
    if amount and isinstance(steps, int) and _whole(steps):
        _note(sources, "optimizer.decay", optimizer["decay"])
        optimizer["decay"] = as_decay(steps - _until(phases, amount, steps), steps)


def as_decay(updates: int, steps: int) -> float:
    """Return the value of `optimizer.decay` with which the last `updates` updates of a run of `steps` steps are the decay."""
    return float(updates) if updates > 1 else max(0, updates) / steps


def decay_updates(optimizer: OptimizerSpec, steps: int) -> float:
    """Return the number of updates in the decay phase at the end of a run of `steps` steps."""
    return optimizer.decay if optimizer.decay > 1 else optimizer.decay * steps


def _until(phases: Phases, amount: Amount, steps: int) -> int:
    if amount.unit == "steps":
        return max(0, steps - amount.number)
    samples = phases.after(0, steps)
    left = (samples if amount.unit == "samples" else phases.tokens(samples)) - amount.number
    return phases.steps_to(Amount(left, amount.unit)) if left > 0 else 0


def _points(tree: Tree, start: Phase, sources: MutableMapping[str, str]) -> Phases | None:
    """Replace the `begin` of each phase and batch change by a number of samples, and return all phases; None if a table is
    invalid."""
    points, tables = list[Point](), dict[str, Tree]()
    for key, table in _tables(tree):
        kind = RampSpec if key.startswith(RAMP) else PhaseSpec
        begin: Any = Amount.read(table.get("begin")) or _number(kind, "begin", table.get("begin"))
        changes = {name: _number(kind, name, table[name]) for name in ("seq_len", "global_batch") if name in table}
        if not (isinstance(begin, Amount) or _whole(begin, least=0)) or not all(map(_whole, changes.values())):
            return None
        tables[key] = table
        points.append(Point(key, begin, changes))
    phases = Phases.walk(start, points)
    for phase in phases.all:
        for key in phase.keys:
            if Amount.read(tables[key]["begin"]):
                _note(sources, key.partition("[")[0], tables[key]["begin"])
                tables[key]["begin"] = phase.first
    return phases


def _tables(tree: Tree) -> Iterator[tuple[str, Tree]]:
    for key in (RAMP, DATA):
        table, _, name = key.partition(".")
        listed = _table(tree, table).get(name)
        for number, each in enumerate(listed if isinstance(listed, list) else ()):
            if isinstance(each, dict):
                yield f"{key}[{number}]", each


def _table(tree: Tree, name: str) -> Tree:
    found = tree.get(name)
    return found if isinstance(found, dict) else {}


def _number(kind: type[Spec], name: str, value: Any) -> Any:
    field = kind.model_fields.get(name)
    mark = next((each for each in field.metadata if isinstance(each, Thousand)), None) if field else None
    return whole(value, mark) if mark and isinstance(value, str) else value


def _whole(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _note(sources: MutableMapping[str, str], key: str, written: str) -> None:
    sources[key] = f"{sources.get(key, '')}: {literal(written)}"
