"""Branches with other batch sizes from a run's own checkpoint."""

from pathlib import Path
from typing import Any

import pytest

from megalith.commands.advise import AdviceResult, advise
from megalith.planner.batch import Advice, BatchJudgement
from megalith.spec import files
from megalith.spec.problem import SpecErrors
from tests import runs
from tests.commands.calling import call
from tests.specs import tiny_run
from tests.train.prepared import VOCAB, small_data


@pytest.mark.slow
def test_branches_are_trained_once_and_judged_on_what_the_run_validates(tmp_path: Path):
    folder, texts = tmp_path / "run", tmp_path / "texts"
    texts.mkdir()
    spec = tiny_run(
        model={"layers": 1, "vocab": VOCAB},
        plan={"data": 2},
        data={"path": small_data(texts)},
        train={"steps": 3, "global_batch": 4},
        validation={"every": 2, "samples": 8},
        checkpoint={"every": 1, "keep": 5, "asynchronous": False},
        fleet={"recover": False},
    )
    files.save(files.ResolvedRun(spec, dict.fromkeys(_names(spec), "test")), folder)
    runs.train(spec, folder)
    trained = list[str]()

    def train(trial, where: Path) -> int:
        files.save(files.ResolvedRun(trial.spec, dict.fromkeys(_names(trial.spec), "test")), where)
        runs.train(trial.spec, where)
        trained.append(trial.name)
        return 0

    asked: dict[str, Any] = {
        "step": 2,
        "factors": [1.0, 2.0],
        "steps": 2,
        "replicas": 2,
        "scale": "root",
        "tolerance": 0.005,
        "out": None,
    }
    with pytest.raises(SpecErrors, match=r"not a multiple of plan.data 2"):
        advise(folder, **asked | {"factors": [0.25, 1.0]}, train=train)
    assert trained == []
    found = advise(folder, **asked, train=train)
    assert len(trained) == 4 and found.folder == folder / "advise-batch" / "step-00000002" and found.step == 2
    assert [row.batch for row in found.advice.rows] == [4, 8]
    assert all(row.loss > 0 for row in found.advice.rows) and found.advice.rows[0].excess == 0.0
    assert runs.position(found.folder / "batch-8-replica-1") == {"step": 3, "samples": 8 + 8 + 8, "updates": 3}
    assert found.noise_scale is None or found.noise_scale > 0
    again = advise(folder, **asked, train=train)
    assert again == found and len(trained) == 4, "a branch that is finished is not trained again"
    for other, key in ({"steps": 4}, "train.steps"), ({"scale": "none"}, "optimizer.lr"):
        with pytest.raises(SpecErrors, match=rf"holds a branch with other settings \(.*{key}.*--out"):
            advise(folder, **asked | other, train=train)
    assert len(trained) == 4
    with pytest.raises(RuntimeError, match="other/step-00000002/batch-4-replica-0 did not finish"):
        advise(folder, **asked | {"scale": "none", "out": tmp_path / "other"}, train=lambda trial, where: 1)


@pytest.mark.parametrize("factors", ["0,1", "inf", "-2", "nan", "1e999"])
def test_a_factor_that_makes_no_batch_is_a_usage_error(factors: str):
    result = call("advise", "batch", "runs/first", f"--factors={factors}")
    assert result.exit_code == 2 and "Factors are positive and finite" in " ".join(result.output.split()), result.output


def test_a_folder_with_brackets_is_printed_as_it_is_named(monkeypatch: pytest.MonkeyPatch):
    own = BatchJudgement(factor=1.0, batch=4, tokens=64, loss=1.0, excess=0.0, error=None, verdict="as good")
    advice = Advice(rows=(own,), tolerance=0.005, critical=4, begins=None)
    for folder in (Path("run[v2]"), Path("run[/v2]")):
        found = AdviceResult(advice, folder, step=2, noise_scale=None)
        monkeypatch.setattr("megalith.commands.advise.advise", lambda *_, found=found, **__: found)
        assert call("advise", "batch", "run").stdout.endswith(f"branches: {folder}\n")


def _names(spec):
    from megalith.spec.toml import dotted
    from megalith.spec.validate import leaves

    return [dotted(leaf.path) for leaf in leaves(spec)]
