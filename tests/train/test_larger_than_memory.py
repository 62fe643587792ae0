"""A training state larger than the memory limit trains from disk within that limit, with the bits of a run without the limit."""

import ctypes
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.prove.parity import RandomText
from megalith.prove.worlds import run_ranks
from megalith.spec.run import RunSpec
from megalith.train.assemble import assemble, mesh_groups
from megalith.train.batches import indices
from megalith.train.step import train_step
from tests.full import only_full

pytestmark = pytest.mark.slow

MIB = 1 << 20
MODEL = {"layers": 14, "dim": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn": 1536, "vocab": 8192, "context": 32}
A_PARAMETER = 16
"""Bytes of training state of a parameter: weight 2, gradient 2, master weight 4, moments 8."""
ROOM = 400 * MIB
"""Bytes that a process may have beyond those of its parent."""
STACK = 1 << 20
"""Bytes of a thread's stack, all of which the kernel counts. Some thirty threads with the usual 8 MiB would take more than the state."""
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "within_memory.py"


def _spec(state: dict[str, Any], *, zero: int = 0) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": MODEL,
            "data": {"path": "none"},
            "plan": {"recompute": "full", "zero": zero, "state": state},
            "train": {"steps": 2, "global_batch": 1, "seq_len": 32, "precision": "bf16", "gradients": "bf16"},
            "optimizer": {"warmup": 0, "lr": 1e-4},
        }
    )


def _trained(rank: int, spec: RunSpec, room: int | None) -> tuple[list[float], int]:
    """Return losses and the bytes of the training state, with this limit on data: the kernel refuses more."""
    if room is not None:
        _spare()
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData")]
        most = int(line.split()[1]) * 1024 + room
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    device = torch.device("cpu")
    trainer = assemble(spec, groups=mesh_groups(spec, device), device=device)
    text, losses = RandomText(spec), list[float]()
    for step in range(spec.train.steps):
        losses.append(train_step(trainer, [text.batch(part) for part in indices(spec, first=step, data_rank=0)], step=step).loss)
    return losses, A_PARAMETER * sum(parameter.numel() for parameter in trainer.parameters.values())


def _spare() -> None:
    """Give threads small stacks, and freed tensors back to the system."""
    library, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
    library.pthread_attr_init(attributes)
    library.pthread_attr_setstacksize(attributes, ctypes.c_size_t(STACK))
    assert library.pthread_setattr_default_np(attributes) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on data is Linux's")
def test_a_state_that_memory_has_no_room_for_trains_from_disk(tmp_path: Path) -> None:
    resident = _spec({})
    ((losses, state),) = run_ranks(_trained, 1, resident, None)
    assert state > ROOM
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        run_ranks(_trained, 1, resident, ROOM)
    away = _spec({"optimizer": "disk", "chunk": 4, "folder": str(tmp_path)})
    assert run_ranks(_trained, 1, away, ROOM) == [(losses, state)]
    streamed = _spec({"optimizer": "disk", "weights": "disk", "release": True, "chunk": 4, "folder": str(tmp_path)}, zero=3)
    assert run_ranks(_trained, 1, streamed, state // 4) == [(losses, state)]


@only_full  # it trains 90M and 254M parameters in groups of 900 MiB
def test_all_of_a_process_fits_a_group_with_less_memory_than_its_state(tmp_path: Path) -> None:
    """The limit includes Python, torch and building the model. Losses equal those of a process without the limit, and a process
    with its state in memory is killed."""

    def trained(*options: str) -> subprocess.CompletedProcess[str]:
        asked = [sys.executable, str(SCRIPT), "--steps", "2", "--json", "--folder", str(tmp_path), *options]
        return subprocess.run(asked, capture_output=True, text=True)

    within = trained("--limit", "900")
    if "no memory control group can be made" in within.stderr:
        # a memory cgroup needs root and cgroup v1; the limit by RLIMIT_DATA above is tested everywhere
        pytest.skip(within.stderr.strip())
    assert within.returncode == 0, within.stderr
    found, with_room = json.loads(within.stdout), json.loads(trained("--inside", "--place", "device").stdout)
    assert found["state"] > 1.5 * 900 * MIB > 900 * MIB >= found["peak"]
    assert found["losses"] == with_room["losses"]
    assert "ended with -9" in trained("--limit", "900", "--place", "device").stderr
    streamed = trained("--limit", "900", "--place", "streamed", "--layers", "18")
    assert streamed.returncode == 0, streamed.stderr
    found = json.loads(streamed.stdout)
    with_room = json.loads(trained("--inside", "--place", "device", "--layers", "18").stdout)
    assert found["state"] > 4 * 900 * MIB >= 4 * found["peak"] > 0
    assert found["losses"] == with_room["losses"]
