"""Long benchmarks: their cases, and a small version of the whole in tests that may take minutes."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cases, link, optimizers, precision, sites, spikes, within_memory
from benchmarks.optimizers import GRIDS, Case, Ran, Search, best_of, kept, print_table, reached
from megalith.check import check
from megalith.machine import wire
from megalith.machine.wire import Conditions
from megalith.parallel.data import local
from megalith.prove.worlds import run_ranks
from megalith.spec import files
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.phases import Phases
from tests.full import only_full
from tests.runs import prepare_text

ROOT = Path(__file__).parents[1]


def search(part: str) -> Search:
    return optimizers.full(part, "unused")


def test_every_optimizer_has_the_same_search() -> None:
    assert GRIDS.keys() == OPTIMIZERS.keys()
    assert {kind: len(set(search("optimizers").first(kind))) for kind in GRIDS} == dict.fromkeys(GRIDS, 10)
    specs = {kind: search("optimizers").spec_of(search("optimizers").first(kind)[0]) for kind in GRIDS}
    assert {spec.optimizer.kind for spec in specs.values()} == GRIDS.keys()
    assert len({(spec.train.steps, spec.optimizer.warmup, spec.model) for spec in specs.values()}) == 1


def test_large_batches_and_ramps_read_the_same_tokens() -> None:
    whole = search("optimizers").spec_of(Case("optimizers", "adamw", 1e-3, 0.1, 0)).train
    for kind in ("adamw", "lamb", "ramp"):
        spec = search("batch").spec_of(Case("batch", kind, 1e-3, 0.1, 0))
        sizes = list(optimizers.batches(spec, Phases.of(spec)))
        assert sum(sizes) == whole.steps * whole.global_batch
        assert max(sizes) == sizes[-1] == 8 * whole.global_batch and len(set(sizes)) == (4 if kind == "ramp" else 1)


def test_tokens_to_a_loss_lie_on_the_line_between_validations() -> None:
    assert reached([(0.5, 6.0), (1.0, 4.0)], 5.0) == 0.75
    assert reached([(0.5, 6.0), (1.0, 4.0)], 7.0) == 0.5
    assert reached([(0.5, 6.0), (1.0, 4.0)], 3.0) == float("inf")


def test_a_table_has_what_is_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that stopped early cannot be the best."""
    small = optimizers.quick("optimizers", tmp_path)
    first, second = small.first("adamw")
    found = {first: Ran([*first], [(0.5, 3.0)], "", ""), second: Ran([*second], [(0.5, 5.0), (1.0, 4.0)], "", "")}
    assert best_of(found, small, "adamw") == second
    print_table(found, small)
    assert len(capsys.readouterr().out.split("\n")) == 3
    print_table(found | dict.fromkeys(small.others(second), found[second]), small)
    assert "adamw         0.004!   0.1  4.0000" in capsys.readouterr().out and not kept(tmp_path / "none")


def test_clean_runs_that_are_watched_change_batch_and_length(tmp_path: Path) -> None:
    spec = spikes.varied(spikes.spec_of(tmp_path, 90))
    assert [(phase.step, phase.global_batch, phase.seq_len) for phase in Phases.of(spec).all] == [
        (0, 8, 64),
        (30, 16, 64),
        (60, 16, 32),
    ]


def test_alarms_are_counted_from_the_numbers_of_a_run(tmp_path: Path) -> None:
    """Single steps outside, two in a row, one far outside, and the first step of sequences of another length, which has no band yet."""
    spec = spikes.varied(spikes.spec_of(tmp_path, 240))
    losses = [3.0] * 240
    for step, loss in {50: 3.9, 70: 3.9, 71: 3.9, 90: 3.9, 100: 9.0, 160: 9.0, 239: 3.9}.items():
        losses[step] = loss
    assert spikes.watched(losses, [1.0] * 240, spec) == ([72, 101], [51, 91])


