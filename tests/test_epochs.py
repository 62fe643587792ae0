"""Names of epochs, and the initial files of each."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megalith import epochs
from megalith.epochs import begin, name, newest


def test_epoch_0_has_the_plain_names_and_readers_take_the_highest(tmp_path: Path) -> None:
    assert [name(file, epoch) for file in ("events.jsonl", "checkpoints") for epoch in (0, 12)] == [
        "events.jsonl", "events-12.jsonl", "checkpoints", "checkpoints-12",
    ]  # fmt: skip
    assert newest(tmp_path / "nowhere", "events.jsonl").name == "events.jsonl"
    for file in ("events.jsonl", "events-2.jsonl", "events-10.jsonl", "events-x.jsonl", "events-11.jsonl.tmp", "events-03.jsonl"):
        (tmp_path / file).touch()
    assert newest(tmp_path, "events.jsonl").name == "events-10.jsonl"


def _folder(run: Path) -> None:
    (run / "ranks").mkdir(parents=True)
    (run / "checkpoints" / "step-00000010").mkdir(parents=True)
    (run / "events.jsonl").write_text("one\n")
    (run / "ranks" / "fleet.json").write_text("{}")


def _seen(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.name != "ranks")


def test_an_epoch_begins_with_all_that_there_was_and_an_earlier_owners_paths_lead_nowhere(tmp_path: Path) -> None:
    _folder(tmp_path)
    with (tmp_path / "events.jsonl").open("a") as late:
        begin(tmp_path, 1)
        late.write("late\n")
    assert newest(tmp_path, "events.jsonl").read_text() == "one\n"
    assert newest(tmp_path, "ranks/fleet.json").name == "fleet-1.json"
    assert newest(tmp_path, "checkpoints") == tmp_path / "checkpoints-1"
    assert [path.name for path in (tmp_path / "checkpoints-1").iterdir()] == ["step-00000010"]
    (tmp_path / "checkpoints" / "step-00000020").mkdir(parents=True)  # by the earlier owner, to whom these names belong
    begin(tmp_path, 3)
    assert [path.name for path in newest(tmp_path, "checkpoints").iterdir()] == ["step-00000010"]
    assert newest(tmp_path, "events.jsonl").read_text() == "one\n"


@pytest.mark.parametrize("moment", range(len((*epochs.COPIED, *epochs.MOVED, *epochs.SHOWN))))
def test_whoever_dies_while_an_epoch_begins_is_followed_by_one_that_does_the_rest(
    moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _folder(tmp_path)
    done = [0]

    def dies(run_dir: Path, what: str, epoch: int) -> None:
        done[0] += 1
        if done[0] > moment:
            raise KeyboardInterrupt
        original[what](run_dir, what, epoch)

    original: dict[str, Callable[[Path, str, int], None]] = {
        **dict.fromkeys(epochs.COPIED, epochs._copy),
        **dict.fromkeys((*epochs.MOVED, *epochs.SHOWN), epochs._move),
    }
    monkeypatch.setattr(epochs, "_copy", dies)
    monkeypatch.setattr(epochs, "_move", dies)
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path, 1)
    monkeypatch.undo()
    begin(tmp_path, 2)
    assert newest(tmp_path, "events.jsonl").read_text() == "one\n"
    assert newest(tmp_path, "events.jsonl").name == "events-2.jsonl"
    assert [path.name for path in newest(tmp_path, "checkpoints").iterdir()] == ["step-00000010"]
    assert newest(tmp_path, "checkpoints").name == "checkpoints-2"


def test_a_users_own_file_with_a_number_is_no_epochs_description(tmp_path: Path) -> None:
    _folder(tmp_path)
    for file, text in {"run.toml": "first", "run-1.toml": "a user's", "run-2.toml": "a user's"}.items():
        (tmp_path / file).write_text(text)
    assert newest(tmp_path, "run.toml").read_text() == "first"
    for epoch in (1, 3, 3):
        begin(tmp_path, epoch)
        assert newest(tmp_path, "run.toml") == tmp_path / f"run-{epoch}.toml"
        assert newest(tmp_path, "run.toml").read_text() == "first"
    assert (tmp_path / "run-1.toml.user").read_text() == "a user's"
    assert (tmp_path / "run-2.toml").read_text() == "a user's"


def test_a_folder_of_an_earlier_version_has_its_description_under_the_plain_names(tmp_path: Path) -> None:
    _folder(tmp_path)
    begin(tmp_path, 1)
    (tmp_path / "spec.json").write_text("{}")
    assert newest(tmp_path, "spec.json") == tmp_path / "spec.json"
    begin(tmp_path, 1)  # by the next owner, of this version, after an orderly end
    assert newest(tmp_path, "spec.json") == tmp_path / "spec-1.json"


def test_a_rank_reads_what_its_own_owner_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _folder(tmp_path)
    (tmp_path / "spec.json").touch()
    begin(tmp_path, 1)
    assert epochs.own(tmp_path, "spec.json").name == "spec-1.json"
    monkeypatch.setenv(epochs.VARIABLE, "0")
    assert epochs.own(tmp_path, "spec.json").name == "spec.json"
    assert epochs.is_named(tmp_path / "spec-1.json", "spec.json") and not epochs.is_named("spectrum.json", "spec.json")


def test_times_are_moved_and_the_index_is_made_anew(tmp_path: Path) -> None:
    _folder(tmp_path)
    for folder in ("times", "steps"):
        (tmp_path / "ranks" / folder).mkdir()
        (tmp_path / "ranks" / folder / "one").write_text("1")
    begin(tmp_path, 1)
    assert [path.name for path in newest(tmp_path, "ranks/times").iterdir()] == ["one"]
    assert not (tmp_path / "ranks" / "times").exists()
    assert newest(tmp_path, "ranks/steps").name == "steps-1" and not list(newest(tmp_path, "ranks/steps").iterdir())


def test_times_that_cannot_be_moved_do_not_keep_an_epoch_from_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _folder(tmp_path)
    (tmp_path / "ranks" / "times").mkdir()
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if path.name == "times":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    begin(tmp_path, 1)
    assert newest(tmp_path, "events.jsonl").name == "events-1.jsonl"
    assert newest(tmp_path, "ranks/times").name == "times"


def test_a_disk_that_fills_while_an_epoch_begins_keeps_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _folder(tmp_path)

    def fills(old: Path, part: Path) -> None:
        part.write_text("o")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(epochs.shutil, "copyfile", fills)
    with pytest.raises(OSError, match="No space left"):
        begin(tmp_path, 1)
    assert not list(tmp_path.rglob("*.tmp"))


def test_old_epochs_are_removed_but_for_the_plain_names_and_the_epoch_before(tmp_path: Path) -> None:
    _folder(tmp_path)
    (tmp_path / "run.toml").touch()
    for epoch in (1, 2, 3):
        begin(tmp_path, epoch)
    (tmp_path / "run-9.toml").touch()  # a user's
    begin(tmp_path, 4)
    assert {path for path in _seen(tmp_path) if "step-" not in path} == {
        "run.toml", "run-3.toml", "run-4.toml", "run-9.toml", "events.jsonl", "events-3.jsonl", "events-4.jsonl",
        "checkpoints-4", "ranks/fleet.json", "ranks/fleet-3.json", "ranks/fleet-4.json",
        "ranks/steps-3", "ranks/steps-4", "ranks/times-4",
    }  # fmt: skip


@pytest.mark.parametrize("odd", ["folder", "link", "unreadable"])
def test_something_odd_at_the_tokenizers_name_does_not_keep_an_epoch_from_beginning(
    odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _folder(tmp_path)
    path = tmp_path / "tokenizer.json"
    if odd == "folder":
        (path / "full").mkdir(parents=True)
    elif odd == "link":
        path.symlink_to("nowhere")
    else:
        path.touch()
        copyfile = epochs.shutil.copyfile

        def copies(old: Path, part: Path) -> None:
            if old == path:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            copyfile(old, part)

        monkeypatch.setattr(epochs.shutil, "copyfile", copies)
    begin(tmp_path, 1)
    assert newest(tmp_path, "events.jsonl").name == "events-1.jsonl"
    assert newest(tmp_path, "tokenizer.json") == path


def test_a_folder_that_nothing_was_saved_in_yet_is_there_all_the_same(tmp_path: Path) -> None:
    """So a later save of the earlier owner is not the newest."""
    begin(tmp_path, 1)
    assert _seen(tmp_path) == ["checkpoints-1"]


def test_a_mount_point_cannot_be_renamed_and_the_way_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _folder(tmp_path)

    def rename(self: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match=r"put a symbolic link in its place.*checkpoints"):
        begin(tmp_path, 1)
