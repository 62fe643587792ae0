"""The one checkpoint that a folder means as a run's first weights."""

import os
import shutil
from pathlib import Path

import pytest

from megalith import sealed
from megalith.check.resume import check_resume
from megalith.checkpoint.folder import MANIFEST, Manifest, name, write_manifest
from megalith.commands.shared import first_weights, runs
from megalith.spec import files


def _save(run: str, step: int) -> Path:
    path = Path(run, "checkpoints", name(step))
    path.mkdir(parents=True)
    write_manifest(path, Manifest(step, step, {}, {}))
    return Path(os.path.abspath(path))


def test_a_run_keeps_the_checkpoint_that_it_began_with_while_the_other_run_goes_on(run: Path) -> None:
    asked, folder = files.load(run, overrides=["train.init_from=runs/parent"]), Path("runs/first")
    assert first_weights.pinned(asked, folder) == asked, "there is none yet"
    first = _save("runs/parent", 10)
    began = first_weights.pinned(asked, folder)
    assert began.spec.train.init_from == str(first) and began.provenance == asked.provenance
    files.save(began, folder)
    second = _save("runs/parent", 20)
    assert first_weights.pinned(asked, folder) == began
    assert runs._await(asked, folder, timeout=1.0) == began, "the other ranks take what rank 0 took"
    assert check_resume(began.spec, asked.spec) == []
    other = files.load(run, overrides=["train.init_from=runs/other"])
    assert [problem.key for problem in check_resume(began.spec, other.spec)] == ["train.init_from"]
    assert first_weights.pinned(other, folder) == other
    shutil.rmtree(first)
    assert first_weights.pinned(asked, folder).spec.train.init_from == str(second), "the run has saved nothing"
    _save("runs/first", 5)
    assert first_weights.pinned(asked, folder) == began, "the run goes on from its own checkpoint"


def test_a_link_to_the_first_weights_may_move_on(run: Path) -> None:
    """The run goes on from its own checkpoint, and what its file names is what it named."""
    _save("base/v1", 10)
    Path("base/latest").symlink_to("v1")
    asked, folder = files.load(run, overrides=["train.init_from=base/latest"]), Path("runs/first")
    began = first_weights.pinned(asked, folder)
    files.save(began, folder)
    _save("runs/first", 5)
    for other in ("v2", None):
        Path("base/latest").unlink()
        if other:
            Path("base/latest").symlink_to(other)
        assert check_resume(began.spec, asked.spec) == [] and first_weights.pinned(asked, folder) == began


def test_other_ranks_wait_until_the_first_has_chosen_other_weights(run: Path) -> None:
    """The recorded ones were pruned before the run had a checkpoint."""
    asked, folder, first = (
        files.load(run, overrides=["train.init_from=runs/parent"]),
        Path("runs/first"),
        _save("runs/parent", 10),
    )
    files.save(first_weights.pinned(asked, folder), folder)
    _save("runs/parent", 20)
    shutil.rmtree(first)
    with pytest.raises(TimeoutError):
        runs._await(asked, folder, timeout=0.0)
    chosen = first_weights.pinned(asked, folder)
    files.save(chosen, folder)
    assert runs._await(asked, folder, timeout=0.0) == chosen


def test_the_manifest_of_the_first_weights_is_sealed(run: Path) -> None:
    start = _save("runs/parent", 10)
    spec = first_weights.pinned(files.load(run, overrides=["train.init_from=runs/parent"]), Path("runs/first")).spec
    first = runs.job(spec, Path("runs/first"), runs.TRAIN, {}).arguments["first"]
    assert list(first) == [str(start / MANIFEST)]
    write_manifest(start, Manifest(10, 11, {}, {}))
    with pytest.raises(sealed.AlteredError, match=MANIFEST):
        sealed.read(start / MANIFEST, first)
    assert first_weights.seals(files.load(run).spec) == {}
