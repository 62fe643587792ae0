"""The source of a run's key, and files that must not contain it."""

import os
import stat
from pathlib import Path

import pytest

from megalith.fleet.secure import key
from megalith.fleet.secure.key import FILE_VARIABLE, VARIABLE, Key, NoKey

TEXT = "0123456789abcdef" * 4


def test_a_mac_is_of_the_key_the_purpose_and_the_borders_of_the_parts() -> None:
    one = Key(TEXT)
    mac = one.mac("copy", b"ab", b"c")
    assert one.proves(mac, "copy", b"ab", b"c") and len(mac) == key.MAC_BYTES
    others = [one.mac("copy", b"a", b"bc"), one.mac("letter", b"ab", b"c"), Key(TEXT + "0").mac("copy", b"ab", b"c")]
    assert len({mac, *others}) == 4
    assert TEXT not in repr(one)


def test_the_environment_comes_before_a_file_and_a_file_before_the_run_folder(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("f" * 32 + "\n")
    file.chmod(0o600)
    assert key.given({VARIABLE: TEXT, FILE_VARIABLE: str(file)}) == Key(TEXT)
    assert key.given({FILE_VARIABLE: str(file)}) == Key("f" * 32)
    assert key.given({}) is None
    assert key.of_run(tmp_path, {VARIABLE: TEXT}) == key.shared(tmp_path, {VARIABLE: TEXT}) == Key(TEXT)
    assert not key.path_in(tmp_path).exists()


@pytest.mark.parametrize("umask", [0o022, 0o000, 0o777])
def test_a_made_key_is_this_users_alone_and_stays(tmp_path: Path, umask: int, capsys: pytest.CaptureFixture[str]) -> None:
    before = os.umask(0o022)
    (tmp_path / "ranks").mkdir()
    os.umask(umask)
    try:
        assert key.make(tmp_path) and not key.make(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(key.path_in(tmp_path).stat().st_mode) == 0o600
    found = key.shared(tmp_path, {})
    assert found == key.of_run(tmp_path, {}) and len(found.text) == 64
    assert capsys.readouterr() == ("", "")
    assert [path.name for path in (tmp_path / "ranks").iterdir()] == ["key"]


def test_a_machine_of_several_without_a_key_is_told_the_command(tmp_path: Path) -> None:
    with pytest.raises(NoKey, match=rf"MEGALITH_KEY.*megalith key {tmp_path}$"):
        key.shared(tmp_path, {})


@pytest.mark.parametrize("text", ["short", "", "x" * 31, "ä" * 40, "a" * 40 + "\0"])
def test_what_is_too_short_or_no_text_is_no_key(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    if text and "\0" not in text:
        with pytest.raises(NoKey, match="MEGALITH_KEY holds no key"):
            key.given({VARIABLE: text})
    key.make(tmp_path)
    key.path_in(tmp_path).write_text(text)
    with pytest.raises(NoKey, match="ranks/key holds no key"):
        key.shared(tmp_path, {})
    made = key.of_run(tmp_path, {})
    assert "A new key is made" in capsys.readouterr().err
    assert key.of_run(tmp_path, {}) == key.shared(tmp_path, {}) == made


def test_a_named_key_file_that_is_missing_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(NoKey, match=r"gone, which does not exist\. Make a key .* megalith key"):
        key.given({FILE_VARIABLE: str(tmp_path / "gone")})


def test_a_key_that_others_can_read_serves_no_port(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key.make(tmp_path)
    key.path_in(tmp_path).chmod(0o644)
    with pytest.raises(NoKey, match="mode 0644"):
        key.shared(tmp_path, {})
    with pytest.raises(NoKey, match="mode 0644"):
        key.given({FILE_VARIABLE: str(key.path_in(tmp_path))})
    key.of_run(tmp_path, {})
    assert "chmod 600" in capsys.readouterr().err


def test_a_key_of_another_user_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key.make(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if os.getuid() != 0:  # files of root are trusted
        with pytest.raises(NoKey, match=f"belongs to user {os.getuid()}, not to 12345"):
            key.shared(tmp_path, {})
    else:
        os.chown(key.path_in(tmp_path), 54321, -1)
        with pytest.raises(NoKey, match="belongs to user 54321, not to 12345"):
            key.shared(tmp_path, {})
        with pytest.raises(NoKey, match="belongs to user 54321"):
            key.of_run(tmp_path, {})


def test_a_pipe_in_the_place_of_a_key_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    os.mkfifo(key.path_in(tmp_path), 0o600)
    with pytest.raises(NoKey, match="is not a regular file"):
        key.shared(tmp_path, {})
