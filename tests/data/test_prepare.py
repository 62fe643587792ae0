import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from megalith.data.errors import DataError
from megalith.data.inspection import verify
from megalith.data.manifest import Reading, read_manifest
from megalith.data.prepare import prepare
from megalith.data.shards import SplitReader
from megalith.data.sources import documents, parse_source
from megalith.data.tokenizer import load
from tests.patience import PATIENCE

BYTES = load("bytes")


def _lines(path, *texts: str) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def _texts(folder, domain: str, split: str) -> list[str]:
    manifest = read_manifest(folder)
    reader = SplitReader(folder, getattr(manifest.domains[domain], split))
    tokenizer = load(folder)
    found = [reader.document(number) for number in range(reader.documents)]
    assert all(ids[-1] == tokenizer.end_of_text for ids in found)
    return [tokenizer.decode(ids[:-1]) for ids in found]


def _contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_document_is_in_one_split_once_and_in_order(prepared, novel, words):
    for source in (novel, words):
        expected = list(documents(parse_source(str(source))))
        train, validation = (_texts(prepared, source.stem, split) for split in ("train", "validation"))
        assert sorted(train + validation) == sorted(expected)
        assert train == [text for text in expected if text in set(train)]
        assert validation == [text for text in expected if text in set(validation)]
        assert len(validation) >= 1


def test_the_manifest_counts_what_lies_there(prepared, tokenizer):
    manifest = verify(prepared)
    assert set(manifest.domains) == {"novel", "words"}
    assert manifest.tokenizer == tokenizer.record
    assert load(prepared).fingerprint == tokenizer.fingerprint
    for domain, name, split in manifest.splits():
        texts = _texts(prepared, domain, name)
        assert split.documents == len(texts)
        assert split.bytes == sum(len(text.encode()) for text in texts)
        assert split.tokens == sum(len(tokenizer.encode(text)) + 1 for text in texts)
        assert len(split.shards) > 1 or split.tokens <= 1500


def test_the_same_is_prepared_byte_for_byte_anywhere(prepared, novel, words, tokenizer, tmp_path):
    moved = tmp_path / novel.name
    shutil.copy(novel, moved)
    prepare([str(words), str(moved)], tokenizer=tokenizer, out=tmp_path / "b", shard_tokens=1500, validation=0.1)
    assert _contents(tmp_path / "b") == _contents(prepared)


def test_preparing_again_writes_nothing_and_says_so(tmp_path, capsys):
    source = _lines(tmp_path / "a.jsonl", "one", "two")
    first = prepare([source], tokenizer=BYTES, out=tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert prepare([source], tokenizer=BYTES, out=tmp_path / "out", progress=True) == first
    assert "already prepared" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_a_folder_prepared_otherwise_is_kept_unless_told(tmp_path, tokenizer):
    source = _lines(tmp_path / "a.jsonl", "one", "two")
    prepare([source], tokenizer=BYTES, out=tmp_path / "out")
    before = _contents(tmp_path / "out")
    reading = Reading(minimum=5)
    with pytest.raises(DataError, match=r"tokenizer .* now .*; seed 0, now 3; minimum 2000, now 5.*--overwrite"):
        prepare([source], tokenizer=tokenizer, out=tmp_path / "out", seed=3, reading=reading)
    _lines(tmp_path / "a.jsonl", "one", "too")
    with pytest.raises(DataError, match=r"sources a=a.jsonl .*, now a=a.jsonl"):
        prepare([source], tokenizer=BYTES, out=tmp_path / "out")
    assert _contents(tmp_path / "out") == before
    prepare([source], tokenizer=tokenizer, out=tmp_path / "out", overwrite=True)
    assert _texts(tmp_path / "out", "a", "train") == ["one"]
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "out"}


def test_a_damaged_folder_is_prepared_again(tmp_path):
    source = _lines(tmp_path / "a.jsonl", "one", "two")
    prepare([source], tokenizer=BYTES, out=tmp_path / "out")
    before = _contents(tmp_path / "out")
    (tmp_path / "out" / "a-train-00000.bin").write_bytes(b"")
    prepare([source], tokenizer=BYTES, out=tmp_path / "out")
    assert _contents(tmp_path / "out") == before


