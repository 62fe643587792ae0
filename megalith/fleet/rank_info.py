"""A rank's slot, node, and folder for copies of the state. Every rank imports this module first, so it imports few others."""

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
    """Nodes and folders as a rank sees them. `placement`: the node of each slot; a slot consists of `world / slots` consecutive
    ranks. `memory`: folder that contains all nodes' copies of the state in shared memory (None: no copies); this rank writes only
    into `folder`. `disk`: folder that contains all nodes' copies on disk. `agent`: id of the process that supervises this node's
    ranks, if any. `key`: the run's key, if any.
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
        """Read a rank's nodes and folders from the environment. Without a supervisor, there is one slot, which has all ranks."""
        rank, world = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
        memory, disk = (Path(root) if (root := environment.get(name)) else None for name in (MEMORY, DISK))
        placement = tuple(environment.get(PLACEMENT, "0").split(","))
        agent = environment.get(AGENT)
        return cls(rank, world, placement, memory, disk, int(agent) if agent else None, key.given(environment))

    def slot_of(self, rank: int) -> int:
        """The slot that holds a rank."""
        return slot_of(rank, world=self.world, slots=len(self.placement))

    def node_of(self, rank: int) -> str:
        """The node on which a rank runs."""
        return self.placement[self.slot_of(rank)]

    @property
    def slot(self) -> int:
        return self.slot_of(self.rank)

    @property
    def node(self) -> str:
        return self.placement[self.slot]

    @property
    def folder(self) -> Path | None:
        """Folder for the copies that this rank's node keeps in memory."""
        return self.memory and node_folder(self.memory, self.node)


def slot_of(rank: int, *, world: int, slots: int) -> int:
    """Return the slot of a rank; all slots have the same number of consecutive ranks."""
    return rank * slots // world


def ranks_of(slot: int, *, world: int, slots: int) -> range:
    """The ranks of a slot."""
    return range(slot * world // slots, (slot + 1) * world // slots)


def node_folder(memory: Path, node: str) -> Path:
    """Return the folder for a node's copies of the state, in memory or on disk."""
    return memory / f"node-{node}"
