"""The driver under real Ray."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megalith.events import Checkpoint, RunStarted, of_kind, read
from megalith.fleet.engines import Launch, emit
from megalith.spec.files import load
from tests.fleet.engines.test_slurm import ROOT, RUN, until_event
from tests.patience import PATIENCE
from tests.runs import assert_same_bits, final_state, position, prepare_text, train

PYTHON = ROOT / ".ray/bin/python"
RAYS_OWN = "You have likely discovered a bug in Ray"


@pytest.mark.engines
@pytest.mark.timeout(PATIENCE)
@pytest.mark.skipif(not PYTHON.exists(), reason=f"needs Ray in {PYTHON.parents[1].name} (make engines)")
def test_a_node_whose_processes_die_is_started_again_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN.format(data=prepare_text(tmp_path)))
    spec, folder, output = load(tmp_path / "run.toml").spec, tmp_path / "run", tmp_path / "output"
    train(spec, tmp_path / "whole")
    launch = Launch(
        run_file=str(tmp_path / "run.toml"), run_dir=str(folder), ranks_per_node=2, rank_restarts=0, workdir=str(ROOT),
        environment={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    made = emit("ray", spec, launch)
    (tmp_path / made.file).write_text(made.text)
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    # without a token in the home folder, and without usage reports to Ray's makers
    environment = {**os.environ, "PATH": path, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}

    def kill_torchrun() -> None:
        until_event(folder, Checkpoint, output)
        [torchrun] = _torchruns(folder)
        os.kill(torchrun, signal.SIGKILL)

    command, times = [str(PYTHON), str(tmp_path / made.file)], 1
    code = _submit(command, environment, output, meanwhile=kill_torchrun)
    while code and RAYS_OWN in output.read_text() and times < 3:  # Ray itself failed: the user submits the job again
        code, times = _submit(command, environment, output), times + 1
    assert code == 0, output.read_text()[-5000:]
    starts = [event.resumed_step for event in of_kind(read(folder), RunStarted)]
    assert len(starts) >= 2 and starts[1] >= 40, starts
    assert_same_bits(final_state(tmp_path / "whole"), final_state(folder))
    assert position(tmp_path / "whole") == position(folder)


def _submit(
    command: list[str], environment: dict[str, str], output: Path, *, meanwhile: Callable[[], None] = lambda: None
) -> int:
    """Run the driver to its end; return its exit status."""
    with output.open("wb") as out:
        driver = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT, process_group=0)
    try:
        meanwhile()
        return driver.wait()
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()


def _torchruns(folder: Path) -> list[int]:
    """Return the process ids of this run's torchruns."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process ended meanwhile
            words = path.read_bytes().split(b"\0")
            if str(folder).encode() in words and any(word.endswith(b"/torchrun") for word in words):
                found.append(int(path.parent.name))
    return found
