"""The interface between a run's controller and the run's machines, which is the same for one machine and for many."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megalith.fleet import collective_progress, evidence
from megalith.fleet.causes import Exit, Failure
from megalith.fleet.commands import QuarantineCopy
from megalith.fleet.heartbeat import Beat
from megalith.fleet.observations import Observation
from megalith.fleet.tiers import Copy, Source


@dataclass(frozen=True)
class Generation:
    """One start of all ranks. `name`: unique name of this start. `placement`: the node of each slot. `source`: the copy of the
    state to restore; None: the entry function chooses one. `shrunk`: the ranks run the job's fallback; they keep no copies in
    memory or on disks, and earlier copies there are invalidated, because those are sharded for the run's own plan. `epoch`: the
    epoch of the run folder's owner (`megalith.epochs`).
    """

    name: str
    placement: tuple[str, ...]
    source: Source | None = None
    shrunk: bool = False
    epoch: int = 0


@dataclass(frozen=True)
class RankInspection:
    """State of a rank on request: the stack of its main thread ("" without an answer), and its progress. `begun`: number of collectives
    begun in each of its process groups; `recorded`: descriptions of the last collectives. `begun` and `recorded` are empty if unknown.
    """

    stack: str
    stopped: bool = False  # the kernel says so
    begun: dict[str, int] = field(default_factory=dict)
    recorded: tuple[str, ...] = ()

    @classmethod
    def of(cls, dump: str, *, stopped: bool) -> "RankInspection":
        """Parse a rank's answer."""
        return cls(evidence.main_stack(dump), stopped, *collective_progress.read(dump))

    @property
    def where(self) -> str:
        """The innermost call."""
        return next((line.strip() for line in self.stack.splitlines() if line.lstrip().startswith("File ")), "")


class Nodes(Protocol):
    """Nodes on which ranks can be started."""

    def there(self) -> tuple[str, ...]:
        """Return all nodes that answer now, whether they are in the mesh or not."""
        ...

    def start(self, generation: Generation) -> None:
        """Start all ranks as new processes. All ranks of the previous generation must have ended."""
        ...

    def wait(self, seconds: float) -> list[Exit | Failure | Observation]:
        """Wait at most `seconds` for events: orderly exits, failures with their cause, reports of ranks, and nodes that joined, left or
        were checked."""
        ...

    def running(self) -> frozenset[int]:
        """Return the ranks that were started and have not ended."""
        ...

    def beats(self) -> list[Beat]:
        """The last heartbeat of each rank."""
        ...

    def send(self, number: int, ranks: Collection[int]) -> None:
        """Send a signal to ranks; SIGKILL is also sent to the processes that ranks started."""
        ...

    def inspect(self, ranks: Collection[int]) -> dict[int, RankInspection]:
        """Ask ranks for their stacks and progress, and wait a few seconds for the answers."""
        ...

    def queued(self) -> dict[str, float]:
        """Return for each machine the total seconds for which threads of its ranks were ready to run but had no processor.
        Machines that do not report the time are left out."""
        ...

    def unstarted(self) -> Failure:
        """Return the failure of a start in which no rank was running in time."""
        ...

    def log(self, rank: int) -> Path:
        """Return the path of a rank's log."""
        ...

    def survey(self, placement: Sequence[str]) -> tuple[Copy, ...]:
        """Return the complete and partial copies of the state on the nodes of `placement`. Digests of copies in memory are
        verified."""
        ...

    def set_aside(self, order: QuarantineCopy) -> None:
        """Rename a damaged copy of the state, so that it is never restored."""
        ...

    def check(self, node: str) -> None:
        """Start a check of a node's health, whose result a later `wait` returns."""
        ...

    def close(self, *, forget: bool) -> None:
        """End all processes that still run. `forget`: also delete the copies of the state."""
        ...
