"""Merges equal, bit for bit, an implementation in numpy without ranks, under any plan inside a site and given the same weights."""

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalith.events import Merge
from megalith.parallel.data import local
from megalith.parallel.groups import group_of
from megalith.prove.site_merges import Reference
from megalith.spec.run import RunSpec
from megalith.spec.sites import FRAME_BYTES, Fragment, at_site, folder_of, fragments, sent_after, verdict_bytes, wire_bytes
from megalith.spec.sites.late import Backlog
from megalith.train.assemble import assemble, mesh_groups
from megalith.train.sites import codes, meet, merge, outer
from megalith.train.sites.meet import build
from megalith.train.sites.merge import Sites
from megalith.train.sites.messages import LENGTH_BYTES, Verdict
from tests import certificates
from tests.full import only_full
from tests.keys import GIVEN
from tests.ranks import everyone, run_ranks
from tests.specs import tiny_run

STEPS = 9
METHODS: dict[str, dict[str, Any]] = {
    "diloco": {"inner_steps": 4},
    "plain momentum": {"inner_steps": 3, "nesterov": False, "bits": 8},
    "no momentum": {"inner_steps": 3, "momentum": 0.0, "lr": 1.0, "bits": 4, "error_feedback": False},
    "streaming": {"inner_steps": 4, "fragments": 3, "overlap": 3, "bits": 4},
    "streaming, 2 bits": {"inner_steps": 3, "fragments": 2, "overlap": 1, "mixing": 0.25, "bits": 2},
}
METHODS |= {
    "sparse": {"inner_steps": 3, "top_k": 200, "bits": 2, "momentum": 0.0, "lr": 1.0, "feedback_decay": 0.95},
    "eager": {"inner_steps": 4, "fragments": 2, "overlap": 3, "eager": True},
    "eager, sparse": {"inner_steps": 4, "fragments": 2, "overlap": 3, "eager": True, "top_k": 300, "bits": 4},
}
METHODS |= {
    "asynchronous": {"inner_steps": 3, "fragments": 2, "overlap": 1, "bits": 4, "staleness": 2},
    "asynchronous, whole": {"inner_steps": 2, "staleness": 1},
}
METHODS |= {f"{name}, on the host": METHODS[name] | {"place": "host"} for name in ("streaming, 2 bits", "eager, sparse")}
PLANS: dict[str, dict[str, Any]] = {
    "alone": {},
    "zero 3 in 3": {"plan": {"data": 3, "zero": 3}, "train": {"global_batch": 18}},  # no size of the model is a multiple of 3
    "tensor, tied": {"plan": {"tensor": 2}, "model": {"tied": True}},
    "pipeline, tied": {"plan": {"pipeline": 2}, "model": {"tied": True}},
    "experts": {"plan": {"data": 2, "expert": 2, "zero": 1}, "model": {"preset": "deepseek-tiny"}},
    "each its own": {
        "train": {"global_batch": 12},
        "model": {"tied": True},
        "each": [{"plan": {"data": 2, "zero": 3}}, {"plan": {"pipeline": 2}, "share": 4}],
    },
}


def _run(plan: str, method: str, sites: int) -> RunSpec:
    parts = PLANS[plan]
    own = {"each": parts["each"]} if "each" in parts else {}
    tables = {name: table for name, table in parts.items() if name != "each"}
    train = {"train": {"steps": STEPS, "global_batch": 12} | parts.get("train", {})}
    return at_site(tiny_run(sites={"count": sites} | METHODS[method] | own, **tables | train))


