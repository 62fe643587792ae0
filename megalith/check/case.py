"""The run that rules check, and the problems that they report."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megalith.data.errors import DataError
from megalith.data.manifest import Manifest, read_manifest
from megalith.spec import cluster as clusters
from megalith.spec.base import AbsentError
from megalith.spec.cluster import ClusterSpec
from megalith.spec.model import BlockSpec, ModelSpec
from megalith.spec.plan import Plan
from megalith.spec.problem import Problem, SpecErrors
from megalith.spec.run import RunSpec
from megalith.spec.sizes import Count, count_blocks

Found = Iterator[Problem]


@dataclass(frozen=True)
class Case:
    """A run and the facts about it that rules need."""

    spec: RunSpec
    world: int | None
    """The number of ranks that were started, if known."""
    files: bool
    """True if rules may read files on this machine."""
    begun: bool = False
    """True if the run has checkpoints to resume from."""
    remedies: bool = True
    """True if a problem of memory names the cheapest change with which the run fits: the search for it checks many other runs."""
    later: bool = False
    """True if `spec` has the values of a later phase, so that other phases may have other ones."""
    folder: Path | None = None
    """The run folder, if known: files of state and activations are there unless the plan names another folder."""

    @property
    def plan(self) -> Plan:
        return self.spec.plan

    @cached_property
    def model(self) -> ModelSpec | None:
        """The model as parts; None if its sizes are faulty or contradictory (rules about sizes report this)."""
        try:
            return self.spec.model.build()
        except (ValidationError, AbsentError):
            return None

    @cached_property
    def blocks(self) -> dict[BlockSpec, str]:
        """The distinct blocks, each with the name of the first block of its kind."""
        kinds: dict[BlockSpec, str] = {}
        for number, block in enumerate(self.model.blocks if self.model else ()):
            kinds.setdefault(block, f"blocks.{number}")
        return kinds

    @cached_property
    def cluster(self) -> ClusterSpec | None:
        """The cluster; None if the run is for this machine, or if the cluster is unknown."""
        try:
            return None if self.spec.cluster == "local" else clusters.load(self.spec.cluster)
        except SpecErrors:
            return None

    @cached_property
    def manifest(self) -> Manifest | None:
        """The manifest of the prepared data; None if it is missing or unreadable, or if rules may not read files."""
        try:
            return read_manifest(Path(self.spec.data.path)) if self.files else None
        except (DataError, OSError):
            return None

    @cached_property
    def parameters(self) -> Count:
        """The number of parameters in all blocks."""
        return count_blocks(self.model) if self.model else Count(0, 0)


def error(name: str, value: Any, reason: str, way_out: str) -> Problem:
    """Return a problem that stops the run before it starts."""
    return Problem("error", name, value, reason, way_out)


def advice(name: str, value: Any, reason: str, way_out: str) -> Problem:
    """Return a problem that is reported and does not stop the run."""
    return Problem("advice", name, value, reason, way_out)


def divisors(name: str, whole: int, near_to: int) -> str:
    """Return the advice to use a divisor of `whole` close to `near_to` as the value of `name`."""
    every = [d for d in range(1, whole + 1) if whole % d == 0]
    below = [d for d in every if d < near_to][-3:]
    above = [d for d in every if d > near_to][:1]
    *most, last = map(str, below + above)
    return f"Use {name} = {', '.join(most)} or {last}." if most else f"Use {name} = {last}."


def next_multiple(value: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `value`."""
    return -(-value // unit) * unit


def format_bytes(count: float) -> str:
    """Return a number of bytes as text, in the largest fitting unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
