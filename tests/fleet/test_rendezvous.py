"""Rendezvous in a store that earlier starts used: the ranks are threads, and the store is a dictionary."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from megalith.fleet.rendezvous import agree
from tests.fleet.stores import Dictionary
from tests.patience import PATIENCE


def _meet(store: Dictionary, world: int, value: str, *, late: float = 0.0) -> list[str]:
    def rank(number: int) -> str:
        time.sleep(late * (world - number))
        return agree(store, value if number == 0 else "not mine to say", rank=number, world=world, seconds=PATIENCE)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(rank, range(world)))


def test_all_ranks_get_what_rank_0_says_whoever_comes_first() -> None:
    assert _meet(Dictionary(), 4, "a", late=0.03) == ["a"] * 4
    assert _meet(Dictionary(), 1, "alone") == ["alone"]


def test_no_start_takes_the_word_of_an_earlier_one() -> None:
    store = Dictionary()
    for value in ("first", "second", "third"):
        assert _meet(store, 3, value, late=0.02) == [value] * 3


def test_words_of_a_start_that_broke_off_disturb_nobody() -> None:
    store = Dictionary()
    store.set("hello/1", "of one that died before it was answered")
    store.set("hello/2", "dead")
    store.set("answer/dead", "oldmeeting old")
    store.set("thanks/oldmeeting/2", "")
    assert _meet(store, 3, "new", late=0.02) == ["new"] * 3


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(TimeoutError, match=r"ranks 1, 2 of 3 did not arrive within 0\.1 s"):
        agree(Dictionary(), "x", rank=0, world=3, seconds=0.1)
