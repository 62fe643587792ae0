"""`megalith replay` repeats a run across sites from its log."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megalith.commands.sites import replay as replaying
from megalith.commands.sites.replay import ReplayResult, replay
from megalith.train.sites.record import RecordError
from tests.commands.calling import call
from tests.runs import prepare_text, typed

SITES = "[sites]\ncount = 2\ninner_steps = 2\nbits = 4\n"


def _replay(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "megalith.cli", "replay", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _answer(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_run_that_was_typed_is_replayed(tmp_path: Path) -> None:
    """The replayed merges give the same bits. If a merge is in no log, nothing is trained."""
    (tmp_path / "text").mkdir()
    data, folder = prepare_text(tmp_path / "text"), tmp_path / "runs" / "two"
    train = typed(tmp_path / "run.toml", data, steps=4, more=SITES)
    alone = ["--set", "plan.data=1", "--set", "plan.zero=0", "--set", "launch.start_timeout=600"]
    done = subprocess.run([*train, str(folder), *alone], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    again = _replay(folder, "--json")
    assert again.returncode == 0, again.stdout + again.stderr
    assert (found := _answer(again))["ok"] and found["tensors"] > 10 and found["different"] == []
    assert Path(found["run_dir"]) == folder.with_name("two-replay")
    recovers = json.loads((folder.with_name("two-replay") / "spec.json").read_text())["fleet"]["recover"]
    assert recovers is False, "a site that started again would wait for differences that the others no longer send"
    for log in (folder / "events.jsonl", folder / "site-1" / "events.jsonl"):
        altered = re.sub(r'("merged": ?)\[0, ?1\]', r"\1[0]", log.read_text(), count=1)
        assert altered != log.read_text()
        log.write_text(altered)
    refused = _replay(folder, "--out", tmp_path / "other")
    assert refused.returncode == 1 and "Also name the folders of the other sites" in refused.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("named", [".", "../two", "steps/.."])
def test_a_replay_of_the_current_folder_is_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    (tmp_path / "two" / "steps").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "two")
    monkeypatch.setattr(replaying, "replay", lambda run_dir, others, out, *, console: ReplayResult(out, 0, 1, ()))
    found = json.loads(call("replay", named, "--json").stdout)
    assert Path(found["run_dir"]).resolve() == tmp_path / "two-replay"


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"exists, but a replay needs a new folder\. Name another folder with --out"):
        replay(tmp_path / "run", (), tmp_path, console=Console())
