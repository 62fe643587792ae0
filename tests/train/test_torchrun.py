"""Ranks that torchrun starts, and starts again."""

import dataclasses
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import get_args_parser

from tests.fleet.conftest import is_alive, until
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]

RANK = """
import os, time
from megalith.commands.shared import runs
from megalith.fleet.environment import find
runs.end_with_torchrun(find())
print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_a_rank_ends_with_the_torchrun_that_started_it() -> None:
    """A killed torchrun leaves its processes running: they would continue to write to the run folder, together with those of the next
    start."""
    place = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    start = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    environment = os.environ | place | {"TORCHELASTIC_RUN_ID": "one"}
    with subprocess.Popen([sys.executable, "-c", start, RANK], cwd=ROOT, env=environment, stdout=subprocess.PIPE) as torchrun:
        assert torchrun.stdout is not None
        rank = int(torchrun.stdout.readline())
        assert is_alive(rank)
        torchrun.kill()
        torchrun.stdout.read()  # reaches its end when no process has it open any more
    until(lambda: not is_alive(rank), seconds=PATIENCE)  # a process closes its output shortly before it is gone


@pytest.mark.slow
def test_ranks_meet_again_after_torchrun_has_started_them_anew(tmp_path: Path) -> None:
    """torch 2.15 restarts ranks with the same store and the same keys, so with gloo they would call dead ranks for ever.

    torchrun's sharing of its store is left on, because this is the failing case.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
    words = "--nproc-per-node 2 --max-restarts 1 --monitor-interval 0.1 --rdzv-backend c10d --rdzv-endpoint localhost:0 -m"
    command = [sys.executable, "-m", "torch.distributed.run", *words.split(), "tests.train.meet", str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"lives-{rank}").read_text() for rank in range(2)] == ["met\nmet\n"] * 2


def test_torchrun_still_has_no_option_for_its_wait_at_the_end() -> None:
    """torchrun waits five minutes for machines that are gone. Once this test fails, the launch files should set torch's
    new option."""
    assert "exit_barrier_timeout" in inspect.signature(LocalElasticAgent).parameters
    assert "exit_barrier_timeout" not in {field.name for field in dataclasses.fields(LaunchConfig)}
    assert not [action.dest for action in get_args_parser()._actions if "barrier" in action.dest]
