import json
import shutil
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.data.errors import DataError
from megalith.data.manifest import read_manifest
from megalith.data.prepare import prepare
from megalith.data.shards import SplitReader
from megalith.data.stream import NO_TARGET, Sample, Stream
from megalith.data.tokenizer import load
from tests.data.conftest import SEQ_LEN
from tests.processor import cost

GLOBAL_BATCH = 8


def _flat(folder, domain: str, split: str = "train") -> np.ndarray:
    found = getattr(read_manifest(folder).domains[domain], split)
    return SplitReader(folder, found).read(0, found.tokens)


def _key(sample: Sample) -> tuple:
    return sample.domain, sample.tokens.tobytes(), sample.targets.tobytes(), sample.positions.tobytes(), sample.segments


def _domain_epoch(stream: Stream, domain: str, epoch: int) -> list[Sample]:
    """Return all samples of one epoch of one domain in order."""
    size, found, index = stream.epoch_samples[domain], [], 0
    while len(found) < (epoch + 1) * size:
        if stream.domains[stream._phases[0].mixture.place(index)[0]] == domain:
            found.append(stream.sample(index))
        index += 1
    return found[epoch * size :]


@pytest.fixture(scope="module")
def stream(prepared) -> Stream:
    return Stream(prepared, seq_len=SEQ_LEN, seed=5)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_any_number_of_ranks_sees_what_one_rank_sees(prepared, ranks, stream):
    """Each rank opens the folder itself and takes its part of every step's samples."""
    steps = 12
    alone = [_key(stream.sample(index)) for index in range(steps * GLOBAL_BATCH)]
    together: dict[int, tuple] = {}
    for rank in range(ranks):
        own = Stream(prepared, seq_len=SEQ_LEN, seed=5)
        for step in reversed(range(steps)):  # the order in which samples are requested does not matter either
            indices = range(step * GLOBAL_BATCH + rank, (step + 1) * GLOBAL_BATCH, ranks)
            together |= {index: _key(own.sample(index)) for index in indices}
    assert [together[index] for index in range(steps * GLOBAL_BATCH)] == alone


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(stop=st.integers(0, 200))
def test_a_resume_at_any_sample_goes_on_as_if_nothing_had_happened(prepared, stream, stop):
    fingerprint = json.loads(json.dumps(stream.fingerprint))
    resumed = Stream(prepared, seq_len=SEQ_LEN, seed=5)
    resumed.check_same(fingerprint)
    assert [_key(resumed.sample(index)) for index in range(stop, stop + 3)] == [
        _key(stream.sample(index)) for index in range(stop, stop + 3)
    ]


@pytest.mark.parametrize("document_mask", [True, False])
@pytest.mark.parametrize("domain", ["novel", "words"])
def test_every_token_is_a_target_exactly_once_an_epoch(prepared, domain, document_mask):
    stream = Stream(prepared, seq_len=SEQ_LEN, seed=1, weights={"novel": 1, "words": 2}, document_mask=document_mask)
    flat, end = _flat(prepared, domain), stream.end_of_text
    first_of_documents = np.flatnonzero(flat[:-1] == end) + 1
    is_target = np.ones(len(flat), bool)
    is_target[0] = False
    is_target[first_of_documents] = not document_mask
    for epoch in range(2):
        samples = _domain_epoch(stream, domain, epoch)
        targets = np.concatenate([sample.targets for sample in samples])
        assert Counter(targets[targets != NO_TARGET].tolist()) == Counter(flat[is_target].tolist())
        inputs = np.concatenate([sample.tokens for sample in samples])
        padding = len(samples) * SEQ_LEN - (len(flat) - 1)
        assert Counter(inputs.tolist()) == Counter(flat[:-1].tolist()) + Counter({end: padding})


@pytest.mark.slow
def test_every_window_comes_once_an_epoch_and_every_epoch_in_another_order(prepared, stream):
    for domain in stream.domains:
        flat = _flat(prepared, domain)
        windows = [flat[start : start + SEQ_LEN] for start in range(0, len(flat) - 1, SEQ_LEN)]
        windows[-1] = windows[-1][: len(flat) - 1 - (len(windows) - 1) * SEQ_LEN]
        expected = [tuple(window) + (stream.end_of_text,) * (SEQ_LEN - len(window)) for window in windows]
        orders = [[tuple(sample.tokens) for sample in _domain_epoch(stream, domain, epoch)] for epoch in range(2)]
        for order in orders:
            assert sorted(order) == sorted(expected)
        assert orders[0] != orders[1]
        assert orders[0] != expected


@pytest.mark.slow
def test_the_seed_changes_the_order_and_nothing_else(prepared, stream):
    other = Stream(prepared, seq_len=SEQ_LEN, seed=6)
    for domain in stream.domains:
        first, second = ([_key(sample) for sample in _domain_epoch(chosen, domain, 0)] for chosen in (stream, other))
        assert first != second
        assert Counter(first) == Counter(second)


