import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from megalith.check.remedies import NONE, Change, changes
from megalith.cli import app
from megalith.commands.shared.arguments import RunRequest
from megalith.commands.shared.runs import check
from megalith.planner.candidates import offloaded
from megalith.planner.described import roomy
from megalith.planner.find import choice_of, find, find_form, scorer_of, skeleton
from megalith.planner.formats import state_of
from megalith.planner.plan_result import PlanResult, best_plans, cheapest_remedy, frontier, headroom, short
from megalith.planner.request import PlanRequest, ResolvedRequest, resolve
from megalith.planner.run_file import as_run
from megalith.planner.search import Candidate, SearchResult
from megalith.planner.varied import vary
from megalith.report import plans
from megalith.spec import files
from megalith.spec.plan import Plan, RetainSpec, StateSpec
from megalith.spec.problem import SpecErrors
from megalith.spec.sizes import model_parameters
from tests.patience import PATIENCE
from tests.prepared import hollow_data

WORDS = {"model": "tiny", "cluster": "h100:4", "seq_len": 128, "global_batch": 8, "tokens": "1B"}
TIGHT = {"model": "llama3.2-3b", "cluster": "a100-40gb:1", "seq_len": 8192, "global_batch": 16, "offload": True}
ARGUMENTS = ["plan", *(word for key, value in WORDS.items() for word in (f"--{key.replace('_', '-')}", str(value)))]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Keep traces for the tests of this file only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGALITH_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("COLUMNS", "80")
        yield


@pytest.fixture(scope="module")
def answered(cache) -> PlanResult:
    return best_plans(resolve(PlanRequest(**WORDS)), top=5, why=True)


@pytest.mark.slow
def test_all_that_is_shown_is_valid_and_fits(answered: PlanResult):
    assert len(answered.found.choices) == 5
    for choice in (*answered.found.choices, *answered.found.pareto):
        assert choice.estimate.fits
        assert answered.request.is_valid(choice.plan)
    assert all(answered.request.is_valid(one.plan) for one in answered.neighbours)


def test_what_check_denies_is_passed_over_and_counted(answered: PlanResult, monkeypatch: pytest.MonkeyPatch):
    best = answered.found.choices[0].plan
    monkeypatch.setattr(type(answered.request), "is_valid", lambda self, plan: skeleton(plan) != skeleton(best))
    other = best_plans(answered.request, top=2)
    assert [one.plan for one in other.found.choices] == [one.plan for one in answered.found.choices[1:3]]
    assert other.found.refused > 0
    assert best not in [one.plan for one in other.found.pareto]


