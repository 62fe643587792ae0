import gzip
import os

import pytest

from megalith.data.errors import DataError
from megalith.data.files import find
from megalith.data.manifest import Reading


def _told(folder, **reading) -> set[str]:
    return {str(one) for one in find(folder, Reading(**reading)).left_out()}


def test_what_is_left_out_of_a_folder_is_counted_and_named_by_reason(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.jsonl").write_text('{"text": "text"}')
    (tmp_path / "table.arrow").write_bytes(b"PAR1 and no zero byte at all")
    (tmp_path / "notes.pdf.gz").write_bytes(gzip.compress(b"%PDF"))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "image").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "packed.gz").write_bytes(gzip.compress(b"a\0b"))
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("not counted: its folder is")
    (tmp_path / ".notes").write_text("hidden")
    (tmp_path / "link.txt").symlink_to("a.txt")
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "linked").symlink_to("deep")
    assert _told(tmp_path) == {
        "4 binary (1 no ending, 1 .pdf.gz, 1 .gz, 1 .arrow): deep/image, notes.pdf.gz, packed.gz, table.arrow",
        "2 hidden (2 no ending): .git, .notes",
        "3 links (2 no ending, 1 .txt): gone, link.txt, linked",
    }


def test_of_many_files_left_out_the_first_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for number in range(12):
        (tmp_path / f"{number:02d}.arrow").write_bytes(b"PAR1")
    for number in range(30):
        (tmp_path / f"x.{number:02d}").write_bytes(b"\0")
    (one,) = find(tmp_path, Reading()).left_out()
    assert (one.count, one.names) == (42, tuple(f"{number:02d}.arrow" for number in range(5)))
    assert next(iter(one.endings.items())) == (".arrow", 12)
    assert str(one).endswith("04.arrow and 37 more")


def test_files_of_other_endings_than_asked_for_are_counted(tmp_path):
    (tmp_path / "a.py").write_text("text")
    (tmp_path / "b.md").write_text("text")
    assert _told(tmp_path, extensions=(".py",)) == {"1 another ending than asked for (1 .md): b.md"}


def test_a_name_that_is_not_utf8_can_be_told(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "caf\udce9.arrow").write_bytes(b"PAR1")
    (one,) = find(tmp_path, Reading()).left_out()
    assert one.names == ("caf\\udce9.arrow",)
    one.model_dump_json()


@pytest.mark.parametrize("given", ["folder", "file", "compressed"])
def test_nothing_but_parquet_without_its_extra_is_an_error_with_the_way_out(given, tmp_path, monkeypatch):
    monkeypatch.setattr("megalith.data.files.find_spec", lambda name: None)
    name = "a.parquet.gz" if given == "compressed" else "a.parquet"
    (tmp_path / name).write_bytes(b"PAR1\0")
    says = {
        "folder": "holds no file that Megalith can read; left out are 1 Parquet without the extra `parquet`",
        "file": "a.parquet is Parquet, but the package pyarrow is not installed",
        "compressed": "is not text: Megalith does not read .parquet.gz files",
    }
    with pytest.raises(DataError) as error:
        find(tmp_path if given == "folder" else tmp_path / name, Reading())
    assert says[given] in str(error.value)
    assert given == "file" or "Megalith reads JSON lines (.jsonl, .ndjson) and UTF-8 text" in str(error.value)
    assert given == "compressed" or "pandas.read_parquet('a.parquet').to_json('a.jsonl'" in str(error.value)


def test_a_folder_without_files_or_with_other_endings_only_is_an_error(tmp_path):
    with pytest.raises(DataError, match="holds no file that Megalith can read\\. Megalith reads"):
        find(tmp_path, Reading())
    (tmp_path / "a.md").write_text("text")
    with pytest.raises(DataError, match=r"left out are 1 another ending than asked for \(1 \.md\): a\.md"):
        find(tmp_path, Reading(extensions=(".py",)))


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # file modes do not restrict root
    with pytest.raises(DataError, match="closed cannot be listed: Permission denied"):
        find(tmp_path, Reading())