@pytest.mark.parametrize("workers", [1, 2])
def test_finished_cases_are_kept_and_not_run_again(workers: int, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    cases.finish(file, [("a", 1)], _length, workers=workers)
    assert [row["length"] for row in cases.finish(file, [("a", 1), ("bc", 2)], _length, workers=workers)] == [1, 2]
    rows = cases.finish(file, [("bc", 2), ("a", 1)], _refused, workers=workers)
    assert [row["case"] for row in rows] == [["a", 1], ["bc", 2]] == [row["case"] for row in cases.kept(file)]
    assert all(row["commit"] == cases.commit() and "torch" in row["machine"] for row in rows)


def _length(case: tuple[str, int]) -> dict[str, int]:
    return {"length": len(case[0])}


def _refused(case: tuple[str, int]) -> dict[str, int]:
    raise AssertionError(f"{case} was run again")


@only_full
@pytest.mark.parametrize(
    "benchmark", ["optimizers", "spikes", "sites", "site_kills", "precision", "precision --model experts", "moments"]
)
def test_all_of_it_in_small(benchmark: str, tmp_path: Path) -> None:
    """The second time all runs are already in the file."""
    name, *more = benchmark.split()
    asked = [sys.executable, str(ROOT / f"benchmarks/{name}.py"), *more, "--quick", "--file", str(tmp_path / "runs.jsonl")]
    first, second = (subprocess.run(asked, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert second.strip() and {*second.splitlines()} <= {*first.splitlines()}


@only_full
@pytest.mark.parametrize(("benchmark", "bad"), [("precision", "bad maxima"), ("precision", "integers"), ("moments", "integers")])
def test_a_bad_recipe_is_seen(benchmark: str, bad: str, tmp_path: Path) -> None:
    """Its loss is farther from that of wide numbers than the loss of the good recipe, already after a fiftieth of the steps."""
    asked = [sys.executable, str(ROOT / f"benchmarks/{benchmark}.py"), "--data", str(prepare_text(tmp_path)), "--steps", "40"]
    wide = ["fp32", "noise"] if benchmark == "moments" else ["noise"]
    asked += ["--seeds", "1", "--out", str(tmp_path / "runs.jsonl"), "--cases", *wide, "fp8", bad]
    printed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    gaps = {name: float(re.search(rf"^{name} .*? ([+-][\d.]+) %", printed, re.M)[1]) for name in ("noise", "fp8", bad)}  # type: ignore[index]
    assert abs(gaps["noise"]) < abs(gaps["fp8"]) < gaps[bad], printed


@pytest.mark.parametrize("model", precision.MODELS)
def test_each_model_can_be_trained_in_each_precision(model: str) -> None:
    specs = [precision.run_of("unused", 2000, 0, model, case) for case in precision.CASES.values()]
    assert not [problem for spec in specs for problem in check(spec, files=False) if problem.severity == "error"]


def test_the_model_of_quickstart_is_compared() -> None:
    model, recipe = (
        spec.model
        for spec in (
            precision.run_of("unused", 40, 0, "quickstart", precision.CASES["fp8"]),
            files.load(ROOT / "recipes/quickstart.toml").spec,
        )
    )
    assert model == recipe.model_copy(update={"vocab": model.vocab})


def test_errors_of_gradients_are_shown_by_part(capsys: pytest.CaptureFixture[str]) -> None:
    """The mean over the seeds, for all gradients and for those of embedding, blocks and head."""
    names = ("embedding.weight", "blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight", "head.output.weight")
    parts = precision.by_part({name: torch.tensor([float(number)]) for number, name in enumerate(names)})
    assert {part: each.tolist() for part, each in parts.items()} == {
        "all": [0, 1, 2, 3],
        "embedding": [0],
        "blocks": [1, 2],
        "head": [3],
    }
    seeds: list[dict[str, Any]] = [
        {"recipes": {"fp8": {part: [seed / 10, 0.5, 0.3, 0.25] for part in parts}}, "hadamard": {"nvfp4": [0.4, 0.3, 0.2, 0.1]}}
        for seed in (1, 3)
    ]
    precision._show_gradients(seeds)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split() for line in printed[1:3]] == [
        ["fp8", "all", "0.2000", "0.50000", "0.3000", "0.25000"],
        ["embedding", "0.2000", "0.50000", "0.3000", "0.25000"],
    ]
    assert len(printed) == 8 and printed[-1].split() == ["nvfp4", "0.4000", "0.3000", "0.2000", "0.1000"]


@pytest.mark.slow
def test_noise_is_in_the_first_weights_too(tmp_path: Path) -> None:
    """Each weight differs by about a millionth, and each seed draws other differences."""
    data = str(prepare_text(tmp_path))
    (same,) = run_ranks(_weights, 1, data, 0, "noise")
    for seed in range(2):
        wide, ours = (run_ranks(_weights, 1, data, seed, name)[0] for name in ("bf16", "noise, weights"))
        differ = (ours / wide - 1)[wide != 0]
        assert 0.9e-6 < differ.std() < 1.1e-6 and differ.abs().max() < 1e-5
        assert torch.equal(same, wide) == (seed == 0)


def _weights(rank: int, data: str, seed: int, name: str) -> torch.Tensor:
    trainer = precision.begun(data, torch.device("cpu"), 40, seed, "dense", name)
    return torch.cat([local(parameter).detach().flatten().double() for parameter in trainer.parameters.values()])


@only_full
def test_draws_have_no_bias_and_rounding_to_nearest_has_one(tmp_path: Path) -> None:
    """Four standard errors of the mean of many draws are the limit, without and with an outlier."""
    (found,) = run_ranks(
        precision.distances, 1, str(prepare_text(tmp_path)), torch.device("cpu"), 40, 0, "dense", 64, timeout=3600.0
    )
    for drawn, nearest, then, too in found.values():
        assert max(drawn, then) < 4 < min(nearest, too), found


@only_full
def test_a_hadamard_transform_lowers_the_error_of_weight_gradients_with_an_outlier() -> None:
    """In MXFP4, on the text and after the steps of the table in docs/guide/precision.md."""
    with cases.own_data() as data:
        (found,) = run_ranks(_hadamard, 1, str(data), timeout=3600.0)
    assert all(turned < plain and too < then for plain, turned, then, too in found), found


def _hadamard(rank: int, data: str) -> list[list[float]]:
    at = precision.Fixed(data, torch.device("cpu"), 100, 0, "dense")
    return [precision.hadamard(at, "mxfp4", rounding) for rounding in precision.ROUNDINGS]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "step_seconds"), [("merge", 0.0), ("data-parallel", 0.0), ("data-parallel", 0.05)])
