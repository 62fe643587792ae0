"""A user's own parts, taken from the page: equal under every plan, resumed exactly, imported only for a command given the run."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith import own
from megalith.check import check
from megalith.checkpoint.folder import find
from megalith.checkpoint.shares import as_tensor, shares
from megalith.commands.export import export
from megalith.commands.report import report
from megalith.commands.shared.arguments import RunRequest
from megalith.commands.shared.runs import check as check_request
from megalith.data.errors import DataError
from megalith.events import Problem, RunStarted, Step, of_kind, read
from megalith.fleet.exit_codes import ExitCode
from megalith.prove.compare import compare
from megalith.prove.parity import record, reference, shrink
from megalith.spec import files
from megalith.spec.base import AbsentError
from megalith.spec.optimizers import OPTIMIZERS, Kind, admit
from megalith.spec.run import RunSpec
from megalith.spec.sites import folder_of
from megalith.spec.state import Slot
from megalith.train.evaluate import evaluate
from megalith.train.generate import generate
from megalith.train.loop import stepper_of
from megalith.train.optimizers.rule import opened
from megalith.train.own.admit import admit as admit_run
from megalith.train.own.admit import changes
from megalith.train.own.callbacks import Callbacks, Done
from megalith.train.own.trial import try_rule
from megalith.train.stream import open_stream
from tests.full import sampled
from tests.keys import GIVEN
from tests.parallel.running import CPU, microbatches, trainer_of
from tests.patience import PATIENCE
from tests.ranks import run_ranks
from tests.runs import SITE, assert_same_bits, final_state, finish, position, prepare_text, start, train, typed
from tests.specs import tiny_run

PAGE = Path(__file__).parents[2] / "docs/guide/own_parts.md"
OWN = {"loss": "mine:focal", "callbacks": ["mine:Best"]}
PLANS: list[dict[str, Any]] = [
    {"data": 2, "zero": 3},
    {"tensor": 2},
    {"pipeline": 2},
    {"context": 2},
    {"pipeline": 2, "schedule": "zb-h2", "post_validation": True},
]


def shown(name: str) -> str:
    """Return a file that the page shows."""
    return re.search(rf"<!-- file: {name} -->\n```\w+\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]  # type: ignore[index]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder with the page's module and prepared data. The module is removed afterwards."""
    here = tmp_path_factory.mktemp("own")
    (here / "mine.py").write_text(shown("mine.py"))
    prepare_text(here)
    path, kinds = list(sys.path), dict(OPTIMIZERS)
    sys.path.append(str(here))
    admit("mine:MOMENTUM")
    yield here
    sys.path[:] = path
    for name in set(OPTIMIZERS) - set(kinds):
        del OPTIMIZERS[name]
    sys.modules.pop("mine", None)


def run(folder: Path, plan: Mapping[str, Any] | None = None, *, train: Mapping[str, Any] | None = None, **parts: Any) -> RunSpec:
    tables = {
        "model": {"layers": 2, "dim": 32, "heads": 4, "ffn": 48, "vocab": 264, "context": 64},
        "data": {"path": str(folder / "data"), "source": "mine:Swapped"},
        "optimizer": {"kind": "mine:MOMENTUM", "lr": 0.05, "warmup": 0, "schedule": "constant"},
        "launch": {"threads": 1},
    }
    return tiny_run(plan=dict(plan or {}), train={"steps": 6} | OWN | dict(train or {}), **{**tables, **parts})


# --- equal under every plan ---


def _recorded(rank: int, spec: RunSpec) -> Any:
    return record(trainer_of(spec))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_loss_and_optimizer_under_a_plan_equal_one_process(plan: dict[str, Any], folder: Path) -> None:
    spec = shrink(run(folder, plan), steps=3)
    assert (spec.train.loss, spec.optimizer.kind) == ("mine:focal", "mine:MOMENTUM")
    found = run_ranks(_recorded, spec.plan.ranks, spec)[0]
    rows = compare(reference(spec, device=CPU), found, spec=spec)
    assert all(row.equal for row in rows), [row for row in rows if not row.equal]


def _first_loss(rank: int, spec: RunSpec) -> float:
    return record(trainer_of(spec)).losses[0]


