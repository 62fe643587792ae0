"""Sites that train separately and merge: equal to a run without sites where they must be, resumed exactly, under any plan and
number of sites."""

import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megalith.checkpoint.folder import find, read_manifest
from megalith.checkpoint.huggingface import OUTPUT
from megalith.checkpoint.read import read_full
from megalith.commands.export import export
from megalith.events import Holding, Merge, Problem, RunStarted, Step, Validation, of_kind, read, read_kind
from megalith.fleet.secure.session import GREETING_BYTES, ClientHandshake
from megalith.models import generate as writer
from megalith.models.stage import Stage
from megalith.parallel.data import local
from megalith.prove.site_merges import Reference
from megalith.report.history import history
from megalith.spec.phases import Phases
from megalith.spec.run import RunSpec
from megalith.spec.sites import at_site, folder_of, fragments, verdict_bytes, wire_bytes, within
from megalith.spec.sites.deal import Deal, Portion, Share
from megalith.train.assemble import assemble, mesh_groups
from megalith.train.evaluate import evaluate, window_losses
from megalith.train.generate import find_tokenizer, generate, load_model
from megalith.train.restore import indices_in, read_portion
from megalith.train.sites.record import chain, recorded
from megalith.train.step import train_step
from megalith.train.stream import open_stream
from megalith.train.tally import StepResult
from tests.fleet.conftest import until
from tests.full import only_full, sampled
from tests.keys import GIVEN, OTHER_KEY
from tests.patience import PATIENCE
from tests.ranks import everyone, run_ranks
from tests.runs import (
    assert_same_bits,
    die_once_saved,
    final_state,
    finish,
    position,
    prepare_text,
    signal_yourself,
    start,
    start_site,
    typed,
    when,
)
from tests.specs import tiny_run

STREAMING: dict[str, Any] = {"inner_steps": 4, "fragments": 2, "overlap": 3, "bits": 4}
TEXT = "On day 3 the ship sailed 21 miles and nobody spoke of day 2."
PLAIN_SGD = {"kind": "sgd", "momentum": 0.0, "nesterov": False, "clip": 0.0, "weight_decay": 0.0, "lr": 0.1}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("text"))


def _spec(data: Path, sites: dict[str, Any] | None, **parts: Any) -> RunSpec:
    parts["train"] = {"steps": 10, "global_batch": 12} | parts.get("train", {})
    given = {} if sites is None else {"sites": sites}
    return tiny_run(model={"vocab": 264, "layers": 2}, data={"path": str(data)}, checkpoint={"every": 3}, **given, **parts)


def _train(spec: RunSpec, folder: Path) -> dict[str, torch.Tensor]:
    codes = finish(start(spec, folder, environment=GIVEN))
    assert not any(codes), "\n".join(path.read_text()[-3000:] for path in sorted(folder.rglob("rank-*.log")))
    return final_state(folder)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    _train(_spec(data, STREAMING), folder)
    return folder


def _weights(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith("weights.")}


def _assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], *, within: float) -> None:
    assert one.keys() == other.keys()
    apart = {name: float((one[name] - other[name]).abs().max() / other[name].abs().max()) for name in one}
    assert max(apart.values()) < within, apart


def test_one_site_that_takes_its_own_weights_is_plain_training(data: Path, tmp_path: Path) -> None:
    """The runs are equal except for a - (a - b), which is not exactly b."""
    alone = _train(_spec(data, None), tmp_path / "plain")
    site = _train(_spec(data, {"count": 1, "inner_steps": 2, "lr": 1.0, "momentum": 0.0}), tmp_path / "site")
    _assert_close(_weights(site), _weights(alone), within=1e-5)


def test_merging_after_each_step_of_sgd_is_data_parallelism(data: Path, tmp_path: Path) -> None:
    """These sites have equally many targets, so the mean of each site has the same weight."""
    sites = {"count": 2, "inner_steps": 1, "lr": 1.0, "momentum": 0.0}
    merged = _train(_spec(data, sites, optimizer=PLAIN_SGD), tmp_path / "sites")
    together = _train(_spec(data, None, plan={"data": 2}, optimizer=PLAIN_SGD), tmp_path / "data")
    _assert_close(_weights(merged), _weights(together), within=1e-6)


