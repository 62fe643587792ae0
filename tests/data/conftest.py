"""Real text, a small tokenizer and a prepared folder, made once in each session. Tests that change a folder copy it first."""

import random
from pathlib import Path

import pytest

from megalith.data.bundled import austen
from megalith.data.prepare import prepare
from megalith.data.tokenizer import Tokenizer, train

SEQ_LEN = 32


@pytest.fixture(scope="session")
def novel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first part of the bundled text as a file of its own."""
    path = tmp_path_factory.mktemp("novel") / "novel.txt"
    path.write_text(austen()[:120_000])
    return path


@pytest.fixture(scope="session")
def tokenizer(novel: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A BPE of 400 tokens."""
    return train([str(novel)], 400, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short documents of 1 to 8 numbers, one JSON line each, so that a window has many borders."""
    path, rng = tmp_path_factory.mktemp("words") / "words.jsonl", random.Random(7)
    lines = (" ".join(str(rng.randrange(1000)) for _ in range(rng.randrange(1, 9))) for _ in range(500))
    path.write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
    return path


@pytest.fixture(scope="session")
def prepared(novel: Path, words: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two domains, novel and words, in shards so small that many windows cross a border of shards."""
    out = tmp_path_factory.mktemp("prepared") / "data"
    prepare([str(novel), str(words)], tokenizer=tokenizer, out=out, shard_tokens=1500, validation=0.1)
    return out
