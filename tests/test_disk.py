"""A full disk or an unreachable store may cost notes, but not runs."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from megalith import disk
from megalith.checkpoint.folder import committed, locate
from megalith.control.node_ledger import NodeRecord, note, read_nodes
from megalith.control.owner import hold
from megalith.data.manifest import read_manifest
from megalith.events import FILE, EventLog, Problem, RunStarted, Step, of_kind, read
from megalith.fleet.secure import key
from megalith.fleet.tiers import roots
from tests.report.run_folder import start, step


class Disk:
    """Replaces `os.write`: it accepts this many more bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room, self._write = 1 << 20, os.write
        monkeypatch.setattr(disk.os, "write", self.write)

    def write(self, descriptor: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(descriptor, data[: self.room])
        self.room -= written
        return written


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def _messages(folder: Path) -> list[str]:
    return [problem.message for problem in of_kind(read(folder), Problem)]


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EACCES, errno.EIO])
def test_a_store_that_cannot_be_read_is_not_taken_for_empty(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.14 on, Path.is_dir and its like return False for these errors."""
    run, stat = tmp_path / "run", os.stat
    saved = run / "checkpoints" / "step-00000010"
    saved.mkdir(parents=True)
    for ask in (committed, locate, read_manifest):
        monkeypatch.undo()
        away = saved if ask is locate else run / "checkpoints"

        def fails(path: Any, *args: Any, away: Path = away, **rest: Any) -> os.stat_result:
            return _raise(code) if Path(path).is_relative_to(away) else stat(path, *args, **rest)

        monkeypatch.setattr(os, "stat", fails)
        monkeypatch.setattr(Path, "stat", lambda self, **rest: os.stat(self, **rest))  # noqa: PTH116
        for name in ("is_dir", "is_file", "exists"):
            monkeypatch.setattr(Path, name, lambda self, **rest: False)
        with pytest.raises(OSError, match=os.strerror(code)):
            ask(away)
    with pytest.raises(OSError, match=os.strerror(code)):
        list(disk.lines(run / "checkpoints" / FILE))


def test_folders_files_and_missing_paths_differ(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    paths = [tmp_path, tmp_path / "file", tmp_path / "none", tmp_path / "file" / "none", tmp_path / "loop"]
    asked = (disk.is_folder, disk.is_file, disk.is_there)
    yes, no = True, False
    assert [[ask(path) for path in paths] for ask in asked] == [
        [yes, no, no, no, no],
        [no, yes, no, no, no],
        [yes, yes, no, no, no],
    ]


@pytest.mark.parametrize("left", [0, 1, 17])
def test_events_wait_for_room_and_another_writer_loses_none_by_it(room: Disk, tmp_path: Path, left: int) -> None:
    log, other = EventLog(tmp_path), EventLog(tmp_path)
    log.write(Problem("warning", "first"))
    room.room = left
    for message in ("second", "third"):
        log.write(Problem("warning", message))
    assert _messages(tmp_path) == ["first"]
    room.room = 1 << 20
    other.write(Problem("warning", "of another"))
    log.write(Problem("warning", "fourth"))
    assert _messages(tmp_path) == ["first", "of another", "second", "third", "fourth"]
    assert len((tmp_path / FILE).read_bytes().splitlines()) == 5, "no torn line is left"


def test_what_never_found_room_is_counted_at_the_end(room: Disk, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(tmp_path)
    room.room = 0
    for _ in range(3):
        log.write(Problem("warning", "lost"))
    log.close()
    assert f"the last 3 lines of {tmp_path / FILE} could not be written" in capsys.readouterr().err


def test_a_ledger_of_nodes_goes_without_a_record(room: Disk, tmp_path: Path) -> None:
    path, records = tmp_path / "nodes.jsonl", [NodeRecord(float(n), "a", "fault", "", "run") for n in range(3)]
    note(path, records[0])
    room.room = 5
    note(path, records[1])
    room.room = 1 << 20
    note(path, records[2])
    assert read_nodes(path) == [records[0], records[2]]
    assert len(path.read_bytes().splitlines()) == 2, "nothing is left of what found no room"


@pytest.mark.parametrize("code", sorted(disk.AWAY))
def test_a_disk_that_may_be_back_costs_a_note_and_says_why(code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with disk.if_available(tmp_path / "note"):
        raise OSError(code, os.strerror(code))
    assert f"{tmp_path / 'note'} cannot be written ({os.strerror(code)})" in capsys.readouterr().err


def test_other_errors_of_a_disk_are_raised(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="a folder"), disk.if_available(tmp_path / "note"):
        raise OSError(errno.EISDIR, "a folder")


def test_events_wait_while_the_store_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path)
    log.write(Problem("warning", "first"))
    with monkeypatch.context() as away:
        away.setattr(disk.os, "fstat", lambda descriptor: _raise(errno.ESTALE))
        log.write(Problem("warning", "second"))
    assert _messages(tmp_path) == ["first"]
    log.close()
    assert _messages(tmp_path) == ["first", "second"]


def test_a_run_folder_that_goes_away_before_its_ranks_open_the_log_is_not_made_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    run.rename(tmp_path / "elsewhere")
    log = EventLog(run, existed=True)
    log.write(Problem("warning", "early"))
    assert not run.exists()
    (tmp_path / "elsewhere").rename(run)
    log.close()
    assert _messages(run) == ["early"]


def test_a_place_is_made_once_and_not_while_it_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("run/checkpoints")
    place = disk.Place(folder.parent)
    for _ in range(2):
        place.make(folder)
        assert folder.is_dir() and not place.away()
    folder.parent.rename("elsewhere")
    with pytest.raises(FileNotFoundError):
        place.make(folder)
    assert not folder.parent.exists()


def _raise(code: int) -> NoReturn:
    raise OSError(code, os.strerror(code))


@pytest.mark.parametrize("how", ["deleted", "emptied", "replaced", "made a folder"])
def test_a_log_that_is_gone_begins_anew_with_one_note_and_the_newest_start(how: str, tmp_path: Path) -> None:
    log, other = EventLog(tmp_path), EventLog(tmp_path)
    log.write(start())
    log.write(step(7))
    other.write(Problem("warning", "first"))
    if how == "emptied":
        (tmp_path / FILE).write_text("")
    else:
        (tmp_path / FILE).unlink()
    if how == "replaced":
        (tmp_path / FILE).write_text("somebody's\n")
    if how == "made a folder":
        (tmp_path / FILE).mkdir()
    other.write(Problem("warning", "second"))
    log.write(step(8))
    found = list(read(tmp_path))
    notes = [event.message for event in of_kind(found, Problem)]
    assert [note.partition(" the run:")[0] for note in notes] == (
        ["second"] if how == "replaced" else [f"{FILE} was removed or emptied during", "second"]
    )
    assert [event.resumed_step for event in of_kind(found, RunStarted)] == [7]
    assert [event.step for event in of_kind(found, Step)] == [8]


def test_nothing_is_written_where_a_file_system_was_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder still exists there, but it is another one."""
    mounted = {str(tmp_path)}
    monkeypatch.setattr(disk.os.path, "ismount", lambda path: str(path) in mounted)
    log = EventLog(tmp_path)
    log.write(Problem("warning", "first"))
    kept = (tmp_path / FILE).rename(tmp_path.parent / "kept")
    mounted.clear()
    log.write(Problem("warning", "second"))
    assert not any(tmp_path.iterdir())
    kept.rename(tmp_path / FILE)
    mounted.add(str(tmp_path))
    log.write(Problem("warning", "third"))
    assert _messages(tmp_path) == ["first", "second", "third"]


def test_nothing_is_written_to_a_folder_that_has_replaced_the_first_one(tmp_path: Path) -> None:
    """Its files are those of another run."""
    run = tmp_path / "run"
    place, log = disk.Place(run), EventLog(run)
    assert not place.away()
    log.write(Problem("warning", "first"))
    run.rename(tmp_path / "aside")
    EventLog(run).write(Problem("warning", "another run's"))
    log.write(Problem("warning", "second"))
    assert _messages(run) == ["another run's"] and place.away() == disk.REPLACED
    run.rename(tmp_path / "other")
    (tmp_path / "aside").rename(run)
    log.close()
    assert _messages(run) == ["first", "second"] and not place.away()


def test_a_file_system_that_is_mounted_again_may_number_its_files_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FUSE does. A folder with another number on the same mount is another folder."""
    place, stat, numbers = disk.Place(tmp_path), Path.stat, {"st_dev": 1, "st_ino": 5}
    monkeypatch.setattr(
        Path, "stat", lambda self, **given: SimpleNamespace(**numbers) if self == tmp_path else stat(self, **given)
    )
    for device, inode, said in ((1, 5, ""), (2, 9, ""), (2, 10, disk.REPLACED)):
        numbers |= {"st_dev": device, "st_ino": inode}
        assert place.away() == said


@pytest.mark.parametrize(("line", "bare"), [("host:/x {0} nfs rw 0 0", True), ("# host:/x {0} nfs", False), ("", False)])
def test_a_mount_point_at_which_nothing_is_mounted_is_recognised(line: str, bare: bool, tmp_path: Path) -> None:
    (tmp_path / "fstab").write_text(f"proc /proc proc defaults 0 0\n{line.format(tmp_path / 'store')}\n")
    found = disk.bare_mount(tmp_path / "store" / "runs" / "first", table=tmp_path / "fstab")
    assert found == (tmp_path / "store" if bare else None)


def test_a_process_outlives_output_to_a_full_disk() -> None:
    """/dev/full refuses every write."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        full = disk.Output(descriptor)
        with disk.text_output(full) as output:
            print("a line\nand another", file=output, flush=True)
        assert (full.lost, full.why) == (19, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


def test_a_folder_that_cannot_be_made_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    for folder in (tmp_path / "note.txt", tmp_path / "note.txt" / "out", tmp_path / ("d" * 300)):
        with pytest.raises(OSError, match=r"cannot be made .*choose another") as error:
            disk.make_folder(folder)
        assert str(folder) in str(error.value) and error.value.errno


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_a_file_is_made_by_one_process_only(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:
        monkeypatch.setattr(os, "link", lambda part, path: _raise(errno.EPERM))
    path = tmp_path / "file"
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda text: disk.make_new(path, text, mode=0o600), "abcdefgh"))
    assert [path.read_text()] == [text for text, own in zip("abcdefgh", made, strict=True) if own]
    assert [found.name for found in tmp_path.iterdir()] == ["file"] and path.stat().st_mode & 0o777 == 0o600
    if links:
        monkeypatch.setattr(os, "link", lambda part, path: _raise(errno.EACCES))
        with pytest.raises(PermissionError):
            disk.make_new(tmp_path / "other", "text")
        assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_a_file_without_hard_links_that_cannot_be_written_whole_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would look like that of another process."""
    monkeypatch.setattr(os, "link", lambda part, path: _raise(errno.EPERM))
    create = disk._create

    def full(path: Path, text: str, mode: int | None) -> None:
        create(path, text if path.suffix == ".tmp" else "", mode)
        if path.suffix != ".tmp":
            _raise(errno.ENOSPC)

    monkeypatch.setattr(disk, "_create", full)
    with pytest.raises(OSError, match="No space"):
        disk.make_new(tmp_path / "file", "text")
    assert not [*tmp_path.iterdir()]


def test_a_run_folder_may_be_on_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", lambda part, path: _raise(errno.EPERM))
    with hold(tmp_path / "run"):
        pass
    with hold(tmp_path / "run") as own:
        assert own.epoch == 0
        found = key.of_run(tmp_path / "run", {})
        assert key.of_run(tmp_path / "run", {}) == found and not key.make(tmp_path / "run")
        assert roots.owner_text(tmp_path / "run") == roots.owner_text(tmp_path / "run")


def test_many_writers_of_one_file_do_not_disturb_each_other_or_a_reader(tmp_path: Path) -> None:
    path, contents = tmp_path / "file", [f"{writer}" * (1 << 16) for writer in range(8)]
    disk.write_whole(path, contents[0])

    def write_and_read(content: str) -> bool:
        for _ in range(20):
            disk.write_whole(path, content)
            if path.read_text() not in contents:
                return False
        return True

    with ThreadPoolExecutor(len(contents)) as threads:
        assert all(threads.map(write_and_read, contents))
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_an_empty_folder_in_the_place_of_a_file_gives_way(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.mkdir()
    disk.write_whole(path, "text")
    assert path.read_text() == "text"
    disk.remove_empty_folder(path)
    assert path.read_text() == "text", "no folder"


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    (path / "mine").touch()
    with pytest.raises(IsADirectoryError):
        disk.write_whole(path, "text")
    assert [found.name for found in tmp_path.iterdir()] == ["folder"]
    with pytest.raises(FileNotFoundError) as error:
        disk.write_whole(tmp_path / "nowhere" / "file", "text")
    assert error.value.filename == str(tmp_path / "nowhere" / "file"), "not the name of its part"
