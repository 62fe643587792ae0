"""The loss on text equals that computed from logits, for any window."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.data.sources import documents, parse_sources
from megalith.data.tokenizer import load
from megalith.models.batch import Batch
from megalith.models.stage import Stage
from megalith.spec.families.llama import Llama
from megalith.train import evaluate as scoring
from megalith.train.evaluate import Score, evaluate, window_losses
from megalith.train.generate import find_tokenizer
from tests.commands.calling import call

SPEC = Llama(layers=2, dim=16, heads=2, ffn=24, vocab=300, context=32).build()
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.fixture
def model() -> Stage:
    torch.manual_seed(0)
    model = Stage(SPEC)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def test_a_whole_window_has_the_loss_of_its_logits(model: Stage) -> None:
    ids = torch.tensor([IDS])
    with torch.no_grad():
        logits = model(ids[:, :-1], Batch(ids[:, :-1]))
    assert isinstance(logits, torch.Tensor)
    wanted = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="sum")
    (found,) = window_losses(model, IDS, 32)
    assert found == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("length", [1, 3, 5, 10])
def test_windows_predict_every_token_but_the_first_once(length: int, model: Stage) -> None:
    found = window_losses(model, IDS, length)
    assert len(found) == math.ceil((len(IDS) - 1) / length)
    alone = [window_losses(model, IDS[start : start + length + 1], 32)[0] for start in range(0, len(IDS) - 1, length)]
    assert found == pytest.approx(alone, rel=1e-6)


def test_bits_a_byte_count_every_token() -> None:
    score = Score(10, math.log(2), 8, 4)
    assert (score.perplexity, score.bits_per_byte) == (pytest.approx(2.0), pytest.approx(2.0))


def prepared(monkeypatch: pytest.MonkeyPatch, model: Stage) -> None:
    class Manifest:
        step, meta = 7, {"spec": {"train": {"seq_len": 8}}}

    class Letters:
        end_of_text = 256

        def encode(self, text: str) -> list[int]:
            return list(text.encode())

    monkeypatch.setattr(scoring.folder, "find", lambda path: path)
    monkeypatch.setattr(scoring.folder, "read_manifest", lambda path: Manifest)
    monkeypatch.setattr(scoring, "find_tokenizer", lambda *_: Letters())
    monkeypatch.setattr(scoring, "load_model", lambda *_, **__: model)


def test_documents_are_scored_apart_and_weighed_by_their_tokens(monkeypatch: pytest.MonkeyPatch, model: Stage) -> None:
    prepared(monkeypatch, model)
    one, two = (evaluate(Path("run"), [text]) for text in ("a first text", "and more"))
    both = evaluate(Path("run"), ["a first text", "and more"])
    assert (both.step, both.tokens, both.text_bytes) == (7, one.tokens + two.tokens, 20)
    assert both.loss == pytest.approx((one.loss * one.tokens + two.loss * two.tokens) / both.tokens)
    with pytest.raises(ValueError, match="nothing to predict"):
        evaluate(Path("run"), [""])
    with pytest.raises(ValueError, match="context of 32"):
        evaluate(Path("run"), ["a text"], seq_len=33)


def test_the_command_takes_sources_as_data_prepare_does(monkeypatch: pytest.MonkeyPatch, model: Stage, tmp_path: Path) -> None:
    prepared(monkeypatch, model)
    (tmp_path / "text.txt").write_text("a first text\n\nand more")
    told: dict[str, Any] = json.loads(call("eval", "run", str(tmp_path / "text.txt"), "--json").stdout)
    wanted = evaluate(Path("run"), [text for source in parse_sources([str(tmp_path / "text.txt")]) for text in documents(source)])
    assert told["ok"] and told["tokens"] == wanted.tokens
    assert told["loss"] == pytest.approx(wanted.loss) and told["bits_per_byte"] == pytest.approx(wanted.bits_per_byte)
    assert "bits a byte" in call("eval", "run", str(tmp_path / "text.txt")).stdout


def test_the_folder_of_the_data_is_not_listed_for_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold very many files, or be a folder that one may enter but not list."""
    for folder in ("run", "data"):
        load("bytes").save(tmp_path / folder)
    iterdir = Path.iterdir

    def lists(folder: Path) -> Iterator[Path]:
        if folder.name == "data":
            raise PermissionError(folder)
        return iterdir(folder)

    monkeypatch.setattr(Path, "iterdir", lists)
    assert find_tokenizer(tmp_path / "run", str(tmp_path / "data")).kind == "bytes"
    (tmp_path / "run" / "tokenizer.json").unlink()
    assert find_tokenizer(tmp_path / "run", str(tmp_path / "data")).kind == "bytes"
