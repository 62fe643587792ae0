"""The visible keys of each query, cut into rectangles and triangles. The blocks come from arithmetic on positions: no mask tensor
is ever created.

A token sees itself and the tokens of its document before it, or the last `window` of them. The mask between a set of queries and
a set of keys is then a staircase. This staircase consists of rectangles and triangles, which attention kernels compute at full
speed.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Literal, NamedTuple

Segment = tuple[int, int]  # consecutive positions: first and past-the-last
Segments = tuple[Segment, ...]  # in rising order


class MaskBlock(NamedTuple):
    """A block of visible pairs: queries [query, query + queries) of one tensor and keys [key, key + keys) of another, numbered by
    their place in these tensors.

    `sees`: with "all", each query sees all keys. With equally many keys and queries, "past" means that query t sees the first t +
    1 keys, and "future" that it sees all but the first t keys.
    """

    query: int
    queries: int
    key: int
    keys: int
    sees: Literal["all", "past", "future"]

    @property
    def scored(self) -> int:
        """The number of visible pairs of a query and a key."""
        return self.queries * self.keys if self.sees == "all" else self.queries * (self.queries + 1) // 2


class MaskRows(NamedTuple):
    """Rows [first, end) of a batch, and the blocks of visible pairs that each of these rows has."""

    first: int
    end: int
    pairs: tuple[MaskBlock, ...]


class _Spot(NamedTuple):
    """Positions [first, end) of a sequence. Position `first` is entry `local` of the tensor that holds them."""

    local: int
    first: int
    end: int

    def clip(self, first: int, end: int) -> Segment:
        return max(first, self.first), min(end, self.end)


def mask_rows(
    queries: Segments, keys: Segments, *, batch: int, segments: Sequence[tuple[int, ...]] | None = None, window: int | None = None
) -> tuple[MaskRows, ...]:
    """Return the blocks of keys at `keys` that queries at `queries` see, for each row of a batch; neighbouring rows with the same
    blocks are grouped.

    `segments`: the lengths of the documents of each whole row; None: each row is one document.
    """
    if segments is None:
        return (MaskRows(0, batch, mask_blocks(queries, keys, None, window)),)
    assert len(segments) == batch, (len(segments), batch)
    found: list[MaskRows] = []
    for lengths, alike in groupby(segments):
        first = found[-1].end if found else 0
        found.append(MaskRows(first, first + len(list(alike)), mask_blocks(queries, keys, lengths, window)))
    return tuple(found)


@lru_cache(maxsize=4096)  # every layer asks the same
def mask_blocks(
    queries: Segments, keys: Segments, lengths: tuple[int, ...] | None = None, window: int | None = None
) -> tuple[MaskBlock, ...]:
    """Return the blocks of keys at `keys` that queries at `queries` see, in one row whose documents have these `lengths`."""
    whole = max(end for _, end in (*queries, *keys))
    ends = list(accumulate(lengths)) if lengths else [whole]
    assert ends[-1] >= whole, (lengths, whole)
    found: list[MaskBlock] = []
    for first, end in zip([0, *ends], ends, strict=False):
        of_queries = list(_spots(queries, first, end))
        if queries == keys and of_queries and (window is None or end - first <= window):
            length = sum(spot.end - spot.first for spot in of_queries)  # rising positions: causal in the order of the tensor
            found.append(MaskBlock(of_queries[0].local, length, of_queries[0].local, length, "past"))
            continue
        of_keys = list(_spots(keys, first, end)) if of_queries else []
        found += [pair for q in of_queries for k in of_keys for pair in _pairs(q, k, window or end)]
    return tuple(_joined(found))


def _spots(runs: Segments, first: int, end: int) -> Iterator[_Spot]:
    local = 0
    for start, stop in runs:
        low, high = max(start, first), min(stop, end)
        if low < high:
            yield _Spot(local + low - start, low, high)
        local += stop - start


def _pairs(q: _Spot, k: _Spot, window: int) -> Iterator[MaskBlock]:
    """Yield blocks in which position i sees the positions j with i - window < j <= i. The visible pairs of each `window` queries
    form a triangle of the oldest keys, rectangles, and a triangle of the newest keys; each of these is one block."""

    def pair(queries: Segment, keys: Segment, sees: Literal["all", "past", "future"]) -> Iterator[MaskBlock]:
        (i, i_end), (j, j_end) = queries, keys
        if i < i_end and j < j_end:
            yield MaskBlock(q.local + i - q.first, i_end - i, k.local + j - k.first, j_end - j, sees)

    for first in range(q.first, q.end, window):
        end = min(first + window, q.end)
        old, old_end = k.clip(first - window + 1, end - window)
        turn = old + window - 1  # the last query that sees key `old`
        yield from pair((first, turn), (old, old_end), "all")
        yield from pair((turn, turn + old_end - old), (old, old_end), "future")
        yield from pair((first, end), k.clip(end - window, first), "all")
        new, new_end = k.clip(first, end)
        yield from pair((new, new_end), (new, new_end), "past")
        yield from pair((new_end, end), (new, new_end), "all")


def _joined(pairs: Sequence[MaskBlock]) -> Iterator[MaskBlock]:
    last: MaskBlock | None = None
    for pair in pairs:
        if last is None:
            last = pair
        elif last.sees == pair.sees == "all" and last[2:] == pair[2:] and last.query + last.queries == pair.query:
            last = last._replace(queries=last.queries + pair.queries)
        elif last.sees == pair.sees == "all" and last[:2] == pair[:2] and last.key + last.keys == pair.key:
            last = last._replace(keys=last.keys + pair.keys)
        else:
            yield last
            last = pair
    if last is not None:
        yield last
