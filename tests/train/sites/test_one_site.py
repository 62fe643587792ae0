"""A single site that takes its own weights is plain training, round by round: a - (a - b) is b within one unit in the last place."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalith.parallel.data import local
from megalith.prove.parity import RandomText
from megalith.spec.run import RunSpec
from megalith.spec.sites import within
from megalith.train.assemble import Trainer, assemble, mesh_groups
from megalith.train.batches import indices
from megalith.train.sites.meet import build
from megalith.train.step import train_step
from tests.full import only_full
from tests.keys import GIVEN
from tests.ranks import everyone, run_ranks
from tests.specs import tiny_run

ROUND, ROUNDS = 3, 3


def _run(plan: dict[str, Any], **sites: Any) -> RunSpec:
    return tiny_run(
        model={"layers": 2}, plan=plan, train={"steps": ROUND * ROUNDS, "global_batch": 4, "precision": "fp32"},
        sites={"count": 1, "inner_steps": ROUND, "lr": 1.0, "momentum": 0.0} | sites,
    )  # fmt: skip


def _shares(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return this rank's weights and moments."""
    return {name: local(each) for kind in ("weights", "optimizer") for name, each in trainer.state.shares(kind).items()}


def _weights(trainer: Trainer) -> dict[str, np.ndarray]:
    return {name: each.detach().numpy().copy() for name, each in _shares(trainer).items() if name.startswith("weights.")}


def _rounds(rank: int, spec: RunSpec, folder: Path) -> tuple[float, int]:
    """Train a site, and beside it plain training that begins each round with the site's state. Return how far merged weights are at most
    from the plain ones, in units in the last place of the larger of b and a - b, and how many differ."""
    os.environ.update(GIVEN)
    device, worst, others = torch.device("cpu"), 0.0, 0
    site, plain = (assemble(one, groups=mesh_groups(one, device, everyone()), device=device) for one in (spec, within(spec)))
    sites = build(site, folder, beat=lambda: None)
    sites.state.begin()
    sites.begin([])
    text = RandomText(spec)
    for step in range(ROUND * ROUNDS):
        if step % ROUND == 0:
            for name, share in _shares(plain).items():
                share.detach().copy_(_shares(site)[name])
            first = _weights(site)
        parts = indices(site.spec, first=step * spec.train.global_batch, data_rank=site.groups.coordinates["data"])
        sites.deal(step)
        for trainer in (site, plain):
            train_step(trainer, [text.batch(part) for part in parts], step=step)
        if (step + 1) % ROUND == 0:
            assert all(np.array_equal(each, _weights(plain)[name]) for name, each in _weights(site).items()), "before the merge"
        sites.after_step(step + 1, stop=False)
        if (step + 1) % ROUND == 0:
            for name, merged in _weights(site).items():
                a, b = first[name], _weights(plain)[name]
                unit = np.spacing(np.maximum(np.abs(b), np.abs(a - b)))
                worst = max(worst, float((np.abs(merged - b) / unit).max(initial=0.0)))
                others += int((merged != b).sum())
    sites.close()
    return worst, others


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{}, pytest.param({"data": 2, "zero": 3}, marks=only_full)])
def test_each_round_is_plain_training_within_one_unit_in_the_last_place(plan: dict[str, Any], tmp_path: Path) -> None:
    """Some weights do differ: there is no special case for a single site. A slightly larger outer rate is found."""
    spec = _run(plan)
    for worst, others in run_ranks(_rounds, spec.ranks, spec, tmp_path):
        assert 0 < worst <= 1 and others > 0
    assert max(worst for worst, _ in run_ranks(_rounds, spec.ranks, _run(plan, lr=1.001), tmp_path)) > 1
