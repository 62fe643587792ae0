"""A user's own attention, MLP and norm are equal under every plan, resumed exactly, counted, and refused where not declared, never
guessed."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith import Run, own
from megalith.check import check
from megalith.check.own import admit as admit_all
from megalith.commands.export import export
from megalith.commands.report import report
from megalith.commands.shared.arguments import admit_parts
from megalith.cost.predicted import predict, workload_of
from megalith.events import EventLog, Step
from megalith.models.generate import generate as written
from megalith.models.init import initialise
from megalith.models.own import own_part
from megalith.models.stage import Stage
from megalith.planner.measured import measured
from megalith.prove.compare import compare
from megalith.prove.parity import record, reference, shrink
from megalith.spec import files, parts
from megalith.spec.problem import SpecErrors
from megalith.spec.run import RunSpec
from megalith.spec.sizes import count_model
from megalith.train.generate import generate
from megalith.train.own.model_trial import try_parts
from megalith.watch.predict import predicted
from tests.models.plain import lively, logits
from tests.parallel.running import CPU, trainer_of
from tests.promises import own_model
from tests.promises.test_own_parts import shown
from tests.prove.dry import dry
from tests.ranks import run_ranks
from tests.runs import assert_same_bits, final_state, prepare_text, train
from tests.specs import tiny_run

HERE = own_model.__name__
OWN = {"attention": f"{HERE}:GATED", "mlp": "mine:BILINEAR", "norm": f"{HERE}:POWER"}
PLANS: list[dict[str, Any]] = [
    {"data": 2, "zero": 3},
    {"tensor": 2},
    {"tensor": 2, "sequence": False, "recompute": "selective", "recompute_parts": ("attention.core", "mlp")},
    {"pipeline": 2, "schedule": "zb-h1"},
    {"context": 2, "tensor": 2, "recompute": "full"},
]


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder with the page's module and prepared data. Imported modules are removed afterwards."""
    here = tmp_path_factory.mktemp("own")
    (here / "mine.py").write_text(shown("mine.py"))
    prepare_text(here)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(here))
        import sys

        sys.modules.pop("mine", None)
        for name in ("GATED", "WHOLE", "POWER", "MEAN", "SHIFTED", "COUNTED", "HALVED", "NAMED", "ODD", "CROSSED", "SHORT"):
            parts.admit(f"{HERE}:{name}")
        parts.admit("mine:BILINEAR", "mlp")
        yield here
        parts.PARTS.clear()
        sys.modules.pop("mine", None)


def run(plan: Mapping[str, Any] | None = None, *, model: Mapping[str, Any] | None = None, **tables: Any) -> RunSpec:
    sizes = {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 264, "context": 64}
    return tiny_run(plan=dict(plan or {}), model=sizes | (OWN if model is None else dict(model)), launch={"threads": 1}, **tables)


def errors(spec: RunSpec) -> dict[str, str]:
    return {problem.key: problem.reason for problem in check(spec, files=False) if problem.severity == "error"}


# --- equal under every plan, resumed exactly ---


def _recorded(rank: int, spec: RunSpec) -> Any:
    return record(trainer_of(spec))


def _parity(spec: RunSpec) -> None:
    small = shrink(spec, steps=2)
    assert parts.named_by(small.model) == parts.named_by(spec.model)
    rows = compare(reference(small, device=CPU), run_ranks(_recorded, small.plan.ranks, small)[0], spec=small)
    assert all(row.equal for row in rows), [row for row in rows if not row.equal]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_own_parts_under_a_plan_equal_one_process(plan: dict[str, Any]) -> None:
    assert not errors(run(plan))
    _parity(run(plan))


@pytest.mark.parametrize("attention", ["WHOLE", "MEAN"])
def test_what_cuts_nothing_is_computed_by_every_tensor_rank(attention: str) -> None:
    spec = run({"tensor": 2}, model={"attention": f"{HERE}:{attention}"}, data={"path": "unused", "document_mask": False})
    assert not errors(spec)
    _parity(spec)


@pytest.mark.slow
def test_a_stopped_run_ends_in_the_same_bits(folder: Path, tmp_path: Path) -> None:
    whole, split = tmp_path / "whole", tmp_path / "split"
    data = {"path": str(folder / "data")}
    for place, steps in ((whole, 3), (split, 1), (split, 3)):
        train(run({"data": 2, "zero": 3}, train={"steps": steps}, data=data), place)
    assert_same_bits(final_state(whole), final_state(split))
    assert any("gate.weight" in name for name in final_state(whole))


