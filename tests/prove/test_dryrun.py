"""The parts of a dry run: the meter, the stand-ins for a world and its data, and runs that do not fit."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalith.commands import dryrun as command
from megalith.commands.shared.arguments import RunRequest
from megalith.cost.predicted import held, predict, workload_of
from megalith.prove import fake
from megalith.prove.fits import GIB, does_not_fit
from megalith.prove.meter import Memory, Meter, attention_flops
from megalith.spec import cluster, files
from megalith.spec.problem import SpecErrors
from tests.full import FULL, sampled
from tests.prove.dry import dry, in_a_child
from tests.specs import brief_run, tiny_run

# --- the meter ---


def test_a_storage_counts_once_and_until_its_last_view_is_gone() -> None:
    with Meter() as meter:
        meter.begin_step()
        x = torch.zeros(1000)
        y = x.view(10, 100)[3:]
        del x
        z = torch.ones(500)
        del y
        kept = torch.ones(10)
    memory = meter.memory()
    assert sum(memory.peak.values()) == 4000 + 2000
    assert sum(memory.between.values()) == 2000 + 40 == z.nbytes + kept.nbytes


def test_a_storage_that_is_resized_counts_as_large_as_it_is() -> None:
    with Meter() as meter:
        meter.begin_step()
        x = torch.zeros(1000)
        x.untyped_storage().resize_(0)
        y = torch.zeros(900)
        x.untyped_storage().resize_(4000)
    memory = meter.memory()
    assert sum(memory.peak.values()) == 4000 + 3600 == x.untyped_storage().nbytes() + y.nbytes
    assert torch.UntypedStorage.resize_(x.untyped_storage(), 0).nbytes() == 0


def test_a_label_holds_for_all_the_life_of_a_storage() -> None:
    with Meter() as meter:
        meter.begin_step()
        first = torch.zeros(100)
        second = torch.zeros(50)
        meter.label(first.view(10, 10), "gradients")
        del second
    memory = meter.memory()
    assert memory.peak == {"weights": 0, "gradients": 400, "optimizer": 0, "activations": 200, "buffers": 0}
    assert memory.between == {"weights": 0, "gradients": 400, "optimizer": 0, "activations": 0, "buffers": 0}


def test_the_memory_timeline_of_a_step_meets_its_peak_and_keeps_its_length() -> None:
    with Meter() as meter:
        meter.begin_step()
        kept = [torch.zeros(100) for _ in range(1000)]
        kept.clear()
    timeline = meter.memory_timeline(moments=50)
    assert len(timeline) == 50
    assert max(sum(moment.values()) for moment in timeline) == sum(meter.memory().peak.values()) == 400_000
    assert timeline[-1]["activations"] < 400_000 // 10


def test_meta_tensors_hold_nothing() -> None:
    with Meter() as meter:
        meter.begin_step()
        torch.zeros(1000, device="meta").add(1)
        torch.zeros(1)
    assert sum(meter.memory().peak.values()) == 4


def test_a_product_is_two_flops_a_multiplication() -> None:
    with Meter() as meter:
        torch.mm(torch.zeros(3, 4), torch.zeros(4, 5))
        torch.bmm(torch.zeros(2, 3, 4), torch.zeros(2, 4, 5))
        torch.addmm(torch.zeros(5), torch.zeros(3, 4), torch.zeros(4, 5))
    assert meter.work().products == 2 * 3 * 4 * 5 * (1 + 2 + 1)


def test_causal_attention_counts_what_is_not_masked() -> None:
    q = torch.zeros(2, 3, 8, 4)
    with Meter() as meter:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    seen = 8 * 9 // 2
    assert meter.work().attention == 2 * 2 * 3 * seen * (4 + 4)
    assert attention_flops(q, q, q, 2, causal=False) == 2 * 2 * 3 * 64 * (4 + 4)


# --- stand-ins ---


def _answers() -> list[object]:
    with fake.Fakes():
        x = torch.randn(6, device="cpu")
        return [
            float(x.sum()),
            int((x > 0).sum()),
            bool((x > 0).any()),
            list(x[x > 0].shape),
            torch.empty(2, device="meta").is_meta,
        ]


def test_where_data_would_decide_the_answer_is_always_the_same() -> None:
    assert in_a_child(_answers) == [4.0, 4, False, [6], True]


def _second_world() -> str:
    with fake.groups_of(64, rank=37):
        assert (dist.get_rank(), dist.get_world_size()) == (37, 64)
        try:
            with fake.groups_of(8, rank=0):
                return "entered"
        except RuntimeError as error:
            return str(error)


def test_a_rank_of_one_world_cannot_be_a_rank_of_another() -> None:
    assert "in another process" in in_a_child(_second_world)
    assert not dist.is_initialized()


@pytest.mark.slow
def test_memory_between_steps_is_the_state_alone() -> None:
    found = dry(brief_run(plan={"data": 2, "tensor": 2, "pipeline": 2, "zero": 2}, train={"precision": "bf16"}), 5)
    assert found.memory.between["weights"] == found.state["weights"]
    assert found.memory.between["optimizer"] == found.state["optimizer"]
    assert found.memory.between["activations"] == found.memory.between["gradients"] == 0


@pytest.mark.slow
def test_recomputation_holds_less_and_computes_more() -> None:
    plain, again = (dry(brief_run(plan={"recompute": policy}), 0) for policy in ("none", "full"))
    assert again.memory.most["activations"] < 0.6 * plain.memory.most["activations"]
    assert again.work.products > 1.2 * plain.work.products
    assert again.memory.most["weights"] == plain.memory.most["weights"]


@sampled(1, together=True)
@pytest.mark.slow
def test_zero_3_holds_less_of_the_weights_and_zero_1_of_the_moments() -> None:
    held = [dry(brief_run(plan={"data": 4, "zero": zero}, train={"precision": "bf16"}), 1).memory for zero in range(4)]
    assert held[1].most["optimizer"] == held[2].most["optimizer"] == held[3].most["optimizer"]
    assert 3.9 < held[0].most["optimizer"] / held[1].most["optimizer"] <= 4
    assert held[2].most["weights"] == held[1].most["weights"] > 1.5 * held[3].most["weights"]


# --- runs that do not fit ---


def _memory(**held: float) -> Memory:
    sizes = {name: int(held.get(name, 0) * GIB) for name in ("weights", "gradients", "optimizer", "activations", "buffers")}
    return Memory(sizes, sizes, {}, int(held.get("building", 0) * GIB))


def test_what_fits_is_no_problem() -> None:
    assert does_not_fit(tiny_run(), _memory(weights=10, activations=70), 80 * GIB) is None


def test_what_does_not_fit_names_the_category_and_what_would_help() -> None:
    problem = does_not_fit(tiny_run(plan={"data": 8, "zero": 0}), _memory(weights=30, optimizer=60), 80 * GIB)
    assert problem is not None
    assert problem.severity == "error"
    assert "holds 90.0 GiB of 80.0 GiB" in problem.reason
    assert "optimizer hold most" in problem.reason
    assert "plan.zero = 1" in problem.way_out
    assert "recompute" not in problem.way_out


def test_a_change_that_saves_too_little_is_not_said_to_suffice() -> None:
    problem = does_not_fit(tiny_run(plan={"data": 2, "zero": 0}), _memory(weights=70, optimizer=10, activations=81), 80 * GIB)
    assert problem is not None
    assert problem.way_out.startswith("No single change would make it fit.")
    assert 'plan.recompute = "full"' in problem.way_out
    assert "3 times as many ranks" in problem.way_out


@pytest.mark.parametrize(("batch", "named"), [(1, True), (2, False)])
def test_release_of_gradients_is_named_where_check_lets_the_run_have_it(batch: int, named: bool) -> None:
    run = tiny_run(plan={"state": {"optimizer": "disk"}}, train={"precision": "bf16", "global_batch": batch})
    problem = does_not_fit(run, _memory(weights=40, gradients=50), 80 * GIB)
    assert problem is not None
    assert ("plan.state.release = true" in problem.way_out) == named


@pytest.mark.parametrize(("zero", "named"), [(3, True), (2, False)])
def test_weights_elsewhere_are_named_where_check_lets_the_run_have_them(zero: int, named: bool) -> None:
    run = tiny_run(plan={"zero": zero, "state": {"optimizer": "host"}}, train={"precision": "bf16"})
    problem = does_not_fit(run, _memory(weights=85), 80 * GIB)
    assert problem is not None
    assert ('plan.state.weights = "host"' in problem.way_out) == named


LEAST: dict[str, tuple[dict[str, Any], str, str]] = {
    "muon": ({"optimizer": {"kind": "muon"}, "cluster": "h100:1"}, "optimizer", ""),
    "parts": (
        {"plan": {"retain": {"parts": {"mlp": "recompute"}}}, "cluster": "h100:1"},
        "activations",
        'plan.retain.blocks = "host"',
    ),
    "segments": ({"plan": {"recompute": "segments:2"}, "cluster": "h100:1"}, "activations", 'plan.retain.blocks = "host"'),
    "release": (
        {
            "plan": {"microbatch": 4, "state": {"optimizer": "disk", "release": True}},
            "train": {"precision": "bf16", "global_batch": 4},
            "cluster": "h100:1",
        },
        "activations",
        'plan.recompute = "full" or plan.retain.blocks = "host"',
    ),
    "five sequences": (
        {"plan": {"microbatch": 5, "recompute": "full"}, "train": {"global_batch": 5}, "cluster": "h100:1"},
        "activations",
        'plan.retain.blocks = "host" or plan.microbatch = 1',
    ),
    "as many copies as ranks": ({"plan": {"data": 4, "zero": 0, "replicate": 4}}, "optimizer", 'plan.state.optimizer = "host"'),
    "more devices": (
        {"cluster": "h100:2", "plan": {"recompute": "full"}},
        "activations",
        'plan.retain.blocks = "host" or plan.context = 2',
    ),
}
"""Runs that do not fit, the category that holds most, and the only changes that `check` allows and that save memory there."""


@pytest.mark.parametrize("case", LEAST)
def test_ways_out_are_what_check_allows_and_what_saves_memory(case: str) -> None:
    tables, largest, named = LEAST[case]
    run = tiny_run(**{name: {} | table for name, table in tables.items() if name != "cluster"})
    run = run.model_copy(update={"cluster": tables.get("cluster", "local")})
    problem = does_not_fit(run, _memory(**{largest: 81}), 80 * GIB)
    assert problem is not None
    said = problem.way_out.partition("By proportion, ")[2].partition(" would make it fit")[0]
    assert said == named


def test_building_can_be_what_does_not_fit() -> None:
    problem = does_not_fit(tiny_run(), _memory(weights=10, building=90), 80 * GIB)
    assert problem is not None
    assert "while a rank builds the model" in problem.reason


# --- the command ---


def _run_file(folder: Path, plan: str) -> Path:
    path = folder / "run.toml"
    path.write_text(
        f'model.preset = "tiny"\ndata.path = "none"\nplan = {plan}\n'
        "train = { steps = 1, global_batch = 8, seq_len = 32 }\noptimizer.warmup = 0\n"
    )
    return path


def test_a_rank_or_a_world_that_the_plan_has_not_is_refused(tmp_path: Path) -> None:
    run = _run_file(tmp_path, "{ data = 4 }")
    with pytest.raises(SpecErrors, match="the plan has ranks 0 to 3"):
        command.dryrun(RunRequest(run), rank=4)
    with pytest.raises(SpecErrors, match="16"):
        command.dryrun(RunRequest(run), world=16)


@pytest.mark.slow
def test_a_dry_run_needs_no_data(tmp_path: Path) -> None:
    run = _run_file(tmp_path, "{ data = 512, pipeline = 2, tensor = 4 }")
    settings = ["train.global_batch=1024", "cluster=h100:4096"]
    result = in_a_child(lambda: command.dryrun(RunRequest(run, settings), world=4096, rank=4095))
    assert (result.run.world, result.run.rank, result.limit, result.problems) == (4096, 4095, 80 * GIB, [])
    assert result.run.counted.coordinates == {"pipeline": 1, "data": 511, "context": 0, "tensor": 3}


@pytest.mark.slow
@pytest.mark.parametrize("replicate", [1, 2])
def test_the_buffers_of_weights_and_gradients_do_not_grow_with_the_microbatches(replicate: int) -> None:
    def most(batch: int) -> int:
        plan = {"data": 4, "zero": 3, "replicate": replicate}
        run = tiny_run(plan=plan, model={"layers": 2}, train={"global_batch": batch})
        return dry(run, 0).memory.most["buffers"]

    assert most(12) == most(8)


# --- the published layouts ---


@dataclass(frozen=True)
class Shown:
    """A row of the guide's table: a command, and its result in GiB."""

    recipe: str
    settings: tuple[str, ...]
    rank: int
    peak: tuple[float, ...]  # weights, gradients, optimizer, activations, buffers
    total: float
    building: float
    device: float
    fits: bool

    @classmethod
    def of(cls, line: str) -> "Shown":
        command, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        recipe, *options = shlex.split(command.strip("`"))
        given = list(zip(options[::2], options[1::2], strict=True))
        *peak, total, building, device = map(float, cells[:8])
        settings = tuple(value for name, value in given if name == "--set")
        return cls(recipe, settings, int(dict(given)["--rank"]), tuple(peak), total, building, device, cells[8] == "yes")


