import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.data.manifest import Split
from megalith.data.prepare import prepare
from megalith.data.shards import SplitReader, SplitWriter
from megalith.data.tokenizer import load

DOCUMENTS = st.lists(st.lists(st.integers(1, 60_000), max_size=12), min_size=1, max_size=20)


def _write(folder, documents, shard_tokens, dtype="<u2") -> Split:
    writer = SplitWriter(folder, "x-train", dtype=np.dtype(dtype), shard_tokens=shard_tokens, end_of_text=0)
    for document in documents:
        writer.write(np.array(document, dtype), text_bytes=3)
    assert writer.documents == len(documents)
    return writer.close()


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(documents=DOCUMENTS, shard_tokens=st.integers(1, 40), data=st.data())
def test_what_is_written_is_read_from_any_place_across_any_shards(tmp_path_factory, documents, shard_tokens, data):
    folder = tmp_path_factory.mktemp("shards")
    split = _write(folder, documents, shard_tokens)
    reader = SplitReader(folder, split)
    ended = [[*document, 0] for document in documents]
    flat = np.array([token for document in ended for token in document])
    begins = np.cumsum([0, *map(len, ended)])[:-1]
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(flat))] * 2)))
    if start < stop:
        assert reader.read(start, stop).tolist() == flat[start:stop].tolist()
    assert reader.documents_between(start, stop).tolist() == [b for b in begins.tolist() if start <= b < stop]
    assert [reader.document(number).tolist() for number in range(len(documents))] == ended
    assert reader.document_lengths(1000).tolist() == [len(document) for document in ended]
    assert (split.tokens, split.documents, split.bytes) == (len(flat), len(documents), 3 * len(documents))


def test_a_shard_is_full_at_its_limit_unless_one_document_is_longer(tmp_path):
    split = _write(tmp_path, [[1] * 4, [2] * 4, [3] * 30, [4], [5]], 10)
    assert [(shard.tokens, shard.documents) for shard in split.shards] == [(10, 2), (31, 1), (4, 2)]


@pytest.mark.parametrize(("dtype", "width"), [("<u2", 2), ("<u4", 4)])
def test_digests_and_sizes_are_those_of_the_files(dtype, width, tmp_path):
    (shard,) = _write(tmp_path, [[1, 2], [3]], 100, dtype).shards
    for name, digest in ((shard.file, shard.sha256), (shard.index, shard.index_sha256)):
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest
    assert (tmp_path / shard.file).read_bytes() == np.array([1, 2, 0, 3, 0], dtype).tobytes()
    assert (tmp_path / shard.file).stat().st_size == 5 * width
    assert np.fromfile(tmp_path / shard.index, "<i8").tolist() == [0, 3, 5]


def test_a_split_without_documents_has_no_files(tmp_path):
    assert _write(tmp_path, [], 10) == Split()
    assert not any(tmp_path.iterdir())


def test_a_reader_keeps_few_files_open(tmp_path, monkeypatch):
    monkeypatch.setattr("megalith.data.verified_files.MAX_FILES", 4)
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"{i} " * 1500 for i in range(40)))
    folder = tmp_path / "data"
    manifest = prepare([f"d={text}"], tokenizer=load("bytes"), out=folder, shard_tokens=5_000, validation=0)
    split = manifest.domains["d"].train
    assert len(split.shards) > 10
    reader = SplitReader(folder, split)
    before = len(list(Path("/proc/self/fd").iterdir()))
    whole = reader.read(0, reader.tokens)
    assert len(whole) == reader.tokens
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4