def test_files_that_are_not_prepared_data_are_never_touched(tmp_path):
    source = _lines(tmp_path / "a.jsonl", "one", "two")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    for out in (tmp_path / "out", tmp_path / "a.jsonl"):
        with pytest.raises(DataError, match=r"Choose a"):
            prepare([source], tokenizer=BYTES, out=out, overwrite=True)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "mine"


def test_a_mount_point_is_refused_before_the_work_unless_it_holds_the_data(tmp_path, monkeypatch):
    source, out = _lines(tmp_path / "a.jsonl", "one", "two"), tmp_path / "out"
    (tmp_path / "link").symlink_to("out")
    monkeypatch.setattr("os.path.ismount", lambda path: path == out)
    monkeypatch.setattr("megalith.data.prepare._write_domains", lambda *_: pytest.fail("the text is encoded"))
    for given in (out, tmp_path / "link"):
        with pytest.raises(DataError, match=rf"{given} is a mount point.*Choose a folder in it"):
            prepare([source], tokenizer=BYTES, out=given)
    monkeypatch.undo()
    prepare([source], tokenizer=BYTES, out=out)
    monkeypatch.setattr("os.path.ismount", lambda path: path == out)
    prepare([source], tokenizer=BYTES, out=out)
    with pytest.raises(DataError, match="out is a mount point"):
        prepare([source], tokenizer=BYTES, out=out, seed=1, overwrite=True)


@pytest.mark.slow
def test_an_error_in_the_last_document_leaves_nothing_behind(tmp_path):
    path = tmp_path / "a.jsonl"
    _lines(path, *(f"text {number}" for number in range(9000)))
    with path.open("a") as file:
        file.write("{broken")
    with pytest.raises(DataError, match=r"a\.jsonl:9001"):
        prepare([str(path)], tokenizer=BYTES, out=tmp_path / "out", shard_tokens=1000)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_a_killed_prepare_leaves_no_manifest_and_the_next_one_succeeds(tmp_path):
    source, out = _lines(tmp_path / "a.jsonl", *("some text " * 3 for _ in range(50))), tmp_path / "out"
    killed_before_the_last_document = (
        "import os, signal, sys; from megalith.data import prepare, tokenizer;"
        "prepare._write_last = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL);"
        "prepare.prepare(sys.argv[1:2], tokenizer=tokenizer.load('bytes'), out=sys.argv[2], shard_tokens=100)"
    )
    child = subprocess.run(
        [sys.executable, "-c", killed_before_the_last_document, source, str(out)], timeout=PATIENCE, check=False
    )
    assert child.returncode == -signal.SIGKILL
    assert not out.exists()
    assert list(tmp_path.glob(".out.partial/*.bin"))
    assert not list(tmp_path.rglob("manifest.json"))
    prepare([source], tokenizer=BYTES, out=out, shard_tokens=100)
    verify(out)
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "out"}


