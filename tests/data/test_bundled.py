from pathlib import Path

import pytest

from megalith.data import bundled
from megalith.data.errors import DataError


def test_all_six_novels_are_there():
    text = bundled.austen()
    titles = ("EMMA", "MANSFIELD PARK", "NORTHANGER ABBEY", "Persuasion", "PRIDE AND PREJUDICE", "SENSE AND SENSIBILITY")
    assert all(f"\n{title}\n" in "\n" + text for title in titles)
    assert len(text.encode()) == 4_025_035


def test_provenance_and_digests_are_shipped_beside_the_text():
    folder = Path(bundled.__file__).parent
    assert "public domain" in (folder / "README.md").read_text()
    assert "austen.txt.xz" in (folder / "SHA256SUMS").read_text()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "austen.txt.xz").write_bytes(b"no xz"), "does not unpack"),
        (lambda folder: (folder / "austen.txt.xz").unlink(), "missing"),
        (lambda folder: (folder / "SHA256SUMS").write_text(f"{'0' * 64}  austen.txt\n"), "has sha256 db2cdbf6.* but 00000"),
    ],
)
def test_a_damaged_text_is_refused_with_what_is_wrong(damage, says, tmp_path, monkeypatch):
    for name in ("austen.txt.xz", "SHA256SUMS"):
        (tmp_path / name).write_bytes((Path(bundled.__file__).parent / name).read_bytes())
    damage(tmp_path)
    monkeypatch.setattr(bundled, "files", lambda _: tmp_path)
    with pytest.raises(DataError, match=says):
        bundled.austen.__wrapped__()
