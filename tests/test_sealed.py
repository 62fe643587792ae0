"""Files that must not change."""

from pathlib import Path

import pytest

from megalith.sealed import AlteredError, check, read, seal, unchanged


def test_a_file_that_changed_is_named_and_what_is_not_sealed_may_change(tmp_path: Path) -> None:
    kept, other = tmp_path / "kept", tmp_path / "other"
    kept.write_bytes(b"one")
    sealed = seal([kept])
    other.write_bytes(b"two")
    assert (read(kept, sealed), read(other, sealed)) == (b"one", b"two")
    kept.write_bytes(b"on")
    with pytest.raises(AlteredError, match=f"{kept} was changed while this run was in progress"):
        check(sealed)
    kept.write_bytes(b"one")
    check(sealed)


def test_a_file_that_changes_while_it_is_read_is_named_too(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_bytes(b"one")
    with pytest.raises(AlteredError), unchanged(seal([kept])):
        kept.write_bytes(b"two")


def test_a_file_that_cannot_be_read_is_no_changed_one(tmp_path: Path) -> None:
    """The file's store may be unreachable."""
    (tmp_path / "kept").write_bytes(b"one")
    sealed = seal([tmp_path / "kept"])
    (tmp_path / "kept").unlink()
    with pytest.raises(FileNotFoundError):
        check(sealed)
