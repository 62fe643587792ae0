"""Changes of mixture and sequence length in the middle of a run: nothing is lost, nothing is read twice."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.data.errors import DataError
from megalith.data.manifest import read_manifest
from megalith.data.shards import SplitReader
from megalith.data.stream import NO_TARGET, PhaseChange, Stream

lengths = st.integers(5, 90)


def _weights(folder, shares) -> dict[str, float]:
    return dict(zip(read_manifest(folder).domains, shares, strict=False))


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.data())
def test_every_token_is_a_target_once_a_pass_whatever_the_phases(prepared, data):
    names = list(read_manifest(prepared).domains)
    shares = st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=len(names), max_size=len(names))
    firsts = sorted(data.draw(st.sets(st.integers(1, 300), max_size=3)))
    phases = [PhaseChange(first, data.draw(lengths), _weights(prepared, data.draw(shares))) for first in firsts]
    stream = Stream(prepared, seq_len=data.draw(lengths), seed=3, phases=phases, weights=_weights(prepared, data.draw(shares)))
    seen: dict[str, list[int]] = defaultdict(list)
    ids = {
        name: (reader := SplitReader(prepared, read_manifest(prepared).domains[name].train)).read(0, reader.tokens)
        for name in names
    }
    for index in range(400):
        sample, (domain, length, runs) = stream.sample(index), stream._place(index)
        assert len(sample.tokens) == length == sum(sample.segments) and sample.domain == names[domain]
        wanted = [phase.seq_len for phase in phases if phase.first <= index]
        assert length == (wanted[-1] if wanted else stream.seq_len)
        for run in runs:
            text = ids[sample.domain][run.start : run.start + run.count + 1]
            assert (sample.tokens[run.at : run.at + run.count] == text[:-1]).all()
            targets = sample.targets[run.at : run.at + run.count]
            assert ((targets == text[1:]) | (targets == NO_TARGET)).all()
            assert sample.positions[run.at] == 0, "a document does not go on in what was put behind it"
            seen[sample.domain] += range(run.start, run.start + run.count)
        assert (sample.targets >= 0).sum() == stream.valid_targets([index])
    for name, places in seen.items():
        whole = len(ids[name]) - 1
        for begin in range(0, len(places), whole):
            part = places[begin : begin + whole]
            assert len(set(part)) == len(part), "read twice in one pass"
            if len(part) == whole:
                assert set(part) == set(range(whole)), "left out of a pass"


def test_a_phase_of_the_same_data_changes_no_sample(prepared):
    plain = Stream(prepared, seq_len=32, seed=3)
    split = Stream(prepared, seq_len=32, seed=3, phases=[PhaseChange(37, 32, None), PhaseChange(101, 32, plain.shares)])
    for index in range(200):
        assert (plain.sample(index).tokens == split.sample(index).tokens).all()


def test_each_phase_keeps_its_own_shares(prepared):
    names = list(read_manifest(prepared).domains)
    first = {name: float(number == 0) + 1 for number, name in enumerate(names)}
    second = {name: float(number == len(names) - 1) for number, name in enumerate(names)}
    stream = Stream(prepared, seq_len=16, weights=first, phases=[PhaseChange(100, 16, second), PhaseChange(150, 16, first)])
    counts = [Counter(stream.sample(i).domain for i in range(*span)) for span in ((0, 100), (100, 150), (150, 250))]
    assert counts[1] == {names[-1]: 50}
    for count in (counts[0], counts[2]):
        for name in names:
            assert abs(count[name] - 100 * first[name] / sum(first.values())) <= 1


def test_shorter_samples_take_a_window_apart_in_its_order(prepared):
    (name, *others) = read_manifest(prepared).domains
    only = {name: 1.0} | dict.fromkeys(others, 0.0)
    long, short = (
        Stream(prepared, seq_len=64, weights=only),
        Stream(prepared, seq_len=64, weights=only, phases=[PhaseChange(3, 16, only)]),
    )
    parts = np.concatenate([short.sample(3 + number).tokens for number in range(4)])
    assert (parts == long.sample(3).tokens).all()


def test_a_checkpoint_holds_to_the_phases_that_had_begun(prepared):
    one, two = PhaseChange(50, 16, None), PhaseChange(80, 64, None)
    plain, both = Stream(prepared, seq_len=32), Stream(prepared, seq_len=32, phases=[one, two])
    assert "phases" not in plain.fingerprint
    both.check_same(plain.fingerprint, samples=50)
    plain.check_same(both.fingerprint, samples=50)
    with pytest.raises(DataError, match="phases was 'not saved'"):
        both.check_same(plain.fingerprint, samples=51)
    with pytest.raises(DataError, match=r"phases was \[\[50, 16, .*, but is now not set\. Restore the entries of data\.phases"):
        plain.check_same(both.fingerprint, samples=51)
    Stream(prepared, seq_len=32, phases=[one, PhaseChange(80, 8, None)]).check_same(both.fingerprint, samples=80)
