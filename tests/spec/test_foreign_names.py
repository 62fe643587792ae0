"""For a name from another trainer the error gives our key, and guesses never have another meaning."""

from pathlib import Path

import pytest

from megalith.spec import files
from megalith.spec.foreign_names import MEANINGS, keys, meaning
from megalith.spec.run import RunSpec
from megalith.spec.validate import kinds_of

RUN = """
model.preset = "tiny"
data.path = "data"
train = { steps = 100, global_batch = 64, seq_len = 128 }
"""


def way_out(key: str, tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    (problem,) = files.read(path, overrides=[f"{key}=1"]).problems
    assert (problem.key, problem.reason) == (key, "unknown key")
    return problem.way_out


def test_every_key_in_the_table_is_one_of_a_run_file() -> None:
    top = RunSpec.model_fields
    for key in keys():
        table, _, name = key.partition(".")
        assert table in top, key
        kinds = kinds_of(top[table].annotation)
        known = {field for kind in kinds for field in kind.model_fields} | ({"preset"} if table == "model" else set())
        assert not name or name in known, key


def test_no_name_in_the_table_is_the_key_that_it_stands_for() -> None:
    assert not [name for name, found in MEANINGS.items() if found.key.rpartition(".")[2] == name]


@pytest.mark.parametrize(
    ("key", "means"),
    [
        ("learning_rate", "optimizer.lr"),
        ("train.learning_rate", "optimizer.lr"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("train.batch_size", "train.global_batch"),
        ("train.batch", "train.global_batch"),
        ("plan.micro_batch_size", "plan.microbatch"),
        ("train.gradient_accumulation_steps", "train.global_batch"),
        ("train.epochs", "train.steps"),
        ("epochs", "train.steps"),
        ("model.hidden_size", "model.dim"),
        ("hidden_size", "model.dim"),
        ("model.max_seq_len", "model.context"),
        ("train.max_seq_len", "train.seq_len"),
        ("plan.tp", "plan.tensor"),
        ("plan.pp", "plan.pipeline"),
        ("plan.dp", "plan.data"),
        ("plan.ep", "plan.expert"),
        ("plan.cp", "plan.context"),
        ("plan.tensor_parallel", "plan.tensor"),
        ("plan.gpus", "plan.data"),
        ("optimizer.warmup_steps", "optimizer.warmup"),
        ("save_steps", "checkpoint.every"),
        ("precision.master", "optimizer.master"),
        ("precision.moments", "optimizer.moments"),
    ],
)
def test_names_that_everybody_types_are_told_the_key(key: str, means: str, tmp_path: Path) -> None:
    assert way_out(key, tmp_path).startswith(f"Use {means}")


@pytest.mark.parametrize(
    ("key", "means"),
    [("train.bath", "train.global_batch"), ("plan.tensor_ranks", "plan.tensor"), ("lerning_rate", "optimizer.lr")],
)
def test_a_foreign_name_may_be_misspelt_and_a_key_may_be_a_word_of_a_longer_name(key: str, means: str, tmp_path: Path) -> None:
    assert way_out(key, tmp_path) == f"Did you mean {means}?"


@pytest.mark.parametrize("key", ["train.colour", "plan.gantry", "optimizer.zebra"])
def test_a_key_that_is_like_none_is_told_those_of_its_table(key: str, tmp_path: Path) -> None:
    assert way_out(key, tmp_path).startswith("Known here: ")


def test_a_name_without_a_key_says_how_it_is_done() -> None:
    found = meaning("output-dir")
    assert found is not None and found.way_out().startswith("The run folder is an option of the command line, --run-dir")


@pytest.mark.parametrize("name", ["head", "embedding", "embeddings", "router", "norms"])
def test_parts_that_are_never_narrow_have_no_key_of_their_precision(name: str, tmp_path: Path) -> None:
    assert "never computed in a narrow format" in way_out(f"precision.{name}", tmp_path)
    assert "never computed" not in way_out(f"plan.{name}", tmp_path)


def test_names_of_multi_token_prediction_are_told_the_key_of_the_family_that_has_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN.replace("tiny", "deepseek-tiny"))
    (problem,) = files.read(path, overrides=["model.num_nextn_predict_layers=1"]).problems
    assert problem.way_out.startswith("Use model.ahead: ")


def test_an_unknown_key_that_means_a_missing_one_is_the_only_problem(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN.replace("global_batch", "batch_size"))
    assert [problem.key for problem in files.read(path).problems] == ["train.batch_size"]