# --- counted ---


def test_sizes_and_first_weights_are_the_declared_ones() -> None:
    with torch.device("meta"):
        made = own_part(f"{HERE}:GATED", 32, run().model.build().blocks[0].attention, 0)
    usual = count_model(run(model={}).model.build()).total
    dim, queries = 32, 32
    assert sum(p.numel() for p in made.parameters()) == 2 * dim * queries + 2 * dim * dim + 2 * dim * 16 + dim
    assert count_model(run().model.build()).total == usual + 2 * (2 * dim * dim + dim)  # in each block: gate, outer and its bias
    block = Stage(run().model.build(), 1, 2).blocks["0"]
    initialise(block, name="blocks.0", spec=run().model.build(), seed=0)
    weights = {name: parameter.detach() for name, parameter in block.named_parameters()}
    assert torch.equal(weights["mlp_norm.scale"], torch.ones(32))
    assert not weights["attention.outer.bias"].any()
    assert weights["attention.outer.weight"].std() < 0.7 * weights["attention.gate.weight"].std()


@pytest.mark.slow
def test_planner_and_dry_run_count_the_same_of_a_tensor_rank() -> None:
    spec = run({"tensor": 2, "sequence": False}, train={"precision": "bf16"})
    found, told = dry(spec, 0), predict(workload_of(spec), rank=0)
    assert found.work.products == told.work.products
    assert found.memory.peak["weights"] == pytest.approx(told.memory["weights"], rel=1e-3)


# --- no core is assumed ---


@pytest.mark.parametrize("attention", ["GATED", "SHIFTED", "NAMED"])
def test_text_is_that_of_reading_all_tokens_again_for_each(attention: str) -> None:
    model = lively(run(model={"attention": f"{HERE}:{attention}"}).model, spread=0.6)
    line = [3, 1, 4, 1, 5]
    with torch.no_grad():
        for _ in range(12):
            line.append(int(logits(model, torch.tensor([line]))[0, -1].argmax()))
    assert list(written(model, line[:5], tokens=12, temperature=0)) == line[5:]
    assert len(set(line[5:])) > 1


def test_another_module_named_core_is_counted_as_what_it_is() -> None:
    assert _products("NAMED") == _products("MEAN")
    assert _products("SHIFTED") == _products("")


def _products(attention: str) -> float:
    return predict(workload_of(run(model={"attention": f"{HERE}:{attention}"} if attention else {})), rank=0).work.products


# --- imported only for a command that is given it ---


def test_what_only_opens_a_run_imports_no_part_of_its_model(folder: Path, tmp_path: Path) -> None:
    spec = run(train={"steps": 1}, data={"path": str(folder / "data")})
    train(spec, tmp_path / "run")
    files.save(files.ResolvedRun(spec, {}), tmp_path / "run")
    kept = dict(parts.PARTS)
    parts.PARTS.clear()
    try:
        report(tmp_path / "run")
        with pytest.raises(own.OwnPartError, match=re.escape(f"--own {HERE}:GATED")):
            generate(tmp_path / "run", "On day", tokens=2)
        with pytest.raises(ValueError, match="no class for a model with own parts"):
            export(tmp_path / "run", out=tmp_path / "exported")
        errors(spec)
        assert not parts.PARTS
        admit_parts(list(OWN.values()))
        text = generate(tmp_path / "run", "On day", tokens=2, temperature=0)
        parts.PARTS.clear()
        opened = Run.open(tmp_path / "run")
        with pytest.raises(own.OwnPartError, match=re.escape("in Python")):
            opened.generate("On day", tokens=2)
        assert opened.generate("On day", tokens=2, temperature=0, own=list(OWN.values())) == text
        parts.PARTS.clear()
        assert opened.evaluate("On day", own=list(OWN.values())).loss > 0
    finally:
        parts.PARTS.update(kept)