def test_the_loss_is_the_users(folder: Path) -> None:
    """A new model gives no token a high probability, so nearly all of the cross-entropy remains."""
    focal, plain = (
        run_ranks(_first_loss, 1, shrink(run(folder, train={"loss": name}), steps=1))[0] for name in ("mine:focal", None)
    )
    assert plain * 0.9 < focal < plain


def test_whole_runs_read_the_users_samples_under_every_plan(folder: Path, tmp_path: Path) -> None:
    losses = []
    for number, each in enumerate(({"data": 2}, {"context": 2})):
        train(run(folder, each, train={"steps": 3}), tmp_path / str(number))
        losses.append([event.loss for event in of_kind(read(tmp_path / str(number)), Step)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    plain = run(folder, train={"steps": 3}, data={"path": str(folder / "data"), "source": None})
    assert (open_stream(plain, "train").sample(0).tokens == open_stream(run(folder), "train").sample(1).tokens).all()


def _trained(rank: int, spec: RunSpec) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of three steps, and this rank's shares after them, wherever they are stored."""
    trainer = trainer_of(spec)
    stepper = stepper_of(trainer)
    done = [each for step in range(3) for each in stepper.step(microbatches(trainer, step), step=step)]
    losses = [each.loss for each in (*done, *stepper.settle())]
    return losses, {key: as_tensor(share).clone() for key, share in shares(trainer.state.laid()).items()}


def test_an_own_optimizers_state_elsewhere_changes_no_bit(folder: Path) -> None:
    """Host memory holds whole shares, and a file holds pieces of shares."""
    found = []
    for place in ({"optimizer": "device"}, {"optimizer": "host"}, {"optimizer": "disk", "chunk": 1}):
        found.append(run_ranks(_trained, 2, shrink(run(folder, {"data": 2, "zero": 1, "state": place}), steps=3)))
    for each in found[1:]:
        for (losses, state), (expected, held) in zip(each, found[0], strict=True):
            assert losses == expected
            assert_same_bits(state, held)
    assert any("moments.velocity" in str(key) for key in found[0][0][1])


# --- resumed exactly ---


def test_a_stopped_run_ends_in_the_same_bits(folder: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(run(folder, {"data": 2}), whole)
    train(run(folder, {"data": 2}, train={"steps": 3}), parts)
    train(run(folder, {"data": 2}), parts)
    assert_same_bits(final_state(whole), final_state(parts))
    states = [json.loads(next(place.glob("checkpoints/step-00000006/manifest.json")).read_text()) for place in (whole, parts)]
    assert states[0]["meta"]["callbacks"] == states[1]["meta"]["callbacks"] != {}


class Limit:
    """A callback that keeps the losses of its site, and asks to stop on site 1 after the fourth step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def after_step(self, done: Done) -> bool:
        assert done.site == int(os.environ[SITE])
        self.seen.append(done.loss)
        return done.site == 1 and done.step == 4

    def state(self) -> list[float]:
        return self.seen

    def load(self, state: list[float]) -> None:
        self.seen = state


@sampled(1, together=True)
@pytest.mark.parametrize("sites", [{"inner_steps": 2}, {"method": "data-parallel"}], ids=["merged", "data-parallel"])
def test_a_callback_of_one_site_stops_the_sites_and_each_resumes_with_its_own_state(
    sites: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """Two sites are a quorum only together, so both stop."""
    parts: dict[str, Any] = {"sites": {"count": 2, **sites}, "checkpoint": {"every": 2}, "data": {"path": str(folder / "data")}}
    parts["optimizer"] = {"kind": "adamw"}
    plain, stops = (
        run(folder, train={"steps": 8, "loss": None, "callbacks": names}, **parts) for names in ([], [f"{__name__}:Limit"])
    )
    assert not [each for each in check(stops, files=False) if each.severity == "error"]
    assert finish(start(plain, tmp_path / "plain", environment=GIVEN)) == [0, 0]
    assert finish(start(stops, tmp_path / "stopped", environment=GIVEN)) == [75, 75]
    assert 4 < position(tmp_path / "stopped")["step"] < 8
    assert finish(start(stops, tmp_path / "stopped", environment=GIVEN)) == [0, 0]
    for site in range(2):
        there = [folder_of(tmp_path / name, site) for name in ("plain", "stopped")]
        assert_same_bits(final_state(there[0]), final_state(there[1]))
        losses = [step.loss for step in of_kind(read(there[0]), Step)]
        meta = json.loads(find(there[1]).joinpath("manifest.json").read_text())["meta"]
        assert meta["callbacks"] == {f"{__name__}:Limit": losses}


ENOUGH = """
class Enough:
    def after_step(self, done):
        return done.step >= 2
"""


@pytest.mark.slow
def test_a_callback_stops_the_command_that_started_the_ranks(tmp_path: Path) -> None:
    """The command resumes ranks that stop unasked, so the ranks must tell it."""
    (tmp_path / "enough.py").write_text(ENOUGH)
    data = prepare_text(tmp_path)
    line = [*typed(tmp_path / "run.toml", data, steps=40), str(tmp_path / "run"), "--set", 'train.callbacks=["enough:Enough"]']
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])}
    for starts in (1, 2):
        ended = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert ended.returncode == ExitCode.STOPPED, ended.stderr
        log = list(read(tmp_path / "run"))
        assert len(list(of_kind(log, RunStarted))) == starts
    assert max(step.step for step in of_kind(log, Step)) < 10


def test_the_state_of_a_callback_goes_with_a_copy_in_memory() -> None:
    callbacks, again = Callbacks(), Callbacks()
    callbacks._all, callbacks._stateful = {"one": _Counts()}, {"one"}
    again._all, again._stateful = {"one": _Counts()}, {"one"}
    callbacks.after_step(DONE)
    again.load(json.loads(callbacks.add_to('{"losses": []}'))["callbacks"])
    assert again.dump() == callbacks.dump() == {"one": 1}


def test_a_source_that_changed_is_said() -> None:
    (text,) = changes(
        {"train.loss": "b" * 64, "data.source": "b" * 64, "new": "c"}, {"train.loss": "a" * 64, "data.source": "a" * 64}
    )
    assert "train.loss, data.source has changed" in text
    assert changes({"train.loss": "a"}, {"train.loss": "a"}) == []


@sampled(1, together=True)
@pytest.mark.slow
def test_the_commands_of_the_page_train_and_resume_it(tmp_path: Path) -> None:
    """The digest of the source is in the provenance; a change is said in the log."""
    for name in ("mine.py", "own.toml"):
        (tmp_path / name).write_text(shown(name))
    prepare_text(tmp_path)
    command = [sys.executable, "-m", "megalith.cli", "train", "own.toml", "--set", "data.path=data", "--set"]
    for steps in (2, 3):
        done = subprocess.run(
            [*command, f"train.steps={steps}"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        if steps == 2:
            (tmp_path / "mine.py").write_text(shown("mine.py") + "# changed\n")
    saved = json.loads((tmp_path / "runs/own/provenance.json").read_text())
    assert saved["train.loss.source"].startswith("sha256 ")
    first, second = of_kind(read(tmp_path / "runs/own"), RunStarted)
    assert first.own.keys() == {"model.mlp", "data.source", "train.loss", "train.callbacks.0", "optimizer.kind"}
    assert first.own != second.own
    assert any("has changed since" in event.message for event in of_kind(read(tmp_path / "runs/own"), Problem))


# --- imported only for a command that is given the run ---


def test_what_only_opens_a_run_imports_nothing_that_it_names(folder: Path, tmp_path: Path) -> None:
    """The module creates a mark when it is imported: only the ranks that train do so, and no later command."""
    mark, trained = tmp_path / "mark", tmp_path / "run"
    (folder / "trap.py").write_text(shown("mine.py") + f"\nopen({str(mark)!r}, 'w').close()\n")
    spec = RunSpec.model_validate_json(run(folder, train={"steps": 1}).model_dump_json().replace('"mine:', '"trap:'))
    train(spec, trained)
    assert mark.exists()
    mark.unlink()
    files.save(files.ResolvedRun(spec, {}), trained)
    report(trained)
    generate(trained, "On day", tokens=2)
    evaluate(trained, ["On day 3"])
    export(trained, out=tmp_path / "exported", dtype="fp32")
    sizes = spec.model.model_dump(exclude={"family"})
    check(tiny_run(model=sizes, data={"path": str(folder / "data")}, train={"init_from": str(trained)}))
    check(spec)
    with pytest.raises(AbsentError, match="only commands that are given a run file or run folder import"):
        OPTIMIZERS["trap:MOMENTUM"]
    assert not mark.exists()
    check_request(RunRequest.in_folder(trained))
    assert mark.exists()


# --- refused, never guessed ---


def test_check_names_every_part_that_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    text = files.dump(files.resolve([files.Layer(run(folder).model_dump(mode="json", exclude_none=True), "file")]))
    (tmp_path / "run.toml").write_text(text)
    wrong = {
        "data.source": "nowhere:Source",
        "train.loss": "mine:missing",
        "optimizer.kind": "mine:Momentum",
        "train.callbacks": '["mine:Best", "mine:Best"]',
    }
    found = check_request(RunRequest(tmp_path / "run.toml", [f"{key}={value}" for key, value in wrong.items()])).errors
    reasons = {problem.key: problem.reason for problem in found}
    assert "cannot be imported" in reasons["data.source"]
    assert "has no missing" in reasons["train.loss"]
    assert "an optimizer must be a megalith.spec.optimizers.Kind" in reasons["optimizer.kind"]
    assert "more than once" in reasons["train.callbacks"]


def test_plans_that_a_part_is_not_written_for_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "mine:WHOLE", OPTIMIZERS["mine:MOMENTUM"]._replace(unit="tensor"))
    for kind, refused in (("mine:MOMENTUM", False), ("mine:WHOLE", True)):
        away = run(folder, {"state": {"optimizer": "host"}}, optimizer={"kind": kind})
        found = {problem.key for problem in check(away, files=False) if problem.severity == "error"}
        assert ("plan.state.optimizer" in found) is refused


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(Exception, match="has the name MODULE:OBJECT"):
        tiny_run(train={"loss": "focal"})


DONE = Done(step=1, loss=2.0, grad_norm=1.0, lr=0.1, tokens_seen=32, skipped="", rank=0)


class _Counts:
    """A callback with a state. A test below removes its `load`."""

    def __init__(self) -> None:
        self.count = 0

    def after_step(self, done: Done) -> None:
        self.count += 1

    def state(self) -> int:
        return self.count

    def load(self, state: int) -> None:
        self.count = state


class Careless:
    """A callback that keeps a list and does not declare it as state."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def after_step(self, done: Done) -> None:
        self.losses.append(done.loss)


class Half:
    """A callback that can be saved but not restored."""

    def after_step(self, done: Done) -> None: ...

    def state(self) -> int:
        return 0


def test_a_callback_that_keeps_what_it_does_not_declare_is_refused() -> None:
    with pytest.raises(own.OwnPartError, match="keeps losses from step to step"):
        Callbacks([f"{__name__}:Careless"]).after_step(DONE)
    with pytest.raises(own.OwnPartError, match="needs both or neither"):
        Callbacks([f"{__name__}:Half"])


class Normed:
    """A rule that divides by the norm of its share."""

    def __init__(self, spec: Any, whole: Any) -> None: ...

    def update(self, parts: Any, *, number: int, lr: float) -> None:
        for part in parts:
            part.weight.sub_(part.gradient / part.gradient.norm(), alpha=lr)


class Hoarder:
    """A rule that keeps its moment in an attribute."""

    def __init__(self, spec: Any, whole: Any) -> None:
        self.moment = torch.zeros(())

    def update(self, parts: Any, *, number: int, lr: float) -> None:
        for part in parts:
            self.moment = self.moment + part.gradient
            part.weight.sub_(self.moment, alpha=lr)


class Grasping:
    """A rule that uses the slots without opening the part."""

    def __init__(self, spec: Any, whole: Any) -> None: ...

    def update(self, parts: Any, *, number: int, lr: float) -> None:
        for part in parts:
            part.slots["moments.velocity"].add_(part.gradient)
            part.weight.sub_(part.slots["moments.velocity"], alpha=lr)


def test_a_rule_that_cannot_update_state_elsewhere_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = f"{__name__}:GRASPING"
    monkeypatch.setitem(OPTIMIZERS, kind, OPTIMIZERS["mine:MOMENTUM"]._replace(rule=f"{__name__}:Grasping"))
    try_rule(kind, tiny_run().optimizer)
    with pytest.raises(own.OwnPartError, match="accept any shape"):
        try_rule(kind, tiny_run().optimizer, away=True)
    try_rule("mine:MOMENTUM", tiny_run().optimizer, away=True)


class Shaped:
    """An elementwise rule that treats a share as a matrix."""

    def __init__(self, spec: Any, whole: Any) -> None: ...

    def update(self, parts: Any, *, number: int, lr: float) -> None:
        for part in opened(parts):
            rows, columns = part.weight.shape
            part.weight.sub_(part.gradient.view(rows, columns), alpha=lr)


class Early(Shaped):
    """A rule that changes weights without opening the part."""

    def update(self, parts: Any, *, number: int, lr: float) -> None:
        for part in parts:
            part.weight.sub_(part.gradient, alpha=lr)


FEW: list[dict[str, Any]] = [
    {"train": {"precision": "bf16", "gradients": "bf16"}},
    {"optimizer": {"moments": "bf16"}},
    {"train": {"precision": "bf16"}, "optimizer": {"master": "split16"}},
]


@pytest.mark.parametrize("few", FEW, ids=str)
@pytest.mark.parametrize(("rule", "unit"), [("Shaped", "element"), ("Early", "element"), ("Early", "tensor")])
def test_a_rule_that_cannot_update_numbers_of_few_bits_is_refused(
    rule: str, unit: Any, few: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = f"{__name__}:{rule}"
    monkeypatch.setitem(OPTIMIZERS, kind, Kind(title=rule, rule=kind, slots=(), unit=unit))
    monkeypatch.setattr("megalith.train.own.admit.admit_optimizer", lambda name: None)
    with pytest.raises(own.OwnPartError, match="few bits"):
        admit_run(_of_kind(kind, few))
    admit_run(_of_kind(kind, {}))


def test_a_rule_of_whole_tensors_may_look_at_their_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = f"{__name__}:Shaped"
    monkeypatch.setitem(OPTIMIZERS, kind, Kind(title="Shaped", rule=kind, slots=(), unit="tensor"))
    try_rule(kind, tiny_run().optimizer, away=True)


def _of_kind(kind: str, asked: dict[str, Any]) -> RunSpec:
    return tiny_run(train=asked.get("train", {}), optimizer={"kind": kind, **asked.get("optimizer", {})})


@pytest.mark.parametrize(("rule", "says"), [("Normed", 'Say unit = "tensor"'), ("Hoarder", "Keep lasting state only in slots")])
def test_a_rule_that_needs_more_than_its_row_says_is_refused(rule: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = f"{__name__}:{rule}_ROW"
    monkeypatch.setitem(OPTIMIZERS, kind, Kind(title=rule, rule=f"{__name__}:{rule}", slots=()))
    with pytest.raises(own.OwnPartError, match=re.escape(says)):
        try_rule(kind, tiny_run().optimizer)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (Kind(title="", rule="here", slots=()), "is not a module:Class"),
        (Kind(title="", rule="a:B", slots=(Slot("weights"),)), "has the name of one of Megalith.s own tensors"),
        (Kind(title="", rule="a:B", slots=(Slot("m"), Slot("m"))), "two slots"),
        (Kind(title="", rule="a:B", slots=(), rest="adamz"), "is not the name of an optimizer"),
    ],
)
def test_a_row_with_a_fault_is_refused(row: Kind, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "FAULTY", row, raising=False)
    with pytest.raises(own.OwnPartError, match=says):
        admit(f"{__name__}:FAULTY")


class Short:
    """A source whose samples are too short."""

    def __init__(self, prepared: Any) -> None:
        self.prepared = prepared

    def sample(self, index: int) -> Any:
        found = self.prepared.sample(index)
        return type(found)(found.tokens[1:], found.targets, found.positions, found.segments, found.domain)


def test_a_sample_that_does_not_fit_the_run_is_refused(folder: Path) -> None:
    spec = run(folder, data={"path": str(folder / "data"), "source": f"{__name__}:Short"})
    with pytest.raises(DataError, match=r"test_own_parts:Short returns an invalid sample 0: tokens has the shape \[31\]"):
        open_stream(spec, "train").sample(0)