def test_two_processes_do_not_prepare_the_same_folder_at_once(tmp_path):
    source = _lines(tmp_path / "a.jsonl", "one", "two")
    (tmp_path / ".out.partial").mkdir()
    held = os.open(tmp_path / ".out.partial", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(DataError, match="is being prepared by another process"):
        prepare([source], tokenizer=BYTES, out=tmp_path / "out")
    os.close(held)
    prepare([source], tokenizer=BYTES, out=tmp_path / "out")


def test_a_folder_that_cannot_be_made_is_named_as_it_was_typed(tmp_path):
    source, out = _lines(tmp_path / "a.jsonl", "one", "two"), tmp_path / ("d" * 250)
    with pytest.raises(OSError, match="cannot be made") as error:
        prepare([source], tokenizer=BYTES, out=out)
    assert error.value.filename == str(out)


@pytest.mark.parametrize("count", [2, 3, 10])
@pytest.mark.parametrize("validation", [1e-9, 0.5, 0.999])
def test_two_documents_are_enough_for_both_splits(count, validation, tmp_path):
    source = _lines(tmp_path / "a.jsonl", *map(str, range(count)))
    prepare([source], tokenizer=BYTES, out=tmp_path / "out", validation=validation)
    train, validated = _texts(tmp_path / "out", "a", "train"), _texts(tmp_path / "out", "a", "validation")
    assert train
    assert validated
    assert sorted(train + validated) == sorted(map(str, range(count)))


def test_a_single_document_holds_out_its_end(tmp_path):
    source = _lines(tmp_path / "a.jsonl", "x" * 90 + "y" * 10)
    prepare([source], tokenizer=BYTES, out=tmp_path / "out", validation=0.1)
    assert _texts(tmp_path / "out", "a", "train") == ["x" * 90]
    assert _texts(tmp_path / "out", "a", "validation") == ["y" * 10]


def test_a_single_short_document_keeps_a_token_for_training(tmp_path):
    source = _lines(tmp_path / "a.jsonl", "abc")
    prepare([source], tokenizer=BYTES, out=tmp_path / "out", validation=0.99)
    assert _texts(tmp_path / "out", "a", "train") == ["a"]
    assert _texts(tmp_path / "out", "a", "validation") == ["bc"]


def test_no_validation_is_possible(tmp_path):
    source = _lines(tmp_path / "a.jsonl", "one", "two")
    manifest = prepare([source], tokenizer=BYTES, out=tmp_path / "out", validation=0)
    assert manifest.domains["a"].validation.documents == 0
    assert _texts(tmp_path / "out", "a", "train") == ["one", "two"]


def test_the_seed_chooses_about_the_share_asked_for(tmp_path):
    source = _lines(tmp_path / "a.jsonl", *map(str, range(1000)))
    held = []
    for seed in (1, 2):
        prepare([source], tokenizer=BYTES, out=tmp_path / f"{seed}", validation=0.1, seed=seed)
        held.append(set(_texts(tmp_path / f"{seed}", "a", "validation")))
        assert 60 < len(held[-1]) < 140
    assert held[0] != held[1]


def test_sources_of_one_name_are_one_domain(tmp_path):
    sources = [f"web={_lines(tmp_path / 'b.jsonl', '1', '2')}", f"web={_lines(tmp_path / 'a.jsonl', '3')}"]
    manifest = prepare(sources, tokenizer=BYTES, out=tmp_path / "out", validation=0)
    assert list(manifest.domains) == ["web"]
    assert _texts(tmp_path / "out", "web", "train") == ["1", "2", "3"]


def test_all_options_out_of_range_are_named_at_once(tmp_path):
    with pytest.raises(DataError) as error:
        prepare(["bundled:austen"], tokenizer=BYTES, out=tmp_path / "out", validation=1.5, shard_tokens=0)
    assert "validation=1.5" in str(error.value)
    assert "shard_tokens=0" in str(error.value)


def test_a_wrong_split_is_refused_before_a_folder_is_read(tmp_path):
    with pytest.raises(DataError, match="split='words' is not one of"):
        prepare([_mixed_folder(tmp_path / "d")], tokenizer=BYTES, out=tmp_path / "out", reading=Reading(split="words"))
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_domain_without_text_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(DataError, match="domain empty has no documents"):
        prepare([str(tmp_path / "empty.txt")], tokenizer=BYTES, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _mixed_folder(path):
    path.mkdir()
    (path / "a.txt").write_text("one text")
    _lines(path / "b.jsonl", "two", "three")
    (path / "c.arrow").write_bytes(b"PAR1")
    return str(path)


def test_what_is_left_out_is_told_and_in_the_manifest(tmp_path, capsys):
    source = _mixed_folder(tmp_path / "d")
    manifest = prepare([source], tokenizer=BYTES, out=tmp_path / "out", progress=True)
    assert f"{source}: left out 1 binary (1 .arrow): c.arrow" in capsys.readouterr().err
    assert [str(one) for one in read_manifest(tmp_path / "out").sources[0].left_out] == ["1 binary (1 .arrow): c.arrow"]
    prepare([source], tokenizer=BYTES, out=tmp_path / "again")
    assert _contents(tmp_path / "again") == _contents(tmp_path / "out")
    assert prepare([source], tokenizer=BYTES, out=tmp_path / "out") == manifest


def test_a_manifest_from_before_left_out_was_said_reads_and_is_not_written_anew(tmp_path, capsys):
    source = _mixed_folder(tmp_path / "d")
    prepare([source], tokenizer=BYTES, out=tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    old = json.loads(path.read_text())
    del old["sources"][0]["left_out"]
    path.write_text(json.dumps(old, indent=1, ensure_ascii=False) + "\n")
    before = path.read_text()
    assert read_manifest(tmp_path / "out").text() == before
    prepare([source], tokenizer=BYTES, out=tmp_path / "out", progress=True)
    told = capsys.readouterr().err
    assert "left out 1 binary" in told
    assert "already prepared" in told
    assert path.read_text() == before


def test_a_manifest_of_sources_read_whole_has_no_key_for_what_was_left_out(prepared):
    assert "left_out" not in (prepared / "manifest.json").read_text()


def test_a_copy_of_a_file_is_read_once_so_that_no_text_is_in_both_splits(tmp_path, capsys):
    texts = [f"text {number}" for number in range(40)]
    (tmp_path / "d").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        _lines(tmp_path / "d" / name, *texts)
    for name in ("empty.txt", "void.txt"):
        (tmp_path / "d" / name).write_text("")
    prepare([str(tmp_path / "d")], tokenizer=BYTES, out=tmp_path / "out", validation=0.5, progress=True)
    train, validation = (_texts(tmp_path / "out", "d", split) for split in ("train", "validation"))
    assert sorted(train + validation) == sorted(texts)
    assert "left out 1 the same bytes as another file (1 .jsonl): b.jsonl" in capsys.readouterr().err


def test_a_file_of_a_folder_is_not_read_again_as_a_source(tmp_path):
    (tmp_path / "d").mkdir()
    inside = _lines(tmp_path / "d" / "a.jsonl", "one", "two", "three")
    with pytest.raises(
        DataError, match=r"a\.jsonl' holds only text that is also in another source: .* has the same bytes as .*held out"
    ):
        prepare([f"a={tmp_path / 'd'}", f"b={inside}"], tokenizer=BYTES, out=tmp_path / "out")
    _lines(tmp_path / "d" / "b.jsonl", "four")
    prepare([f"b={tmp_path / 'd'}", f"a={inside}"], tokenizer=BYTES, out=tmp_path / "out", validation=0)
    assert _texts(tmp_path / "out", "a", "train") == ["one", "two", "three"]
    assert _texts(tmp_path / "out", "b", "train") == ["four"]


def test_a_name_that_is_not_utf8_can_be_prepared(tmp_path):
    folder, file = tmp_path / "d\udce9", tmp_path / "caf\udce9.txt"
    folder.mkdir()
    (folder / "caf\udce9.txt").write_text("one")
    file.write_text("two")
    prepare([f"folder={folder}", f"file={file}"], tokenizer=BYTES, out=tmp_path / "out", validation=0)
    assert [source.name for source in read_manifest(tmp_path / "out").sources] == ["caf\\udce9.txt", "d\\udce9"]
    assert _texts(tmp_path / "out", "folder", "train") == ["one"]


def test_a_copy_of_a_source_is_refused(tmp_path):
    first = _lines(tmp_path / "a.jsonl", "one", "two")
    second = shutil.copy(first, tmp_path / "b.jsonl")
    with pytest.raises(DataError, match=r"b\.jsonl has the same bytes as .*a\.jsonl.*Give each text once"):
        prepare([first, str(second)], tokenizer=BYTES, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_full_disk_is_told_with_the_folder_and_the_size_wanted(tmp_path, monkeypatch):
    source = _lines(tmp_path / "a.jsonl", *("some text " * 50 for _ in range(40_000)))
    free = 4_000_000

    def settle(file):
        file.close()
        if sum(path.stat().st_size for path in tmp_path.glob(".out.partial/*")) > free:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("megalith.data.shards.settle", settle)
    with pytest.raises(DataError) as error:
        prepare([source], tokenizer=BYTES, out=tmp_path / "out", shard_tokens=500_000, validation=0)
    told = re.search(
        r"out has no room \(No space left on device\) after ([\d,]+) bytes.* will take about ([\d,]+)", str(error.value)
    )
    assert told
    written, wanted = (int(number.replace(",", "")) for number in told.groups())
    assert free < written < 2 * free
    assert 20_000_000 < wanted < 60_000_000  # 40,000 documents of 501 tokens, two bytes each
    assert f"Make room in {tmp_path}" in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl"}
