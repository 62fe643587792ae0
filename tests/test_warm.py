"""A command that a test forks is like one that is started anew."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.patience import PATIENCE

PROBE = [sys.executable, "-m", "tests.probe"]


def _run(fresh: bool, *words: str, folder: Path, **options: Any) -> tuple[dict[str, Any], "subprocess.CompletedProcess[str]"]:
    environment = os.environ | {"PYTHONPATH": str(warm.ROOT), "PROBE": "here"} | ({warm.FRESH: "1"} if fresh else {})
    done = subprocess.run(
        [*PROBE, *words],
        cwd=folder,
        env=environment,
        input="given",
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        **options,
    )
    return json.loads(done.stdout), done


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"start_new_session": True}, {"process_group": 0}], ids=str)
@pytest.mark.parametrize("words", [("0",), ("7",), ()], ids=str)
def test_a_fork_is_given_what_a_new_interpreter_is(words: tuple[str, ...], options: dict[str, Any], tmp_path: Path) -> None:
    (forked, here), (anew, there) = (_run(fresh, *words, folder=tmp_path, **options) for fresh in (False, True))
    assert forked == anew
    assert here.returncode == there.returncode == (int(words[0]) if words else 1)
    assert (
        here.stderr.splitlines()[0] == there.stderr.splitlines()[0]
        and here.stderr.splitlines()[-1] == there.stderr.splitlines()[-1]
    )


def test_it_is_a_child_and_ends_by_a_signal_as_a_child_does(tmp_path: Path) -> None:
    process = subprocess.Popen([*PROBE, "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path)
    status = Path(f"/proc/{process.pid}/status").read_text()
    assert f"PPid:\t{os.getpid()}\n" in status
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    assert process.wait(PATIENCE) == -signal.SIGKILL
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


def test_a_descriptor_that_is_passed_keeps_its_number(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        done = subprocess.run(
            [*PROBE, "0"], pass_fds=[writing], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, check=True
        )
        assert writing in json.loads(done.stdout)["descriptors"]
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize(
    ("command", "forks"),
    [
        ([sys.executable, "-m", "megalith.cli", "check"], "megalith.cli"),
        ([sys.executable, "-P", "-m", "megalith.fleet.fork_server", "1", "2"], "megalith.fleet.fork_server"),
        ([sys.executable, "-c", "pass"], None),
        (["/usr/bin/python3", "-m", "megalith.cli"], None),
        ([sys.executable, "-m", "torch.distributed.run"], None),
        ("ls", None),
    ],
)  # fmt: skip
def test_only_commands_of_this_tree_are_forked(command: Any, forks: str | None) -> None:
    assert warm._module(command) == forks


def test_what_a_library_reads_when_it_is_loaded_needs_a_new_interpreter(tmp_path: Path) -> None:
    source = warm._found()
    assert source is not None
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    assert source.suits("megalith.cli", plain, str(tmp_path))
    for more in (
        {"OMP_NUM_THREADS": "2"},
        {"LD_PRELOAD": "x.so"},
        {"TORCH_LOGS": "all"},
        {"PYTHONPATH": str(tmp_path / "other")},
    ):
        (tmp_path / "other" / "megalith").mkdir(parents=True, exist_ok=True)
        assert not source.suits("megalith.cli", plain | more, str(tmp_path)), more
