"""Comparison of runs: numbers, keys that differ, curves."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megalith import events
from megalith.report import compare
from megalith.report.page import render
from tests.commands.calling import call
from tests.report.run_folder import spec, start, step


def _run(folder: Path, *, lr: float = 3e-3, loss: float = 0.0, steps: int = 5, **tables: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text("")
    log = events.EventLog(folder)
    log.write(replace(start(), spec=spec() | {"optimizer": {"lr": lr}, "name": folder.name} | tables))
    for number in range(1, steps + 1):
        log.write(step(number, loss=4 + loss - 0.1 * number))
    log.write(events.Validation(steps, 3.5 + loss, {"web": 3.5 + loss}, 1.0))
    log.close()
    return folder


def test_numbers_and_differing_keys_stand_beside_each_other(tmp_path: Path) -> None:
    one, other = _run(tmp_path / "one"), _run(tmp_path / "other", lr=1e-3, loss=0.25)
    said = call("report", str(one), str(other), "--out", str(tmp_path / "page.html"))
    assert said.exit_code == 0, said.output
    lines = [" ".join(line.split()) for line in said.stdout.splitlines()]
    assert "one other" in lines
    assert "training loss 3.7000 3.9500" in lines
    assert "validation loss 3.5000 at step 5 3.7500 at step 5" in lines
    assert "optimizer.lr 0.003 0.001" in lines
    assert not any(line.startswith("name ") for line in lines), "a name is no difference"
    page = (tmp_path / "page.html").read_text()
    assert page.count("<polyline") == 8, "four charts of two runs"
    assert "optimizer.lr" in page and "://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_programs_get_numbers_by_run_and_values_by_key(tmp_path: Path) -> None:
    one, other = _run(tmp_path / "one"), _run(tmp_path / "other", lr=1e-3)
    said = call("report", str(one), str(other), "--out", str(tmp_path / "page.html"), "--json")
    found = json.loads(said.stdout)
    assert found["differences"] == {"optimizer.lr": {"one": 3e-3, "other": 1e-3}}
    assert found["runs"]["one"]["step"] == 5


def test_runs_in_folders_of_one_name_are_distinguished_by_the_path_above(tmp_path: Path) -> None:
    runs = compare.read([_run(tmp_path / "a" / "run"), _run(tmp_path / "b" / "run"), _run(tmp_path / "c")])
    assert [*runs] == ["a/run", "b/run", f"{tmp_path.name}/c"]


def test_equal_descriptions_are_said_to_be_equal(tmp_path: Path) -> None:
    runs = compare.read([_run(tmp_path / "one"), _run(tmp_path / "other", loss=1.0)])
    assert compare.differences(runs) == {}
    assert "The runs have the same values for all keys except <code>name</code>." in compare.render(runs)


def test_a_branch_differs_from_the_run_that_it_left(tmp_path: Path) -> None:
    one, other = (
        _run(tmp_path / "one", branch=None),
        _run(tmp_path / "other", branch={"checkpoint": "one/checkpoints/4", "decay": 8}),
    )
    assert compare.differences(compare.read([one, other])) == {
        "branch.checkpoint": (compare.NOT_GIVEN, "one/checkpoints/4"),
        "branch.decay": (compare.NOT_GIVEN, 8),
    }


def test_a_folder_without_a_run_is_refused_and_so_is_a_trace_of_two(tmp_path: Path) -> None:
    one = _run(tmp_path / "one")
    assert call("report", str(one), str(tmp_path)).exit_code == 1
    refused = call("report", str(one), str(one), "--trace")
    assert refused.exit_code == 2
    assert "--trace shows one run" in refused.stderr


def test_a_run_that_has_not_begun_has_no_numbers_yet(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "run.toml").write_text("")
    page = compare.render(compare.read([_run(tmp_path / "one"), empty]))
    assert "not started" in page


def test_the_page_of_a_run_says_which_folder_it_is_of_when_it_began_and_how_long_it_took(tmp_path: Path) -> None:
    folder = _run(tmp_path / "first")
    run = compare.history(folder)
    page = render(replace(run, starts=[replace(run.starts[0], spec=spec())]), folder=folder)
    assert "<title>first light · first</title>" in page and "<h1>first light · first</h1>" in page
    assert "started 1970-01-01 00:16 UTC" in page


@pytest.mark.parametrize("name", ["<b>", "a&b"])
def test_names_are_text(name: str, tmp_path: Path) -> None:
    page = compare.render(compare.read([_run(tmp_path / name), _run(tmp_path / "other")]))
    assert name not in page
