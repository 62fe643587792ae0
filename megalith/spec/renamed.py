"""Renamed keys of run files. An old key in a run file is an error that states the new name; an old key in a run folder keeps its
meaning (`spec.run.OptimizerSpec`)."""

from collections.abc import Callable, Iterator
from typing import Any

from megalith.spec.problem import Problem
from megalith.spec.run import OptimizerSpec

OLD = "optimizer.min_lr"


def take(tree: dict[str, Any], source: Callable[[str], str]) -> Iterator[Problem]:
    """Remove the old key `optimizer.min_lr` from a run file's values, and yield a problem for it. `source(key)` returns the
    origin of a value.
    """
    optimizer = tree.get("optimizer")
    if not isinstance(optimizer, dict) or "min_lr" not in optimizer:
        return
    value, lr = optimizer.pop("min_lr"), optimizer.get("lr", OptimizerSpec.model_fields["lr"].default)
    reason, way_out = "is now called min_lr_ratio, because it is a share of optimizer.lr", "Write min_lr_ratio."
    if _number(value) and _number(lr) and lr > 0:
        reason += f"; {value:g} times optimizer.lr = {lr:g} would be a lowest learning rate of {value * lr:.3g}"
        rates = {value / lr: value, value: value * lr}
        readings = [
            f"min_lr_ratio = {share:.6g} for a lowest learning rate of {rate:.3g}" for share, rate in rates.items() if share <= 1
        ]
        way_out = f"Write {', or '.join(readings)}." if readings else "Write min_lr_ratio, a share from 0 to 1."
    yield Problem("error", OLD, value, reason, way_out, source(OLD))


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