def test_a_training_takes_its_tokens(answered: PlanResult):
    best, whole = answered.found.choices[0], answered.trainings[0]
    assert whole.steps == -(-(10**9) // (128 * 8))
    assert whole.days * 86_400 == pytest.approx(whole.steps * best.estimate.time.step)


def test_the_tables_fit_a_terminal(answered: PlanResult):
    own = replace(answered, own=answered.found.choices[0])
    console = Console(width=80, record=True, file=io.StringIO(), highlight=False)
    console.print(plans.table(own), plans.reasons(answered))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert max(map(len, lines)) <= 80
    assert any("(yours)" in line for line in lines)


def test_what_beats_a_plan_is_said_by_the_terms_of_the_step(answered: PlanResult):
    first, slow = answered.found.choices[0], answered.found.choices[-1]
    assert plans.gain_over_own_plan(answered) == ""
    assert "No examined plan is faster" in plans.gain_over_own_plan(replace(answered, own=first))
    time, best = vars(slow.estimate.time), vars(first.estimate.time)
    said = plans.gain_over_own_plan(replace(answered, own=slow))
    assert f"best plan's step is {1 - best['step'] / time['step']:.1%} shorter than yours" in said
    largest = min((name for name in best if name != "step"), key=lambda name: best[name] - time[name])
    assert f"({largest} -" in said


def test_a_layout_in_short_leaves_out_what_is_one():
    assert short(Plan()) == "d1 z1 m1"
    assert short(Plan(data=2, tensor=8, context=2, pipeline=4, chunks=3, expert=16, zero=3)) == "t8 c2 p4x3 e16 d2 z3 m1"
    assert short(Plan(data=8, pipeline=16, chunks=2, schedule="zb-v")) == "p16x2 zb-v d8 z1 m1"
    assert short(Plan(data=64, zero=3, replicate=8)) == "d64 z3 r8 m1"
    assert short(offloaded(Plan(data=8), 0.25)) == "d8 z1 m1 o25"
    assert short(Plan(retain=RetainSpec(blocks="host", share=0.5))) == "d1 z1 m1 a50"


def test_the_best_plan_is_written_as_a_run_that_check_accepts(answered: PlanResult, tmp_path: Path):
    path = tmp_path / "plan.toml"
    path.write_text(as_run(answered))
    hollow_data(tmp_path / "data", "text")
    checked = check(RunRequest(path, [f"data.path={tmp_path / 'data'}"]), world=4)
    assert not checked.errors
    written, best = checked.resolved.spec.plan, answered.found.choices[0].plan
    assert (short(written), written.recompute, written.layers) == (short(best), best.recompute, best.layers)


def test_a_run_files_own_values_stay_as_they_were(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text(
        'name = "mine"\nmodel.preset = "tiny"\ndata.path = "my/data"\noptimizer = { lr = 1e-3, warmup = 5 }\nplan.data = 4\n'
        "train = { steps = 50, global_batch = 8, seq_len = 128 }\n"
    )
    found = best_plans(resolve(PlanRequest(path=path, cluster="h100:4")), top=1)
    assert found.own is not None
    assert found.own.estimate.time.step >= found.found.choices[0].estimate.time.step
    text = as_run(found)
    path.write_text(text)
    spec = check(RunRequest(path)).resolved.spec
    assert (spec.name, spec.data.path, spec.optimizer.lr, spec.train.steps, spec.cluster) == (
        "mine",
        "my/data",
        1e-3,
        50,
        "h100:4",
    )
    assert "# file" in text
    assert 'preset = "tiny"' in text


def test_folders_and_chunks_of_a_run_file_are_kept(tmp_path: Path):
    """The folders of each site are kept too. A plan that leaves nothing on disk needs none."""
    state, retain = '{ optimizer = "disk", folder = "/nvme", chunk = 32 }', '{ blocks = "disk", folder = "/scratch" }'
    other = '{ optimizer = "disk", folder = "/second", chunk = 64 }'
    (tmp_path / "run.toml").write_text(
        'model.preset = "tiny"\ndata.path = "data"\ncluster = "h100:1"\ntrain = { steps = 9, global_batch = 8, seq_len = 128 }\n'
        f"[plan]\nstate = {state}\nretain = {retain}\n[sites]\ncount = 2\nlink = {{ megabits = 10, milliseconds = 1 }}\n"
        f'each = [{{ cluster = "h100:1" }}, {{ cluster = "h100:1", plan.state = {other} }}]\n'
    )
    asked = resolve(PlanRequest(path=tmp_path / "run.toml"))
    assert asked.sites is not None
    away = Plan(state=StateSpec(optimizer="disk"), retain=RetainSpec(blocks="disk"))
    estimate = SimpleNamespace(time=SimpleNamespace(step=1.0), mfu=0.5, memory=SimpleNamespace(total=1.0))
    for plan, kept in ((away, True), (Plan(), False)):
        each = tuple(one.model_copy(update={"plan": plan}) for one in asked.sites.each)
        request = replace(asked, sites=asked.sites.model_copy(update={"each": each}))
        best = SimpleNamespace(best=SimpleNamespace(plan=plan, estimate=estimate))
        made: Any = SimpleNamespace(request=request, found=best, linked=None, site_plans=True)
        (tmp_path / "plan.toml").write_text(as_run(made))
        spec = files.load(tmp_path / "plan.toml").spec
        assert spec.sites is not None
        first, second = (one.plan for one in spec.sites.each)
        assert first is not None and second is not None
        found = [(one.state.folder, one.state.chunk) for one in (spec.plan, first, second)]
        assert found == ([("/nvme", 32), ("/nvme", 32), ("/second", 64)] if kept else [("", 16)] * 3)
        assert [one.retain.folder for one in (spec.plan, first)] == ["/scratch" if kept else ""] * 2


@pytest.fixture(scope="module")
def tight(cache) -> PlanResult:
    """Return the answer for a model whose moments fit on the host but not on a device."""
    return best_plans(resolve(PlanRequest(**TIGHT)), top=2, why=True)


@pytest.mark.slow
def test_a_layout_that_needs_its_hosts_memory_says_so(tight: PlanResult):
    found = tight.to_json()
    assert tight.found.best is not None and tight.found.best.offload > 0
    assert tight.found.runnable is None
    for row in found["choices"]:
        assert row["offload"] > 0 and not row["predicted_only"]
        assert f" o{100 * row['offload']:.0f}" in row["layout"]
    assert "offloaded to host memory" in plans.legend(tight)


def test_what_needs_no_host_memory_is_not_marked(answered: PlanResult):
    found = answered.to_json()
    assert not any(row["offload"] for row in found["choices"])
    assert "offloaded to host memory" not in plans.legend(answered)
    (moved,) = [one for one in answered.neighbours if one.change == "offload none -> optimizer"]
    assert moved.seconds > 0 > moved.memory
    assert found["runnable"]["layout"] == found["choices"][0]["layout"]


FORMATS = {"fp8": "h100:8", "mxfp8": "b200:8", "nvfp4": "a100-80gb:8", "fp16": "v100-32gb:8"}


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_a_plan_in_any_format_is_written_as_the_trainer_runs_it(format: str, tmp_path: Path):
    """The prices are those of the written file: predicted again from it, its step takes as long."""
    path, cluster = tmp_path / "plan.toml", FORMATS[format]
    request = {"model": "llama3.2-1b", "cluster": cluster, "seq_len": 4096, "global_batch": 64}
    found = best_plans(resolve(PlanRequest(**request, format=format, out=True)), top=1)
    path.write_text(as_run(found))
    checked = check(RunRequest(path))
    assert {problem.key for problem in checked.errors} == {"data.path"}
    spec = checked.resolved.spec
    assert (spec.train.precision, spec.precision) == (format, found.request.run.precision)
    best = found.found.best
    assert best is not None and not found.to_json()["choices"][0]["predicted_only"]
    again = best_plans(resolve(PlanRequest(path=path)), top=1).own
    assert again is not None
    assert again.estimate.time.step == best.estimate.time.step
    assert again.estimate.memory == best.estimate.memory


@pytest.mark.slow
def test_no_format_of_ours_is_predicted_to_be_faster_than_the_trainer_is():
    """Only products of codes gain. The table of layers and the step agree about it."""
    request = {"model": "llama3.2-1b", "cluster": "h200:8", "seq_len": 4096, "global_batch": 64}
    steps = {
        (format, software): best_plans(resolve(PlanRequest(**request, format=format, software=software)), top=1)
        for format, software in (("bf16", "megalith"), ("fp8", "megalith"), ("mxfp8", "megalith"), ("fp8", "megatron-te"))
    }
    seconds = {key: found.found.choices[0].estimate.time.step for key, found in steps.items()}
    gains = steps["fp8", "megalith"].gains
    assert gains is not None and gains.recipe["multiply"] == "codes"
    assert (
        seconds["bf16", "megalith"] * 0.9
        < seconds["fp8", "megalith"]
        < seconds["bf16", "megalith"]
        < seconds["mxfp8", "megalith"]
    )
    assert steps["mxfp8", "megalith"].gains is None and "emulated" in steps["mxfp8", "megalith"].assumption
    assert steps["fp8", "megatron-te"].gains is None and steps["fp8", "megatron-te"].to_json()["choices"][0]["predicted_only"]
    assert steps["fp8", "megatron-te"].request.run.train.precision == "bf16"


@pytest.mark.slow
def test_layers_that_lose_under_the_best_plan_stay_wide():
    found = best_plans(
        resolve(PlanRequest(model="llama3.1-8b", cluster="h100:8", seq_len=8192, global_batch=64, format="fp8")), top=1
    )
    assert found.found.best is not None and found.gains is not None
    assert found.request.widened(found.found.best.plan) is None
    assert set(found.gains.wide) == set(found.request.run.precision.wide) == {"*.attention.k", "*.attention.v"}
    shown = plans.recipe_advice(found.gains)
    assert "[precision]" in shown and 'multiply = "codes"' in shown and "*.attention.k" in shown


def test_a_layout_that_needs_its_hosts_memory_is_written(tight: PlanResult, tmp_path: Path):
    path = tmp_path / "plan.toml"
    path.write_text(as_run(tight))
    checked = check(RunRequest(path))
    assert tight.found.best is not None and checked.resolved.spec.plan.state == tight.found.best.plan.state
    assert not [problem for problem in checked.errors if problem.key.startswith("plan")]


@pytest.mark.slow
def test_where_nothing_fits_the_category_and_ways_out_are_named():
    with pytest.raises(SpecErrors) as caught:
        best_plans(resolve(PlanRequest(model="llama3-8b", cluster="h100:1", seq_len=8192, global_batch=16, offload=False)))
    (problem,) = caught.value.problems
    assert "most of it optimizer" in problem.reason
    assert problem.way_out.startswith("The cheapest change that fits on these devices: --small-state (moments, ")
    assert "; 2 h100 would be enough" in problem.way_out
    assert "b200" in problem.way_out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cluster", "format"), [("llama3.2-3b", "a100-40gb:1", "fp16"), ("llama3.1-70b", "rtx-4090:8", "bf16")]
)
def test_every_device_that_a_way_out_names_can_be_planned_for(model: str, cluster: str, format: str):
    request = PlanRequest(model=model, cluster=cluster, seq_len=2048, global_batch=512, format=format)
    with pytest.raises(SpecErrors) as caught:
        best_plans(resolve(request), top=1)
    said = re.findall(r"(\d+) (\S+(?: or \S+)*) would be enough", caught.value.problems[0].way_out)
    named = [f"{name}:{count}" for count, names in said for name in names.split(" or ")]
    assert "b200" in caught.value.problems[0].way_out
    for one in named:
        resolve(replace(request, cluster=one))


def test_devices_are_named_only_if_a_prediction_is_possible():
    room = {"memory": 20 * 2**30, "ours": True}
    assert "rtx-4090" in roomy(1, format="bf16", **room)
    assert not {"rtx-4090", "a10"} & set(roomy(16, format="bf16", **room)), "nobody published their scale_out"
    assert "tpu-v5p" in roomy(16, format="bf16", **room)
    assert "tpu-v5p" not in roomy(16, format="fp16", **room)


DEEP = """
name = "deep"
cluster = "h100:1"
model = {{ preset = "llama3.2-1b", layers = {layers} }}
data = {{ path = "none" }}
train = {{ steps = 100, global_batch = 4, seq_len = {seq_len}, precision = "bf16" }}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "seq_len", "remedy"),
    [
        (64, 24576, "--small-state"),
        (2000, 8192, ""),
    ],
)
def test_the_cheapest_change_is_named_first(layers: int, seq_len: int, remedy: str, tmp_path: Path):
    (tmp_path / "deep.toml").write_text(DEEP.format(layers=layers, seq_len=seq_len))
    asked = resolve(PlanRequest(path=tmp_path / "deep.toml"))
    assert cheapest_remedy(asked).partition(" (")[0] == remedy
    if remedy:
        few = best_plans(resolve(PlanRequest(path=tmp_path / "deep.toml", small=True)), top=1)
        assert few.found.best is not None and few.found.best.estimate.fits
        (tmp_path / "small.toml").write_text(as_run(few))
        checked = check(RunRequest(tmp_path / "small.toml"))
        assert checked.resolved.spec.optimizer.moments == "fp8" and {problem.key for problem in checked.errors} <= {"data.path"}


def tighter(request: ResolvedRequest, memory: float) -> ResolvedRequest:
    """Return the request on devices with less memory."""
    device = request.cluster.accelerator.model_copy(update={"memory": int(memory)})
    return replace(request, cluster=request.cluster.model_copy(update={"accelerator": device}))


@pytest.mark.slow
@pytest.mark.parametrize("small", [False, True])
def test_where_memory_is_short_other_forms_of_the_state_are_searched_and_written(small: bool, tmp_path: Path):
    """The device holds the smallest plan with the form that needs the least memory, but not with the defaults. Only with --small-state
    do forms that round count, and what the run file gives stays."""
    text = DEEP.format(layers=4, seq_len=512)
    (tmp_path / "run.toml").write_text(text)
    (tmp_path / "given.toml").write_text(text + 'optimizer = { master = "fp32" }\n')
    asked, given = (resolve(PlanRequest(path=tmp_path / f"{name}.toml", small=small)) for name in ("run", "given"))
    forms = [values for values, _ in asked.forms()]
    assert forms[0] == {"optimizer.master": "split16"} and len(forms) == (5 if small else 1)
    assert [values for values, _ in given.forms()] == ([{"train.gradients": "bf16"}] if small else [])
    none = (find(tighter(one, 1), top=1).closest for one in (asked, asked.forms()[-1][1]))
    wide, least = (one.estimate.memory.total * (1 + headroom()) for one in none if one is not None)
    with pytest.raises(SpecErrors):
        best_plans(tighter(given, wide - 1) if not small else tighter(asked, least - 1), top=1)
    found = best_plans(tighter(asked, (wide + least) / 2), top=2)
    assert found.found.best is not None and found.found.best.estimate.fits and "else nothing fits" in found.request.notes[-1]
    (tmp_path / "plan.toml").write_text(as_run(found))
    checked = check(RunRequest(tmp_path / "plan.toml"))
    assert {problem.key for problem in checked.errors} <= {"data.path"}
    written, (chosen, _) = checked.resolved.spec, asked.forms()[0 if not small else -1]
    assert small or state_of(written) == state_of(asked.run) | chosen
    assert not small or (written.optimizer.moments == "fp8" and written.train.gradients == "bf16")
    assert best_plans(asked, top=1).request.run == asked.run, "where all plans fit, the defaults stay"


def test_changes_are_tried_from_the_cheapest_and_what_rounds_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Inputs in 8 bits cost time on the device, and offloading that of a link. Compiled blocks cannot keep them so."""
    (tmp_path / "deep.toml").write_text(DEEP.format(layers=2, seq_len=512))
    asked, tried = resolve(PlanRequest(path=tmp_path / "deep.toml")), list[tuple[str, str, bool]]()
    enough: tuple[str, str, bool] | None = None

    def find(request: ResolvedRequest, *, top: int) -> tuple[ResolvedRequest, SearchResult]:
        tried.append((request.run.optimizer.moments, request.run.precision.kept, request.offload))
        best = Candidate(Plan(), None) if tried[-1] == enough else None  # pyright: ignore[reportArgumentType]
        return request, SearchResult((best,) if best else (), (), 1, 0, None)

    monkeypatch.setattr("megalith.planner.plan_result.find_form", find)
    assert cheapest_remedy(asked, activations=True) == ""
    assert tried == sorted(set(tried), key=tried.index) and len(tried) == 7
    assert tried[:3] == [("fp8", "wide", False), ("fp32", "fp8", False), ("fp8", "fp8", False)]
    assert all(offload for *_, offload in tried[3:])
    tried.clear()
    monkeypatch.setattr(
        "megalith.check.remedies.changes", lambda spec: [[NONE, Change({"plan.state.optimizer": "host"}, 1)], *changes(spec)]
    )
    assert cheapest_remedy(asked) == "" and tried[0] == ("fp32", "wide", True), "the order is that of the list that check reads"
    enough = ("fp32", "fp8", False)
    assert cheapest_remedy(asked) == "" != cheapest_remedy(asked, activations=True)
    assert cheapest_remedy(asked, activations=True).startswith('precision.kept = "fp8" with plan.compile = false')
    whole = resolve(PlanRequest(**WORDS))
    assert whole.compiles and not whole.changed(kept=True).compiles


def test_ways_out_start_from_what_was_asked(monkeypatch: pytest.MonkeyPatch):
    """The form of the state with the least memory rules out weights off the device."""
    asked, judged = resolve(PlanRequest(**WORDS)), list[str]()

    def find(request: ResolvedRequest, *, top: int, tick: Any) -> tuple[ResolvedRequest, SearchResult]:
        return request.forms()[-1][1], SearchResult((), (), 1, 1, None)

    monkeypatch.setattr("megalith.planner.plan_result.find_form", find)
    monkeypatch.setattr(
        "megalith.planner.plan_result._nothing", lambda request, *others: judged.append(request.run.optimizer.master) or []
    )
    with pytest.raises(SpecErrors):
        best_plans(asked)
    assert judged == ["fp32"]


@pytest.mark.parametrize("offload", [False, True])
def test_with_offloading_a_form_is_tried_although_the_one_with_the_least_memory_does_not_fit(
    offload: bool, monkeypatch: pytest.MonkeyPatch
):
    """Gradients in bf16 beside fp32 master weights can be released, and so need less than split ones in the end."""
    asked, chosen = resolve(PlanRequest(**WORDS, offload=offload, small=True)), {"train.gradients": "bf16"}
    time = SimpleNamespace(time=SimpleNamespace(step=1.0))
    fits = SearchResult((Candidate(Plan(), time),), (), 1, 0, None)  # pyright: ignore[reportArgumentType]

    def find(request: ResolvedRequest, **others: Any) -> SearchResult:
        fit = offload and state_of(request.run) == state_of(asked.run) | chosen
        return fits if fit else SearchResult((), (), 1, 1, None)

    monkeypatch.setattr("megalith.planner.find.find", find)
    form, found = find_form(asked, top=1)
    assert (found.best is not None) == offload
    assert not offload or state_of(form.run) == state_of(asked.run) | chosen


@pytest.mark.parametrize("given", [False, True])
def test_only_a_change_to_split16_is_not_tried_where_data_ranks_shard_the_state(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    more = 'optimizer = { master = "split16" }\n' if given else ""
    (tmp_path / "run.toml").write_text(DEEP.format(layers=2, seq_len=512) + more)
    tried = list[tuple[str, bool]]()

    def find(request: ResolvedRequest, *, space: Any = None, **others: Any) -> SearchResult:
        if space is not None:
            tried.append((request.run.optimizer.master, space.sharded))
        return SearchResult((), (), 1, 1, None)

    monkeypatch.setattr("megalith.planner.find.find", find)
    find_form(resolve(PlanRequest(path=tmp_path / "run.toml", offload=True, small=True)), top=1)
    assert set(tried) == ({("split16", True)} if given else {("split16", False), ("split8", True), ("fp32", True)})


def test_a_search_with_further_wide_layers_starts_from_the_form_that_was_asked(monkeypatch: pytest.MonkeyPatch):
    asked, searched = resolve(PlanRequest(**WORDS)), list[str]()

    def find(request: ResolvedRequest, **others: Any) -> tuple[ResolvedRequest, SearchResult]:
        searched.append(request.run.optimizer.master)
        best = Candidate(Plan(), None)  # pyright: ignore[reportArgumentType]
        return request.forms()[-1][1], SearchResult((best,) if len(searched) == 1 else (), (), 1, 0, None)

    monkeypatch.setattr("megalith.planner.plan_result.find_form", find)
    monkeypatch.setattr("megalith.planner.plan_result._nothing", lambda *given: [])
    monkeypatch.setattr(ResolvedRequest, "widened", lambda self, plan: self)
    with pytest.raises(SpecErrors):
        best_plans(asked)
    assert searched == ["fp32", "fp32"]


@pytest.mark.slow
def test_a_layout_that_fits_in_segments_is_found_and_written(tmp_path: Path):
    (tmp_path / "deep.toml").write_text(DEEP.format(layers=48, seq_len=70656))
    found = best_plans(resolve(PlanRequest(path=tmp_path / "deep.toml")), top=1)
    best = found.found.best
    assert best is not None and best.plan.recompute.startswith("segments:")
    (tmp_path / "plan.toml").write_text(as_run(found))
    checked = check(RunRequest(tmp_path / "plan.toml"))
    assert checked.resolved.spec.plan.recompute == best.plan.recompute and {problem.key for problem in checked.errors} <= {
        "data.path"
    }


@pytest.mark.slow
def test_the_command_prints_a_table_or_json(answered: PlanResult, tmp_path: Path):
    printed = CliRunner().invoke(app, [*ARGUMENTS, "--explain", "--out", str(tmp_path / "plan.toml")])
    assert printed.exit_code == 0, printed.output
    for said in ("tokens a step, bf16", "MFU: model FLOPs", "976,563 steps", "one change", "written: "):
        assert said in printed.output.replace("\n", " ")
    said = json.loads(CliRunner().invoke(app, [*ARGUMENTS, "--top", "2", "--json"]).stdout)
    assert said["ok"] is True
    assert [row["layout"] for row in said["choices"]] == [short(one.plan) for one in answered.found.choices[:2]]
    assert said["choices"][0]["training"]["steps"] == 976_563


@pytest.mark.slow
def test_fewer_devices_are_on_the_frontier_where_they_are_cheaper_or_hold_less():
    """The model needs more memory than the communicators."""
    answered = best_plans(
        resolve(PlanRequest(**(WORDS | {"model": "llama3.2-1b", "cluster": "h100:8", "global_batch": 64}))), top=5
    )
    points = frontier(answered.request, answered.found)
    best, price = answered.found.best, answered.request.cluster.price_per_hour
    assert best is not None and price is not None
    assert points[0].choice.estimate.time.step <= best.estimate.time.step
    assert len({point.devices for point in points}) > 1
    for one in points:
        assert not any(
            other.choice.estimate.time.step <= one.choice.estimate.time.step
            and other.device_hours <= one.device_hours
            and other.choice.estimate.memory.total <= one.choice.estimate.memory.total
            for other in points
            if other != one
        )
        steps = 1e9 / (64 * 128)
        assert one.dollars == pytest.approx(one.devices * price * one.choice.estimate.time.step / 3600 * steps)


def test_of_layouts_with_about_the_same_memory_the_fastest_is_shown():
    def point(devices: int, step: float, gib: float) -> SimpleNamespace:
        held = SimpleNamespace(time=SimpleNamespace(step=step), memory=SimpleNamespace(total=gib * 2**30), limit=80 * 2**30)
        return SimpleNamespace(devices=devices, choice=SimpleNamespace(estimate=held))

    points = [point(8, 1, 70), point(8, 1.1, 65), point(4, 1.2, 65), point(8, 1.3, 61), point(8, 1.4, 60), point(4, 1.5, 50)]
    assert plans.distinct(points) == [points[0], points[2], points[3], points[5]]  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_if_changes_one_thing(answered: PlanResult):
    request = PlanRequest(**WORDS)
    changes = ("scale_up=100", "accelerator=b200", "seq_len=64", "global_batch_tokens=2Ki")
    found = best_plans(resolve(request), top=1, what_ifs=[(change, vary(request, change)) for change in changes])
    assert [one.change for one in found.what_ifs] == list(changes)
    slower, larger, shorter, batch = (one.choice for one in found.what_ifs)
    best = found.found.best
    assert best and slower and larger and shorter and batch
    assert slower.estimate.time.step >= best.estimate.time.step
    assert larger.estimate.limit and best.estimate.limit and larger.estimate.limit > best.estimate.limit
    assert (shorter.estimate.tokens, batch.estimate.tokens) == (64 * 8, 2048)
    console = Console(width=80, record=True, file=open(os.devnull, "w"), highlight=False)
    console.print(plans.what_ifs(found), plans.frontier(found.frontier))
    console.file.close()
    assert "accelerator=b200" in console.export_text()


@pytest.mark.parametrize("change", ["seq_len", "seqlen=4", "scale_out=fast", "nodes=3"])
def test_a_what_if_that_is_not_known_is_an_error(change: str):
    with pytest.raises(SpecErrors) as caught:
        vary(PlanRequest(**WORDS), change)
    assert caught.value.problems[0].key == "--what-if"


def test_a_prefill_needs_no_optimizer_and_writes_no_run(answered: PlanResult):
    words = {key: value for key, value in WORDS.items() if key not in ("tokens", "global_batch")}
    found = best_plans(resolve(PlanRequest(**words, forward_only=True)), top=3)
    assert found.request.run.train.global_batch == 1
    for choice in found.found.choices:
        assert choice.estimate.memory.optimizer == 0
    with pytest.raises(SpecErrors) as caught:
        resolve(PlanRequest(**words, forward_only=True, tokens="1B", out=True))
    assert {problem.key for problem in caught.value.problems} == {"--tokens", "--out"}


def test_a_mistake_ends_with_status_2():
    result = CliRunner().invoke(app, ["plan", "--model", "tinny", "--cluster", "h100:4"])
    assert result.exit_code == 2


@pytest.mark.slow
def test_a_second_call_does_without_torch(answered: PlanResult):
    code = f"""
import sys
from typer.testing import CliRunner
from megalith.cli import app
assert CliRunner().invoke(app, {ARGUMENTS}).exit_code == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr


# --- sites ---


def _across_sites(folder: Path, link: str, more: str = "", lr: str = "lr = 0.8") -> PlanResult:
    path = folder / "sites.toml"
    path.write_text(
        f'model.preset = "tiny"\ndata.path = "my/data"\ncluster = "h100:4"\n[sites]\ncount = 2\n{lr}\n{more}\n[sites.link]\n{link}\n'
        "[train]\nsteps = 50\nglobal_batch = 16\nseq_len = 128\n"
    )
    return best_plans(resolve(PlanRequest(path=path)), top=1)


@pytest.mark.slow
def test_what_sites_leave_out_is_chosen_for_their_link_and_written(tmp_path: Path) -> None:
    found = _across_sites(tmp_path, "megabits = 1000\nmilliseconds = 20", "bits = 8")
    linked, step = found.linked, found.found.choices[0].estimate.time.step
    assert linked is not None and linked.proposed is not None and linked.chosen is not None and linked.gain is not None
    assert linked.proposed.use > max(0.9, linked.said.use) and linked.chosen.bits == 8 and linked.chosen.lr == 0.8
    alone = best_plans(resolve(PlanRequest(path=_without_sites(tmp_path))), top=1).found.choices[0].estimate.time.step
    assert linked.gain == pytest.approx(alone * linked.proposed.use / step)
    (tmp_path / "out.toml").write_text(as_run(found))
    hollow_data(tmp_path / "data", "text")
    checked = check(RunRequest(tmp_path / "out.toml", [f"data.path={tmp_path / 'data'}"]))
    written = checked.resolved.spec
    assert not checked.errors and written.sites == linked.chosen and written.train.global_batch == 16
    said = plans.across(found.linked)
    assert f"inner_steps = {linked.proposed.inner_steps}, " in said and "with the run file's method" in said


@pytest.mark.slow
def test_data_parallelism_is_chosen_for_a_link_that_is_fast_enough(tmp_path: Path) -> None:
    """A file that names a key of merges keeps them, and the answer shows data parallelism beside them."""
    fast = "megabits = 1e7\nmilliseconds = 0.001"
    free = _across_sites(tmp_path, fast, lr="").linked
    assert free is not None and free.chosen is not None and free.chosen.exchanges_gradients and free.proposed == free.together
    grace = _across_sites(tmp_path, fast, "grace = 30", lr="").linked
    assert grace is not None and grace.chosen is not None and not grace.chosen.exchanges_gradients, "which has no grace period"
    guarded = _across_sites(tmp_path, f"{fast}\n[fleet]\nverify_every = 10", lr="").linked
    assert guarded is not None and guarded.together is None, "its gradients would have no guards"
    found = _across_sites(tmp_path, fast)
    assert found.linked is not None and found.linked.chosen is not None and not found.linked.chosen.exchanges_gradients
    assert 'with method = "data-parallel": data parallelism. Each site sends' in plans.across(found.linked)
    slow = _across_sites(tmp_path, "megabits = 1000\nmilliseconds = 20", lr="").linked
    assert slow is not None and slow.chosen is not None and not slow.chosen.exchanges_gradients
    assert slow.together is not None and slow.proposed is not None and slow.together.use < slow.proposed.use
    asked = _across_sites(tmp_path, fast, 'method = "data-parallel"', lr="").linked
    assert asked is not None and asked.chosen is None and asked.together is None and asked.said.method == "data parallelism"


@pytest.mark.slow
def test_merges_are_proposed_where_a_link_is_too_slow_for_gradients(tmp_path: Path) -> None:
    """No interval is tried for gradients, so the answer says nothing about intervals."""
    found = _across_sites(tmp_path, "megabits = 1000\nmilliseconds = 20", 'method = "data-parallel"', lr="")
    linked, said = found.linked, plans.across(found.linked)
    assert linked is not None and linked.merging is not None and not linked.merging.gradients
    assert linked.merging.use > 0.9 > linked.said.use and linked.to_json()["merging"]["inner_steps"] == linked.merging.inner_steps
    assert (
        'use method = "merge"' in said
        and f"inner_steps = {linked.merging.inner_steps}, " in said
        and "no inner_steps" not in said
    )


def _without_sites(folder: Path) -> Path:
    before, _, rest = (folder / "sites.toml").read_text().partition("[sites]")
    path = folder / "alone.toml"
    path.write_text(f"{before}[train]{rest.partition('[train]')[2]}")
    return path


@pytest.mark.slow
def test_a_second_site_that_does_not_pay_is_called_so(tmp_path: Path) -> None:
    found = _across_sites(tmp_path, "megabits = 0.001\nmilliseconds = 20")
    assert found.linked is not None and found.linked.gain is not None and found.linked.gain < 1
    assert "More than one site does not pay" in plans.across(found.linked)


@pytest.mark.slow
def test_memory_of_merges_counts(tmp_path: Path) -> None:
    """Anchors, velocities and feedback take 12 bytes for each weight that a rank updates."""
    found = _across_sites(tmp_path, "megabits = 1000\nmilliseconds = 20")
    plain = replace(found.request, sites=None)
    best = found.found.choices[0].plan
    held = [choice_of(one, best, scorer_of(one)).estimate.memory for one in (found.request, plain)]
    assert held[0].optimizer - held[1].optimizer == pytest.approx(12 * model_size(found) / best.data, rel=0.01)
    assert replace(held[0], optimizer=0) == replace(held[1], optimizer=0)


def model_size(found: PlanResult) -> int:
    return sum(prod(each.shape) for each in model_parameters(found.request.model).values())
