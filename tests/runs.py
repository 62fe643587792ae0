"""Whole training runs for tests: ranks are forked from the test process, and call the same function as under any launcher."""

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

import megalith.train.run
from megalith import epochs
from megalith.checkpoint.folder import committed
from megalith.checkpoint.read import read_full
from megalith.data.prepare import prepare
from megalith.data.tokenizer import load
from megalith.events import FILE
from megalith.fleet.heartbeat import Heartbeat
from megalith.spec.run import RunSpec
from megalith.spec.sites import at_site, folder_of
from tests.fleet.conftest import until
from tests.patience import PATIENCE

torch.set_num_threads(1)

SITE = "TEST_SITE"
"""Variable with the site of a rank."""

_LOG_TAIL = 1 << 14  # bytes


def prepare_text(folder: Path, *, days: int = 400) -> Path:
    """Prepare a little text in two domains."""
    verse, tale = folder / "verse.txt", folder / "tale.txt"
    verse.write_text("\n\n".join(f"Line {i} of a verse, which has {i * i} words in it, or nearly." for i in range(400)))
    tale.write_text(
        "\n\n".join(f"On day {i} the ship sailed {7 * i} miles and nobody spoke of day {i - 1}." for i in range(days))
    )
    out = folder / "data"
    prepare([f"verse={verse}", f"tale={tale}"], tokenizer=load("bytes"), out=out, validation=0.1)
    return out


def typed(file: Path, data: Path, *, steps: int, more: str = "") -> list[str]:
    """Return the command `megalith train` for a small run of two ranks, without the run folder. `more`: further tables of the file."""
    file.write_text(
        "[model]\nlayers = 2\ndim = 32\nheads = 4\nffn = 48\nvocab = 264\ncontext = 64\n[plan]\ndata = 2\nzero = 3\n"
        f'[data]\npath = "{data}"\n[train]\nsteps = {steps}\nglobal_batch = 4\nseq_len = 32\nprecision = "fp32"\n'
        f"[optimizer]\nwarmup = 2\n[checkpoint]\nevery = 5\n[launch]\nthreads = 1\n{more}"
    )
    return [sys.executable, "-m", "megalith.cli", "train", str(file), "--run-dir"]


def newest_step(folder: Path) -> int:
    """Return the newest step in the end of a run's log, 0 if there is none. To parse a long log again and again would take more processor
    time than the training."""
    with contextlib.suppress(OSError), (log := epochs.newest(folder, FILE)).open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_TAIL))
        return max((int(step) for step in re.findall(rb'"type": ?"step".*?"step": ?(\d+)', file.read())), default=0)
    return 0


def await_step(step: int, folder: Path, process: "subprocess.Popen[str]") -> None:
    """Wait until the log of a run that was started as a command has a step. Fails if the run ends before."""
    while newest_step(folder) < step:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def process_of(rank: int, folder: Path) -> int:
    """Return the latest process id of a rank in the log of a run that was started as a command."""
    return int(re.findall(rf"rank {rank} of \d+, process (\d+)", (folder / f"ranks/rank-{rank}.log").read_text())[-1])


def start(
    spec: RunSpec, folder: Path, *, source: dict[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> dict[int, int]:
    """Fork the run's ranks, and return process id -> rank. `source`: the state from which they resume. All sites of a run are started,
    with ranks numbered across sites."""
    if spec.sites is not None and spec.sites.site is None:
        found = {}
        for site in range(spec.sites.count):
            found |= start_site(spec, folder, site, source=source, environment=environment)
        return found
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.json").write_text(spec.model_dump_json())
    store = folder / f"store-{secrets.token_hex(4)}"
    pids = {}
    for rank in range(spec.ranks):
        pid = os.fork()
        if pid == 0:
            os.environ.update(environment or {})
            _rank(spec, folder, rank, store, source)
        pids[pid] = rank
    return pids


def start_site(
    spec: RunSpec, folder: Path, site: int, *, source: dict[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> dict[int, int]:
    """Fork the ranks of one site of a run, numbered from `first`."""
    assert spec.sites is not None
    own = at_site(spec.model_copy(update={"sites": spec.sites.model_copy(update={"site": site})}))
    before = sum(at_site(spec, other).ranks for other in range(site))
    started = start(own, folder_of(folder, site), source=source, environment={SITE: str(site), **(environment or {})})
    return {pid: before + rank for pid, rank in started.items()}


def _rank(spec: RunSpec, folder: Path, rank: int, store: Path, source: dict[str, Any] | None) -> None:
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    ranks = str(spec.ranks)
    os.environ.update(RANK=str(rank), WORLD_SIZE=ranks, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=ranks)
    os.environ.update(MEGALITH_STORE=f"file://{store}", MEGALITH_GENERATION=store.name)
    code = 0
    try:
        megalith.train.run.main(str(folder), source=source)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        code = 1
    os._exit(code)


def finish(pids: dict[int, int], *, timeout: float = PATIENCE) -> list[int]:
    """Wait for the ranks and return their exit statuses (minus the signal's number for a killed rank). Once one has failed, the
    others are killed, as by a supervisor."""
    codes: dict[int, int] = {}
    running, end = dict(pids), time.monotonic() + timeout
    while running:
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > end or any(code not in (0, 75) for code in codes.values()):
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[rank] for rank in sorted(codes)]


def train(spec: RunSpec, folder: Path) -> None:
    """Run to the end. Raises with the ranks' logs if a rank fails."""
    codes = finish(start(spec, folder))
    if any(codes):
        raise RuntimeError(f"{codes}\n" + "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("rank-*.log"))))


@contextlib.contextmanager
def when(phase: str, step: int | None, *, rank: int = 0, site: int = 0, act: Callable[[], object]) -> Iterator[None]:
    """In runs that are started meanwhile, `rank` (of `site`, if there are sites) acts when it reports this phase of this step (None:
    any step). The others wait for it there, so nothing depends on the speed of an observer."""
    say = Heartbeat.beat

    def say_and_act(self: Heartbeat, name: str, at: int = -1, **rest: float) -> None:
        say(self, name, at, **rest)
        here = (name, os.environ["RANK"], os.environ.get(SITE, "0"))
        if here == (phase, str(rank), str(site)) and step in (None, at):
            act()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Heartbeat, "beat", say_and_act)
        yield


def signal_yourself(number: int) -> None:
    """Send a signal to this process."""
    os.kill(os.getpid(), number)


def die_once_saved(folder: Path, step: int | None = None) -> None:
    """Kill this process once there is a checkpoint of this step (default: any) to resume from. Checkpoints are written while training
    continues."""
    until(
        lambda: any(step is None or path.name == f"step-{step:08d}" for path in committed(folder / "checkpoints")),
        seconds=PATIENCE,
    )
    signal_yourself(signal.SIGKILL)


def final_state(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the newest checkpoint."""
    return read_full(folder)


def position(folder: Path) -> dict[str, int]:
    """Return the steps done and samples consumed, from the newest checkpoint."""
    newest = max(folder.glob("checkpoints/step-*"), key=lambda path: path.name)
    return json.loads((newest / "manifest.json").read_text())["meta"]["position"]


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """True if names and bits are equal."""
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, different