def test_two_sites_wait_over_a_relay_where_no_wire_can_be_made(
    method: str, step_seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All messages cross the relay, and take the time of the link. With data parallelism they are gradients of every step."""
    monkeypatch.setattr(wire, "missing", lambda: "needs root")
    data = prepare_text(tmp_path)
    spec = link.run_of(str(data), "0.1M", 2, {"method": method} | ({"inner_steps": 1} if method == "merge" else {}))
    (ran, other), crossed = link.measured(spec, Conditions(20, 40), step_seconds)
    assert ran.merges == other.merges == 2 and ran.loss == other.loss and ran.sent > 2 * 4 * sites.parameters(spec)
    assert ran.sent <= crossed < ran.sent + 8192
    transfers = 2 * (ran.sent / 2 * 8 / 20e6 + 0.04)  # a site that is late waits less, and the other waits as much more
    assert ran.waited + other.waited >= 2 * (transfers - 0.05) and ran.loss > 0


def test_the_study_says_how_long_it_will_take() -> None:
    """Each size and optimizer has steps of its own length. A search that is also a case of the study is run once."""
    study = sites.Study(sizes=("0.1M", "25M"), steps=10, seeds=2)
    wanted = sites.left(study, [])
    searched = sites.searches(study)
    assert len(wanted) == len(searched) + 2 * 2 * len(sites.STUDY) - 3 and wanted[: len(searched)] == searched
    rows = [{"case": [*at], "loss": at[5] + at[6]} for at in searched]
    rest = sites.left(study, rows)
    assert len(rest) == len(wanted) - len(searched)
    assert sites.left(study, [*rows, *({"case": [*at], "loss": 1.0} for at in rest)]) == []
    seconds = {("0.1M", "adamw"): 1.0, ("0.1M", "muon"): 2.0, ("25M", "adamw"): 100.0, ("25M", "muon"): 200.0}
    assert sites.hours([("Muon", "25M", 10, 30, 0), ("DiLoCo", "0.1M", 10, 30, 0)], seconds) == pytest.approx(2010 / 3600)
    assert {sites._kind(at) for at in wanted} == seconds.keys()


@pytest.mark.parametrize("size", sites.SIZES)
def test_sizes_are_about_as_large_as_their_names_say(size: str) -> None:
    runs = link.run_of("none", size, 1, {"inner_steps": 1}), sites.run_of("DiLoCo", "none", size, 1, 1, 0)
    exact, other = map(sites.parameters, runs)
    assert exact == other
    assert all(run.sites is not None and run.sites.grace and run.sites.grace >= 600 for run in runs), "no site is left out"
    named = 6.5 if size == sites.QUICKSTART else float(size.removesuffix("M"))
    assert abs(exact / 1e6 - named) < max(0.05, 0.05 * named)


def test_the_size_of_quickstart_is_the_recipes() -> None:
    assert link.run_of("none", sites.QUICKSTART, 1, {}).model == files.load(ROOT / "recipes" / "quickstart.toml").spec.model


def test_the_twelve_links_are_twelve() -> None:
    assert len({(*vars(conditions).values(), *map(str, method.items())) for conditions, method in link.LINKS}) == 12


def test_the_study_searches_once_for_each_method() -> None:
    """Runs with fewer bits or a fault take the settings of their method; a search is of the smallest size."""
    study = sites.Study()
    found = sites.searches(study)
    assert {at[0] for at in found} == {"DiLoCo", "streaming", "Muon"} and {at[1] for at in found} == {"1.5M"}
    assert len(found) == 3 * len(study.rates) * len(study.momenta)
    rows = [{"case": [*at], "loss": abs(at[5] - 0.7) + abs(at[6] - (0.6 if at[0] == "Muon" else 0.9))} for at in found]
    best = sites.chosen(study, rows)
    assert best == {"DiLoCo": (0.7, 0.9), "streaming": (0.7, 0.9), "Muon": (0.7, 0.6)}
    assert sites.at_best(study, best, "Muon, 2 bits", "25M", 2) == ("Muon, 2 bits", "25M", 600, 30, 2, 0.7, 0.6)
    assert (
        sites.method_of("fault: DiLoCo, wrong sign") == "DiLoCo" and sites.method_of("fault: Muon, 2 bits, no feedback") == "Muon"
    )
    assert sites.at_best(study, best, "data parallelism", "1.5M", 0) == ("data parallelism", "1.5M", 600, 30, 0)
    spec = sites.run_of("Muon, 2 bits", "none", "1.5M", 600, 30, 2, {"lr": 0.7, "momentum": 0.6})
    assert spec.sites is not None and (spec.sites.lr, spec.sites.momentum, spec.sites.bits) == (0.7, 0.6, 2)


V1 = "4:memory:/own\n1:cpu:/\n"
V2 = "0::/user/own\n"


@pytest.fixture
def control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files like those of control groups. The kernel removes a group's files with its folder; here the test does."""
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)
    for name in ("memory/own", "user/own", "proc/self"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "proc/swaps").write_text("Filename Type Size Used Priority\n")
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    (tmp_path / "user/cgroup.subtree_control").write_text("cpu\n")
    (tmp_path / "user/own/cgroup.subtree_control").mkdir()  # the kernel refuses: the group has processes
    return tmp_path


