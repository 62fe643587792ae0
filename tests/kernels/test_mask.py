"""Rectangles and triangles contain each visible pair of tokens once, and no other pair."""

import random
from collections import Counter

import pytest

from megalith.kernels.mask import MaskBlock, Segments, mask_blocks, mask_rows


def positions(runs: Segments) -> list[int]:
    return [position for first, end in runs for position in range(first, end)]


def held(pairs: tuple[MaskBlock, ...], queries: Segments, keys: Segments) -> Counter[tuple[int, int]]:
    """Return the pairs of positions in `pairs`, by definition."""
    of_queries, of_keys = positions(queries), positions(keys)
    shapes = {"all": lambda i, j: True, "past": lambda i, j: j <= i, "future": lambda i, j: j >= i}
    return Counter(
        (of_queries[pair.query + i], of_keys[pair.key + j])
        for pair in pairs
        for i in range(pair.queries)
        for j in range(pair.keys)
        if shapes[pair.sees](i, j)
    )


def seen(queries: Segments, keys: Segments, lengths: tuple[int, ...] | None, window: int | None) -> Counter[tuple[int, int]]:
    """Return the pairs of positions that see each other, found one by one."""
    document = [number for number, length in enumerate(lengths or (10_000,)) for _ in range(length)]
    return Counter(
        (i, j)
        for i in positions(queries)
        for j in positions(keys)
        if document[i] == document[j] and j <= i and (window is None or i - j < window)
    )


def cut(seq: int, chance: random.Random) -> tuple[int, ...]:
    """Return random lengths of documents that fill `seq` tokens."""
    ends = [*sorted(chance.sample(range(1, seq), chance.randint(0, min(6, seq - 1)))), seq]
    return tuple(end - first for first, end in zip([0, *ends], ends, strict=False))


def some_runs(seq: int, chance: random.Random) -> Segments:
    """Return one or two intervals of [0, seq), adjacent or not."""
    a, b, c, d = sorted(chance.choices(range(seq + 1), k=4))
    return tuple(run for run in ((a, b), (c, d)) if run[0] < run[1]) or ((0, seq),)


@pytest.mark.parametrize("seed", range(200))
def test_each_visible_pair_is_held_once_and_no_other(seed):
    chance = random.Random(seed)
    seq = chance.randint(2, 24)
    queries = some_runs(seq, chance)
    keys = queries if chance.random() < 0.3 else some_runs(seq, chance)
    lengths = chance.choice([None, cut(seq, chance)])
    window = chance.choice([None, 1, 2, 3, 5, 11, 30])
    pairs = mask_blocks(queries, keys, lengths, window)
    assert held(pairs, queries, keys) == seen(queries, keys, lengths, window)
    assert sum(pair.scored for pair in pairs) == seen(queries, keys, lengths, window).total()
    assert all(pair.queries == pair.keys for pair in pairs if pair.sees != "all")


def test_a_rank_sees_itself_in_one_call_whatever_lies_between_its_parts():
    runs = ((4, 8), (24, 28))
    assert mask_blocks(runs, runs) == (MaskBlock(0, 8, 0, 8, "past"),)


def test_a_rank_sees_another_in_one_call():
    early, late = ((4, 8), (24, 28)), ((8, 12), (20, 24))
    assert mask_blocks(early, late) == (MaskBlock(4, 4, 0, 8, "all"),)  # the rank's late part sees both parts of the others
    assert mask_blocks(late, early) == (MaskBlock(0, 8, 0, 4, "all"),)  # both parts see the early part of the others


def test_parts_without_a_common_document_make_no_call():
    assert mask_blocks(((8, 12),), ((0, 8),), (8, 4)) == ()


def test_a_window_costs_what_it_shows():
    for seq, window in ((1024, 16), (2048, 16)):
        scored = sum(pair.scored for pair in mask_blocks(((0, seq),), ((0, seq),), None, window))
        assert scored == seq * window - window * (window - 1) // 2


def test_neighbouring_rows_cut_alike_stand_together():
    here = ((0, 8),)
    rows = mask_rows(here, here, batch=4, segments=((8,), (8,), (3, 5), (8,)))
    assert [(row.first, row.end) for row in rows] == [(0, 2), (2, 3), (3, 4)]
    assert rows[0].pairs == rows[2].pairs == (MaskBlock(0, 8, 0, 8, "past"),)
    assert len(rows[1].pairs) == 2
