"""A dry run's tables and picture."""

import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from megalith.cost.predicted import Comparison
from megalith.prove.dryrun import DryRun, RankCounts
from megalith.prove.meter import CATEGORIES, Memory, Work
from megalith.report.dryrun import COLOURS, gap, memory_timeline, page
from megalith.spec.problem import Problem


@pytest.mark.parametrize(
    ("share", "said"), [(None, "–"), (0.0, "none"), (1e-6, "none"), (0.031, "+3.1 %"), (-0.5, "-50.0 %"), (40.0, "41 times")]
)
def test_a_gap_is_a_share_or_none(share: float | None, said: str) -> None:
    assert gap(share) == said


def test_every_category_has_a_colour() -> None:
    assert set(COLOURS) == set(CATEGORIES)


def test_the_memory_timeline_is_a_whole_picture() -> None:
    moments = [dict.fromkeys(CATEGORIES, 2**30 * at) for at in range(1, 9)]
    picture = memory_timeline(moments)
    assert ElementTree.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"
    assert "together 40 GiB" in picture


class Reader(HTMLParser):
    """Records the tags that are open, and the text between them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open += [] if tag == "meta" else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def a_page() -> str:
    """Return the page of a made-up dry run with a line in every table."""
    sizes: dict[str, int] = {name: 2**30 * at for at, name in enumerate(CATEGORIES, 1)}
    every = sum(sizes.values())
    held = Memory(peak=sizes, most=sizes, between=sizes, building=every)
    counted = RankCounts({"data": 3}, ["embedding", "head"], 1000, {}, held, [sizes] * 8, [], Work(5, 2, 3), [])
    figures = {f"memory.{name}": size for name, size in sizes.items()} | {
        "memory.all": every,
        "work.products": 5,
        "work.attention": 2,
    }
    lines = {name: Comparison(name, 1.1 * value, value) for name, value in figures.items()}
    problem = Problem("error", "plan", None, "does not fit <80 GiB", "Use more devices.")
    return page("first & last", DryRun(8, 3, counted, 1.0, 1), lines, 80 * 2**30, [problem])


def test_the_page_has_the_picture_every_table_and_what_does_not_fit() -> None:
    reader = Reader()
    reader.feed(a_page())
    assert reader.open == []
    words = " ".join(reader.words)
    for expected in (
        "Dry run of first & last",
        "rank 3 of 8: data 3",
        "does not fit <80 GiB",
        "+10.0 %",
        "matrix products",
        *CATEGORIES,
    ):
        assert expected in words
    assert "[bold]" not in words
