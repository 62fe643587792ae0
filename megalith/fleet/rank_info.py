"""Place of a rank: its slot, the node that fills the slot, and its folder of copies. Every rank imports this first, so it imports
little."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megalith.fleet.secure import key
from megalith.fleet.secure.key import Key

REPORTS, PLACEMENT, MEMORY, DISK = "MEGALITH_REPORTS", "MEGALITH_PLACEMENT", "MEGALITH_MEMORY", "MEGALITH_DISK"
AGENT = "MEGALITH_AGENT"


@dataclass(frozen=True)
class RankInfo:
    """A rank's place in the fleet. `placement` is the node of each slot; a slot holds `world / slots` consecutive ranks.

    `memory`: the root of the copies in shared memory (None: no copies); this rank writes only below `folder`. `disk`: the root of the
    copies on disks. `agent`: the process that supervises this node's ranks, if there is one. `key`: the run's key, if it has one.
    """

    rank: int
    world: int
    placement: tuple[str, ...]
    memory: Path | None
    disk: Path | None = None
    agent: int | None = None
    key: Key | None = None

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> "RankInfo":
        """Return this process's place from its environment. Outside a supervised run, the process is the only rank of the only slot."""
        rank, world = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
        memory, disk = (Path(root) if (root := environment.get(name)) else None for name in (MEMORY, DISK))
        placement = tuple(environment.get(PLACEMENT, "0").split(","))
        agent = environment.get(AGENT)
        return cls(rank, world, placement, memory, disk, int(agent) if agent else None, key.given(environment))

    def slot_of(self, rank: int) -> int:
        """The slot that holds a rank."""
        return slot_of(rank, world=self.world, slots=len(self.placement))

    def node_of(self, rank: int) -> str:
        """The node that now fills the slot of a rank."""
        return self.placement[self.slot_of(rank)]

    @property
    def slot(self) -> int:
        return self.slot_of(self.rank)

    @property
    def node(self) -> str:
        return self.placement[self.slot]

    @property
    def folder(self) -> Path | None:
        """Folder in which this rank's node keeps copies."""
        return self.memory and node_folder(self.memory, self.node)


def slot_of(rank: int, *, world: int, slots: int) -> int:
    """Return the slot of a rank; each slot holds equally many consecutive ranks."""
    return rank * slots // world


def ranks_of(slot: int, *, world: int, slots: int) -> range:
    """The ranks of a slot."""
    return range(slot * world // slots, (slot + 1) * world // slots)


def node_folder(memory: Path, node: str) -> Path:
    """Folder in which a node keeps copies."""
    return memory / f"node-{node}"
