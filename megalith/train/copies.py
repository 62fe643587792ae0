"""Copies of a rank's state in its node's memory, on a buddy node and on the node's disk: set up before the first step."""

import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from megalith.checkpoint.memory import Memory
from megalith.fleet.observations import SaveFailed
from megalith.fleet.rank_info import RankInfo
from megalith.fleet.report import report
from megalith.fleet.tiers import Tier
from megalith.parallel.groups import MESSAGES_ONLY, another
from megalith.train.assemble import Trainer
from megalith.train.stability.history import room

GOOD_COPIES = 2  # kept to go back to: one may be too young for a spike, and a second spike goes further back


def copies_of(trainer: Trainer, *, group: dist.ProcessGroup, warn: Callable[[str], None]) -> Memory | None:
    """Open the node's memory for copies of this rank's state; return None if no copies are kept. All ranks of `group` call this together.
    If the memory of one rank's node has no room, no rank keeps copies."""
    spec, rank_info = trainer.spec, RankInfo.find()
    if rank_info.memory is None or not spec.fleet.memory_every or not trainer.state.all_in_memory:
        return None
    memory, failed = None, ""
    may_rise = len(trainer.model.blocks) if spec.precision.auto else 0
    wanted = GOOD_COPIES if "rewind" in spec.stability.answers else 0
    for good in range(wanted, -1, -1):
        try:
            memory = Memory(
                trainer.state.shares(),
                rank_info=rank_info,
                keep=spec.fleet.memory_keep,
                pinned=spec.fleet.verify_every > 0,
                good=good,
                text_bytes=room(spec.stability, blocks=may_rise) + trainer.callbacks.room,
                disk=rank_info.disk if spec.fleet.disk_every else None,
                generation=os.environ.get("MEGALITH_GENERATION", ""),
                warn=warn,
            )
        except OSError as error:
            memory, failed = None, str(error)
        short = torch.tensor(int(memory is None))
        dist.all_reduce(short, group=group)
        if not int(short):
            break
        memory = None
        if good and rank_info.rank == 0:
            warn(f"the nodes' memory has no room for {good} copies for rewinds: {failed or 'another rank has no room'}")
    if memory is None:
        return _without(Tier.MEMORY, failed or "another rank has no room", rank_info, warn)
    distance = spec.fleet.buddy_distance(len(rank_info.placement))
    if distance:
        patience = timedelta(seconds=spec.launch.timeout)
        lanes = another(trainer.groups.world, timeout=patience, purpose=MESSAGES_ONLY)
        try:
            memory.join(distance, group=lanes)
        except OSError as error:
            _without(Tier.BUDDY, str(error), rank_info, warn)
    return memory


def _without(tier: Tier, error: str, rank_info: RankInfo, warn: Callable[[str], None]) -> None:
    where = "a buddy node's memory" if tier is Tier.BUDDY else "memory"
    warn(f"no copies of the state are kept in {where}: {error}")
    if rank_info.rank == 0:
        report(SaveFailed(time=time.time(), tier=tier, error=error))
