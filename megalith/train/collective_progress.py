"""A rank's report of its progress in its collectives, whatever its main thread is doing."""

import json
import os
import signal
import threading

import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megalith.fleet import collective_progress
from megalith.fleet.evidence import STACKS
from megalith.parallel.groups import MESSAGES_ONLY

_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""torch's flight recorders: that of gloo, and that of NCCL if torch was built with NCCL."""


def answer() -> None:
    """Start a thread that logs this process's collectives whenever its stack is requested."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # the signal's number is written even while the main thread is in C
    threading.Thread(target=_answer, args=(reading,), name="standing", daemon=True).start()


def _answer(reading: int) -> None:
    while asked := os.read(reading, 1):
        if asked[0] == STACKS:
            os.write(2, collective_progress.line(begun(), recorded()).encode())


def begun() -> dict[str, int]:
    """Return the number of collectives that this rank has begun in each of its groups, by group name; gloo also counts point-to-point
    messages. Groups that only send point-to-point messages are left out, because the counts of their members differ.
    """
    found = {}
    for group, ranks in list(distributed_c10d._world.pg_group_ranks.items()):
        if isinstance(group, dist.ProcessGroup) and len(ranks) > 1 and group.group_desc != MESSAGES_ONLY:
            name = f"{group.group_name} ({len(ranks)} ranks, {min(ranks)} to {max(ranks)})"
            found[name] = group._get_sequence_number_for_group()  # pyright: ignore[reportAttributeAccessIssue]
    return found


def recorded() -> list[str]:
    """Return the last collective of each group in torch's flight recorder, with its number and state; empty if the recorder
    is off."""
    last: dict[str, str] = {}
    for recorder in _RECORDERS:
        dump = getattr(c10d, recorder, None)
        for entry in json.loads(dump() or "{}").get("entries", ()) if dump else ():
            group = str(entry["process_group"][0])
            last[group] = f"{entry['profiling_name']} {entry['collective_seq_id']} of group {group}: {entry['state']}"
    return list(last.values())
