"""The proof that a combination with sites trains like one process.

Sites that merge weights are compared round by round: each site must train like one process, and merges must have the bits of an
independent implementation in numpy. Whole runs cannot be compared if differences are rounded, because the last bit of a weight
can change a code. The merges in numpy therefore begin with the bits of the sites' weights before each merge, and the single
processes continue from the trainer's merged weights. In a rounded precision, one further process for each site does the same in fp32, and
the sites' distances from these fp32 processes are compared with the distances of the single processes from them.

Sites that exchange gradients are compared with one process that trains on the samples of all sites. Sites that exchange gradients must all
hold the same bits.
"""

import os
import tempfile
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.fleet.secure import key
from megalith.kernels.narrow import FACTORS, OUTPUTS, TOKENS, TrackedMaxima
from megalith.parallel.groups import group_of
from megalith.prove.axes import sites_of
from megalith.prove.compare import Gap, Recording, Row, cancelled, learning_rates, worst
from megalith.prove.one_process import SingleProcess, reference
from megalith.prove.parity import Recorder
from megalith.prove.site_merges import Reference
from megalith.prove.verdict import Verdict, in_precision, judge, parity_of
from megalith.prove.worlds import run_ranks
from megalith.spec.numbers import Rounded
from megalith.spec.phases import Phases, during
from megalith.spec.run import RunSpec
from megalith.spec.sites import at_site, folder_of, fragments, within
from megalith.spec.sites.deal import Portion
from megalith.spec.treatment import amplifies
from megalith.train.assemble import assemble, mesh_groups
from megalith.train.sites.meet import build

CPU = torch.device("cpu")
Weights = dict[str, Tensor]


@dataclass
class SiteRecording:
    """Recording of one site. `shares`: the site's samples in each step; `before`, `after`: unsharded weights before and after
    each step's merge."""

    run: Recording = field(default_factory=Recording)
    shares: list[Portion] = field(default_factory=list)
    before: list[Weights] = field(default_factory=list)
    after: list[Weights] = field(default_factory=list)


def prove_sites(spec: RunSpec, *, timeout: float) -> Verdict:
    """Train a run across sites on ranks forked from this process, and compare it with one process and, if sites merge weights, with
    merges in numpy. Return the worst gap of each quantity over all sites.

    Raises RuntimeError or TimeoutError if the ranks do not finish.
    """
    assert spec.sites is not None
    here = sites_of(spec)
    ends = [*accumulate(site.plan.ranks for site in here)]
    with tempfile.TemporaryDirectory() as folder:
        for site in range(spec.sites.count):
            folder_of(Path(folder), site).mkdir(exist_ok=True)
        found = run_ranks(_record, ends[-1], spec, ends, folder, key.new().text, timeout=timeout)
    sites: list[SiteRecording] = [found[end - site.plan.ranks] for end, site in zip(ends, here, strict=True)]
    return _together(spec, sites) if spec.sites.exchanges_gradients else _apart(spec, here, sites)


def _together(spec: RunSpec, sites: list[SiteRecording]) -> Verdict:
    first, maxima = sites[0].run, dict[str, TrackedMaxima]()
    for name, one in ((name, one) for site in sites for name, one in site.run.maxima.items()):
        maxima[name] = _of_all(name, one, len(sites)).joined(maxima.get(name))
    losses = [sum(each) / len(sites) for each in zip(*(site.run.losses for site in sites), strict=True)]
    alone = partial(reference, device=CPU, parts=len(sites))
    verdict = judge(replace(first, losses=losses, maxima=maxima), spec=within(spec, spec.train.global_batch), alone=alone)
    other_bits = [
        (_other_bits(theirs[name], tensor), f"{name}, step {step + 1}, site {number}")
        for number, site in enumerate(sites)
        for step, (ours, theirs) in enumerate(zip(sites[0].after, site.after, strict=True))
        for name, tensor in ours.items()
    ]
    return replace(verdict, rows=(*verdict.rows, Row("weights of sites, numbers with other bits", *worst(other_bits, 0.0))))


def _of_all(name: str, one: TrackedMaxima, sites: int) -> TrackedMaxima:
    """Return a site's maxima in the scale of one process: a site divides its loss by its own samples, so its gradients are as many times
    as large as there are sites."""
    if f"{TOKENS} x {OUTPUTS}" not in name and FACTORS[TOKENS, OUTPUTS] not in name:
        return one
    return one._replace(least=one.least / sites, total=one.total / sites)