@pytest.mark.parametrize(
    ("line", "parent", "files"),
    [
        (V1, "memory/own", {"memory.limit_in_bytes": f"{900 << 20}", "memory.memsw.limit_in_bytes": f"{900 << 20}"}),
        (V2, "user", {"memory.max": f"{900 << 20}", "memory.swap.max": "0"}),
    ],
)
def test_a_control_group_has_a_limit_and_no_swap(line: str, parent: str, files: dict[str, str], control_groups: Path) -> None:
    (control_groups / "proc/self/cgroup").write_text(line)
    with within_memory.group(900, cgroups=control_groups, proc=control_groups / "proc") as made:
        assert made.folder.parent == control_groups / parent
        assert {each.name: each.read_text() for each in made.folder.iterdir()} == files
        made.enter()
        assert (made.folder / "cgroup.procs").read_text().isdecimal()
        (made.folder / made.names.now).write_text("70")
        made.look()
        (made.folder / made.names.now).write_text("60")
        made.look()
        assert made.peak == 70  # a kernel without memory.peak
        (made.folder / made.names.peak).write_text("80")
        assert made.peak == 80
    assert not made.folder.exists()
    assert line != V2 or (control_groups / "user/cgroup.subtree_control").read_text() == "+memory"


def test_the_reason_is_given_where_no_control_group_can_be_made(control_groups: Path) -> None:
    (control_groups / "proc/self/cgroup").write_text("1:cpu:/\n")
    with pytest.raises(SystemExit, match="no cgroup has a memory controller here"):
        within_memory.group(1, cgroups=control_groups, proc=control_groups / "proc").__enter__()
    (control_groups / "proc/self/cgroup").write_text("4:memory:/gone\n")
    with pytest.raises(SystemExit, match=r"gone: No such file or directory.*Use --inside"):
        within_memory.group(1, cgroups=control_groups, proc=control_groups / "proc").__enter__()


