"""Draws that show every pair of choices, or the reason why a pair has none."""

from collections import Counter

import pytest

from megalith.prove.axes import AXES, Axes, Pair, axes_with_precisions, pairs_of
from megalith.prove.draw import conflict_of, draw, uncovered

SMALL: Axes = {axis: {name: AXES[axis][name] for name in list(AXES[axis])[:2]} for axis in AXES} | {
    "zero": AXES["zero"],
    "pipeline": {name: AXES["pipeline"][name] for name in ("1", "dualpipe")},
    "precision": {name: AXES["precision"][name] for name in ("fp32", "bf16")},
}


def _pair(*choices: str) -> Pair:
    return frozenset((axis, value) for axis, _, value in (choice.partition(": ") for choice in choices))


@pytest.mark.slow
def test_as_many_are_drawn_as_all_pairs_need_and_each_is_needed() -> None:
    """Only the pairs that are refused are left."""
    drawn = draw(None, 0, SMALL)
    left = uncovered(drawn, SMALL)
    assert set(left) == {
        _pair("model: dense", "expert: 2"),
        *(_pair(f"zero: {stage}", "pipeline: dualpipe") for stage in (2, 3)),
        _pair("sites: one that merges", "norm: known late"),
    }
    times = Counter(pair for one in drawn for pair in one.pairs)
    assert all(any(times[pair] == 1 for pair in one.pairs) for one in drawn)


@pytest.mark.slow
def test_the_first_draws_show_most_and_further_ones_follow() -> None:
    few, many = draw(4, 0, SMALL), draw(60, 0, SMALL)
    assert len(uncovered(few, SMALL)) < len(uncovered(many[-4:], SMALL))
    assert len({one.choices for one in many}) == len(many) == 60
    assert len(uncovered(many, SMALL)) == 4


@pytest.mark.slow
def test_rounding_proves_only_pairs_with_what_is_never_exact() -> None:
    plain = {axis: next(iter(values)) for axis, values in AXES.items()}
    exact, rounded = (tuple((plain | {"precision": name}).items()) for name in ("fp32", "bf16"))
    assert len(pairs_of(exact)) == len(AXES) * (len(AXES) - 1) // 2
    assert pairs_of(rounded) == {frozenset({("precision", "bf16"), choice}) for choice in rounded[:-1]}
    streamed = tuple((plain | {"precision": "bf16", "state": "on disk, weights too"}).items())
    assert len(pairs_of(streamed)) == 2 * (len(AXES) - 1) - 1
    assert draw(3, 0, axes_with_precisions("bf16"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (
            _pair("tensor: 2, whole sequence, in pieces", "precision: fp8, inputs kept in fp8"),
            'precision.kept = "fp8": does not work with plan.overlap_tensor = 2: inputs that are sent in pieces are kept wide.',
        ),
        (_pair("model: dense", "expert: 2"), "plan.expert = 2: divides experts among ranks, but the model has no experts."),
        (_pair("sites: two", "norm: known late"), "plan.post_validation = true: may undo an update after"),
        (
            _pair("model: experts", "sites: two, data parallel"),
            'sites.method = "data-parallel": does not support models with experts',
        ),
        (_pair("optimizer: lion", "precision: bf16"), 'optimizer.kind = "lion": amplifies the rounding of bf16'),
    ],
)
def test_a_refused_pair_has_the_reason(pair: Pair, said: str) -> None:
    (problem,) = conflict_of(pair)
    assert str(problem).startswith(said)


@pytest.mark.parametrize(
    "pair",
    [
        _pair("expert: 2", "precision: fp8, tokens sent in fp8"),
        _pair("pipeline: dualpipe", "precision: fp8, inputs kept in fp8"),
        _pair("pipeline: dualpipev", "state: on disk, weights too"),
    ],
)
def test_what_is_compatible_is_found_however_rare(pair: Pair) -> None:
    assert not conflict_of(pair)
