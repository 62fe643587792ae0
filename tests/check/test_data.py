"""Prepared data that is missing, damaged or insufficient."""

from pathlib import Path

import pytest

from megalith.check import check
from tests.check.runs import is_named, keys, spec
from tests.prepared import hollow_data


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        (["data.weights={austen=0}"], "data.weights", "gives no domain a share"),
    ],
)
def test_an_illegal_value_is_named_with_its_reason_and_a_way_out(settings: list[str], key: str, said: str):
    is_named(settings, key, said)


def test_data_that_is_not_there_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (problem,) = check(spec())
    assert str(tmp_path / "data") in problem.reason
    assert "megalith data prepare" in problem.way_out
    Path("data").mkdir()
    (problem,) = check(spec())
    assert "no manifest.json" in problem.reason
    assert "--tokenizer TOKENIZER --out data" in problem.way_out
    for text in ("{", "{}", "[]"):
        Path("data/manifest.json").write_text(text)
        (problem,) = check(spec())
        assert "is not a manifest that this version can read" in problem.reason


def test_every_file_of_the_data_is_there_in_its_length_or_in_a_copy(data: Path):
    Path("data/austen-train.bin").unlink()
    Path("data/code-train.idx").write_bytes(b"")
    hollow_data(Path("copy"), "austen", "code")
    missing, short = check(spec())
    assert (missing.key, short.key) == ("data.path", "data.path")
    assert "austen-train.bin is missing (expected size: 4000000 bytes)" in missing.reason
    assert "code-train.idx has 0 bytes, but 16 according to the manifest" in short.reason
    assert check(spec("data.copies=['copy']")) == []


def test_of_many_missing_files_a_few_are_named_and_all_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    hollow_data(Path("data"), "austen", "code")
    for path in (*Path("data").glob("*.bin"), *Path("data").glob("*.idx")):
        path.unlink()
    *named, counted = check(spec())
    assert ["is missing" in problem.reason for problem in named] == [True] * 5
    assert "3 more files of the folder" in counted.reason


def test_a_copy_is_there_and_of_the_same_data(data: Path):
    hollow_data(Path("other"), "austen")
    gone, other = check(spec("data.copies=['gone', 'other']"))
    assert (gone.key, gone.reason) == ("data.copies", "gone does not exist")
    assert (other.key, other.reason) == ("data.copies", "other holds different data from data")
    assert keys("data.path=nowhere", "data.copies=['gone', 'other']") == ["data.path", "data.copies"]


def test_the_tokenizer_is_that_of_the_data(data: Path):
    Path("data/tokenizer.json").write_text('{"other": 1}')
    (problem,) = check(spec())
    assert "fingerprint" in problem.reason
    Path("data/tokenizer.json").unlink()
    (problem,) = check(spec())
    assert (problem.key, problem.reason) == ("data.path", "data/tokenizer.json is missing")


def test_a_domain_that_is_read_has_a_token_and_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    hollow_data(Path("data"), "note", train=1)
    assert keys("train.steps=1", "optimizer.warmup=1") == ["data.weights.note", "train.steps"]


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        (["model.vocab=900"], "model.vocab", "vocabulary of 1000 tokens. Use 1000"),
        (["model.vocab=900", "plan.tensor=4", "plan.data=4"], "model.vocab", "Use 1008"),
        (["data.weights={austn=1}"], "data.weights.austn", "Did you mean austen? The data has: austen, code."),
        (["validation.every=5", "train.seq_len=4096"], "validation.every", "hold out 2000 tokens"),
        (["train.steps=10000"], "train.steps", "81,920,000 tokens, 20.5 times the data's 4,000,000"),
        (["train.init_from=nowhere"], "train.init_from", "no such checkpoint"),
    ],
)
def test_the_run_must_fit_the_data(data: Path, settings: list[str], key: str, said: str):
    problems = {problem.key: problem for problem in check(spec(*settings))}
    assert said in str(problems[key])


def test_a_vocabulary_is_checked_under_a_plan_of_more_copies_than_ranks(data: Path):
    found = keys("model.vocab=900", "plan.data=2", "plan.replicate=4")
    assert {"model.vocab", "plan.replicate"} <= set(found)


@pytest.mark.parametrize(("held", "severity"), [(1, "error"), (2, "advice"), (2047, "advice"), (2048, None)])
def test_validation_needs_a_held_out_token_and_the_next(
    held: int, severity: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Fewer tokens than a sequence are validated as one short sample."""
    monkeypatch.chdir(tmp_path)
    hollow_data(Path("data"), "note", validation=held)
    said = [problem for problem in check(spec("train.seq_len=2048", "validation.every=5")) if problem.key == "validation.every"]
    assert [problem.severity for problem in said] == ([severity] if severity else [])


def test_only_the_weighted_domains_tokens_count(data: Path):
    """200 steps of 64 x 1024 tokens are 3.3 passes over both domains, but 6.6 over one."""
    assert "train.steps" not in {p.key for p in check(spec("train.seq_len=1024", "train.steps=200"))}
    assert "train.steps" in {p.key for p in check(spec("train.seq_len=1024", "train.steps=200", "data.weights={code=1}"))}


def test_nothing_on_disk_is_read_without_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert check(spec(), files=False) == []


def test_a_mixture_says_the_share_of_every_domain(data: Path):
    said = [p for p in check(spec("data.weights={austen=1}")) if p.severity == "error"]
    assert [(p.key, p.value) for p in said] == [("data.weights.code", None)]
    assert "code = 0" in said[0].way_out
    assert not [p for p in check(spec("data.weights={austen=1, code=0}")) if p.severity == "error"]