def _one_after_the_other(rank: int, spec: RunSpec) -> dict[str, torch.Tensor]:
    """Train all sites of a run in one process, and merge with the reference in numpy; return the merged weights."""
    sites, device = spec.sites, torch.device("cpu")
    assert sites is not None
    alone = within(spec.model_copy(update={"plan": type(spec.plan)()}))
    trainers = [assemble(alone, groups=mesh_groups(alone, device, everyone()), device=device) for _ in range(sites.count)]
    live = [
        {name.removeprefix("weights."): local(each) for name, each in one.state.shares("weights").items()} for one in trainers
    ]
    first = {name: tensor.detach().numpy().copy() for name, tensor in live[0].items()}
    cut = fragments({name: first[name].shape for name in sorted(first)}, sites)
    merges, stream, part = Reference.begin(sites, cut, set(), first), open_stream(spec, "train"), alone.train.global_batch
    for step in range(spec.train.steps):
        for site, trainer in enumerate(trainers):
            portion = Portion((Share(step * spec.train.global_batch + site * part, part),))
            train_step(trainer, read_portion(stream, alone, portion, 0), step=step)
            merges.weights[site] = {name: tensor.detach().numpy().copy() for name, tensor in live[site].items()}
        merges.after_step(step + 1, last=step + 1 == spec.train.steps)
        for site, weights in enumerate(merges.weights):
            for name, tensor in live[site].items():
                tensor.detach().copy_(torch.from_numpy(weights[name]))
    return {f"weights.{name}": torch.from_numpy(anchor) for name, anchor in merges.anchors.items()}


@pytest.mark.parametrize(
    ("sites", "optimizer"),
    [
        ({"inner_steps": 3}, {}),
        pytest.param(STREAMING | {"bits": 32}, {}, marks=only_full),
        pytest.param({"inner_steps": 3}, {"kind": "muon", "iteration": "fp32"}, marks=only_full),
    ],
)
def test_a_whole_run_is_that_of_sites_in_one_process(
    sites: dict[str, Any], optimizer: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    """Each site has two ranks with sharded state. Another outer rate is found."""
    spec = _spec(data, {"count": 2} | sites, plan={"data": 2, "zero": 3}, optimizer=optimizer)
    trained = _weights(_train(spec, tmp_path / "run"))
    _assert_close(trained, run_ranks(_one_after_the_other, 1, spec)[0], within=1e-5)
    assert spec.sites is not None
    other = spec.model_copy(update={"sites": spec.sites.model_copy(update={"lr": 0.69})})
    with pytest.raises(AssertionError):
        _assert_close(trained, run_ranks(_one_after_the_other, 1, other)[0], within=1e-5)


TOGETHER: dict[str, Any] = {"method": "data-parallel", "count": 2}


def _steps(folder: Path) -> list[tuple[int, float]]:
    """Return the norm of each step's gradients."""
    return [(one.step, one.grad_norm) for one in of_kind(read(folder), Step)]


@pytest.mark.parametrize("plan", [{}, pytest.param({"data": 2, "zero": 1}, marks=only_full)])
def test_gradients_that_are_exchanged_make_one_world(plan: dict[str, Any], data: Path, tmp_path: Path) -> None:
    """The run uses AdamW, and clips by the norm of the whole gradient. All sites hold the same bits."""
    spec = _spec(data, TOGETHER, plan=plan, optimizer={"clip": 0.5}, train={"steps": 8})
    merged = _train(spec, tmp_path / "sites")
    world = {"data": 2 * plan.get("data", 1)}
    together = _train(_spec(data, None, plan=world, optimizer={"clip": 0.5}, train={"steps": 8}), tmp_path / "world")
    apart = [float((tensor - _weights(together)[name]).abs().max()) for name, tensor in _weights(merged).items()]
    assert max(apart) < 1e-6, "AdamW makes much of the last bits of gradients near zero"
    assert_same_bits(_weights(final_state(folder_of(tmp_path / "sites", 1))), _weights(merged))
    ours, theirs = _steps(tmp_path / "sites"), _steps(tmp_path / "world")
    assert [norm for _, norm in ours] == pytest.approx([norm for _, norm in theirs], rel=1e-5)
    assert all(norm > 0.5 for _, norm in ours), "every step is clipped"
    shapes = {name.removeprefix("weights."): tuple(tensor.shape) for name, tensor in _weights(merged).items()}
    assert spec.sites is not None
    (whole,) = fragments(shapes, spec.sites)
    made = list(of_kind(read(tmp_path / "sites"), Merge))
    assert [one.step for one in made] == list(range(1, 9))
    logs = [list(of_kind(read(folder_of(tmp_path / "sites", site)), Step)) for site in range(2)]
    for merge, *steps in zip(made, *logs, strict=True):
        assert merge.losses == pytest.approx([one.loss for one in steps], rel=1e-6), "those of the same step"
    assert {one.bytes_sent for one in made} == {wire_bytes(whole) + verdict_bytes()} and whole.bytes == 4 * sum(
        tensor.numel() for tensor in _weights(merged).values()
    )


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=only_full)])
def test_sites_that_exchange_gradients_go_on_with_the_same_bits(victim: int, data: Path, tmp_path: Path) -> None:
    spec = _spec(data, TOGETHER)
    whole = _train(spec, tmp_path / "whole")
    with when("step", 7, site=victim, act=lambda: die_once_saved(folder_of(tmp_path / "killed", victim), 6)):
        assert any(finish(start(spec, tmp_path / "killed", environment=GIVEN)))
    assert_same_bits(_train(spec, tmp_path / "killed"), whole)
    assert _ledger(spec, tmp_path / "killed") == list(range(10 * 12))


