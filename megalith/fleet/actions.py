"""Injection of faults into the process, the connections and the files of a rank.

Every fault is real: a process is killed, a bit flips, sockets are shut down, a file is cut off. Faults in tensors are injected by
`train.inject`.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megalith import epochs
from megalith.fleet.injection import Injection
from megalith.fleet.rank_info import RankInfo, node_folder
from megalith.machine import link, networks

BALLAST = "ballast-"  # and the step: files that fill a disk


class Injected(RuntimeError):  # noqa: N818  # it is what happened
    """A campaign's simulated software bug."""


def _raise(one: Injection, rank_info: RankInfo) -> None:
    raise Injected(f"fault {one.number} of the campaign")


def _send(number: int) -> Callable[[Injection, RankInfo], None]:
    def send(one: Injection, rank_info: RankInfo) -> None:
        os.kill(os.getpid(), number)

    return send


def _never_return(one: Injection, rank_info: RankInfo) -> None:
    """Block the main thread, as a kernel that never ends does. Other threads still answer, but the rank joins no further
    collective."""
    while True:
        time.sleep(1)  # Python handles a signal that arrives just before a sleep only after that sleep


def _segfault(one: Injection, rank_info: RankInfo) -> None:
    ctypes.string_at(0)


def _tear_connections(one: Injection, rank_info: RankInfo) -> None:
    """Shut down every TCP connection of this process, whichever library holds the connection."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            if not stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                continue
            copy = socket.socket(fileno=os.dup(int(entry.name)))
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                copy.shutdown(socket.SHUT_RDWR)
            copy.close()
        except OSError:
            continue


def _unplug(one: Injection, rank_info: RankInfo) -> None:
    """Take this node's network interface down, so that messages in both directions are lost without an error."""
    assert networks.find() is not None, "the campaign did not create this network interface, so other processes may need it"
    link.take_down(networks.INTERFACE)


def _lose_memory(rank_info: RankInfo, nodes: Sequence[str]) -> None:
    """Delete the copies of the state in the memory of these nodes; the nodes themselves stay available."""
    if rank_info.memory is None:
        return
    for node in dict.fromkeys(nodes):
        folder = node_folder(rank_info.memory, node)
        for path in folder.glob("*") if folder.is_dir() else ():
            path.unlink(missing_ok=True)


def _lose_disk(rank_info: RankInfo, node: str) -> None:
    if rank_info.disk is not None:
        shutil.rmtree(node_folder(rank_info.disk, node), ignore_errors=True)


def _checkpoints() -> Path:
    return epochs.newest(Path(os.environ["MEGALITH_RUN_DIR"]), "checkpoints")


def _newest_checkpoint() -> list[Path]:
    steps = sorted(path for path in _checkpoints().glob("step-*") if path.name.removeprefix("step-").isdigit())
    return sorted(steps[-1].glob("rank-*"), key=lambda path: -path.stat().st_size) if steps else []


def _freeze_others() -> None:
    """Stop this machine's other ranks (SIGSTOP) until the supervisor kills them. If the other ranks ran on, one of them could
    still complete a copy in the memory that this fault deletes, and the state would be restored from that copy."""
    import psutil  # which only this needs

    for process in psutil.Process(os.getppid()).children():
        if process.pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGSTOP)


def _lose_copies(rank_info: RankInfo) -> None:
    _lose_memory(rank_info, rank_info.placement)
    for node in rank_info.placement:
        _lose_disk(rank_info, node)


