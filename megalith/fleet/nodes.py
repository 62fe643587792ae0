"""Interface of the machines to the process that directs a run: the same for one machine and for many."""

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
    """One start of all ranks. `name` is never used again; `placement` is the node of each slot; `source` None: as the entry chooses.

    `shrunk`: it runs the job's fallback. Copies in memory are cut for the run's own plan: under another plan there are none, and
    earlier ones are lost.
    `epoch`: the owner's (`megalith.epochs`).
    """

    name: str
    placement: tuple[str, ...]
    source: Source | None = None
    shrunk: bool = False
    epoch: int = 0


@dataclass(frozen=True)
class RankInspection:
    """A rank's answer to a request: the stack of its main thread, "" when it does not answer, and its progress.

    `begun`: number of collectives begun in each of its groups, `recorded`: the last of them in words; empty if unknown.
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
    """Nodes that ranks can be started on."""

    def there(self) -> tuple[str, ...]:
        """Nodes that answer now, in the mesh and outside."""
        ...

    def start(self, generation: Generation) -> None:
        """Start all ranks as new processes; those of the previous generation must have ended."""
        ...

    def wait(self, seconds: float) -> list[Exit | Failure | Observation]:
        """Wait at most `seconds` for events: orderly exits, failures with their cause, reports of ranks, and nodes that joined, left or
        were checked."""
        ...

    def running(self) -> frozenset[int]:
        """Ranks that were started and have not ended."""
        ...

    def beats(self) -> list[Beat]:
        """The last heartbeat of each rank."""
        ...

    def send(self, number: int, ranks: Collection[int]) -> None:
        """Send a signal to ranks; SIGKILL goes to the processes they started as well."""
        ...

    def inspect(self, ranks: Collection[int]) -> dict[int, RankInspection]:
        """Ask ranks for their stacks, and wait a moment for the answers."""
        ...

    def queued(self) -> dict[str, float]:
        """Seconds that the threads of each machine's ranks together were ready to run and had no processor, so far, by its name;
        machines without this count are left out."""
        ...

    def unstarted(self) -> Failure:
        """Describe a start from which no rank arrived in time."""
        ...

    def log(self, rank: int) -> Path:
        """Path of a rank's output."""
        ...

    def survey(self, placement: Sequence[str]) -> tuple[Copy, ...]:
        """Copies of the state that these nodes hold, whole or in part, digests verified."""
        ...

    def set_aside(self, order: QuarantineCopy) -> None:
        """Keep a damaged copy from being used again."""
        ...

    def check(self, node: str) -> None:
        """Start a check of a node's health; `wait` returns the verdict."""
        ...

    def close(self, *, forget: bool) -> None:
        """End whatever still runs. `forget`: remove the copies of the state as well."""
        ...
