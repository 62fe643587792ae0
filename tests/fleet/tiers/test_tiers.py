"""The newest complete state among copies that have lost pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.fleet.tiers import Copy, Source, Tier, fall_back, newest, without_nodes, without_piece

NODES = 4
COPIES = st.lists(
    st.builds(Copy, st.sampled_from(Tier), st.integers(0, 5), st.frozensets(st.integers(0, NODES - 1))),
    max_size=8,
    unique_by=lambda copy: (copy.tier, copy.step),
)


def _whole(step: int, copies: list[Copy]) -> bool:
    return any(copy.step == step for copy in copies) and all(
        any(copy.step == step and slot not in copy.missing for copy in copies) for slot in range(NODES)
    )


@pytest.mark.slow
@given(COPIES)
def test_the_newest_whole_step_is_found_and_no_other(copies: list[Copy]) -> None:
    source, whole = newest(copies), [step for step in range(6) if _whole(step, copies)]
    assert (source.step if source else None) == max(whole, default=None)


@pytest.mark.slow
@given(COPIES)
def test_every_piece_comes_from_a_tier_that_has_it(copies: list[Copy]) -> None:
    source = newest(copies)
    if source is None:
        return
    missing = {(copy.tier, copy.step): copy.missing for copy in copies}
    elsewhere = dict(source.elsewhere)
    assert source.tier is not None
    assert all(slot not in missing[elsewhere.get(slot, source.tier), source.step] for slot in range(NODES))


@pytest.mark.slow
@given(COPIES, st.integers(0, 5))
def test_limits_are_kept(copies: list[Copy], step: int) -> None:
    at_most, before = newest(copies, at_most=step), newest(copies, before=step)
    assert at_most is None or at_most.step <= step
    assert before is None or before.step < step
    below = newest(copies, below=Tier.BUDDY)
    assert below is None or below.tier in (Tier.DISK, Tier.STORE)


def test_one_lost_node_leaves_memory_whole_through_its_buddy() -> None:
    copies = without_nodes([Copy(Tier.MEMORY, 9), Copy(Tier.BUDDY, 9)], [2], nodes=NODES, distance=1)
    assert newest(copies) == Source(9, Tier.MEMORY, ((2, Tier.BUDDY),))


def test_a_node_lost_with_its_buddy_takes_memory_along() -> None:
    copies = without_nodes(
        [Copy(Tier.MEMORY, 9), Copy(Tier.BUDDY, 9), Copy(Tier.DISK, 8), Copy(Tier.STORE, 5)], [2, 3], nodes=NODES, distance=1
    )
    assert newest(copies) == Source(5, Tier.STORE)


def test_a_far_buddy_survives_the_loss_of_neighbours() -> None:
    copies = without_nodes([Copy(Tier.MEMORY, 9), Copy(Tier.BUDDY, 9)], [2, 3], nodes=8, distance=4)
    assert newest(copies) == Source(9, Tier.MEMORY, ((2, Tier.BUDDY), (3, Tier.BUDDY)))


def test_falling_back_leaves_what_was_written_together() -> None:
    copies = [Copy(Tier.MEMORY, 9), Copy(Tier.BUDDY, 9), Copy(Tier.BUDDY, 8), Copy(Tier.STORE, 5)]
    assert fall_back(copies, Source(9, Tier.MEMORY)) == Source(5, Tier.STORE)
    assert fall_back(copies[:3], Source(9, Tier.MEMORY)) == Source(8, Tier.BUDDY)
    assert fall_back(copies, Source(5, Tier.STORE)) is None


def test_a_damaged_piece_is_left_out_and_a_damaged_copy_goes() -> None:
    copies = (Copy(Tier.MEMORY, 9), Copy(Tier.STORE, 5))
    assert without_piece(copies, Tier.MEMORY, 9, 1)[0].missing == {1}
    assert without_piece(copies, Tier.MEMORY, 9, None) == copies[1:]
    assert without_piece(copies, Tier.MEMORY, 8, None) == copies
