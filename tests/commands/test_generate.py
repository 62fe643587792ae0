"""Output of generated text."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands.calling import call


def test_generate_passes_its_choices_on(monkeypatch: pytest.MonkeyPatch):
    given: dict[str, Any] = {}

    def generate(run_dir: Path, prompt: str, **options: Any) -> str:
        given.update(options, prompt=prompt)
        return "It is a truth"

    monkeypatch.setattr("megalith.train.generate.generate", generate)
    result = call("generate", "runs/first", "--prompt", "It is", "--tokens", "5", "--top-k", "3", "--seed", "4", "--greedy")
    assert result.stdout == "It is a truth\n"
    assert given == {"prompt": "It is", "tokens": 5, "temperature": 0.0, "top_k": 3, "top_p": None, "seed": 4, "step": None}
    assert json.loads(call("generate", "runs/first", "--json").stdout)["text"] == "It is a truth"
    assert given["temperature"] == 0.8