def _cut_checkpoint(one: Injection, rank_info: RankInfo) -> None:
    _freeze_others()
    for part in _newest_checkpoint()[:1]:
        os.truncate(part, part.stat().st_size // 2)
    _lose_copies(rank_info)
    os.kill(os.getpid(), signal.SIGKILL)


def _alter_checkpoint(one: Injection, rank_info: RankInfo) -> None:
    _freeze_others()
    for part in _newest_checkpoint()[:1]:
        with part.open("r+b") as file:
            middle = part.stat().st_size // 2
            file.seek(middle)
            byte = file.read(1)[0]
            file.seek(middle)
            file.write(bytes([byte ^ 1]))
    _lose_copies(rank_info)
    os.kill(os.getpid(), signal.SIGKILL)


def _lose_node(one: Injection, rank_info: RankInfo) -> None:
    if rank_info.memory is not None and len(rank_info.placement) > 1:
        _freeze_others()
        _lose_disk(rank_info, rank_info.node)
        shutil.rmtree(node_folder(rank_info.memory, rank_info.node), ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _lose_with_memory(one: Injection, rank_info: RankInfo) -> None:
    """Remove the copies in memory of all nodes in this fault, because another rank may be killed before it removes those of its
    own node. Copies on disk stay, as when a node restarts."""
    _lose_memory(rank_info, [rank_info.node_of(rank) for rank in one.ranks])
    os.kill(os.getpid(), signal.SIGKILL)


def _alter_copy(one: Injection, rank_info: RankInfo) -> None:
    """Flip a bit in the newest copy of this rank's state in its own node's memory, then die, so that the state must be restored from
    another copy, such as a buddy's."""
    from megalith.fleet.tiers import copies  # numpy, which only this needs

    assert rank_info.folder is not None and rank_info.key is not None, (
        "this fault needs copies of the state in memory, but the run keeps none"
    )
    copies.corrupt_piece(rank_info.folder, key=rank_info.key, rank=rank_info.rank)
    os.kill(os.getpid(), signal.SIGKILL)


def _fill_disk(one: Injection, rank_info: RankInfo) -> None:
    """Fill the checkpoints' file system, which the campaign must have created, so that the next checkpoint has no room."""
    folder = _checkpoints()
    assert folder.is_mount(), f"{folder} is not a separate file system: filling it would harm other processes"
    block = bytes(1 << 16)
    with contextlib.suppress(OSError), (folder / f"{BALLAST}{one.step}").open("wb", buffering=0) as file:
        while file.write(block):
            pass


def make_room(*, but: int | None) -> None:
    """Remove the file with which an earlier fault filled the disk."""
    for ballast in _checkpoints().glob(f"{BALLAST}*"):
        if ballast.name != f"{BALLAST}{but}":
            ballast.unlink(missing_ok=True)


def _kill_agent(one: Injection, rank_info: RankInfo) -> None:
    """Kill this node's agent. The node's ranks die with the agent, and no process is left to report their deaths."""
    assert rank_info.agent is not None, "no agent supervises this rank"
    os.kill(rank_info.agent, signal.SIGKILL)
    time.sleep(60)  # it takes this process along


def _kill_supervisor(one: Injection, rank_info: RankInfo) -> None:
    said = (Path(os.environ["MEGALITH_RUN_DIR"]) / "ranks" / "lock").read_text(encoding="utf-8")  # by `control.owner`
    os.kill(int(said.split()[0]), signal.SIGKILL)
    time.sleep(60)  # it takes this process along


ACTIONS: dict[str, Callable[[Injection, RankInfo], None]] = {
    "kill": _send(signal.SIGKILL),
    "stop": _send(signal.SIGSTOP),
    "stuck": _never_return,
    "segfault": _segfault,
    "exception": _raise,
    "sockets": _tear_connections,
    "interface": _unplug,
    "preemption": _send(signal.SIGTERM),
    "checkpoint": _cut_checkpoint,
    "altered": _alter_checkpoint,
    "node": _lose_node,
    "two": _lose_with_memory,
    "copy": _alter_copy,
    "full": _fill_disk,
    "agent": _kill_agent,
    "supervisor": _kill_supervisor,
}


def happen(one: Injection, rank_info: RankInfo) -> None:
    """Inject a fault into a process, its files or its connections."""
    print(f"fault {one.number}: {one.kind} at step {one.step} ({one.moment})", flush=True)
    ACTIONS[one.kind](one, rank_info)
