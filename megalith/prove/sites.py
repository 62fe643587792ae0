"""Proves a combination with sites round by round: each site trains like one process, and merges have the bits of an independent
implementation in numpy.

Whole runs cannot be compared if differences are rounded, because the last bit of a weight can change a code. So the merges in numpy start
from the bits of the trainer's weights, and one process continues from the trainer's merged weights.
"""

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megalith.fleet.secure import key
from megalith.parallel.groups import group_of
from megalith.prove.compare import Gap, Recording, Row, compare, learning_rates, ties, worst
from megalith.prove.one_process import SingleProcess
from megalith.prove.parity import Recorder
from megalith.prove.site_merges import Reference
from megalith.prove.worlds import run_ranks
from megalith.spec.numbers import PRECISIONS, Reordered
from megalith.spec.phases import Phases, during
from megalith.spec.run import RunSpec
from megalith.spec.sites import folder_of, fragments, within
from megalith.spec.sites.deal import Share
from megalith.spec.treatment import amplifies
from megalith.train.assemble import assemble, mesh_groups
from megalith.train.sites.meet import build

CPU = torch.device("cpu")
Weights = dict[str, Tensor]


@dataclass
class SiteRecording:
    """Recording of one site. `shares`: the samples of each step; `before`, `after`: whole weights before and after each step's merge."""

    run: Recording = field(default_factory=Recording)
    shares: list[Share] = field(default_factory=list)
    before: list[Weights] = field(default_factory=list)
    after: list[Weights] = field(default_factory=list)


def prove_sites(spec: RunSpec, *, timeout: float) -> tuple[list[Row], int]:
    """Train a run across sites on ranks forked from this process, and compare it with one process and with merges in numpy. Return the
    worst gap of each quantity over all sites, and the tokens that were sent to other experts because of a tie.

    Raises RuntimeError or TimeoutError if the ranks do not finish.
    """
    assert spec.sites is not None
    with tempfile.TemporaryDirectory() as folder:
        for site in range(spec.sites.count):
            folder_of(Path(folder), site).mkdir(exist_ok=True)
        found = run_ranks(_record, spec.sites.count * spec.plan.ranks, spec, folder, key.new().text, timeout=timeout)
    sites: list[SiteRecording] = found[:: spec.plan.ranks]
    alone = [SingleProcess(within(spec), device=CPU) for _ in sites]
    moved, other_bits = _replayed(spec, sites, alone)
    limits = PRECISIONS[spec.train.precision].parity
    assert isinstance(limits, Reordered)
    rows, tied = list[Row](), 0
    for number, (site, one) in enumerate(zip(sites, alone, strict=True)):
        site.run.weights = site.before[-1]
        rows += [
            Row(row.quantity, row.gap, row.limit, f"{row.where}, site {number}")
            for row in compare(one.kept, site.run, spec=within(spec), limits=limits)
        ]
        tied += ties(one.kept, site.run, tie=limits.tie)
    if not amplifies(spec.optimizer):
        rows.append(Row("weights before merges, in learning rates", *worst(moved, limits.weights)))
    rows.append(Row("weights after merges, elements with other bits", *worst(other_bits, 0.0)))
    return _worst_of_each(rows), tied


def _worst_of_each(rows: list[Row]) -> list[Row]:
    """Return the worst row of each quantity."""
    quantities = {row.quantity: [one for one in rows if one.quantity == row.quantity] for row in rows}
    return [max(of, key=lambda row: (row.gap != row.gap, row.gap)) for of in quantities.values()]


def _replayed(spec: RunSpec, sites: list[SiteRecording], alone: list[SingleProcess]) -> tuple[list[Gap], list[Gap]]:
    """Train each site on one process, and merge the weights of the trainer's sites in numpy. Return the distances of the weights before
    each merge, in learning rates, and how many elements of each tensor have other bits after it."""
    assert spec.sites is not None
    phases, rates, moved, other_bits = Phases.of(spec), learning_rates(spec), list[Gap](), list[Gap]()
    first = {name: tensor.numpy() for name, tensor in alone[0].weights().items()}
    cut = fragments({name: first[name].shape for name in sorted(first)}, spec.sites)
    merges = Reference.begin(spec.sites, cut, set(alone[0].stage.lasting_buffers()), first)
    for step in range(spec.train.steps):
        for number, (site, one) in enumerate(zip(sites, alone, strict=True)):
            share = site.shares[step]
            one.step(within(during(spec, phases.at(share.first)), share.size), first=share.first)
            one.kept.weights, where = one.weights(), f"step {step + 1}, site {number}"
            for name in one.parameters:
                apart = float((site.before[step][name] - one.kept.weights[name]).abs().max()) / rates
                moved.append((apart, f"{name}, {where}"))
            merges.weights[number] = {name: tensor.numpy().copy() for name, tensor in site.before[step].items()}
        merges.after_step(step + 1, last=step + 1 == spec.train.steps)
        for number, (site, one) in enumerate(zip(sites, alone, strict=True)):
            for name, tensor in site.after[step].items():
                same = tensor.numpy().view(np.int32) == merges.weights[number][name].view(np.int32)
                other_bits.append((float((~same).sum()), f"{name}, step {step + 1}, site {number}"))
            merged = {name: each for name, each in site.after[step].items() if not torch.equal(each, site.before[step][name])}
            one.take(merged)
    return moved, other_bits


def _record(rank: int, spec: RunSpec, folder: str, secret: str) -> SiteRecording:
    """Train as one rank of a site, and record the site; only its first rank holds whole tensors."""
    os.environ[key.VARIABLE] = secret
    assert spec.sites is not None and dist.group.WORLD is not None
    site, ranks = rank // spec.plan.ranks, spec.plan.ranks
    inner = group_of(dist.group.WORLD, range(site * ranks, (site + 1) * ranks))
    spec = spec.model_copy(update={"sites": spec.sites.model_copy(update={"site": site})})
    trainer = assemble(spec, groups=mesh_groups(spec, CPU, inner), device=CPU)
    sites = build(trainer, folder_of(Path(folder), site), beat=lambda: None)
    sites.state.begin()
    sites.begin([])
    recorder, phases, found = Recorder(trainer), Phases.of(spec), SiteRecording()
    phase = phases.at(0)
    for step in range(spec.train.steps):
        share = sites.deal(step).share
        assert share is not None, "all sites read samples in every step"
        if phases.at(share.first) is not phase:
            phase = phases.at(share.first)
            recorder.enter(phase, share.size)
        recorder.step(share.first)
        found.shares.append(share)
        found.before.append(recorder.weights())
        sites.after_step(step + 1, stop=False)
        found.after.append(recorder.weights())
    found.run = recorder.finish()
    sites.close()
    return found
