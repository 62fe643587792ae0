import bz2
import gzip
import json
import lzma
import os
import socket
from pathlib import Path

import pytest

from megalith.data.errors import DataError
from megalith.data.manifest import Reading
from megalith.data.sources import Source, documents, parse_source, parse_sources, record, size


def _zstd(content: bytes) -> bytes:
    """Pack as two frames, one after the other."""
    compressor = pytest.importorskip("zstandard", reason="needs the package zstandard").ZstdCompressor(write_checksum=True)
    half = len(content) // 2
    return compressor.compress(content[:half]) + compressor.compress(content[half:])


PACKERS = {".xz": lzma.compress, ".gz": gzip.compress, ".bz2": bz2.compress, ".zst": _zstd}


def _read(path, **reading) -> list[str]:
    return list(documents(Source("x", str(path)), Reading(**reading)))


@pytest.mark.parametrize(
    ("text", "domain"),
    [
        ("books=here/a.txt", "books"),
        ("here/web.v2.jsonl.gz", "web.v2"),
        ("here/a.txt.xz", "a"),
        ("here/WEB.JSONL.GZ", "WEB"),
        ("/srv/linux", "linux"),
        ("bundled:austen", "austen"),
        ("novels=bundled:austen", "novels"),
    ],
)
def test_a_source_names_its_domain(text, domain):
    assert parse_source(text).domain == domain


def test_endings_in_capitals_are_the_same_endings(tmp_path: Path):
    lines = b'{"text": "one"}\n{"text": "two"}\n'
    (tmp_path / "A.JSONL").write_bytes(lines)
    (tmp_path / "B.Jsonl.GZ").write_bytes(gzip.compress(lines))
    (tmp_path / "C.TXT.XZ").write_bytes(lzma.compress(b"three"))
    assert _read(tmp_path) == ["one", "two", "one", "two", "three"]
    assert _read(tmp_path / "B.Jsonl.GZ") == ["one", "two"]


def test_an_existing_path_with_an_equals_sign_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "part=1.txt").write_text("x")
    with pytest.raises(DataError, match=r"Write NAME=part=1\.txt"):
        parse_source("part=1.txt")
    assert parse_source("one=part=1.txt") == Source("one", "part=1.txt")


def test_a_domain_s_name_that_no_file_could_have_is_told_with_its_source():
    with pytest.raises(DataError, match="at most 200 letters") as error:
        parse_sources([f"{'d' * 300}=text.txt", f"{'e' * 200}=text.txt"])
    assert "d=text.txt" in str(error.value) and "does not exist" in str(error.value)


def test_all_missing_sources_are_named_at_once():
    with pytest.raises(DataError) as error:
        parse_sources(["a=nowhere.txt", "bundled:austen", "nor_here.jsonl"])
    assert "nowhere.txt" in str(error.value)
    assert "nor_here.jsonl" in str(error.value)
    with pytest.raises(DataError, match="No source"):
        parse_sources([])


def test_a_bundled_document_is_a_chapter_with_its_title_page():
    chapters = list(documents(parse_source("bundled:austen")))
    assert len(chapters) == 269
    assert sum("CHAPTER I\n" in chapter or "Chapter 1\n" in chapter or "CHAPTER 1\n" in chapter for chapter in chapters) >= 6
    assert chapters[0].startswith("EMMA\n")
    assert all(chapter.lower().count("\nchapter ") <= 1 for chapter in chapters)


@pytest.mark.parametrize("ending", ["", *PACKERS])
def test_json_lines_give_a_document_a_line_however_packed(ending, tmp_path):
    texts = ["one\ntwo", "ünï 你好 🙂", "last"]
    content = "\n".join(json.dumps({"text": text, "id": 1}) for text in texts).encode()
    path = tmp_path / f"x.jsonl{ending}"
    path.write_bytes(PACKERS.get(ending, bytes)(content))
    assert _read(path) == texts


def test_json_lines_take_the_text_from_the_named_field(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"content": "a"}\n\n{"content": "  "}\n{"content": "b"}\n')
    assert _read(path, field="content") == ["a", "b"]
    with pytest.raises(DataError, match=r"x.jsonl:1 has no text in field 'text' \(its fields: content\)"):
        _read(path)


def test_half_a_character_in_json_becomes_a_replacement_character(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a\\ud800b \\ud83d\\ude42"}\n')
    assert _read(path) == ["a\ufffdb 🙂"]


def test_a_line_that_is_not_json_is_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(DataError, match=r"x\.jsonl:2 is not valid JSON"):
        _read(path)


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("blank", ["a\nb\n", "# c\n", "d\n"]),
        ("line", ["a", "b", "# c", "d"]),
        ("file", ["a\nb\n\n# c\n\n\nd\n"]),
        ("heading:#", ["a\nb\n", "# c\n\n\nd\n"]),
        ("delimiter:# c", ["a\nb\n", "d\n"]),
    ],
)
def test_plain_text_is_split_as_asked(split, expected, tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"a\r\nb\r\n\r\n# c\r\n\r\n\r\nd")
    assert _read(path, split=split, minimum=0) == expected


