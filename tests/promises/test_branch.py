"""A branch begins with another run's whole state and next samples, and decays the learning rate."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megalith.check import check
from megalith.commands.branch import settings
from megalith.events import Step, of_kind, read
from megalith.spec import files
from megalith.spec.problem import SpecErrors
from megalith.spec.run import BranchSpec, OptimizerSpec, RunSpec
from megalith.train.optimizers.rates import learning_rate
from tests import runs
from tests.specs import tiny_run
from tests.train.prepared import VOCAB, small_data

BRANCHED, DECAY = 5, 3


def run(data: str, *, steps: int, plan: dict[str, Any] | None = None, schedule: str = "wsd", **more: Any) -> RunSpec:
    return tiny_run(
        model={"layers": 2, "vocab": VOCAB},
        plan=plan or {},
        data={"path": data},
        train={"steps": steps, "global_batch": 4, "batch_ramp": [{"begin": 12, "global_batch": 8}]},
        optimizer={"schedule": schedule, "warmup": 2, "decay": float(DECAY), "lr": 1e-3},
        checkpoint={"every": 1, "keep": 20, "asynchronous": False},
        **more,
    )


def _step(folder: Path, number: int) -> Path:
    return folder / "checkpoints" / f"step-{number:08}"


def _branched(spec: RunSpec, checkpoint: Path, folder: Path | None = None) -> RunSpec:
    layers = [
        files.Layer(spec.model_dump(exclude_none=True), "file"),
        *map(files.read_setting, settings(checkpoint, DECAY, folder)),
    ]
    return files.resolve(layers).spec


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run of ten updates whose learning rate must not decay before the eighth."""
    data, folder = small_data(tmp_path_factory.mktemp("data")), tmp_path_factory.mktemp("parent")
    runs.train(run(data, steps=10), folder)
    return data, folder


@pytest.mark.parametrize("plan", [{}, {"data": 2, "zero": 3}], ids=str)
def test_a_branch_of_a_run_ends_as_one_that_was_to_end_there(parent: tuple[str, Path], plan: dict[str, Any], tmp_path: Path):
    data, folder = parent
    planned, branch = tmp_path / "planned", tmp_path / "branch"
    spec = _branched(run(data, steps=10, plan=plan), _step(folder, BRANCHED))
    assert not [problem for problem in check(spec) if problem.severity == "error"]
    runs.train(spec, branch)
    steps = of_kind(read(branch), Step)
    assert [step.step for step in steps] == [6, 7, 8] and steps[-1].lr == pytest.approx(1e-4)
    runs.train(run(data, steps=BRANCHED + DECAY), planned)
    assert [step.lr for step in steps] == [step.lr for step in of_kind(read(planned), Step)][BRANCHED:]
    assert runs.position(branch) == runs.position(planned)
    if not plan:
        runs.assert_same_bits(runs.final_state(branch), runs.final_state(planned))


def test_a_branch_is_resumed_by_its_own_command(parent: tuple[str, Path], tmp_path: Path):
    data, folder = parent
    branch = tmp_path / "branch"
    layers = [
        files.Layer(run(data, steps=10).model_dump(exclude_none=True), "file"),
        *map(files.read_setting, settings(folder, DECAY, None)),
    ]
    resolved = files.resolve(layers)
    files.save(resolved, branch)
    moved = folder.with_name("moved")
    folder.rename(moved)
    try:
        assert settings(folder, DECAY, branch) == settings(folder, DECAY, branch) != ()
        again = files.resolve([layers[0], *map(files.read_setting, settings(folder, DECAY, branch))])
        assert again.spec == resolved.spec
        with pytest.raises(SpecErrors, match="no checkpoint"):
            settings(folder, DECAY, tmp_path / "elsewhere")
    finally:
        moved.rename(folder)


def test_a_branch_keeps_what_its_state_and_data_depend_on(parent: tuple[str, Path]):
    data, folder = parent
    spec = _branched(run(data, steps=10), _step(folder, BRANCHED))
    assert spec.branch is not None

    def problems(**tables: Any) -> list[str]:
        changed = RunSpec.model_validate(
            spec.model_dump() | {name: spec.model_dump()[name] | table for name, table in tables.items()}
        )
        return [problem.key for problem in check(changed) if problem.severity == "error"]

    assert problems() == []
    assert problems(optimizer={"lr": 1e-4, "clip": 0.5}, plan={"tensor": 2}) == []
    assert problems(train={"batch_ramp": [*spec.model_dump()["train"]["batch_ramp"], {"begin": 28, "global_batch": 16}]}) == []
    assert problems(optimizer={"kind": "lion"}) == ["optimizer.kind"]
    assert problems(train={"seed": 1}) == ["train.seed"]
    assert problems(train={"batch_ramp": []}) == ["train.batch_ramp[0]"]
    assert problems(branch={"updates": 4}) == ["branch.checkpoint"]
    assert problems(train={"steps": 5}) == ["train.steps"]
    assert problems(branch={"checkpoint": "nowhere"}) == ["branch.checkpoint"]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "1-sqrt", "constant"])
@pytest.mark.parametrize("begins", [2, 40, 95, 100])
def test_every_schedule_decays_from_where_it_is_to_its_lowest(schedule: Any, begins: int):
    optimizer = OptimizerSpec(schedule=schedule, warmup=10, lr=1.0)
    branch = BranchSpec(checkpoint="c", updates=begins, samples=1, steps=100, decay=20)
    rates = [learning_rate(update, spec=optimizer, steps=begins + 20, branch=branch) for update in range(begins + 22)]
    plain = [learning_rate(update, spec=optimizer, steps=100) for update in range(100)]
    assert rates[:begins] == plain[:begins]
    start, tail = plain[min(begins, 99)], rates[begins:]
    assert all(after <= before + 1e-12 for before, after in pairwise([start, *tail])) or start < 0.1
    assert tail[19] == tail[-1] == pytest.approx(0.1)
    line = [start + (0.1 - start) * (done / 20 if schedule != "1-sqrt" else (done / 20) ** 0.5) for done in range(1, 21)]
    assert tail[:20] == pytest.approx(line)
    on = branch.model_copy(update={"decay": 0})
    assert [learning_rate(u, spec=optimizer, steps=1, branch=on) for u in range(120)] == plain + plain[-1:] * 20
