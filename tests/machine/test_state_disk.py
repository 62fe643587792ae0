"""The checks of a folder for state and activations on disk."""

import errno
import os
from pathlib import Path

import pytest

from megalith.machine import state_disk
from megalith.machine.state_disk import check_folder

KEY, SIZE = "plan.state.folder", 1 << 20


def _verdicts(folder: Path, *, room: float = 1.0, rate: float | None = None) -> dict[str, str]:
    return {one.check.removeprefix(KEY): one.verdict for one in check_folder(KEY, folder, room=room, rate=rate, size=SIZE)}


def test_a_folder_that_is_fit_passes_and_holds_no_file_afterwards(tmp_path: Path) -> None:
    found = _verdicts(tmp_path, rate=1.0)
    assert found.pop(", direct I/O") in ("ok", "warn")
    assert found == {"": "ok", ", free space": "ok", ", rate": "ok"}
    assert not [*tmp_path.iterdir()]


def test_what_is_missing_is_named_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert _verdicts(tmp_path / "file") == {"": "fail"}
    assert _verdicts(tmp_path / "missing")[""] == "warn"
    assert _verdicts(tmp_path, room=1e30)[", free space"] == "fail"
    assert _verdicts(tmp_path, rate=1e30)[", rate"] == "warn"

    def refuse(folder: Path, *, size: int) -> tuple[float, bool]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(state_disk, "measure", refuse)
    assert _verdicts(tmp_path)[", rate"] == "fail"


def test_a_file_system_without_direct_io_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_disk, "_bypass", lambda file: False)
    assert _verdicts(tmp_path)[", direct I/O"] == "warn"


@pytest.mark.parametrize("call", ["pathlib.Path.exists", "shutil.disk_usage"])
def test_a_folder_that_cannot_be_accessed_is_a_finding(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(call, refuse)
    (found,) = check_folder(KEY, tmp_path, room=1.0, rate=None, size=SIZE)
    assert (found.verdict, found.value) == ("fail", f"{tmp_path} cannot be accessed: {os.strerror(errno.ESTALE)}")