def test_an_error_inside_a_control_group_is_not_taken_for_one_of_the_group(control_groups: Path) -> None:
    (control_groups / "proc/self/cgroup").write_text(V2)
    with (
        pytest.raises(OSError, match="disk full"),
        within_memory.group(1, cgroups=control_groups, proc=control_groups / "proc") as made,
    ):
        raise OSError("disk full")
    assert not made.folder.exists()


COUNTS = """
import json, sys, time
from pathlib import Path
path = Path(sys.argv[1])
for step in range(int(path.read_text()), 6):
    time.sleep(0.05)
    path.write_text(str(step + 1))
    print("step", step + 1, 0.05, flush=True)
print(json.dumps({"steps": path.read_text()}))
"""
"""A process of six steps that resumes after the newest one that it has written."""


@pytest.mark.slow
def test_a_process_is_killed_in_later_and_later_steps_and_ends(control_groups: Path) -> None:
    (control_groups / "proc/self/cgroup").write_text(V2)
    kept = control_groups / "kept"
    kept.write_text("0")
    asked = [sys.executable, "-c", COUNTS, str(kept)]
    with within_memory.group(1, cgroups=control_groups, proc=control_groups / "proc") as made:
        assert within_memory.killed(asked, made, steps=6, kills=3) == {"steps": "6"}
        with pytest.raises(SystemExit, match="use --steps 7"):
            within_memory.killed(asked, made, steps=6, kills=5)
        with pytest.raises(SystemExit, match="ended with 3"):
            within_memory.Process([sys.executable, "-c", "raise SystemExit(3)"], made).finish()


@only_full
def test_a_run_that_is_killed_in_its_group_ends_with_the_same_bits(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "benchmarks/within_memory.py",
        "--layers",
        "1",
        "--steps",
        "4",
        "--kills",
        "2",
        "--place",
        "streamed",
    ]
    done = subprocess.run(
        [*words, "--limit", "2000", "--folder", str(tmp_path), "--json"], cwd=ROOT, capture_output=True, text=True
    )
    if "no memory control group can be made" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kills"] == 2


@only_full
def test_the_rate_of_updates_is_compared_with_a_plain_copy(tmp_path: Path) -> None:
    words = [sys.executable, "benchmarks/offload.py", "--rate", "--steps", "2", "--folder", str(ROOT), "--json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if "is not on a disk" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["update"]) == len(found["copy"]) == 2 and min(*found["update"], *found["copy"]) > 0
