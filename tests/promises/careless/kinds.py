"""Acts of a careless user or a neighbour on a run, and the required outcome of each. The table KINDS is at the end."""

import contextlib
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

from tests.promises.careless.scene import BrokenError, Scene

Must = Literal["goes on", "may stop"]
STRANGER = 65534
"""The id of another user, to whom root can give a folder."""


@dataclass(frozen=True)
class Done:
    """An act that was done, in words. A run that stops because of it names one of `names`; `back` undoes the change."""

    what: str
    names: tuple[str, ...] = ()
    back: Callable[[], None] = field(default=lambda: None)


Do = Callable[[Scene, Random], Done | None]
"""Does something to a run. Returns None if the run has nothing to do it to. Raises BrokenError if a command answers wrongly."""


@dataclass(frozen=True)
class Kind:
    """A kind of act, and the required reaction of the run. `only`: the kind of run to which it applies."""

    must: Must
    do: Do
    only: Literal["", "one machine", "agents"] = ""


# Files


def _delete(path: Path, random: Random) -> None:
    path.unlink()


def _truncate(path: Path, random: Random) -> None:
    os.truncate(path, random.choice((0, path.stat().st_size // 2)))


def _garble(path: Path, random: Random) -> None:
    """Change bytes in place, so that processes which have the file mapped or open see the change."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(random.randrange(max(1, size)))
        file.write(random.randbytes(min(64, max(1, size))))


def _replace(path: Path, random: Random) -> None:
    """Put another file under the same name."""
    part = path.with_name(path.name + ".other")
    part.write_bytes(random.choice((b"", b"[1, 2]", b'{"no": "such thing"}', random.randbytes(100))))
    part.replace(path)


def _move(path: Path, random: Random) -> None:
    """Rename a file. Processes that have it open still write to it, under its new name."""
    path.rename(_moved(path))


def _moved(path: Path) -> Path:
    return path.with_name(f"{path.name}.moved")


def _folder(path: Path, random: Random) -> None:
    path.unlink()
    path.mkdir()


WAYS = (_delete, _truncate, _garble, _replace)


def _alter(
    path: Path, random: Random, ways: Sequence[Callable[[Path, Random], None]] = WAYS, *, names: Sequence[str] = ()
) -> Done:
    before, way = path.read_bytes(), random.choice(ways)
    way(path, random)
    after = path.read_bytes() if path.is_file() else None

    def back() -> None:
        now = path.read_bytes() if path.is_file() else None
        if path.parent.is_dir() and now == after:  # otherwise somebody has created it anew
            if path.is_dir():
                path.rmdir()
            path.write_bytes(before)
            _moved(path).unlink(missing_ok=True)

    return Done(f"{path.name}: {way.__name__.strip('_')}", (path.name, *names), back)


def _any_of(scene: Scene, random: Random, *patterns: str) -> Path | None:
    files = sorted({path for pattern in patterns for path in scene.run.glob(pattern) if path.is_file()})
    return random.choice(files) if files else None


def _altered(*patterns: str, ways: Sequence[Callable[[Path, Random], None]] = WAYS) -> Do:
    """Alter one of the run folder's files of these names."""

    def do(scene: Scene, random: Random) -> Done | None:
        try:
            path = _any_of(scene, random, *patterns)
            return None if path is None else _alter(path, random, ways)
        except FileNotFoundError:  # the run was faster
            return None

    return do


def _log(scene: Scene, random: Random) -> Done | None:
    log = next(iter(sorted(scene.run.glob("events*.jsonl"))), None)
    if log is None:
        return None
    if random.random() < 0.4:
        with log.open("ab") as file:
            file.write(
                random.choice((b"123\n", b'{"no": "type"}\n[]\n', b'{"type": "step", "step": "three"}\n', b"\xff\xfe\0", b"{"))
            )
        return Done("strange lines at the end of the log")
    _alter(log, random, (_delete, _truncate, _folder))
    return Done("the log deleted, cut or made a folder")


def _data(scene: Scene, random: Random) -> Done:
    path = random.choice(sorted(one for one in scene.data.iterdir() if "validation" not in one.name))
    return _alter(path, random, names=(f"{path.stem}.bin",))  # an index belongs to its shard


def _checkpoints(scene: Scene) -> list[Path]:
    return sorted(path for path in scene.run.glob("checkpoints*/step-*") if path.name.removeprefix("step-").isdecimal())


def _last_checkpoint(scene: Scene, random: Random) -> Done | None:
    found = _checkpoints(scene)
    try:
        return _alter(random.choice(sorted(found[-1].iterdir())), random, names=(found[-1].name,)) if found else None
    except FileNotFoundError:
        return None


def _older_checkpoint(scene: Scene, random: Random) -> Done | None:
    found = _checkpoints(scene)
    if len(found) < 3:
        return None
    if random.random() < 0.5:
        shutil.rmtree(found[0], ignore_errors=True)
        return Done(f"{found[0].name} deleted")
    try:
        _alter(random.choice(sorted(found[0].iterdir())), random)
    except FileNotFoundError:
        return None
    return Done(f"{found[0].name} damaged")


# Stores


def _away(folder: Path, seconds: float) -> Done:
    elsewhere = folder.with_name(f"{folder.name}-elsewhere")
    folder.rename(elsewhere)
    time.sleep(seconds)
    if folder.exists():
        made = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        raise BrokenError(f"{folder.name} was created again while it was away: {made}")
    elsewhere.rename(folder)
    return Done(f"{folder.name} away for {seconds:.1f} s")


def _run_away(scene: Scene, random: Random) -> Done:
    return _away(scene.run, random.uniform(0.1, 3.0))


def _data_away(scene: Scene, random: Random) -> Done:
    return _away(scene.data, random.uniform(0.1, 3.0))


# Copies in memory


def _copies(scene: Scene, random: Random) -> Done | None:
    memories = scene.memories()
    if not memories:
        return None
    memory = random.choice(memories)
    files = sorted(path for path in memory.rglob("*") if path.is_file())
    if random.random() < 0.4 or not files:
        shutil.rmtree(memory, ignore_errors=True)
        return Done("copies in memory deleted, with their folder")
    path = random.choice(files)
    with contextlib.suppress(FileNotFoundError):
        _alter(path, random, (_delete, _truncate, _garble))
    return Done(f"a copy in memory hurt: {path.name}")


def _foreign(scene: Scene, random: Random) -> Done | None:
    """Put another user's folder, or one that all may write to, in the place of the run's."""
    memories = scene.memories()
    if not memories:
        return None
    memory = random.choice(memories)
    if os.geteuid() or random.random() < 0.5:
        for path in (memory, *memory.rglob("*")):
            with contextlib.suppress(FileNotFoundError):
                path.chmod(0o777)
        return Done("copies in memory open to all")
    shutil.rmtree(memory, ignore_errors=True)
    with contextlib.suppress(FileExistsError):  # the run was faster, so the folder is its own
        memory.mkdir(mode=0o755)
        os.chown(memory, STRANGER, STRANGER)
        return Done("another user's folder where copies were", back=lambda: shutil.rmtree(memory, ignore_errors=True))
    return Done("copies in memory deleted, with their folder")


# Ports

_LETTERS = (b"GET / HTTP/1.1\r\n\r\n" * 9, b"\xff" * 10_000, b"garbage{\n", bytes(1000), b"\xff\xff\xff\x7f", b"")


@contextlib.contextmanager
def _connected(address: tuple[str, int]) -> Iterator[socket.socket | None]:
    try:
        with socket.create_connection(address, timeout=5) as stranger:
            yield stranger
    except OSError:  # nobody listens any more, or the connection was refused
        yield None


def _garbage(scene: Scene, random: Random) -> Done | None:
    """Send garbage to every port of the run. At some ports keep connections open for a while."""
    ports = scene.ports()
    with contextlib.ExitStack() as stack:
        for address in ports:
            for _ in range(random.choice((1, 1, 20))):
                with contextlib.suppress(OSError):
                    stranger = stack.enter_context(_connected(address))
                    if stranger is not None:
                        stranger.sendall(random.choice(_LETTERS))
        time.sleep(random.choice((0.0, 1.0)))
    return Done(f"garbage at {len(ports)} ports") if ports else None


# Signals

_TO_RANKS = ("KILL", "TERM", "INT", "HUP", "USR1", "USR2", "QUIT", "SEGV", "BUS", "ABRT", "ALRM", "STOP")
_TO_COMMANDS = {"TERM": "SIGTERM", "INT": "Ctrl-C", "HUP": "SIGHUP", "USR1": "SIGUSR1", "KILL": "", "QUIT": ""}
"""Wait for the reply of a command that is told to stop. A signal that no process receives has no reply."""


def _to_a_rank(scene: Scene, random: Random) -> Done | None:
    name, serves = random.choice(_TO_RANKS), random.random() < 0.2
    processes = scene.servers() if serves else scene.ranks()
    if not processes:
        return None
    with contextlib.suppress(ProcessLookupError):
        os.kill(random.choice(processes).pid, signal.Signals[f"SIG{name}"])
    return Done(f"SIG{name} to a {'fork server' if serves else 'rank'}")


def _to_the_command(scene: Scene, random: Random) -> Done:
    """Ctrl-C, Ctrl-\\ and a closing terminal reach the whole process group."""
    name = random.choice(sorted(_TO_COMMANDS))
    number = signal.Signals[f"SIG{name}"]
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if name in ("INT", "QUIT", "HUP") else os.kill)(scene.command.pid, number)
    return Done(f"SIG{name} to the command", (_TO_COMMANDS[name],))


def _stopped(scene: Scene, random: Random) -> Done:
    """Ctrl-Z, and `fg` a little later."""
    seconds = random.uniform(0.2, 2.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(scene.command.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.killpg(scene.command.pid, signal.SIGCONT)
    return Done(f"the command stopped for {seconds:.1f} s")


def _to_an_agent(scene: Scene, random: Random) -> Done:
    """Lose a machine, at once or shortly after its scheduler has sent a notice. Its engine then starts the agent again."""
    rank, told = random.choice((1, 2)), random.random() < 0.5
    agent = scene.processes[rank]
    if told:
        agent.terminate()
        time.sleep(random.uniform(0.5, 3.0))
    agent.kill()
    agent.wait()
    scene.begin_again(rank)
    return Done("another agent killed, after it was told to go" if told else "another agent killed")


# Commands


def _refused(scene: Scene, said: str) -> bool:
    """True if a command refused to begin because of an input that an earlier act has damaged."""
    return "nothing was started" in said and any(str(path) in said for path in (scene.data, scene.file))


def _second(scene: Scene, random: Random) -> Done:
    other = random.choice(
        ([], ["--set", "optimizer.lr=0.01"], ["--set", "train.steps=2"], ["--set", "plan.data=4", "--set", "plan.pipeline=1"])
    )
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    agent = scene.agents and random.random() < 0.5
    words = ["agent" if agent else "train", str(scene.file), "--run-dir", str(scene.run), *other]
    status, said = scene.ask(*words, env=env if agent else None)
    # a damaged input is named before the owner of the run folder
    refused = status != 0 and ("in use by process" in said or _refused(scene, said))
    if scene.command.poll() is None and not refused:
        raise BrokenError(f"a second command was not refused: {words} ended with {status}: {said[-1500:]}")
    return Done(f"a second command: {' '.join((words[0], *other))}")


def _others(scene: Scene, random: Random) -> Done:
    """Commands that inspect a run, or clean up after it."""
    words = random.choice((["report", str(scene.run)], ["clean", str(scene.run), "--yes"], ["check", str(scene.file), "--here"]))
    status, said = scene.ask(*words)
    unexpected = status != 0 and words[0] != "report" and not (words[0] == "check" and _refused(scene, said))
    if "Traceback" in said or unexpected:
        raise BrokenError(f"{words} ended with {status}: {said[-1500:]}")
    return Done(f"megalith {words[0]}")


NOTES = (
    "ranks/*.json",
    "ranks/name",
    "ranks/lock",
    "ranks/owners/*",
    "ranks/flops-*",
    "ranks/peak-*",
    "nodes.jsonl",
    "ranks/nodes/*/*.json",
)
SHOWN = ("report.html", "provenance.json", "ranks/*.log", "ranks/nodes/*/*.log", "incidents/*", "tokenizer*.json")

KINDS: dict[str, Kind] = {
    "second command": Kind("goes on", _second),
    "other commands": Kind("goes on", _others),
    "event log": Kind("goes on", _log),
    "file that only shows moved": Kind("goes on", _altered("events*.jsonl", *SHOWN, *NOTES, ways=(_move,))),
    "files that only show": Kind("goes on", _altered(*SHOWN, ways=(*WAYS, _folder))),
    "notes in ranks/": Kind("goes on", _altered(*NOTES)),
    "older checkpoint": Kind("goes on", _older_checkpoint),
    "copies in memory": Kind("goes on", _copies),
    "foreign folder": Kind("goes on", _foreign),
    "garbage at ports": Kind("goes on", _garbage),
    "run folder away": Kind("goes on", _run_away),
    "data away": Kind("goes on", _data_away),
    "signal to a rank": Kind("goes on", _to_a_rank),
    "command stopped a while": Kind("goes on", _stopped),
    "signal to another agent": Kind("goes on", _to_an_agent, only="agents"),
    "description": Kind("may stop", _altered("spec.json", "run.toml")),
    "input moved": Kind("may stop", _altered("spec.json", "run.toml", "ranks/key", ways=(_move,))),
    "key": Kind("may stop", _altered("ranks/key")),
    "data": Kind("may stop", _data),
    "last checkpoint": Kind("may stop", _last_checkpoint),
    "signal to the command": Kind("may stop", _to_the_command),
}
"""The table. A run continues after damage to displays, a second command, traffic at a port, changes in a folder of copies, the loss of
one rank, and a store that comes back in time. It may stop, with a cause that names the object, after damage to its inputs or to the
state from which it resumes, and when it is told to."""