def _apart(spec: RunSpec, here: list[RunSpec], sites: list[SiteRecording]) -> Verdict:
    limits, precision = parity_of(spec.precision, spec.train.precision), spec.train.precision
    rounds = isinstance(limits, Rounded)
    alone = {
        each: [SingleProcess(in_precision(within(one), each), device=CPU) for one in here]
        for each in (precision, *(("fp32",) if rounds else ()))
    }
    moved, other_bits = _replayed(spec, here, sites, alone)
    rows, tied = list[Row](), 0
    for number, site in enumerate(sites):
        site.run.weights = site.before[-1]

        def known(run: RunSpec, number: int = number) -> Recording:
            return alone[run.train.precision][number].kept

        verdict = judge(site.run, spec=within(here[number]), alone=known)
        rows += [replace(row, where=f"{row.where}, site {number}") for row in verdict.rows]
        tied += verdict.tokens_tied
    if not amplifies(spec.optimizer):
        rows.append(Row("weights before merges, |difference| over the sum of learning rates", *worst(moved, limits.weights)))
    rows.append(Row("weights after merges, numbers with other bits", *worst(other_bits, 0.0)))
    return Verdict(tuple(_worst_of_each(rows)), tied)


def _worst_of_each(rows: list[Row]) -> list[Row]:
    quantities = {row.quantity: [one for one in rows if one.quantity == row.quantity] for row in rows}
    return [max(of, key=lambda row: (row.gap != row.gap, row.gap)) for of in quantities.values()]


def _replayed(
    spec: RunSpec, here: list[RunSpec], sites: list[SiteRecording], alone: Mapping[str, list[SingleProcess]]
) -> tuple[list[Gap], list[Gap]]:
    """Train each site on one process, and repeat the trainer's merges in numpy. Return the distances between the weights of sites and of
    their single processes before each merge, in learning rates, and the number of elements of each tensor that have other bits after the
    merge. `alone`: for each precision, a list with the single process of each site."""
    assert spec.sites is not None
    phases, rates, moved, other_bits = Phases.of(spec), learning_rates(spec), list[Gap](), list[Gap]()
    model, rounds = alone[spec.train.precision][0], len(alone) > 1
    first = {name: tensor.numpy() for name, tensor in model.weights().items()}
    cut = fragments({name: first[name].shape for name in sorted(first)}, spec.sites)
    merges = Reference.begin(spec.sites, cut, set(model.stage.lasting_buffers()), first)
    for step in range(spec.train.steps):
        for number, site in enumerate(sites):
            share = site.shares[step]
            now = within(during(here[number], phases.at(share.first)), share.size)
            for precision, processes in alone.items():
                one = processes[number]
                one.step(in_precision(now, precision), first=share.first)
                one.kept.weights = one.weights()
            found = alone[spec.train.precision][number]
            for name in found.parameters.keys() - cancelled(found.kept.gradients):
                apart = site.before[step][name] - found.kept.weights[name]
                gap = float(apart.square().mean().sqrt() if rounds else apart.abs().max()) / rates
                moved.append((gap, f"{name}, step {step + 1}, site {number}"))
            merges.weights[number] = {name: tensor.numpy().copy() for name, tensor in site.before[step].items()}
        merges.after_step(step + 1, last=step + 1 == spec.train.steps)
        for number, site in enumerate(sites):
            for name, tensor in site.after[step].items():
                other = _other_bits(tensor, torch.from_numpy(merges.weights[number][name]))
                other_bits.append((other, f"{name}, step {step + 1}, site {number}"))
            merged = {name: each for name, each in site.after[step].items() if not torch.equal(each, site.before[step][name])}
            for processes in alone.values():
                processes[number].take(merged)
    return moved, other_bits


def _other_bits(one: Tensor, other: Tensor) -> float:
    return float((one.contiguous().view(torch.int32) != other.contiguous().view(torch.int32)).sum())


def _record(rank: int, spec: RunSpec, ends: list[int], folder: str, secret: str) -> SiteRecording:
    """Train as one rank of a site, and record the site. Only the site's first rank gets unsharded tensors. `ends`: for each site,
    the number of ranks up to its last one."""
    os.environ[key.VARIABLE] = secret
    assert spec.sites is not None and dist.group.WORLD is not None
    site = bisect_right(ends, rank)
    spec = at_site(spec.model_copy(update={"sites": spec.sites.model_copy(update={"site": site})}))
    inner = group_of(dist.group.WORLD, range(ends[site] - spec.plan.ranks, ends[site]))
    trainer = assemble(spec, groups=mesh_groups(spec, CPU, inner), device=CPU)
    sites = build(trainer, folder_of(Path(folder), site), beat=lambda: None)
    sites.state.begin()
    sites.begin([])
    recorder, phases, found = Recorder(trainer, hooks=sites.step_hooks), Phases.of(spec), SiteRecording()
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
