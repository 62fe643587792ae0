"""Checkpoints that give a run its first weights."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from megalith.check import Problem, check
from megalith.check.weights import _file_beside
from megalith.checkpoint import folder as checkpoints
from megalith.checkpoint.folder import Entry
from megalith.data.manifest import tokenizer_fingerprint
from megalith.spec.sizes import model_parameters
from tests.check.runs import keys, spec

DATA = tokenizer_fingerprint({}, 0)
FIRST = "train.init_from=first"


def first_weights(folder: str, *settings: str, tokenizer: str | None = DATA, without: str = "") -> Path:
    """Make a checkpoint of such a run's weights, without their values. `tokenizer`: its fingerprint, or None for an import,
    which has none."""
    path = Path(folder, "checkpoints", checkpoints.name(0))
    path.mkdir(parents=True)
    model = spec(*settings).model
    parameters = model_parameters(model.build())
    index = {f"weights.{name}": Entry(each.shape, "F32", ()) for name, each in parameters.items() if name != without}
    meta = {"spec": {"model": model.model_dump(mode="json")}} | ({"data": {"tokenizer": tokenizer}} if tokenizer else {})
    files = {checkpoints.INDEX: checkpoints.write_index(path, index)}
    checkpoints.write_manifest(path, checkpoints.Manifest(0, 1, meta, files))
    return path


def errors(*settings: str) -> list[Problem]:
    return [problem for problem in check(spec(FIRST, *settings)) if problem.severity == "error"]


def test_weights_to_start_from_are_whole_and_of_the_runs_sizes(data: Path):
    path = first_weights("first")
    assert keys(FIRST) == []
    (problem,) = errors("model.dim=64", "model.ffn=96")
    assert "dim = 128" in problem.reason.partition("but the run's")[0]
    assert "dim = 64" in problem.reason.partition("but the run's")[2]
    (path / checkpoints.INDEX).unlink()
    (problem,) = check(spec(FIRST))
    assert (problem.key, f"{path.name}/{checkpoints.INDEX}" in problem.reason) == ("train.init_from", True)
    (path / checkpoints.MANIFEST).unlink()
    assert keys(FIRST) == ["train.init_from"]
    path.rmdir()
    (problem,) = check(spec(FIRST))
    assert "no checkpoint here" in problem.reason


@pytest.mark.parametrize(
    ("setting", "there", "here"),
    [
        ("model.rope_theta=5e5", "rope_theta = 10000.0", "rope_theta = 500000.0"),
        ("model.norm_eps=1e-6", "norm_eps = 1e-05", "norm_eps = 1e-06"),
        ("model.heads=4", "heads = 8", "heads = 4"),
        ("model.layers=3", "layers = 4", "layers = 3"),
        ("model.layers=6", "layers = 4", "layers = 6"),
        ("model.context=1024", "context = ", "context = 1024"),
        ("model.tied=true", "tied = false", "tied = true"),
    ],
)
def test_each_value_of_the_model_that_its_forward_depends_on_is_compared(data: Path, setting: str, there: str, here: str):
    """A3: if the numbers of parameters were equal, heads, theta and eps were not compared."""
    first_weights("first", "model.head_dim=32", "model.kv_heads=2", "model.tied=false")
    (problem,) = errors("model.head_dim=32", "model.kv_heads=2", "model.tied=false", setting)
    theirs, _, ours = problem.reason.partition(", but the run's model has ")
    assert (problem.key, there in theirs, here in ours) == ("train.init_from", True, True), problem
    assert theirs.count(" = ") == ours.count(" = ") == 1, "and nothing else is said to differ"


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        (["model.rope_theta=5e5"], "rope_theta"),
        (["model.rope_scaling={factor=4}"], "rope_scaling"),
        (["model.layers=3"], "layers"),
        (["model.vocab=4096"], "vocab"),
        (["model.context=1024"], "context"),
    ],
)
def test_a_difference_on_purpose_is_named(data: Path, settings: list[str], change: str):
    first_weights("first")
    (problem,) = errors(*settings)
    assert f'train.init_from_changes = ["{change}"]' in problem.way_out
    (told,) = check(spec(FIRST, *settings, f"train.init_from_changes=['{change}']"))
    assert (told.severity, told.key) == ("advice", "train.init_from")
    assert " there, " in told.reason
    others = sorted({"context", "layers", "rope_theta", "vocab"} - {change})
    assert errors(*settings, f"train.init_from_changes={others}") != [], "another name does not stand for this difference"


def test_what_only_training_uses_may_differ_and_is_listed(data: Path):
    first_weights("first")
    (told,) = check(spec(FIRST, "model.init_std=0.01"))
    assert (told.severity, told.key) == ("advice", "train.init_from")
    assert "init_std = 0.02 there, 0.01 here" in told.reason


def test_weights_are_compared_tensor_by_tensor(data: Path):
    """A tensor may be missing although the description is right."""
    first_weights("first", without="blocks.2.mlp.up.weight")
    (problem,) = errors()
    assert "blocks.2.mlp.up.weight is missing" in problem.reason


def test_a_checkpoint_that_describes_no_model_is_refused(data: Path):
    path = Path("first", checkpoints.name(0))
    path.mkdir(parents=True)
    files = {checkpoints.INDEX: checkpoints.write_index(path, {})}
    checkpoints.write_manifest(path, checkpoints.Manifest(0, 1, {}, files))
    assert any("describes a model that" in problem.reason for problem in errors())


@pytest.mark.parametrize("imported", [False, True])
def test_another_tokenizer_is_refused_or_named(data: Path, imported: bool):
    first_weights("first", tokenizer=None if imported else "f" * 64)
    if imported:
        Path("first/tokenizer.json").write_text('{"model": "another"}')
    (problem,) = errors()
    assert "was trained with another tokenizer" in problem.reason
    assert 'train.init_from_changes = ["tokenizer"]' in problem.way_out
    assert ("--tokenizer first/tokenizer.json" in problem.way_out) == imported
    assert errors("train.init_from_changes=['tokenizer']") == []


def test_a_tokenizer_is_found_in_folders_that_one_may_not_list(data: Path, monkeypatch: pytest.MonkeyPatch):
    first_weights("first", tokenizer=None)
    Path("first/tokenizer.json").write_text('{"model": "another"}')
    place, iterdir = Path("first").absolute(), Path.iterdir

    def lists(folder: Path) -> Iterator[Path]:
        if folder.absolute() in (place, *place.parents):
            raise PermissionError(folder)
        return iterdir(folder)

    path = checkpoints.find_complete(Path("first"))[0]
    monkeypatch.setattr(Path, "iterdir", lists)
    assert _file_beside(path) == Path("first/tokenizer.json")
    assert _file_beside(Path("first/there/step")) == Path("first/tokenizer.json")
    assert _file_beside(Path("first")) == Path("first/tokenizer.json")


def test_an_imports_tokenizer_is_compared_by_what_it_says_not_by_its_bytes(data: Path):
    first_weights("first", tokenizer=None)
    (told,) = check(spec(FIRST))
    assert told.severity == "advice" and "has no tokenizer.json" in told.reason
    Path("first/tokenizer.json").write_text('{ "padding": null }')
    assert keys(FIRST) == []


def test_names_of_changes_without_a_checkpoint_are_idle(data: Path):
    assert keys("train.init_from_changes=['layers']") == ["train.init_from_changes"]


def test_a_run_that_has_begun_does_not_need_its_first_weights_any_more(data: Path):
    assert keys("train.init_from=nowhere") == ["train.init_from"]
    assert keys("train.init_from=nowhere", begun=True) == []