@only_full
def test_a_fault_in_the_first_save_costs_the_steps_before_it(data: Path, tmp_path: Path) -> None:
    """One site has the checkpoint and the other has none. Both start over, and produce the same bits."""
    spec = _spec(data, TOGETHER)
    whole = _train(spec, tmp_path / "whole")
    with when("checkpoint", 3, site=1, act=lambda: die_once_saved(tmp_path / "killed", 3)):
        assert any(finish(start(spec, tmp_path / "killed", environment=GIVEN)))
    assert_same_bits(_train(spec, tmp_path / "killed"), whole)
    assert [one.resumed_step for one in of_kind(read(tmp_path / "killed"), RunStarted)] == [0, 0]


OWN_PLANS: list[dict[str, Any]] = [{"plan": {"data": 2, "zero": 3}}, {"plan": {}}]
"""Two ranks read two thirds of every step, one rank a third."""


def test_sites_of_different_size_are_data_parallelism_too(data: Path, tmp_path: Path) -> None:
    """Each site is weighted by the samples that it reads."""
    sites = {"count": 2, "inner_steps": 1, "lr": 1.0, "momentum": 0.0, "each": OWN_PLANS}
    merged = _train(_spec(data, sites, optimizer=PLAIN_SGD, train={"steps": 5}), tmp_path / "sites")
    together = _train(_spec(data, None, optimizer=PLAIN_SGD, train={"steps": 5}), tmp_path / "plain")
    _assert_close(_weights(merged), _weights(together), within=1e-6)


@sampled(2, together=True)
def test_sites_of_different_size_go_on_with_the_same_bits(data: Path, tmp_path: Path) -> None:
    """One site was killed. The merges of both are replayed, each site under its plan."""
    spec = _spec(data, STREAMING | {"each": OWN_PLANS})
    whole = _train(spec, tmp_path / "whole")
    with when("step", 7, site=1, act=lambda: die_once_saved(folder_of(tmp_path / "killed", 1), 6)):
        assert any(finish(start(spec, tmp_path / "killed", environment=GIVEN)))
    assert_same_bits(_train(spec, tmp_path / "killed"), whole)
    plans = [of_kind(read(folder_of(tmp_path / "killed", site)), RunStarted)[0].spec["plan"]["data"] for site in range(2)]
    assert plans == [2, 1]
    _replayed(spec, tmp_path / "killed", tmp_path / "again")
    assert _ledger(spec, tmp_path / "killed") == list(range(10 * 12))


@sampled(2, together=True)
def test_sparse_and_eager_merges_go_on_with_the_same_bits(data: Path, tmp_path: Path) -> None:
    """The site is killed between its own outer step and the correction."""
    sparse = {"top_k": 400, "bits": 2, "momentum": 0.0, "lr": 1.0, "feedback_decay": 0.95, "eager": True}
    spec = _spec(data, STREAMING | sparse)
    whole = _train(spec, tmp_path / "whole")
    with when("step", 7, site=1, act=lambda: die_once_saved(folder_of(tmp_path / "killed", 1), 6)):
        assert any(finish(start(spec, tmp_path / "killed", environment=GIVEN)))
    assert_same_bits(_train(spec, tmp_path / "killed"), whole)
    _replayed(spec, tmp_path / "killed", tmp_path / "again")


@only_full
def test_the_samples_of_a_large_site_go_to_a_small_one(data: Path, tmp_path: Path) -> None:
    """The large site never comes back. The steps of the other site stay as small as before."""
    folder = tmp_path / "run"
    spec = _spec(data, STREAMING | {"decides": 1, "grace": 5.0, "each": OWN_PLANS}, train={"steps": 12})
    with when("step", 7, site=0, act=lambda: signal_yourself(signal.SIGKILL)):
        second, first = start_site(spec, folder, 1, environment=GIVEN), start_site(spec, folder, 0, environment=GIVEN)
        assert any(finish(first)) and finish(second) == [0]
    small = folder_of(folder, 1)
    made = list(of_kind(read(small), Merge))
    assert [one.left for one in made if one.left] == [[0]] and made[-1].merged == [1]
    assert _ledger(spec, small) == list(range(12 * 12))


