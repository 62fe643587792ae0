"""A prepared folder whose bytes change under its reader."""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.data import verified_files as module
from megalith.data.errors import AwayDataError, DataError
from megalith.data.inspection import verify
from megalith.data.manifest import Split, read_manifest
from megalith.data.prepare import prepare
from megalith.data.shards import SplitReader
from megalith.data.stream import Stream
from megalith.data.tokenizer import load
from megalith.data.verified_files import BLOCK, BlockChecksums, Damage, DamagedDataError

SHARD = "novel-train-00000"


@pytest.fixture(scope="module")
def source(novel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of several blocks."""
    out = tmp_path_factory.mktemp("source") / "data"
    prepare([f"novel={novel}"], tokenizer=load("bytes"), out=out, shard_tokens=20_000, validation=0.0)
    return out


@pytest.fixture
def data(source: Path, tmp_path: Path) -> Path:
    return shutil.copytree(source, tmp_path / "data")


def _split(folder: Path) -> Split:
    return read_manifest(folder).domains["novel"].train


def _flip(path: Path, place: int) -> None:
    """Flip a bit in place, so that open and mapped files see it."""
    with path.open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, place)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 4]), place)


def _reader(folder: Path, *copies: Path) -> tuple[SplitReader, list[Damage]]:
    damages: list[Damage] = []
    return SplitReader(folder, _split(folder), copies=copies, on_damage=damages.append), damages


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.binary(max_size=2 * BLOCK), max_size=6))
def test_sums_do_not_depend_on_the_pieces_in_which_a_shard_is_written(pieces: list[bytes]) -> None:
    one, several = BlockChecksums(), BlockChecksums()
    one.update(b"".join(pieces))
    for piece in pieces:
        several.update(piece)
    assert one.file_content() == several.file_content()
    assert len(one.file_content()) == 4 * -(-sum(map(len, pieces)) // BLOCK)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_is_read_from_the_copy_and_told_once(
    source: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    hurt = shutil.copytree(source, tmp_path_factory.mktemp("hurt") / "data")
    reader, damages = _reader(hurt, source)
    whole = SplitReader(source, _split(source)).read(0, reader.tokens)
    assert np.array_equal(reader.read(0, reader.tokens), whole)
    assert not damages
    place = data.draw(st.integers(0, (hurt / f"{SHARD}.bin").stat().st_size - 1))
    _flip(hurt / f"{SHARD}.bin", place)
    for _ in range(2):
        assert np.array_equal(reader.read(0, reader.tokens), whole)
    (damage,) = damages
    assert (damage.file, damage.elsewhere) == (f"{SHARD}.bin", source)
    assert f"from byte {place // BLOCK * BLOCK} on" in damage.error


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _alter_index(path: Path) -> None:
    _flip(path.with_suffix(".idx"), 9)


def _alter_sums(path: Path) -> None:
    _flip(path.with_suffix(".sum"), 1)


@pytest.mark.parametrize("hurt", [_cut, Path.unlink, _alter_index, _alter_sums])
def test_whatever_is_wrong_with_a_shard_the_copy_is_read_and_without_one_nothing(hurt, source: Path, data: Path) -> None:
    hurt(data / f"{SHARD}.bin")
    whole, _ = _reader(source)
    reader, damages = _reader(data, source)
    stop = _split(source).shards[0].tokens
    assert np.array_equal(reader.read(0, stop), whole.read(0, stop))
    assert np.array_equal(reader.documents_between(0, stop), whole.documents_between(0, stop))
    assert [damage.elsewhere for damage in damages] == [source]
    alone, damages = _reader(data)
    with pytest.raises(DamagedDataError, match=r"novel-train-00000.*data verify"):
        (alone.documents_between if hurt is _alter_index else alone.read)(0, stop)
    assert [damage.elsewhere for damage in damages] == [None]


def test_what_was_not_damaged_is_read_where_it_always_was(source: Path, data: Path) -> None:
    _flip(data / f"{SHARD}.bin", 5)
    reader, damages = _reader(data)
    first = _split(data).shards[0].tokens
    assert np.array_equal(reader.read(first, reader.tokens), _reader(source)[0].read(first, reader.tokens))
    assert not damages


def test_both_copies_wrong_in_one_block_is_the_end_and_in_two_is_not(source: Path, data: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(source, tmp_path / "copy")
    _flip(data / f"{SHARD}.bin", 0)
    _flip(copy / f"{SHARD}.bin", 2 * BLOCK)
    reader, damages = _reader(data, copy)
    assert np.array_equal(reader.read(0, 10), _reader(source)[0].read(0, 10))
    assert len(damages) == 1
    _flip(copy / f"{SHARD}.bin", 0)
    with pytest.raises(DamagedDataError, match=r"data/novel-train-00000.bin has changed.*copy/novel-train-00000.bin has changed"):
        reader.read(0, 10)


def test_a_folder_that_is_away_is_waited_for_and_not_called_damaged(source: Path, data: Path, tmp_path: Path) -> None:
    damages = list[Damage]()
    stream = Stream(data, seq_len=64, seed=3, on_damage=damages.append)
    expected = stream.sample(7).tokens
    fresh = Stream(data, seq_len=64, seed=3, on_damage=damages.append)
    data.rename(tmp_path / "elsewhere")
    assert np.array_equal(stream.sample(7).tokens, expected), "what is open is read on"
    with pytest.raises(AwayDataError, match="is missing") as caught:
        fresh.sample(7)
    assert caught.value.path.parent == data
    with pytest.raises(AwayDataError, match="does not exist"):
        Stream(data, seq_len=64)
    assert np.array_equal(Stream(data.parent / "elsewhere", seq_len=64, seed=3, copies=[source]).sample(7).tokens, expected)
    assert damages == []


def test_a_disk_that_fails_is_away_and_a_file_that_is_missing_beside_its_manifest_is_not(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int, size: int, offset: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    reader, damages = _reader(data)
    with monkeypatch.context() as failing:
        failing.setattr(module.os, "pread", fail)
        with pytest.raises(AwayDataError, match="Input/output error"):
            reader.read(0, 10)
    assert damages == []
    (data / f"{SHARD}.bin").unlink()
    reader, damages = _reader(data)
    with pytest.raises(DamagedDataError, match="is missing"):
        reader.read(0, 10)
    assert len(damages) == 1


def test_a_stream_gives_the_same_samples_from_a_damaged_folder_and_its_copy(source: Path, data: Path) -> None:
    damages: list[Damage] = []
    stream, whole = (
        Stream(data, seq_len=64, seed=3, copies=[source], on_damage=damages.append),
        Stream(source, seq_len=64, seed=3),
    )
    path, begin, end = stream.bytes_of(7)
    assert (path.parent, end - begin) == (data, 2 * 65)
    assert np.array_equal(np.fromfile(path, "<u2")[begin // 2 : end // 2][:-1], whole.sample(7).tokens)
    _flip(path, begin)
    for index in range(20):
        assert np.array_equal(stream.sample(index).tokens, whole.sample(index).tokens)
    assert [damage.file for damage in damages] == [path.name]
    assert stream.fingerprint == whole.fingerprint


def test_a_missing_shard_is_refused_at_opening_unless_a_copy_has_it(source: Path, data: Path, tmp_path: Path) -> None:
    (data / f"{SHARD}.bin").unlink()
    with pytest.raises(DataError, match="is missing"):
        Stream(data, seq_len=64)
    Stream(data, seq_len=64, copies=[source])
    other = tmp_path / "other"
    (tmp_path / "words.txt").write_text("not the novel\n\n" * 200)
    prepare([f"novel={tmp_path / 'words.txt'}"], tokenizer=load("bytes"), out=other)
    with pytest.raises(DataError, match=r"holds different data from .*data\.copies"):
        Stream(source, seq_len=64, copies=[other])


def test_data_without_sums_is_read_unchecked_until_they_are_written(data: Path) -> None:
    written = {path: path.read_bytes() for path in data.glob("*.sum")}
    for path in written:
        path.unlink()
    stream = Stream(data, seq_len=64)
    assert stream.unchecked == [path.with_suffix(".bin").name for path in sorted(written)]
    _flip(data / f"{SHARD}.bin", 5)
    SplitReader(data, _split(data)).read(0, 10)
    with pytest.raises(DataError, match="has sha256"):
        verify(data)
    _flip(data / f"{SHARD}.bin", 5)
    verify(data)
    assert {path: path.read_bytes() for path in data.glob("*.sum")} == written
    _flip(data / f"{SHARD}.sum", 5)
    with pytest.raises(DataError, match=f"{SHARD}.sum does not match its shard"):
        verify(data)
