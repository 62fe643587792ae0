"""A dry run's tables and picture."""

import xml.etree.ElementTree as ElementTree

import pytest

from megalith.report.dried import COLOURS, course, gap
from megalith.train.meter import CATEGORIES


@pytest.mark.parametrize(
    ("share", "said"), [(None, "–"), (0.0, "none"), (1e-6, "none"), (0.031, "+3.1 %"), (-0.5, "-50.0 %"), (40.0, "41 times")]
)
def test_a_gap_is_a_share_or_none(share: float | None, said: str) -> None:
    assert gap(share) == said


def test_every_category_has_a_colour() -> None:
    assert set(COLOURS) == set(CATEGORIES)


def test_the_course_is_a_whole_picture() -> None:
    moments = [dict.fromkeys(CATEGORIES, 2**30 * at) for at in range(1, 9)]
    picture = course(moments)
    assert ElementTree.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"
    assert "together 40 GiB" in picture
