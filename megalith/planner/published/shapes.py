"""Range of shapes in published rows, and the distance of a request from it. No torch."""

from collections.abc import Mapping
from functools import cache
from math import log2
from typing import NamedTuple

from megalith.planner.published.rows import Row, read

COLUMNS = {"parameters": ("params_total_b", 1e9), "tokens a sequence": ("seq_len", 1.0), "devices": ("n_gpus", 1.0)}
"""Size of a shape -> its column, and the unit of this column."""


class Beyond(NamedTuple):
    """One size of a request that is outside of the measured range."""

    name: str
    size: float
    edge: float
    """The nearest measured size."""

    @property
    def doublings(self) -> float:
        """Number of doublings or halvings from the nearest measured size."""
        return abs(log2(self.size / self.edge))


@cache
def measured(kind: str) -> Mapping[str, tuple[float, float]]:
    """Return the smallest and the largest size in the rows of a kind of prediction (`cost.doubt.KINDS`)."""
    rows = [row for row in read() if row.scored and _is_of(row, kind)]
    found: dict[str, tuple[float, float]] = {}
    for name, (column, unit) in COLUMNS.items():
        if kind == "memory" and name == "devices":
            continue  # the bytes of a rank follow from its plan
        sizes = [number * unit for row in rows if (number := row.number(column))]
        found[name] = min(sizes), max(sizes)
    return found


def _is_of(row: Row, kind: str) -> bool:
    if kind == "memory":
        return row.memory is not None
    timed = any(row.text(name) for name in ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu"))
    return timed and (row.number("params_active_b") != row.number("params_total_b")) == (kind == "time.expert")


def beyond(kind: str, sizes: Mapping[str, float]) -> list[Beyond]:
    """Return the sizes of a request that are outside of the measured range, the furthest first."""
    found = []
    for name, (low, high) in measured(kind).items():
        if not low <= sizes[name] <= high:
            found.append(Beyond(name, sizes[name], low if sizes[name] < low else high))
    return sorted(found, key=lambda one: -one.doublings)