def test_masks_cut_where_documents_end(prepared):
    stream = Stream(prepared, seq_len=SEQ_LEN, weights={"novel": 1, "words": 3})
    crowded = 0
    for index in range(300):
        sample = stream.sample(index)
        assert sum(sample.segments) == SEQ_LEN
        assert min(sample.segments) > 0
        edges = np.cumsum(sample.segments)
        assert sample.positions.tolist() == [place for piece in sample.segments for place in range(piece)]
        padded = sample.targets[-1] == NO_TARGET and sample.tokens[-1] == stream.end_of_text
        inside = edges[:-2] if padded and len(edges) > 1 else edges[:-1]
        assert all(sample.tokens[edge - 1] == stream.end_of_text for edge in inside)
        ends = np.flatnonzero(sample.tokens == stream.end_of_text)
        assert all(sample.targets[ends] == NO_TARGET), "what follows an end of text cannot be known from it"
        assert not any(sample.targets[sample.tokens != stream.end_of_text] == NO_TARGET)
        crowded += len(sample.segments) > 2
    assert crowded > 20, "the test needs windows of several documents"


def test_without_masks_a_sequence_is_one_piece_and_every_token_has_a_target(prepared):
    plain = Stream(prepared, seq_len=SEQ_LEN, seed=5, document_mask=False)
    masked = Stream(prepared, seq_len=SEQ_LEN, seed=5)
    for index in range(200):
        sample, other = plain.sample(index), masked.sample(index)
        assert sample.segments == (SEQ_LEN,)
        assert sample.positions.tolist() == list(range(SEQ_LEN))
        assert (sample.tokens == other.tokens).all()
        kept = other.targets != NO_TARGET
        assert (sample.targets[kept] == other.targets[kept]).all()
        real = int((sample.targets != NO_TARGET).sum())
        assert (sample.tokens[1:real] == sample.targets[: real - 1]).all()


@pytest.mark.parametrize("document_mask", [True, False])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_valid_targets_are_counted_without_reading_tokens(prepared, document_mask, split):
    stream = Stream(prepared, split=split, seq_len=SEQ_LEN, document_mask=document_mask)
    indices = range(400) if split == "train" else range(sum(stream.epoch_samples.values()))
    batch = stream.batch(indices)
    assert stream.valid_targets(indices) == (batch.targets != NO_TARGET).sum()
    assert stream.valid_targets([]) == 0


def test_a_batch_is_its_samples_in_the_order_asked_for(stream):
    indices = [7, 3, 250]
    batch, samples = stream.batch(indices), [stream.sample(index) for index in indices]
    assert batch.tokens.shape == batch.targets.shape == batch.positions.shape == (3, SEQ_LEN)
    assert batch.tokens.dtype == batch.targets.dtype == batch.positions.dtype == np.int64
    for row, sample in enumerate(samples):
        assert (batch.tokens[row] == sample.tokens).all()
        assert (batch.targets[row] == sample.targets).all()
        assert (batch.positions[row] == sample.positions).all()
        assert (batch.segments[row], batch.domains[row]) == (sample.segments, sample.domain)


def test_domains_come_in_proportion_to_their_weights_or_tokens(prepared):
    weighted = Stream(prepared, seq_len=SEQ_LEN, weights={"novel": 3, "words": 1})
    counts = Counter(weighted.sample(index).domain for index in range(400))
    assert counts == {"novel": 300, "words": 100}
    tokens = {name: domain.train.tokens for name, domain in read_manifest(prepared).domains.items()}
    assert Stream(prepared, seq_len=SEQ_LEN).shares == pytest.approx(
        {name: count / sum(tokens.values()) for name, count in tokens.items()}, abs=1e-4
    )
    alone = Stream(prepared, seq_len=SEQ_LEN, weights={"novel": 0, "words": 1})
    assert {alone.sample(index).domain for index in range(100)} == {"words"}


def test_a_samples_domain_does_not_disturb_another_domains_order(prepared):
    """The n-th sample of a domain does not depend on the other domains of the mixture."""
    first = Stream(prepared, seq_len=SEQ_LEN, weights={"novel": 1, "words": 1})
    second = Stream(prepared, seq_len=SEQ_LEN, weights={"novel": 0, "words": 1})
    mixed = [sample for sample in map(first.sample, range(80)) if sample.domain == "words"]
    assert [_key(sample) for sample in mixed] == [_key(second.sample(index)) for index in range(40)]


