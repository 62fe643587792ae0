"""Parquet as a source of text, together with JSON lines and plain text. Every row is read once and whole, and unreadable values
are named with their row."""

import json
from pathlib import Path

import pytest

from megalith.data.errors import DataError
from megalith.data.manifest import Reading
from megalith.data.prepare import prepare
from megalith.data.sources import Source, documents, parse_source
from megalith.data.tokenizer import load

pa = pytest.importorskip("pyarrow", reason="needs the extra parquet")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")


def write(path: Path, texts: list[str | None], *, field: str = "text", kind: object = None, **how: object) -> Path:
    pq.write_table(pa.table({"id": list(range(len(texts))), field: pa.array(texts, kind or pa.string())}), path, **how)
    return path


def read(path: Path, **reading: str) -> list[str]:
    return list(documents(Source("x", str(path)), Reading(**reading)))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_every_row_is_read_once_in_order_over_row_groups(kind: object, compression: str, tmp_path: Path) -> None:
    texts = [f"Text {i} – ∑, over\ntwo lines" for i in range(2500)]
    path = write(tmp_path / "a.parquet", texts, kind=kind, compression=compression, row_group_size=700)
    assert read(path) == texts


def test_blank_rows_are_left_out_and_a_column_is_chosen_by_field(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.parquet", ["one", " \n", "two"], field="body"), field="body") == ["one", "two"]
    assert parse_source(str(tmp_path / "a.parquet")).domain == "a"


def test_a_mixture_of_parquet_json_lines_and_text_is_read_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens equal those from JSON lines with the same texts. A duplicate and a binary file are counted and named."""
    mixed, plain = tmp_path / "mixed", tmp_path / "plain"
    mixed.mkdir()
    plain.mkdir()
    (mixed / "a.txt").write_text("a plain text")
    (mixed / "b.jsonl").write_text(json.dumps({"text": "of a line"}) + "\n")
    write(mixed / "c.parquet", ["first row", "second row"])
    write(mixed / "d.parquet", ["first row", "second row"])
    (mixed / "e.pdf").write_bytes(b"%PDF")
    (plain / "all.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("a plain text", "of a line", "first row", "second row"))
    )
    bytes_ = load("bytes")
    one = prepare([f"x={mixed}"], tokenizer=bytes_, out=tmp_path / "one", validation=0.0, progress=True)
    other = prepare([f"x={plain}"], tokenizer=bytes_, out=tmp_path / "other", validation=0.0)
    assert one.domains["x"].train.tokens == other.domains["x"].train.tokens
    assert {str(left) for left in one.sources[0].left_out} == {
        "1 binary (1 .pdf): e.pdf",
        "1 the same bytes as another file (1 .parquet): d.parquet",
    }
    assert "d.parquet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("texts", "field", "kind", "says"),
    [
        (["a", None], "text", None, r"row 2 has no text in column 'text'"),
        (["a"], "body", None, r"has no text column 'text' \(its columns: id \(int64\), body \(string\)\)"),
        ([b"\xff"], "text", pa.binary(), r"text \(binary\)"),
    ],
)
def test_a_table_without_text_is_refused(texts: list[str | None], field: str, kind: object, says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=says):
        read(write(tmp_path / "a.parquet", texts, field=field, kind=kind))


def test_text_that_is_not_utf8_is_named_with_its_row(tmp_path: Path) -> None:
    column = pa.array([b"good", b"b\xffd"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="row 2 is not UTF-8 text: byte 0xff"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("keep", [4, 100, -20])
def test_a_damaged_file_is_named(keep: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [f"text {i}" for i in range(100)])
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet"):
        read(path)
