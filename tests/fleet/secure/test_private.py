"""Folders that only this user can access, in a place that all users can access. Another effective user id plays the other
user."""

import os
import stat
from pathlib import Path

import pytest

from megalith.fleet.secure import private
from megalith.fleet.secure.private import NotPrivate


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_what_is_made_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with private.opened_below(tmp_path / "root" / "node", create=True) as folder:
            os.close(private.open_file(folder, tmp_path / "root" / "node" / "file", os.O_RDWR | os.O_CREAT))
    finally:
        os.umask(before)
    assert [_mode(tmp_path / name) for name in ("root", "root/node", "root/node/file")] == [0o700, 0o700, 0o600]


def test_a_folder_of_another_user_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private.make(tmp_path / "root")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    for act in (private.make, lambda path: private.opened(path).__enter__()):
        with pytest.raises(NotPrivate, match=rf"belongs to user {os.getuid()}, not to user 12345.*{tmp_path / 'root'}"):
            act(tmp_path / "root")
    assert not private.is_usable(tmp_path / "root")


def test_a_folder_that_others_may_write_to_is_refused_and_one_they_may_read_is_closed_to_them(tmp_path: Path) -> None:
    for name, mode in (("open", 0o777), ("group", 0o770), ("readable", 0o755)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    assert [private.is_usable(tmp_path / name) for name in ("open", "group", "readable")] == [False, False, True]
    assert _mode(tmp_path / "readable") == 0o700
    with pytest.raises(NotPrivate, match="mode 0777"):
        private.make(tmp_path / "open")


def test_links_are_not_followed(tmp_path: Path) -> None:
    private.make(tmp_path / "real")
    (tmp_path / "real" / "node").mkdir()
    (tmp_path / "real" / "secret").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(NotPrivate, match="it is a link"):
        private.make(tmp_path / "link")
    (tmp_path / "real" / "linked").symlink_to(tmp_path / "real" / "node")
    with pytest.raises(NotPrivate, match="it is a link"), private.opened_below(tmp_path / "real" / "linked"):
        pass
    (tmp_path / "real" / "node" / "file").symlink_to(tmp_path / "real" / "secret")
    with private.opened_below(tmp_path / "real" / "node") as folder, pytest.raises(NotPrivate, match="it is a link"):
        private.open_file(folder, tmp_path / "real" / "node" / "file", os.O_RDWR | os.O_CREAT)
    assert (tmp_path / "real" / "secret").read_text() == "mine"


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    private.make(tmp_path / "root")
    os.mkfifo(tmp_path / "root" / "owner")
    with private.opened(tmp_path / "root") as folder, pytest.raises(NotPrivate, match="it is not a regular file"):
        private.open_file(folder, tmp_path / "root" / "owner", os.O_RDONLY)


def test_a_file_of_another_user_and_one_that_others_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private.make(tmp_path / "root")
    file = tmp_path / "root" / "file"
    file.touch()
    file.chmod(0o644)
    with private.opened(tmp_path / "root") as folder:
        os.close(private.open_file(folder, file, os.O_RDONLY))
        assert _mode(file) == 0o600
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(NotPrivate, match="belongs to user"):
            private.open_file(folder, file, os.O_RDONLY)
        with pytest.raises(FileNotFoundError):
            private.open_file(folder, file.with_name("none"), os.O_RDONLY)