def test_validation_is_read_once_in_order_and_evenly_when_limited(prepared):
    stream = Stream(prepared, split="validation", seq_len=SEQ_LEN)
    total = sum(stream.epoch_samples.values())
    ranges = [stream.validation_samples(domain) for domain in stream.domains]
    assert [index for indices in ranges for index in indices] == list(range(total))
    for domain, indices in zip(stream.domains, ranges, strict=True):
        tokens = np.concatenate([stream.sample(index).tokens for index in indices])
        flat = _flat(prepared, domain, "validation")
        assert tokens[: len(flat) - 1].tolist() == flat[:-1].tolist()
        assert {stream.sample(index).domain for index in indices} == {domain}
        some = stream.validation_samples(domain, 3)
        assert len(some) == 3
        assert set(some) <= set(indices)
        assert stream.validation_samples(domain, 10**9) == indices
    with pytest.raises(IndexError, match=f"sample {total}: .* has only {total} validation samples"):
        stream.sample(total)
    with pytest.raises(DataError, match=r"'poems' is not a domain.*novel, words"):
        stream.validation_samples("poems")


def test_documents_shorter_than_a_window_and_windows_longer_than_all_data(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": "c"}\n')
    prepare([str(tmp_path / "a.jsonl")], tokenizer=load("bytes"), out=tmp_path / "out", validation=0)
    sample = Stream(tmp_path / "out", seq_len=8).sample(3)  # tokens: a b END c END
    assert sample.tokens.tolist() == [97, 98, 256, 99, 256, 256, 256, 256]
    assert sample.targets.tolist() == [98, 256, NO_TARGET, 256, *[NO_TARGET] * 4]
    assert sample.segments == (3, 1, 4)
    assert sample.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]


def test_changed_data_or_settings_are_refused_with_every_difference(prepared, novel, words, tokenizer, tmp_path):
    saved = Stream(prepared, seq_len=SEQ_LEN, seed=5).fingerprint
    other = Stream(prepared, seq_len=64, seed=6, weights={"novel": 1, "words": 1}, document_mask=False)
    with pytest.raises(DataError) as error:
        other.check_same(saved)
    for said in (
        "seq_len was 32, but is now 64. Set train.seq_len back",
        "seed was 5, but is now 6",
        "weights was",
        "document_mask was True",
    ):
        assert said in str(error.value)
    assert "manifest" not in str(error.value)
    prepare([str(novel), str(words)], tokenizer=load("bytes"), out=tmp_path / "out", shard_tokens=1500, validation=0.1)
    with pytest.raises(DataError) as error:
        Stream(tmp_path / "out", seq_len=SEQ_LEN, seed=5).check_same(saved)
    assert "manifest was" in str(error.value)
    assert f"tokenizer was '{tokenizer.fingerprint}'" in str(error.value)
    with pytest.raises(DataError, match="seed was 'not saved'"):
        Stream(prepared, seq_len=SEQ_LEN, seed=5).check_same({key: value for key, value in saved.items() if key != "seed"})
    with pytest.raises(DataError) as error:
        Stream(prepared, seq_len=SEQ_LEN, seed=5).check_same(saved | {"source": ["mine:Source", 1], "unheard": 2})
    assert "source was ['mine:Source', 1], but is now not set. Restore data.source" in str(error.value)
    assert "unheard was 2, but this version does not know this key" in str(error.value)


def test_a_short_shard_or_another_tokenizer_is_refused_at_opening(prepared, tmp_path):
    folder = shutil.copytree(prepared, tmp_path / "copy")
    shard = folder / "novel-train-00001.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    with pytest.raises(
        DataError, match=f"novel-train-00001.bin has {len(whole) - 2} bytes, but {len(whole)} according to the manifest"
    ):
        Stream(folder, seq_len=SEQ_LEN)
    shard.write_bytes(whole)
    load("bytes").save(folder)
    with pytest.raises(DataError, match=r"tokenizer\.json has fingerprint"):
        Stream(folder, seq_len=SEQ_LEN)


def test_all_problems_of_opening_are_named_at_once(prepared):
    with pytest.raises(DataError) as error:
        Stream(prepared, seq_len=0, weights={"novels": 1, "words": -1})
    for said in (
        "seq_len=0",
        "weights.novels=1 names no domain of the data. Did you mean 'novel'?",
        "weights.words=-1",
        "has no entry for",
    ):
        assert said in str(error.value)
    with pytest.raises(DataError, match="all 0"):
        Stream(prepared, seq_len=8, weights={"novel": 0, "words": 0})


def test_a_folder_without_validation_data_says_so(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": "c"}\n')
    prepare([str(tmp_path / "a.jsonl")], tokenizer=load("bytes"), out=tmp_path / "out", validation=0)
    with pytest.raises(DataError, match="validation share above 0"):
        Stream(tmp_path / "out", split="validation", seq_len=8)


@pytest.mark.slow
def test_a_sample_takes_microseconds(stream):
    """It takes about as long as 40 additions. A thousand would delay a small model's step."""
    stream.batch(range(500))
    assert cost(lambda: stream.batch(range(500)), than=lambda: sum(i + 1 for i in range(500 * 10_000))) < 1
