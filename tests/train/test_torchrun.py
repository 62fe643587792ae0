"""Ranks that torchrun starts, and starts again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_ranks_meet_again_after_torchrun_has_started_them_anew(tmp_path: Path) -> None:
    """torch 2.15 starts ranks again beside the same store and under the same keys: with gloo they would call dead ranks for ever.

    torchrun's own way of sharing its store is left on, as that is what fails.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
    words = "--nproc-per-node 2 --max-restarts 1 --monitor-interval 0.1 --rdzv-backend c10d --rdzv-endpoint localhost:0 -m"
    command = [sys.executable, "-m", "torch.distributed.run", *words.split(), "tests.train.meet", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"lives-{rank}").read_text() for rank in range(2)] == ["met\nmet\n"] * 2
