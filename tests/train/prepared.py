"""A small prepared data set for tests."""

import json
import random
from pathlib import Path

from megalith.data.prepare import prepare
from megalith.data.tokenizer import load

VOCAB = 260  # bytes, the end of a text, and tokens that never occur


def small_data(folder: Path, *, seed: int = 0) -> str:
    """Write a prepared folder of two domains, tokenized as bytes, with documents of 20 to 120 letters."""
    draw = random.Random(seed)
    for name, documents in (("letters", 120), ("digits", 60)):
        alphabet = {"letters": "abcdefgh ", "digits": "0123456789"}[name]
        texts = ["".join(draw.choices(alphabet, k=draw.randrange(20, 120))) for _ in range(documents)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sources = [f"{name}={folder / name}.jsonl" for name in ("letters", "digits")]
    prepare(sources, tokenizer=load("bytes"), out=folder / "data", validation=0.15)
    return str(folder / "data")
