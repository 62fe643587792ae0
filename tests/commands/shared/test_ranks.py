"""The ranks of a command's run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megalith import sealed
from megalith.commands.shared import runs
from megalith.control import controller
from megalith.control.owner import LeaseError, TakenError
from megalith.spec import files


def test_a_jobs_burn_in_is_for_the_device_it_computes_on(run: Path):
    spec = files.load(run, overrides=["train.device=cpu", "fleet.burn_in=3.0"]).spec
    command = runs.job(spec, Path("x"), runs.TRAIN, {}).burn_in
    assert command[command.index("--seconds") + 1] == "3.0" and command[-1] == "cpu"


def test_copies_in_memory_of_a_run_on_other_data_are_not_this_runs(run: Path):
    spec = files.load(run).spec
    before = runs.identity(spec)
    assert runs.identity(files.load(run, overrides=["fleet.nodes=2", "launch.threads=3"]).spec) == before
    described = Path("data/manifest.json")
    described.write_text(described.read_text().replace('"documents": 1', '"documents": 2'))
    assert runs.identity(spec) != before


def test_ranks_get_the_digests_of_the_files_that_their_run_is_computed_from_as_they_are_now(run: Path):
    """This also holds under the fallback plan. The command writes its own description, even if the folder had another one."""
    Path("order.txt").write_text("an order")
    fallback = 'fleet = { nodes = 2, fallback = { data = 2, schedule = "file:order.txt" } }'
    resolved = files.load(run, overrides=[fallback.replace("fleet = ", "fleet=")])
    job = runs.job(resolved.spec, Path("x"), runs.TRAIN, {})
    assert {Path(path).name for path in job.sealed} == {"spec.json", "manifest.json", "tokenizer.json", "order.txt"}
    assert job.fallback is not None and job.fallback.sealed == job.sealed
    files.save(resolved, Path("x"))
    sealed.check(job.sealed)
    assert runs.job(resolved.spec, Path("x"), "megalith.prove.parity:main", {}).sealed == {}
    elsewhere = runs.directed_elsewhere(job)
    assert {Path(path).name for path in elsewhere.sealed} == {"manifest.json", "tokenizer.json", "order.txt"}
    assert elsewhere.fallback is not None and elsewhere.fallback.sealed == elsewhere.sealed


def test_a_wait_for_the_lease_of_a_run_folder_has_a_line_at_its_beginning_and_its_end(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    answers: list[Any] = [LeaseError("the lease could not be renewed"), "finished"]

    def run_here(*_: object, **__: object) -> object:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr(controller, "run_here", run_here)
    waited: list[float] = []
    owner = cast(Any, SimpleNamespace(run_dir=Path("x"), epoch=0, regain=lambda *, seconds: waited.append(seconds)))

    def started() -> object:
        return runs.start(files.load(run, overrides=["fleet.wait_limit=90"]), owner, runs.TRAIN, {}, recover=True)

    assert started() == "finished"
    assert waited == [90.0]
    assert capsys.readouterr().err.splitlines() == [
        "the lease could not be renewed. Waiting until it can be renewed, for at most 90 s (fleet.wait_limit)",
        "the lease of x is renewed again, after 0 s",
    ]
    answers.append(TakenError("owned by another process"))
    with pytest.raises(TakenError):
        started()
    assert waited == [90.0] and not capsys.readouterr().err, "whoever catches the error says so"
