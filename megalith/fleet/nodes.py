"""The interface between a run's controller and its machines: the same for one machine and for many."""

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
    """One start of all ranks. `name` is never used again; `placement` is the node of each slot; `source` None: the entry function
    chooses. `shrunk`: the ranks run the job's fallback; they keep no copies in memory, which are sharded for the run's own plan, and
    earlier ones are lost. `epoch`: that of the run folder's owner (`megalith.epochs`).
    """

    name: str
    placement: tuple[str, ...]
    source: Source | None = None
    shrunk: bool = False
    epoch: int = 0


@dataclass(frozen=True)
class RankInspection:
    """A rank's answer to an inspection: the stack of its main thread ("" without an answer), and its progress. `begun`: number of
    collectives begun in each of its groups; `recorded`: the last ones as text. Both are empty if unknown.
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
        """Return all nodes that answer now, in the mesh or not."""
        ...

    def start(self, generation: Generation) -> None:
        """Start all ranks as new processes; those of the previous generation must have ended."""
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
        """Ask ranks for their stacks, and wait a moment for the answers."""
        ...

    def queued(self) -> dict[str, float]:
        """Return, by name of the machine, the total seconds for which threads of its ranks were ready to run but had no processor.
        Machines that do not report this are left out."""
        ...

    def unstarted(self) -> Failure:
        """Describe a start of ranks that failed because no rank came up in time."""
        ...

    def log(self, rank: int) -> Path:
        """Path of a rank's output."""
        ...

    def survey(self, placement: Sequence[str]) -> tuple[Copy, ...]:
        """Return the complete and partial copies of the state that these nodes hold, with verified digests."""
        ...

    def set_aside(self, order: QuarantineCopy) -> None:
        """Set a damaged copy aside, so that it is never used again."""
        ...

    def check(self, node: str) -> None:
        """Start a check of a node's health; `wait` returns the verdict."""
        ...

    def close(self, *, forget: bool) -> None:
        """End all processes that still run. `forget`: also remove the copies of the state."""
        ...