def test_a_prediction_of_a_run_imports_no_package_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, trace = tmp_path / "strange", tmp_path / "trace"
    package.mkdir()
    (package / "__init__.py").write_text(f"open({str(trace)!r}, 'w')")
    (package / "inner.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = run({"data": 2}, model={"mlp": "strange.inner:PART"}).model_copy(update={"cluster": "h100:2"})
    found = predicted(spec)
    assert found["time"] is found["memory"] is None
    assert "the model part strange.inner:PART is not imported" in found["why"]
    files.save(files.ResolvedRun(spec, {}), tmp_path)
    log = EventLog(tmp_path)
    for step in range(1, 6):
        log.write(
            Step(step=step, loss=1.0, tokens_seen=8, breakdown={}, memory={"peak": 1}, grad_norm=1.0, lr=0.1, tokens=8, seconds=1.0,
                 tokens_per_second=8.0, mfu=None)
        )  # fmt: skip
    log.close()
    with pytest.raises(SpecErrors, match=re.escape("strange.inner:PART is not imported")):
        measured([tmp_path], "megalith")
    assert not trace.exists()


def _extremes(rank: int, spec: RunSpec) -> dict[str, float]:
    trainer = trainer_of(spec)
    record(trainer)
    return trainer.extremes.last.largest


@pytest.mark.parametrize(("attention", "measured"), [("GATED", True), ("MEAN", False)])
def test_extremes_are_measured_where_an_own_attention_has_a_core(attention: str, measured: bool) -> None:
    spec = run(model={"attention": f"{HERE}:{attention}"}, stability={"extremes_every": 1})
    found = run_ranks(_extremes, 1, shrink(spec, steps=1))[0]
    assert {"embedding", "blocks.0", "blocks.1"} <= found.keys()
    assert any("attention" in name for name in found) == measured


# --- refused, never guessed ---


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere:PART", "cannot be imported"),
        (f"{HERE}:POWER", "the part's kind is 'norm', but must be 'mlp'"),
        (f"{HERE}:Odd", "a part of a model must be a megalith.spec.parts.ModelPart"),
        (f"{HERE}:BROKEN", "AttributeError"),
        (f"{HERE}:AWAY", "the run only records a digest of that package's source"),
    ],
)
def test_check_names_a_part_that_cannot_be_used(name: str, says: str) -> None:
    problems, _ = admit_all(run(model={"mlp": name}), {"model.mlp": "own.toml"})
    assert [(problem.key, problem.source) for problem in problems] == [("model.mlp", "own.toml")]
    assert says in problems[0].reason


def test_plans_that_a_part_is_not_declared_for_are_refused() -> None:
    assert "the inputs of down.weight = 50" in errors(run({"tensor": 4}, model={"ffn": 50, "mlp": f"{HERE}:ODD"}))["plan.tensor"]
    assert "of v.weight = 2" in errors(run({"tensor": 4}, model={"attention": f"{HERE}:GATED"}))["plan.tensor"]
    mean = {"attention": f"{HERE}:MEAN"}
    assert "only through self.core" in errors(run({"context": 2}, model=mean))["plan.context"]
    assert "which weights of" in errors(run(model=mean, optimizer={"qk_clip": 100.0}))["optimizer.qk_clip"]
    again = {"recompute": "selective", "recompute_parts": ["attention.core"]}
    assert "plan.recompute_parts" in errors(run(again, model=mean))


@pytest.mark.parametrize(
    ("model", "fault", "says"),
    [
        ({"mlp": f"{HERE}:ODD"}, "random", "gives another result when called again"),
        ({"mlp": f"{HERE}:ODD"}, "mixes", "must process each token separately"),
        ({"mlp": f"{HERE}:ODD"}, "shape", "return the same shape"),
        ({"mlp": f"{HERE}:ODD"}, "buffer", "has buffers (seen)"),
        ({"mlp": f"{HERE}:ODD"}, "norm over a cut", "do not add up to the whole"),
        ({"mlp": f"{HERE}:SHORT"}, "", "down.weight [32, 48]"),
        ({"mlp": f"{HERE}:CROSSED"}, "", f"{HERE}:CROSSED"),
        ({"attention": f"{HERE}:MEAN"}, "", "lets documents see each other"),
        ({"attention": f"{HERE}:COUNTED"}, "", "Take positions from batch.positions"),
        ({"attention": f"{HERE}:HALVED"}, "", "is a Halving. Context parallelism and generation replace"),
    ],
)
def test_a_part_that_does_not_keep_its_word_is_refused(
    model: dict[str, str], fault: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_model.Odd, "fault", fault)
    with pytest.raises(own.OwnPartError, match=re.escape(says)):
        try_parts(run(model=model).model, masked=True)  # pyright: ignore[reportArgumentType]