ROOT = Path(__file__).parents[2]
TABLE = [Shown.of(line) for line in re.findall(r"^\| `recipes/.*", (ROOT / "docs/guide/dryrun.md").read_text(), re.MULTILINE)]


def test_all_large_recipes_are_shown_by_their_first_and_their_last_rank_and_one_that_does_not_fit() -> None:
    specs = {f"recipes/{path.name}": files.load(path).spec for path in (ROOT / "recipes").glob("*.toml")}
    large = {name: spec for name, spec in specs.items() if spec.plan.ranks > 100}
    ranks = {(name, rank) for name, spec in large.items() for rank in (0, spec.plan.ranks - 1)}
    for name, spec in large.items():
        most, device = held(workload_of(spec)), cluster.load(spec.cluster).accelerator.memory
        if device is not None and most.total - most.non_torch > device:
            ranks.add((name, most.rank * spec.plan.ranks // spec.plan.pipeline))
    assert {(one.recipe, one.rank) for one in TABLE if not one.settings} == ranks
    assert {one.fits for one in TABLE} == {True, False}


@sampled(24)
@pytest.mark.parametrize("one", TABLE, ids=lambda one: f"{one.recipe} {one.rank} {' '.join(one.settings)}")
def test_what_is_shown_to_fit_is_also_predicted_to(one: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    spec = files.load(Path(one.recipe), overrides=one.settings).spec
    assert cluster.load(spec.cluster).accelerator.memory == one.device * GIB
    assert one.fits == (max(one.total, one.building) <= one.device)
    assert one.fits == (sum(predict(workload_of(spec), rank=one.rank).memory.values()) <= one.device * GIB)


LOCKED_TORCH = torch.__version__.startswith("2.15")
"""The docs' numbers were counted with this version of torch; older ones hold some inputs of operations a little longer."""

FEWER = ("train.global_batch=64",)  # eight microbatches a data rank: the most that Mixtral's first rank ever holds
TAKEN = (
    [(one, ()) for one in TABLE]
    if FULL
    else [(one, FEWER) for one in TABLE if (one.recipe, one.rank) == ("recipes/mixtral-8x22b.toml", 0)]
)


@sampled(1, together=True)
@pytest.mark.slow
@pytest.mark.timeout(7200)  # Mixtral 8x22B in full takes four minutes of an idle core
@pytest.mark.parametrize(
    ("one", "fewer"), TAKEN, ids=lambda value: f"{value.recipe} {value.rank}" if isinstance(value, Shown) else ""
)
def test_a_large_recipe_holds_what_is_shown(one: Shown, fewer: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    request = RunRequest(Path(one.recipe), (*one.settings, *fewer))
    result = in_a_child(lambda: command.dryrun(request, rank=one.rank))
    memory = result.run.counted.memory
    found = [*memory.peak.values(), sum(memory.peak.values()), memory.building]
    assert [size / GIB for size in found] == pytest.approx([*one.peak, one.total, one.building], abs=0.1 if LOCKED_TORCH else 0.5)
    assert (not result.problems) == one.fits
    assert result.run.resident < 4 * GIB
