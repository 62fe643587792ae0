"""Checkpoints that give a run its first weights."""

from pathlib import Path

from megalith.check import check
from megalith.checkpoint import folder as checkpoints
from tests.check.runs import keys, spec


def first_weights(folder: str, *settings: str) -> Path:
    """A checkpoint, but for its tensors."""
    path = Path(folder, checkpoints.name(0))
    path.mkdir(parents=True)
    index = checkpoints.write_index(path, {})
    meta = {"spec": {"model": spec(*settings).model.model_dump(mode="json")}}
    checkpoints.write_manifest(path, checkpoints.Manifest(0, 1, meta, {checkpoints.INDEX: index}))
    return path


def test_weights_to_start_from_are_whole_and_of_the_runs_sizes(data: Path):
    path = first_weights("first", "model.context=64", "model.layers=5")
    fits, other = "train.init_from=first", ["train.init_from=first", "model.dim=64", "model.ffn=96"]
    assert keys(fits) == []  # nor need it be longer, or as deep
    assert keys(fits, "model.layers=6") == ["train.init_from"]
    (problem,) = check(spec(*other))
    assert "dim = 128" in problem.reason.partition("and the run's")[0]
    assert "dim = 64" in problem.reason.partition("and the run's")[2]
    (path / checkpoints.INDEX).unlink()
    (problem,) = check(spec(fits))
    assert (problem.key, f"{path.name}/{checkpoints.INDEX}" in problem.reason) == ("train.init_from", True)
    (path / checkpoints.MANIFEST).unlink()
    assert keys(fits) == ["train.init_from"]
    path.rmdir()
    (problem,) = check(spec(fits))
    assert "no checkpoint here" in problem.reason


def test_a_run_that_has_begun_does_not_need_its_first_weights_any_more(data: Path):
    assert keys("train.init_from=nowhere") == ["train.init_from"]
    assert keys("train.init_from=nowhere", begun=True) == []