@pytest.mark.parametrize("victim", [pytest.param(0, marks=only_full), 1])
def test_a_killed_run_ends_with_the_same_bits(victim: int, data: Path, whole: Path, tmp_path: Path) -> None:
    """Fragments are in flight at that time. Those that were sent but not merged are sent again."""
    spec = _spec(data, STREAMING)
    with when("step", 7, site=victim, act=lambda: die_once_saved(folder_of(tmp_path / "killed", victim), 6)):
        assert any(finish(start(spec, tmp_path / "killed", environment=GIVEN)))
    assert_same_bits(_train(spec, tmp_path / "killed"), final_state(whole))
    starts = [event.resumed_step for event in of_kind(read(tmp_path / "killed"), RunStarted)]
    assert starts[0] == 0 and starts[1] in (3, 6), "the newest that both have"


@pytest.mark.parametrize(
    ("precision", "place", "anchors"),
    [
        ("fp32", {"optimizer": "host", "share": 0.5}, "host"),
        pytest.param("fp32", {"optimizer": "disk"}, "device", marks=only_full),
        pytest.param("bf16", {"optimizer": "host", "share": 0.5}, "device", marks=only_full),
        pytest.param("bf16", {"optimizer": "disk"}, "host", marks=only_full),
    ],
)
def test_state_elsewhere_changes_no_bit(
    precision: str, place: dict[str, Any], anchors: str, data: Path, whole: Path, tmp_path: Path
) -> None:
    """This includes a kill and a resume. In bf16 master weights are elsewhere too."""
    train = {"precision": precision}
    if precision != "fp32":
        whole = tmp_path / "whole"
        _train(_spec(data, STREAMING, train=train), whole)
    spec = _spec(data, STREAMING | {"place": anchors}, train=train, plan={"state": place})
    with when("step", 7, site=1, act=lambda: die_once_saved(folder_of(tmp_path / "run", 1), 6)):
        assert any(finish(start(spec, tmp_path / "run", environment=GIVEN)))
    assert_same_bits(_train(spec, tmp_path / "run"), final_state(whole))


def test_what_merges_keep_is_counted_in_every_step(whole: Path) -> None:
    """In fp32 a weight has two moments, its anchor, its velocity and its rounding error, of four bytes each."""
    events = [*read(whole)]
    held = of_kind(events, Holding)[-1]
    assert held.optimizer_bytes == of_kind(events, Step)[-1].memory["optimizer"] == pytest.approx(20 * held.parameters, rel=0.01)


def test_sites_stop_together_and_go_on_with_the_same_bits(data: Path, whole: Path, tmp_path: Path) -> None:
    """One site is asked to stop, and the others would be no quorum without it. All stop after the merge that announces this."""
    spec = _spec(data, STREAMING)
    with when("step", 2, site=1, act=lambda: signal_yourself(signal.SIGTERM)):
        assert finish(start(spec, tmp_path / "stopped", environment=GIVEN)) == [75, 75]
    stopped = position(tmp_path / "stopped")["step"]
    assert 3 <= stopped <= 3 + 2 + STREAMING["overlap"], "the next fragment leaves within two steps"
    assert_same_bits(_train(spec, tmp_path / "stopped"), final_state(whole))


@only_full
def test_the_same_run_under_another_plan(data: Path, tmp_path: Path) -> None:
    """A checkpoint of two sites of one rank is loaded by two sites of two."""
    sites = STREAMING | {"bits": 32}
    whole = _train(_spec(data, sites), tmp_path / "whole")
    with when("step", 7, act=lambda: die_once_saved(tmp_path / "changed", 6)):
        finish(start(_spec(data, sites), tmp_path / "changed", environment=GIVEN))
    changed = _train(_spec(data, sites, plan={"data": 2, "zero": 3}), tmp_path / "changed")
    _assert_close(_weights(changed), _weights(whole), within=1e-3)


def _weights_of(model: Stage) -> dict[str, torch.Tensor]:
    return {f"weights.{name}": tensor.detach().clone() for name, tensor in model.parameters_by_name().items()}


