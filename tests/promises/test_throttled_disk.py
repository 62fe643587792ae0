"""A disk that is slower than the computation makes a step longer by the time that is predicted from the cluster file. The disk is throttled
where the trainer reads and writes its files, because the disk of this machine may be too fast to notice."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalith.cost.estimate import estimate
from megalith.cost.parts import parts
from megalith.cost.predicted import workload_of
from megalith.spec.run import RunSpec
from megalith.spec.sizes import model_parameters
from megalith.train.offload import retained, slot_file
from megalith.train.offload.slot_file import move_all
from megalith.train.step import train_step
from tests.full import only_full
from tests.parallel.running import microbatches, trainer_of
from tests.processor import excuse, waited
from tests.ranks import run_ranks
from tests.specs import brief_run

SECONDS = 2.0
"""Seconds that the throttled disk adds to a step: far more than the step computes."""
BURST = 0.01
"""Seconds after which a disk that had nothing to do has no credit left. The credit makes up for threads that wake late."""
CLUSTER = """
count = 1
per_node = 1

[accelerator]
name = "x9"
title = "A device that computes at once"
vendor = "Example"
device_names = ["Example X9"]
peak = {{ fp32 = 1e18, bf16 = 1e18 }}
memory = 51_539_607_552
memory_bandwidth = 1e18
scale_up_domain = 1
source = {{ peak = "made up", memory = "made up" }}

[host]
memory = 274_877_906_944
memory_bandwidth = 1e15
link = 1e15
disk = 2_000_000_000_000
disk_bandwidth = {rate}
"""
SIZES = {"layers": 4, "dim": 128, "heads": 4, "kv_heads": 4, "head_dim": 32, "ffn": 384, "vocab": 264}

pytestmark = pytest.mark.slow


class Throttle:
    """A disk that reads and writes at a rate of bytes a second each, at the same time."""

    def __init__(self, rate: float) -> None:
        self._rate, self._free = rate, dict[Callable[..., int], float]()

    def move_all(self, call: Callable[..., int], file: int, octets: Any, start: int) -> int:
        """Move bytes, and return once the disk is done with them."""
        done, now = move_all(call, file, octets, start), time.monotonic()
        self._free[call] = max(self._free.get(call, 0.0), now - BURST) + len(octets) / self._rate
        time.sleep(max(0.0, self._free[call] - now))
        return done


def _throttled(rank: int, spec: RunSpec, rate: float, terms: tuple[str, ...]) -> tuple[float, float, float]:
    """Return the seconds of `terms` in a step, without and with the throttle, and the share of the time without a processor. An update runs
    while the next forward computes, so the throttle is there for the step before, too."""
    trainer, found = trainer_of(spec), list[float]()
    began, starved = time.monotonic(), waited()
    with pytest.MonkeyPatch.context() as patch:
        for step in range(4):
            if step == 2:
                trainer.state.complete()
                began, starved, disk = time.monotonic(), waited(), Throttle(rate)
                patch.setattr(slot_file, "move_all", disk.move_all)
                patch.setattr(retained, "move_all", disk.move_all)
            done = train_step(trainer, microbatches(trainer, step), step=step)
            found.append(sum(done.breakdown[term] for term in terms))
        trainer.state.complete()
    return found[1], found[3], (waited() - starved) / (time.monotonic() - began)


def _on(spec: RunSpec, folder: Path, rate: float) -> RunSpec:
    """The run on a cluster whose disk has this rate."""
    file = folder / "slow.toml"
    file.write_text(CLUSTER.format(rate=rate), encoding="utf-8")
    return spec.model_copy(update={"cluster": str(file)})


def _assert_predicted(measured: float, predicted: float, starved: float) -> None:
    if measured != pytest.approx(predicted, rel=0.05):
        excuse(starved)
    assert measured == pytest.approx(predicted, rel=0.05)


@only_full
def test_the_update_of_state_on_a_slow_disk_takes_as_long_as_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are small, because no other piece is read while the last one is written."""
    monkeypatch.setattr("megalith.train.offload.home.MIB", 1 << 15)
    spec = brief_run(plan={"state": {"optimizer": "disk", "chunk": 1}}, model=SIZES, train={"precision": "bf16"})
    rate = 12 * sum(each.numel for each in model_parameters(spec.model.build()).values()) / SECONDS
    predicted = estimate(workload_of(_on(spec, tmp_path, rate))).time.optimizer
    assert predicted == pytest.approx(SECONDS, rel=0.01)
    ((_, measured, starved),) = run_ranks(_throttled, 1, spec, rate, ("optimizer",))
    _assert_predicted(measured, predicted, starved)


@only_full
def test_activations_on_a_slow_disk_make_a_step_longer_by_the_predicted_time(tmp_path: Path) -> None:
    """They are written in the forward and read in the backward."""
    spec = brief_run(plan={"retain": {"blocks": "disk"}}, model=SIZES, train={"precision": "bf16", "seq_len": 64})
    traced = parts(workload_of(spec))
    rate = 2 * spec.microbatches * sum(traced.blocks[kind].leaves for kind in traced.kinds) / SECONDS
    predicted = estimate(workload_of(_on(spec, tmp_path, rate))).time.data
    whole = SECONDS * (1 - 1 / (2 * len(traced.kinds)))  # the last block of a microbatch comes back while it leaves
    assert predicted == pytest.approx(whole, rel=0.01)
    ((usual, slow, starved),) = run_ranks(_throttled, 1, spec, rate, ("forward", "backward", "communication"))
    _assert_predicted(slow - usual, predicted, starved)
