"""The ranks that train are an explicit group: they need not be all connected ranks, nor begin at rank 0."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalith import events
from megalith.data.errors import DataError
from megalith.events import EventLog, Step, Validation
from megalith.fleet.heartbeat import Heartbeat
from megalith.fleet.tiers import Source, Tier
from megalith.spec.run import DataSpec, RunSpec
from megalith.train import run as training
from megalith.train.loop import Loop
from megalith.train.run import prepare
from megalith.train.stream import open_stream
from tests.full import sampled
from tests.keys import GIVEN
from tests.ranks import everyone, run_ranks
from tests.specs import tiny_run
from tests.train.prepared import VOCAB, small_data

RANKS, STEPS = 4, 4
PLANS: dict[str, dict[str, Any]] = {
    "pipeline, zero 3": {"plan": {"data": 2, "pipeline": 2, "zero": 3}, "model": {"layers": 2, "vocab": VOCAB}},
    "context, experts": {"plan": {"data": 2, "context": 2, "expert": 4}, "model": {"preset": "deepseek-tiny", "layers": 2}},
}
SOURCES = [None, Source(STEPS, Tier.MEMORY), Source(STEPS, Tier.MEMORY, ((0, Tier.BUDDY),))]
"""The checkpoint, the nodes' memory, and memory with the first node's pieces from its buddy."""


def _run(plan: str, data: str) -> RunSpec:
    return tiny_run(
        data={"path": data},
        train={"steps": STEPS},
        validation={"every": 2, "samples": 4},
        checkpoint={"every": 3},
        fleet={"nodes": 2, "verify_every": 2, "memory_every": 1},
        **PLANS[plan],
    )


def _prepared(rank: int, first: int, spec: RunSpec, folder: Path, source: Source | None) -> Loop | None:
    """Return the result of the run on the ranks from `first` on, and None on earlier ranks."""
    if rank < first:
        return None
    members = list(range(first, first + RANKS))
    world = everyone() if not first else dist.new_group(members, use_local_synchronization=True)
    assert isinstance(world, dist.ProcessGroup)
    os.environ.update(
        GIVEN, RANK=str(rank - first), WORLD_SIZE=str(RANKS), MEGALITH_PLACEMENT="a,b", MEGALITH_MEMORY=str(folder / "memory")
    )
    log = EventLog(folder) if rank == first else None
    told: dict[str, Any] = {"log": log, "device": torch.device("cpu"), "heartbeat": Heartbeat.find()}
    return prepare(spec, folder, world=world, source=source, **told)


def _bits(loop: Loop) -> dict[str, str]:
    """Return digests of this rank's shares of weights and moments."""
    shares = loop.trainer.state.shares()
    return {name: hashlib.sha256(share.detach().contiguous().numpy().tobytes()).hexdigest() for name, share in shares.items()}


def _train(rank: int, first: int, spec: RunSpec, folder: Path) -> dict[str, str]:
    loop = _prepared(rank, first, spec, folder, None)
    if loop is None:
        return {}
    assert loop.guard and loop.guard.memory and loop.guard.memory.kept and loop.guard.update_verifier and loop.guard.replicas
    assert loop.run(stop=False, after_step=lambda step: None) == "finished"
    loop.guard.close()
    return _bits(loop)


def _restore(rank: int, first: int, spec: RunSpec, folder: Path, source: Source | None) -> dict[str, str]:
    loop = _prepared(rank, first, spec, folder, source)
    if loop is None:
        return {}
    assert loop.step == STEPS and loop.guard
    loop.guard.close()
    return _bits(loop)


def _losses(folder: Path) -> list[float]:
    return [event.loss for event in events.read(folder) if isinstance(event, Step | Validation)]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@sampled(1)
def test_a_rank_that_takes_part_in_nothing_changes_nothing(plan: str, tmp_path: Path) -> None:
    spec = _run(plan, small_data(tmp_path))
    folders = {first: tmp_path / f"from-{first}" for first in (0, 1)}
    for folder in folders.values():
        folder.mkdir()
    whole, part = (run_ranks(_train, first + RANKS, first, spec, folder) for first, folder in folders.items())
    assert part == [{}, *whole]
    assert len(_losses(folders[0])) == STEPS + 2
    assert _losses(folders[0]) == _losses(folders[1])
    for source in SOURCES:
        assert run_ranks(_restore, 1 + RANKS, 1, spec, folders[1], source) == part


def _with_other_data(rank: int, data: str, other: str, folder: Path, seed: int) -> str:
    """Return the error of a rank whose node, b from rank 1 on, has other data at the same path, or another seed in its run file."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", MEGALITH_PLACEMENT="a,b,b")
    spec = tiny_run(model={"vocab": VOCAB}, data={"path": data}, plan={"data": 3}, train={"global_batch": 6, "seed": seed * rank})
    if rank:
        training.open_stream = lambda spec, split, **how: open_stream(
            spec.model_copy(update={"data": DataSpec(path=other)}), split
        )
    with pytest.raises(DataError) as caught:
        prepare(spec, folder, world=everyone(), source=None, log=None, device=torch.device("cpu"), heartbeat=Heartbeat.find())
    return str(caught.value)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.slow
def test_nodes_with_other_data_at_the_same_path_are_named_before_the_first_step(seed: int, tmp_path: Path) -> None:
    """Each node checks only its own files."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    data, other = small_data(tmp_path / "a"), small_data(tmp_path / "b", seed=7)
    told = run_ranks(_with_other_data, 3, data, data if seed else other, tmp_path, seed)
    assert len(set(told)) == 1
    if seed:
        assert "ranks 1, 2 on b: [train] of spec.json, seed of" in told[0]
    else:
        assert "rank 0 on a has read" in told[0] and f"ranks 1, 2 on b: manifest of {data}" in told[0], told[0]


def test_a_node_with_another_tokenizer_is_named_though_rank_0_alone_checks_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    data, other = small_data(tmp_path / "a"), tmp_path / "b"
    shutil.copytree(data, other)
    with (other / "tokenizer.json").open("a") as file:
        file.write(" ")
    told = run_ranks(_with_other_data, 3, data, str(other), tmp_path, 0)
    assert len(set(told)) == 1 and "ranks 1, 2 on b: " in told[0] and "tokenizer.json" in told[0], told[0]