def test_all_that_reads_weights_finds_the_merged_ones(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a round a site's own weights are others. The end of the run merges everything."""
    folder, held = tmp_path / "sites", {"every": 3, "samples": 4}
    end = _train(_spec(data, STREAMING, validation=held), folder)
    for site in range(2):
        own = final_state(folder_of(folder, site))
        assert all(torch.equal(end[name], own[f"{kind}{name}"]) for name in _weights(end) for kind in ("", "site."))
    middle = folder / "checkpoints" / "step-00000006"
    state = read_full(middle)
    merged, own = _weights(state), {name: state[f"site.{name}"] for name in _weights(state)}
    assert not any(torch.equal(merged[name], own[name]) for name in merged), "a reader of the wrong ones is found in every tensor"

    written = load_file(next(export(folder, out=tmp_path / "exported", step=6).glob("*.safetensors")))
    assert torch.equal(written[OUTPUT], merged["weights.head.output.weight"])

    model = load_model(middle, device=torch.device("cpu"))
    assert_same_bits(_weights_of(model), merged)
    ids = [*map(int, find_tokenizer(folder, None).encode(TEXT)), find_tokenizer(folder, None).end_of_text]
    right = sum(window_losses(model, ids, 32)) / (len(ids) - 1)
    with torch.no_grad():
        for name, tensor in model.parameters_by_name().items():
            tensor.copy_(own[f"weights.{name}"])
    wrong = sum(window_losses(model, ids, 32)) / (len(ids) - 1)
    assert evaluate(folder, [TEXT], step=6).loss == pytest.approx(right, rel=1e-6) and wrong != pytest.approx(right, rel=1e-5)

    used = list[dict[str, torch.Tensor]]()
    monkeypatch.setattr(writer, "generate", lambda model, ids, **_: used.append(_weights_of(model)) or ids)
    generate(folder, "Line", tokens=1, step=6)
    assert_same_bits(used[0], merged)

    begun = {"steps": 1, "init_from": str(middle)}
    after = _weights(
        _train(_spec(data, None, train=begun, validation=held | {"every": 1}, optimizer={"lr": 1e-12}), tmp_path / "after")
    )
    _assert_close(after, merged, within=1e-6)
    with pytest.raises(AssertionError):
        _assert_close(after, own, within=1e-6)
    losses = {event.step: event.loss for event in of_kind(read(folder), Validation)}
    (there,) = [event.loss for event in of_kind(read(tmp_path / "after"), Validation)]
    assert losses.keys() == {3, 6, 9, 10} and losses[6] == pytest.approx(there, rel=1e-6) and losses[10] < losses[3]


def test_the_number_of_sites_may_change(data: Path, tmp_path: Path) -> None:
    """There are two sites, then three, then one. A new site gets the merged weights, and no sample is left out or read twice."""
    sites, folder = {"inner_steps": 4}, tmp_path / "run"
    with when("step", 7, act=lambda: die_once_saved(folder, 6)):
        finish(start(_spec(data, sites | {"count": 2}), folder, environment=GIVEN))
    _train(_spec(data, sites | {"count": 3}, train={"steps": 20}), folder)
    assert [one.joined for one in of_kind(read(folder), Merge) if one.joined] == [[2]]
    third = final_state(folder_of(folder, 2))
    assert all(torch.equal(tensor, third[name]) for name, tensor in _weights(final_state(folder)).items())
    assert position(folder)["samples"] == 20 * 12
    # Until the next merge the site reads four samples a step, and its plan computes three at a time: eight sequences fill up twelve.
    _train(_spec(data, sites | {"count": 1}, train={"steps": 24}, plan={"microbatch": 3}), folder)
    (last,) = {one.number: one for one in of_kind(read(folder), Merge) if one.left}.values()
    assert last.left == [1, 2] and last.count == 1
    assert _ledger(_spec(data, sites, train={"steps": 24}), folder) == list(range(24 * 12))


@only_full
def test_one_of_two_sites_may_lose_its_run_folder(data: Path, tmp_path: Path) -> None:
    """The other site has the only checkpoint, and is no quorum alone."""
    folder, spec = tmp_path / "run", _spec(data, {"inner_steps": 4, "grace": 60.0}, train={"steps": 20})
    with when("step", 7, act=lambda: die_once_saved(folder, 6)):
        finish(start(spec, folder, environment=GIVEN))
    shutil.rmtree(folder_of(folder, 1))
    _train(spec, folder)
    made = list({one.number: one for one in of_kind(read(folder), Merge)}.values())
    assert [one.joined for one in made if one.joined] == [[1]] and made[-1].merged == [0, 1]
    other = final_state(folder_of(folder, 1))
    assert all(torch.equal(tensor, other[name]) for name, tensor in _weights(final_state(folder)).items())
    assert _ledger(spec, folder) == list(range(20 * 12))


def _wait_for_the_lost_one(folder: Path) -> None:
    """Slow down while the run in a folder lacks a site."""
    made = list(of_kind(read(folder), Merge))
    if any(one.left for one in made) and not any(one.joined for one in made):
        time.sleep(0.5)


@sampled(2, together=True)
def test_a_site_that_is_killed_comes_back(data: Path, tmp_path: Path) -> None:
    """The other site continues meanwhile, which the run file allows. It slows down so that the lost one can return."""
    folder, steps = tmp_path / "run", 60
    spec = _spec(data, {"inner_steps": 4, "fragments": 2, "overlap": 1, "decides": 0, "grace": 3.0}, train={"steps": steps})

    with when("step", None, site=0, act=partial(_wait_for_the_lost_one, folder)):
        with when("step", 7, site=1, act=lambda: signal_yourself(signal.SIGKILL)):
            first, second = start_site(spec, folder, 0, environment=GIVEN), start_site(spec, folder, 1, environment=GIVEN)
            assert finish(second) == [-signal.SIGKILL]
        assert finish(first | start_site(spec, folder, 1, environment=GIVEN)) == [0, 0]
    made = list(of_kind(read(folder), Merge))
    left, joined = ([getattr(one, name) for one in made if getattr(one, name)] for name in ("left", "joined"))
    assert left == joined and left[0] == [1]
    assert made[-1].merged == [0, 1]
    said = [one.message for site in range(2) for one in of_kind(read(folder_of(folder, site)), Problem)]
    assert sum("site 1 joined" in text and "fresh moments" in text for text in said) >= 2, "at both sites"
    assert any("this site has the merged weights" in text and "fresh moments" in text for text in said)
    one, other = final_state(folder), final_state(folder_of(folder, 1))
    assert all(torch.equal(tensor, other[name]) for name, tensor in _weights(one).items())
    assert made[-1].samples == steps * 12 and _ledger(spec, folder) == list(range(steps * 12))
    _replayed(spec, folder, tmp_path / "again")


@sampled(2, together=True)
def test_the_site_that_decides_comes_back_and_nobody_goes_back(data: Path, tmp_path: Path) -> None:
    """The other site waits at the merge, becomes the decider, and sends its weights."""
    folder, steps = tmp_path / "run", 40
    other = folder_of(folder, 1)
    spec = _spec(data, {"inner_steps": 4, "fragments": 2, "overlap": 1, "grace": 60.0}, train={"steps": steps})

    with when("step", None, site=1, act=partial(_wait_for_the_lost_one, other)):
        with when("step", 9, site=0, act=lambda: signal_yourself(signal.SIGKILL)):
            first, second = start_site(spec, folder, 0, environment=GIVEN), start_site(spec, folder, 1, environment=GIVEN)
            assert finish(first) == [-signal.SIGKILL]
        assert finish(second | start_site(spec, folder, 0, environment=GIVEN)) == [0, 0]
    made = list(of_kind(read(other), Merge))
    assert [one.left for one in made if one.left] == [one.joined for one in made if one.joined] == [[0]]
    assert [one.number for one in made] == list(range(len(made))), "no merge was made again"
    assert {one.decided for one in made} == {0, 1} and made[-1].decided == 1 and made[-1].merged == [0, 1]
    assert len(list(of_kind(read(other), RunStarted))) == 1
    assert made[-1].samples == steps * 12 and _ledger(spec, other) == list(range(steps * 12))
    _replayed(spec, folder, tmp_path / "again")


def _replayed(spec: RunSpec, folder: Path, again: Path) -> None:
    """Replay the merges of a run, with no site lost, and assert that they end with the same bits. The log of each site has all merges."""
    assert spec.sites is not None
    made, last = recorded([folder]), read_manifest(find(folder)).meta["sites"]
    assert sorted(made) == list(range(len(made)))
    for site in range(spec.sites.count):
        own = chain(read_kind(folder_of(folder, site), Merge), last["merges"], last["mark"])
        assert {verdict.number: verdict for _, verdict in own} == made
    sites = spec.sites.model_copy(update={"replay": (str(folder),), "grace": 60.0})
    _train(spec.model_copy(update={"sites": sites}), again)
    assert recorded([again]) == made
    assert_same_bits(_weights(final_state(again)), _weights(final_state(folder)))


def test_asynchronous_merges_of_all_sites_are_synchronous_ones(data: Path, whole: Path, tmp_path: Path) -> None:
    """A quorum of two sites is both."""
    state = _train(_spec(data, STREAMING | {"staleness": 2}), tmp_path / "run")
    assert_same_bits(
        {name: tensor for name, tensor in state.items() if "flight" not in name and "slots" not in name},
        {name: tensor for name, tensor in final_state(whole).items() if "flight" not in name},
    )


LATE: dict[str, Any] = {"inner_steps": 4, "fragments": 2, "overlap": 1, "bits": 4, "decides": 0, "grace": 60.0, "staleness": 2}


def _wait_until_missed(folder: Path, times: int) -> None:
    """Wait until a difference of site 1 has missed this many merges of its fragment. On a busy machine earlier ones may be late, too."""

    def missed(merges: list[Merge]) -> int:
        taken = (step for one in merges for site, step in zip(one.merged, one.taken, strict=True) if site == 1)
        newest = max(taken, default=-1)
        return sum(one.sent > newest for one in merges)

    def each() -> Iterator[int]:
        merges = list(of_kind(read(folder), Merge))
        yield from (missed([one for one in merges if one.fragment == fragment]) for fragment in (0, 1))

    until(lambda: max(each()) >= times, seconds=120)


def test_a_late_site_is_merged_later(data: Path, tmp_path: Path) -> None:
    """Nobody waits for the site, it does not leave, and the merges are repeated from the log."""
    folder, steps = tmp_path / "run", 24
    spec = _spec(data, LATE, train={"steps": steps})
    with when("step", 9, site=1, act=partial(_wait_until_missed, folder, 2)):
        _train(spec, folder)
    made = list(of_kind(read(folder), Merge))
    ages = [age for one in made for site, age in zip(one.merged, one.ages, strict=True) if site == 1]
    assert max(ages) == 2 and not any(one.left for one in made)
    assert all(age == 0 for one in made for site, age in zip(one.merged, one.ages, strict=True) if site == 0)
    assert made[-1].samples == steps * 12 and _ledger(spec, folder) == list(range(steps * 12))
    assert_same_bits(_weights(final_state(folder)), _weights(final_state(folder_of(folder, 1))))
    _replayed(spec, folder, tmp_path / "again")


@only_full
@pytest.mark.parametrize("victim", [0, 1])
def test_late_differences_survive_a_kill(victim: int, data: Path, tmp_path: Path) -> None:
    """All sites are killed once the late site has saved a checkpoint with differences that no merge has, and begin from there."""
    folder, steps = tmp_path / "run", 24
    spec = _spec(data, LATE, train={"steps": steps})
    late = when("step", 9, site=1, act=partial(_wait_until_missed, folder, 2))
    with late, when("step", 17, site=victim, act=lambda: die_once_saved(folder_of(folder, 1), 12)):
        assert any(finish(start(spec, folder, environment=GIVEN)))
    _train(spec, folder)
    assert any(age for one in of_kind(read(folder), Merge) for age in one.ages)
    assert _ledger(spec, folder) == list(range(steps * 12))
    _replayed(spec, folder, tmp_path / "again")


def test_a_site_that_never_comes_back_loses_no_sample(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    spec = _spec(data, STREAMING | {"decides": 0, "grace": 3.0}, train={"steps": 12})
    with when("step", 7, site=1, act=lambda: signal_yourself(signal.SIGKILL)):
        first, second = start_site(spec, folder, 0, environment=GIVEN), start_site(spec, folder, 1, environment=GIVEN)
        assert finish(second) == [-signal.SIGKILL] and finish(first) == [0]
    made = list(of_kind(read(folder), Merge))
    assert [one.left for one in made if one.left] == [[1]] and made[-1].merged == [0]
    (text,) = [one.message for one in of_kind(read(folder), Problem) if "site 1 left" in one.message]
    (at,) = [one.step for one in made if one.left]
    assert re.match(f"site 1 left at step {at}: its [1-9]", text) and text.endswith(
        "samples that no merge contains are dealt out again"
    )
    assert made[-1].samples == 12 * 12 and _ledger(spec, folder) == list(range(12 * 12))
    last = position(folder)["step"]
    assert last > 12, "one site alone needs more steps"
    assert history(folder).total_steps == last and all(one.step <= 12 + one.left_out for one in of_kind(read(folder), Step))


def _attack(folder: Path) -> None:
    """Connect to the port of the site in a folder as strangers do: with garbage, with a frame of huge length, and with another key."""
    host, _, port = (folder / "site.address").read_text().rpartition(":")
    for data in (b"garbage" * 1000, struct.pack(">IQ", 2**32 - 1, 1) + bytes(1000), b""):
        with suppress(ConnectionError), socket.create_connection((host, int(port)), timeout=PATIENCE) as stranger:
            if not data:
                greeting = stranger.recv(GREETING_BYTES, socket.MSG_WAITALL)
                data = ClientHandshake(OTHER_KEY, greeting).proof
            stranger.sendall(data)
            while stranger.recv(1 << 16):
                pass  # until the site closes the connection


def test_strangers_change_no_bit_and_are_counted(data: Path, whole: Path, tmp_path: Path) -> None:
    """They come in the middle of training. No other process of the run notices them."""
    folder = tmp_path / "run"
    with when("step", 4, site=0, act=partial(_attack, folder)):
        assert_same_bits(_train(_spec(data, STREAMING), folder), final_state(whole))
    said = [one.message for one in of_kind(read(folder), Problem) if one.severity == "warning" and "run's key" in one.message]
    assert sum(int(re.search(r"closed (\d+) connections", text)[1]) for text in said) == 3  # type: ignore[index]
    assert not [one for one in of_kind(read(whole), Problem) if "run's key" in one.message]


def _ledger(spec: RunSpec, folder: Path) -> list[int]:
    """Return the samples that the recorded merges included, in order, from the events alone and without the trainer."""
    assert spec.sites is not None
    merges = list({one.number: one for one in of_kind(read(folder), Merge)}.values())  # the last event of each merge
    phases = Phases.of(spec)
    deal, found, step = Deal.first(2, at_site(spec).sites.shares), list[int](), 0  # type: ignore[union-attr]
    for one in merges:
        while step < one.step:
            deal.deal(step, phases, one.total)
            step += 1
        newest = dict(zip(one.merged, one.taken or [one.sent] * len(one.merged), strict=True))  # the last of each site
        for site, sent in newest.items():
            taken = [share for after, share in deal.open.get(site, []) if after <= sent]
            found += [number for share in taken for number in range(share.first, share.first + share.size)]
        steps = list(newest.values())
        deal.merge(sent=one.sent, step=one.step, merged=[*newest], left=one.left, joined=one.joined, steps=steps)
        deal.count = one.count
    return sorted(found)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_sample_is_read_once(count: int) -> None:
    spec = tiny_run(sites={"count": count}, plan={"data": 2, "microbatch": 1}, train={"global_batch": 12})
    deal, phases = Deal.first(count), Phases.of(spec)
    for step in range(3):
        shares = deal.deal(step, phases, 36).values()
        found = [n for share in shares for reader in range(2) for part in indices_in(spec, share, reader) for n in part]
        assert sorted(found) == list(range(12 * step, 12 * step + 12))


def test_a_step_that_is_filled_up_has_the_gradients_of_its_samples(data: Path) -> None:
    """A site whose part is six samples reads two ranges of two samples each."""
    spec = _spec(data, {"count": 2}, plan={"microbatch": 3})
    portion = Portion((Share(3, 2), Share(20, 2)))
    filled, exact = run_ranks(_filled, 1, spec, portion)[0]
    assert indices_in(spec, portion, 0) == [[3, 4, 20], [21, 3, 4]]
    assert (filled.tokens, filled.noise) == (exact.tokens, None) and exact.tokens == 4 * 32
    assert filled.loss == pytest.approx(exact.loss, rel=1e-6) and filled.grad_norm == pytest.approx(exact.grad_norm, rel=1e-5)


def _filled(rank: int, spec: RunSpec, portion: Portion) -> list[StepResult]:
    """Return the results of a step that reads a portion, filled up, and of the same samples as a whole batch."""
    device, stream = torch.device("cpu"), open_stream(spec, "train")
    alone = within(spec.model_copy(update={"plan": type(spec.plan)()}), portion.size)
    site, whole = (assemble(one, groups=mesh_groups(one, device, everyone()), device=device) for one in (spec, alone))
    site.enter(Phases.of(spec).at(portion.first), portion.size)
    filled = train_step(site, read_portion(stream, spec, portion, 0), step=0)
    return [filled, train_step(whole, [stream.batch([number]) for number in portion.numbers], step=0)]


def test_merges_are_in_the_log(whole: Path) -> None:
    made = [(one.sent, one.step, one.fragment) for one in of_kind(read(whole), Merge)]
    assert made == [(2, 5, 0), (4, 7, 1), (6, 9, 0), (8, 10, 1), (10, 10, 0), (10, 10, 1)]
    steps = list(of_kind(read(whole), Step))
    assert [step.tokens for step in steps] == [12 * 32] * 10 and steps[-1].tokens_seen == 10 * 12 * 32
    assert all(len(one.losses) == 2 and one.norm > 0 for one in of_kind(read(whole), Merge))


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE)
def test_two_commands_that_would_train_different_runs_end(data: Path, tmp_path: Path) -> None:
    """Both name what differs, and end with the status of a wrong specification."""
    other = prepare_text(tmp_path, days=300)
    own = [("--set", "sites.lr=0.5", "--set", "train.seed=2", "--set", "plan.data=1"), ("--set", f"data.path={other}")]
    words = typed(tmp_path / "run.toml", data, steps=50, more="[sites]\ninner_steps = 4\n")
    started = [
        subprocess.Popen(
            [*words, str(folder_of(tmp_path / "run", site)), "--set", f"sites.site={site}", *own[site]],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | GIVEN,
        )
        for site in range(2)
    ]  # fmt: skip
    for process, (one, two) in zip(started, ((0, 1), (1, 0)), strict=True):
        said = process.communicate(timeout=PATIENCE)[0]
        assert process.returncode == 2, said
        assert f"site {one} and site {two} would not train the same run" in said and "the data differ" in said
        assert (
            "sites.lr is 0.5 on site 0 and 0.7 on site 1" if one == 0 else "train.seed is 0 on site 1 and 2 on site 0"
        ) in said