def test_blank_lines_end_a_document_only_when_it_is_long_enough(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("\n\n".join(f"paragraph {number:02d}" for number in range(20)))
    found = _read(path, minimum=100)
    assert all(len(text) >= 100 for text in found[:-1])
    assert "\n\n".join(text.rstrip("\n") for text in found) == path.read_text()


@pytest.mark.parametrize(("split", "says"), [("words", "is not one of"), ("heading:(", "not a regular expression")])
def test_a_wrong_split_says_what_is_possible(split, says, tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("a")
    for given in (path, tmp_path, "bundled:austen"):
        with pytest.raises(DataError, match=says):
            _read(given, split=split)


def test_a_folder_gives_its_text_files_in_order_and_no_binaries(tmp_path):
    files = {
        "b.py": "print()\n",
        "a/z.py": "x = 1\n",
        "a/doc.md": "# t\n",
        "config.json": '{\n "a": 1\n}\n',
        ".git/config": "no\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "link.py").symlink_to(tmp_path / "b.py")
    assert _read(tmp_path) == ["print()\n", '{\n "a": 1\n}\n', "# t\n", "x = 1\n"]
    assert _read(tmp_path, extensions=(".py",)) == ["print()\n", "x = 1\n"]


@pytest.mark.parametrize(("ending", "pack"), [("", bytes), (".gz", gzip.compress)])
@pytest.mark.parametrize("in_folder", [False, True])
@pytest.mark.parametrize("lines", [2, 200_000])  # in the second case the wrong byte lies beyond the first piece that is read
def test_a_file_that_is_not_utf8_is_refused_with_line_and_byte(in_folder, lines, ending, pack, tmp_path):
    path = tmp_path / f"x.txt{ending}"
    before = "déjà vu\n" * lines
    path.write_bytes(pack(before.encode() + b"caf\xe9 au lait\n" + before.encode()))
    (tmp_path / "good.txt").write_text("good")
    offset = len(before.encode()) + 3
    with pytest.raises(DataError, match=rf"x\.txt{ending}:{lines + 1} is not UTF-8 text: byte 0xe9 at offset {offset} .*iconv"):
        _read(tmp_path if in_folder else path)


def test_text_that_ends_within_a_character_is_refused_with_the_byte(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"one\ntwo " + "你".encode()[:2])
    with pytest.raises(DataError, match=r"x\.txt:2 is not UTF-8 text: byte 0xe4 at offset 8 "):
        _read(path)


def test_a_json_line_that_is_not_utf8_is_refused_with_line_and_byte(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"x\.jsonl:2 is not UTF-8 text: byte 0xe9 at offset 27 "):
        _read(path)


def test_a_json_line_nested_too_deeply_is_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b", "more": ' + "[" * 200_000 + "]" * 200_000 + "}\n")
    with pytest.raises(DataError, match=r"x\.jsonl:2 is nested too deeply"):
        _read(path)


def test_text_with_a_zero_byte_alone_is_text_and_a_binary_alone_is_distinguished_from_latin(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"a\0b\n")
    assert _read(tmp_path / "x.txt") == ["a\0b\n"]
    (tmp_path / "x.weights").write_bytes(b"\0\xff\xfe")
    with pytest.raises(
        DataError, match=r"x\.weights is not text: Megalith does not read \.weights files\. Megalith reads JSON lines"
    ):
        _read(tmp_path / "x.weights")


@pytest.mark.parametrize("text", ["{0}", "d={0}"])
def test_a_pipe_a_socket_and_a_device_are_refused_before_they_are_opened(text, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"pipe' is a pipe, as the shell's <\(\.\.\.\) is; .*Write the text to a file"):
        parse_sources([text.format(tmp_path / "pipe")])
    with pytest.raises(DataError, match="/dev/null' is a device"):
        parse_sources([text.format("/dev/null")])
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "s"))
        with pytest.raises(DataError, match="/s' is a socket"):
            parse_sources([text.format(tmp_path / "s")])


def test_a_shell_s_substitution_is_told_to_be_a_pipe():
    reader, writer = os.pipe()
    try:
        with pytest.raises(DataError, match="is a pipe"):  # rather than that "pipe:[123]" names no domain
            parse_sources([f"/dev/fd/{reader}"])
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("how", ["path", "link", "hard link", "folder", "linked folder", "bundled"])
def test_a_source_given_twice_is_refused_whatever_its_name(how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    (tmp_path / "link.txt").symlink_to("texts/a.txt")
    (tmp_path / "hard.txt").hardlink_to("texts/a.txt")
    (tmp_path / "linked").symlink_to("texts")
    file = "texts/a.txt"
    first, second = {
        "path": (file, str(tmp_path / file)),
        "link": (file, "link.txt"),
        "hard link": (file, "hard.txt"),
        "folder": ("texts", "texts/../texts"),
        "linked folder": ("texts", "linked"),
        "bundled": ("bundled:austen", "bundled:austen"),
    }[how]
    with pytest.raises(DataError, match=rf"'{first}' .* and '{second}' \(domain b\) are the same: documents held out"):
        parse_sources([first, f"b={second}"])


@pytest.mark.parametrize(("ending", "pack"), PACKERS.items())
def test_a_truncated_or_garbled_archive_is_named(ending, pack, tmp_path):
    path = tmp_path / f"x.txt{ending}"
    whole = pack(b"some text, long enough to be cut\n" * 99)
    for content in (whole[:-20], whole[: len(whole) // 2 + 1], whole[:20] + b"\xff" * 8 + whole[28:], b"not packed at all"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"x.txt{ending} cannot be unpacked"):
            _read(path)


def test_progress_adds_up_to_the_size_on_disk(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "some words"}\n' * 2000)
    for path in (tmp_path, tmp_path / "a.jsonl"):
        told: list[int] = []
        source = Source("x", str(path))
        list(documents(source, Reading(), told.append))
        assert sum(told) == size(source, Reading())
        assert min(told) >= 0


def test_a_record_changes_with_contents_and_names_but_not_with_the_place(tmp_path):
    def made(folder, name="a.py", text="x"):
        (tmp_path / folder / "src").mkdir(parents=True)
        (tmp_path / folder / "src" / name).write_text(text)
        return record(Source("d", str(tmp_path / folder / "src")), Reading())[0]

    assert made("one") == made("two")
    assert made("three", text="y") != made("four")
    assert made("five", name="b.py") != made("six")