def _moved(site: int, step: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the change of a site's weights in a step: the same numbers for every plan."""
    draw = np.random.default_rng([site, step, *name.encode()])
    return (draw.standard_normal(shape) * 1e-2).astype(np.float32)


def _spoil(fault: str, sites: Sites) -> None:
    """Plant a fault in this rank's merges."""
    if fault == "sign":
        found = outer.difference
        outer.difference = lambda anchor, weight, *rest: found(weight, anchor, *rest)  # type: ignore[assignment]
    elif fault == "late":
        merge.sent_after = lambda step, spec: sent_after(step - 1, spec)
    elif fault == "left out":
        sites.state.flights.clear()
        sites.fragments = (*sites.fragments[:-1], Fragment(sites.fragments[-1].number, sites.fragments[-1].pieces[:-1]))
    elif fault == "no feedback":
        sites.state.feedback.clear()
    elif fault == "half a step":
        outer.correct = lambda weight, anchor, early: weight.add_((anchor - early) / 2)
    elif fault == "order" and sites.site == 1:
        found = outer.mean
        outer.mean = lambda differences, shares: found(differences[::-1], shares[::-1])
    elif fault == "flipped" and sites.site == 1:
        name = max(sites.state.anchors, key=lambda name: sites.state.anchors[name].numel())
        sites.state.anchors[name].view(-1).view(torch.int32)[7] ^= 1 << 30
    elif fault == "weight":
        found = Backlog.taken
        Backlog.taken = lambda *given: tuple(one._replace(weight=1) for one in found(*given))
    elif fault == "age":
        found = Backlog.taken
        Backlog.taken = lambda *given: tuple(one._replace(weight=one.weight * (1 + one.age)) for one in found(*given))
    elif fault == "one left out":
        found = outer.mean
        outer.mean = lambda differences, shares: found(differences[: len(shares) // 4 + 2], shares[: len(shares) // 4 + 2])
    elif fault == "rounding":
        encode = codes.encode
        codes.encode = lambda values, bits: encode(values * 1.0001, bits)


Box = tuple[tuple[slice, ...], np.ndarray]


def _ranks(spec: RunSpec) -> list[range]:
    """Return the ranks of each site, which are neighbours."""
    assert spec.sites is not None
    sizes = [at_site(spec, site).ranks for site in range(spec.sites.count)]
    return [range(sum(sizes[:site]), sum(sizes[: site + 1])) for site in range(len(sizes))]


def _other_bytes(sites: Sites) -> list[int]:
    """Return a list that gets the bytes of every message that leaves this site and is neither a difference nor a verdict."""
    found = list[int]()
    wire = sites._council._wire if sites._council is not None else None
    if wire is not None:
        send, others = wire.send, sites.spec.count - 1

        def counted(message: bytes, to: int | None = None, *, beside: bool = False) -> None:
            if message[:1] not in b"dv":
                found.append((others if to is None else 1) * (LENGTH_BYTES + len(message) + FRAME_BYTES))
            send(message, to, beside=beside)

        wire.send = counted  # type: ignore[method-assign]
    return found


def _merge(
    rank: int, spec: RunSpec, fault: str, folder: str, record: dict[int, Verdict]
) -> tuple[int, dict[str, dict[str, Box]], list[Merge], int]:
    """Return this rank's site, its boxes of all tensors by kind and name, its site's merges, and the bytes that the site sent
    for them. `record`: the verdicts of asynchronous merges."""
    os.environ.update(GIVEN)
    table = _ranks(spec)
    (site,) = (number for number, ranks in enumerate(table) if rank in ranks)
    inner = group_of(everyone(), table[site])
    assert spec.sites is not None
    repeats = {"replay": (folder,)} if record else {}
    meet.recorded = lambda folders: record
    spec = at_site(spec.model_copy(update={"sites": spec.sites.model_copy(update={"site": site} | repeats)}))
    trainer = assemble(spec, groups=mesh_groups(spec, torch.device("cpu"), inner), device=torch.device("cpu"))
    own = folder_of(Path(folder), site)
    own.mkdir(exist_ok=True)
    sites = build(trainer, own, beat=lambda: None)
    other = _other_bytes(sites)
    sites.state.begin()
    sites.begin([])
    _spoil(fault, sites)
    made = []
    for step in range(1, STEPS + 1):
        sites.deal(step - 1)
        for name in sites.state.names:
            if name in sites._wholes.mine:
                weight = sites.state.weight(name)
                weight += sites._wholes.share(name, torch.from_numpy(_moved(site, step, name, sites._wholes.shapes[name])))
        sites.note(float(step))
        made += sites.after_step(step, stop=False).made
    kinds = {"anchor": sites.state.anchors, "velocity": sites.state.velocities, "feedback": sites.state.feedback}
    kinds["weight"] = {name: sites.state.weight(name) for name in sites.state.names}
    held = {
        kind: {
            name: (sites._wholes.mine[name].where, local(share).numpy().copy())
            for name, share in shares.items()
            if name in sites._wholes.mine
        }
        for kind, shares in kinds.items()
    }
    sites.close()
    wire = sites._council._wire if sites._council is not None else None
    return site, held, made, 0 if wire is None else wire.sent - sum(other)  # type: ignore[attr-defined]


def _first(rank: int, spec: RunSpec) -> dict[str, np.ndarray]:
    alone = spec.model_copy(update={"plan": type(spec.plan)(), "sites": None})
    trainer = assemble(alone, groups=mesh_groups(alone, torch.device("cpu"), everyone()), device=torch.device("cpu"))
    return {
        name.removeprefix("weights."): local(t).detach().numpy().copy() for name, t in trainer.state.shares("weights").items()
    }


def _reference(spec: RunSpec, fragments: tuple[Fragment, ...], first: dict[str, np.ndarray]) -> Reference:
    assert spec.sites is not None
    buffers = {name for name in first if name.endswith((".bias", ".load")) and "router" in name}
    found = Reference.begin(spec.sites, fragments, buffers, first)
    found.late = lambda merge, site, age: site == merge // 4 % 3 and age < found.spec.staleness
    for step in range(1, STEPS + 1):
        for site, weights in enumerate(found.weights):
            for name, weight in weights.items():
                weights[name] = weight + _moved(site, step, name, weight.shape)
        found.after_step(step, last=step == STEPS)
    return found


def _verdicts(reference: Reference) -> dict[int, Verdict]:
    """Return the decisions about the reference's asynchronous merges."""
    found = {}
    for number, (fragment, step, sent, taken) in enumerate(reference.made):
        newest = {site: at for site, at, _ in taken}
        sites, steps = tuple(newest), tuple(newest.values())
        found[number] = Verdict(number, fragment, sent, step, sites, count=reference.spec.count, steps=steps)
    return found


def _different(spec: RunSpec, fault: str = "") -> list[str]:
    """Return the names of tensors that differ from the reference in any bit, on any rank."""
    assert spec.sites is not None
    first = run_ranks(_first, 1, spec)[0]
    cut = fragments({name: first[name].shape for name in sorted(first)}, spec.sites)
    wanted = _reference(spec, cut, first)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        ran: Sequence[Any] = run_ranks(_merge, _ranks(spec)[-1].stop, spec, fault, folder, _verdicts(wanted))
    for site, held, made, sent in ran:
        tables = {"anchor": wanted.anchors, "velocity": wanted.velocities, "feedback": wanted.feedback[site]}
        tables["weight"] = wanted.weights[site]
        found += [
            f"site {site}: {kind} {name}"
            for kind, boxes in held.items()
            for name, (where, values) in boxes.items()
            if tables[kind][name][where].tobytes() != values.tobytes()
        ]
        if made and not fault:
            others = spec.sites.count - 1
            assert sorted(cut[one.fragment].bytes for one in made) == sorted(wanted.sizes)
            told = sum(verdict_bytes(len({*one.merged} if one.taken else ())) for one in made) if site == 0 else 0
            theory = others * (told + sum(wire_bytes(cut[one.fragment]) for one in made))
            assert sum(one.bytes_sent for one in made) == sent == theory
            if spec.sites.staleness:
                for one, (*_, taken), weights in zip(made, wanted.made, wanted.used, strict=True):
                    assert [*zip(one.merged, one.taken, one.ages, strict=True)] == taken and one.weights == weights
                assert {age for one in made for age in one.ages} == set(range(spec.sites.staleness + 1))
            else:
                assert all(one.losses == [one.losses[0]] * spec.sites.count for one in made)
    return found


"""Mark slow cases, and cases that others also cover."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        name if name in ("streaming", "streaming, 2 bits", "sparse", "eager") else pytest.param(name, marks=only_full)
        for name in METHODS
    ],
)
def test_a_merge_is_the_references(method: str) -> None:
    assert _different(_run("alone", method, 2)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "method"),
    [
        ("zero 3 in 3", "streaming, 2 bits"),
        ("pipeline, tied", "streaming"),
        ("each its own", "eager, sparse"),
        pytest.param("experts", "eager, sparse", marks=only_full),
        pytest.param("zero 3 in 3", "streaming, 2 bits, on the host", marks=only_full),
        pytest.param("experts", "eager, sparse, on the host", marks=only_full),
        pytest.param("each its own", "streaming, 2 bits", marks=only_full),
        pytest.param("tensor, tied", "streaming, 2 bits", marks=only_full),
        pytest.param("experts", "streaming", marks=only_full),
    ],
)
def test_it_does_not_depend_on_the_plan(plan: str, method: str) -> None:
    assert _different(_run(plan, method, 2)) == []


@pytest.mark.slow
def test_encryption_changes_no_bit(tmp_path: Path) -> None:
    certificates.authority(tmp_path)
    sites = METHODS["diloco"] | {"count": 2, "tls": certificates.site(tmp_path, "site")}
    assert _different(tiny_run(sites=sites, train={"steps": STEPS})) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "method"),
    [
        ("alone", "asynchronous"),
        pytest.param("alone", "asynchronous, whole", marks=only_full),
        pytest.param("zero 3 in 3", "asynchronous", marks=only_full),
        pytest.param("experts", "asynchronous, whole", marks=only_full),
    ],
)
def test_late_differences_are_merged_as_in_the_reference(plan: str, method: str) -> None:
    """At every merge one of three sites is late by as much as it may be."""
    assert _different(_run(plan, method, 3)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["weight", "age", "one left out", *(pytest.param(one, marks=only_full) for one in ("order", "late"))]
)
def test_a_fault_in_asynchronous_merges_is_found(fault: str) -> None:
    with contextlib.suppress(RuntimeError):  # sites that disagree about a message stop
        assert _different(_run("alone", "asynchronous", 3), fault)


@only_full
def test_three_sites_and_one() -> None:
    assert _different(_run("alone", "streaming, 2 bits", 3)) == []
    assert _different(_run("alone", "streaming", 1)) == []


def _anew(rank: int, spec: RunSpec) -> list[float]:
    trainer = assemble(spec, groups=mesh_groups(spec, torch.device("cpu"), everyone()), device=torch.device("cpu"))
    sites = build(trainer, Path(), beat=lambda: None)
    trainer.state.updates = 5
    for share in [*trainer.state.shares("optimizer").values(), *trainer.state.usual.values()]:
        share.fill_(3.0)
    sites.state.begin_anew()
    kept = [*trainer.state.shares("optimizer").values(), *trainer.state.usual.values()]
    return [trainer.state.updates, *(float(value) for share in kept for value in share.unique())]


def test_a_site_that_begins_anew_forgets_moments_and_usual_norms() -> None:
    spec = tiny_run(sites={"count": 1}, optimizer={"adaptive_clip": 1.05})
    assert set(run_ranks(_anew, 1, spec)[0]) == {0.0, float("inf")}


def _waits(rank: int, spec: RunSpec) -> tuple[str, int]:
    beats = list[int]()
    trainer = assemble(spec, groups=mesh_groups(spec, torch.device("cpu"), everyone()), device=torch.device("cpu"))
    sites = build(trainer, Path(), beat=lambda: beats.append(rank))
    answers = iter((None, None, None, "there"))
    return sites._wait_for(str, lambda _: next(answers)), len(beats)


@pytest.mark.slow
def test_all_ranks_of_a_site_say_that_they_wait() -> None:
    """No rank seems hung while its leader waits for other sites."""
    assert run_ranks(_waits, 2, tiny_run(sites={"count": 1}, plan={"data": 2})) == [("there", 3)] * 2


@pytest.mark.slow
def test_an_eager_step_that_is_not_corrected_is_found() -> None:
    assert _different(_run("alone", "eager", 2), "half a step")


FAULTS = {"sign": 2, "late": 2, "left out": 2, "no feedback": 2, "rounding": 2}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [name if name == "sign" else pytest.param(name, marks=only_full) for name in FAULTS])
def test_a_planted_fault_is_found(fault: str) -> None:
    assert _different(_run("alone", "streaming", FAULTS[fault]), fault)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "plan", "method", "sites"),
    [
        ("flipped", "alone", "streaming", 2),
        ("order", "alone", "streaming", 3),
        pytest.param("flipped", "zero 3 in 3", "asynchronous", 3, marks=only_full),
    ],
)
def test_merged_weights_that_differ_end_the_run_at_the_next_merge(fault: str, plan: str, method: str, sites: int) -> None:
    """A bit of an anchor is flipped at one site, or one site adds up differences in another order."""
    with pytest.raises(
        RuntimeError, match=r"UnequalWeightsError: at merge [0-3], the merged weights of fragment \d .* on site 0.* on site 1"
    ):
        _different(_run(plan, method, sites), fault)
