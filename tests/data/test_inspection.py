import errno
import json
import os
import shutil

import numpy as np
import pytest

from megalith.data.errors import DataError
from megalith.data.inspection import inspect, verify
from megalith.data.manifest import read_manifest
from megalith.data.shards import SplitReader
from megalith.data.tokenizer import load


@pytest.fixture
def copy(prepared, tmp_path):
    return shutil.copytree(prepared, tmp_path / "copy")


def _flip(path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
def test_a_flipped_bit_is_found_and_its_file_named(copy):
    assert verify(copy) == verify(copy, progress=True)
    _flip(copy / "novel-train-00002.bin", 77)
    _flip(copy / "words-validation-00000.idx", 9)
    with pytest.raises(DataError) as error:
        verify(copy)
    assert "novel-train-00002.bin has sha256" in str(error.value)
    assert "words-validation-00000.idx has sha256" in str(error.value)
    assert "novel-train-00001" not in str(error.value)


@pytest.mark.parametrize("reason", [errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC])
def test_data_without_checksums_is_verified_where_nothing_can_be_written(reason, copy, monkeypatch):
    def refuse(path, content):
        raise OSError(reason, os.strerror(reason), str(path))

    for path in copy.glob("*.sum"):
        path.unlink()
    monkeypatch.setattr("megalith.disk.write_whole", refuse)
    if reason == errno.ENOSPC:
        with pytest.raises(OSError, match="No space left"):
            verify(copy)
    else:
        assert verify(copy) == read_manifest(copy)


@pytest.mark.slow
def test_inspection_adds_up(prepared, tokenizer):
    found = inspect(prepared)
    assert found == json.loads(json.dumps(found))
    assert sum(domain["share"] for domain in found["domains"].values()) == pytest.approx(1)
    for name, domain in found["domains"].items():
        for which in ("train", "validation"):
            split = domain[which]
            lengths = [len(_reader(prepared, name, which).document(number)) for number in range(split["documents"])]
            assert split["tokens"] == sum(lengths)
            assert split["document_tokens"]["median"] == np.median(lengths)
            assert split["document_tokens"]["max"] == max(lengths)
            assert split["bytes_per_token"] == pytest.approx(split["bytes"] / (sum(lengths) - len(lengths)))
    assert found["tokenizer"]["fingerprint"] == tokenizer.fingerprint
    assert found["domains"]["novel"]["train"]["samples"][0].startswith("EMMA\n")


def _reader(folder, domain, split):
    return SplitReader(folder, getattr(read_manifest(folder).domains[domain], split))


def test_the_copied_tokenizer_must_be_the_one_the_tokens_are_of(copy):
    load("bytes").save(copy)
    for look in (verify, inspect):
        with pytest.raises(DataError, match=r"tokenizer\.json has fingerprint"):
            look(copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json is missing"):
        verify(copy)


def test_a_folder_that_is_not_prepared_data_says_so(tmp_path):
    with pytest.raises(DataError, match=r"has no manifest\.json"):
        inspect(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        inspect(tmp_path / "none")
    (tmp_path / "manifest.json").write_text('{"version": 2}')
    with pytest.raises(DataError, match="is not a manifest that this version can read: version"):
        inspect(tmp_path)
