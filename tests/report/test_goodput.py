"""Pictures of goodput are well-formed, self-contained, and agree with the numbers."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megalith.control.ledger import Cause
from megalith.rehearse.latencies import PROFILES
from megalith.rehearse.scenario import TimeUse, scenario
from megalith.rehearse.simulate import Life, SimulationResult, SweepPoint
from megalith.report import goodput
from megalith.spec import cluster as clusters

SECONDS = {"useful": 90.0, "lost steps": 6.0, "recovery": 4.0, "planned": 0.0}
CURVES = (((0.0, 1.0), (86_400.0, 0.95), (172_800.0, 0.9)), ((0.0, 1.0), (86_400.0, 0.91), (172_800.0, 0.92)))


def _simulated() -> SimulationResult:
    seconds = {TimeUse(name): value for name, value in SECONDS.items()}
    plan = replace(scenario(clusters.load("h100:64"), days=2, latencies=PROFILES["warm"]), name="16,384 x H100 & more")
    lives = tuple(Life(i, 0.9, seconds, curve=curve) for i, curve in enumerate(CURVES))
    return SimulationResult(plan, lives, 0.9, (0.85, 0.95), 0.01, seconds)


def _tried(marks: Sequence[tuple[float, str]] = ()) -> str:
    points = [SweepPoint(value, goodput=0.9, band=(0.85, 0.95), per_device=0.8) for value in (60.0, 1.0)]
    return goodput.sweep(points, title="a cluster, 5 days: goodput", x_label="minutes between checkpoints", marks=marks)


def test_every_thing_that_time_goes_to_has_a_colour() -> None:
    assert {cause.value for cause in [*Cause, *TimeUse]} == set(goodput.COLOURS)


@pytest.mark.parametrize("account", [Cause, TimeUse])
def test_no_two_things_that_time_goes_to_share_a_colour(account: type[Cause | TimeUse]) -> None:
    used = [goodput.COLOURS[what.value] for what in account]
    assert len(set(used)) == len(used)


def test_a_picture_says_what_it_shows() -> None:
    """A picture has a title, names of both axes, a line at 100 %, and a name for every curve."""
    for picture, curves in (
        (goodput.simulation(_simulated()), {"first seed", "1 other seed"}),
        (
            _tried(marks=[(10.0, "Young: 10")]),
            {"goodput", "of all devices paid for", "goodput, 5th to 95th percentile of the seeds"},
        ),
    ):
        root = ElementTree.fromstring(picture)
        words = {found.text for found in root.iter("{http://www.w3.org/2000/svg}text")}
        assert any("days:" in word for word in words)
        assert words >= curves
        assert words & {"days", "minutes between checkpoints"}
        assert words & {"goodput so far", "share of the wall time"}
        (level,) = (line for line in root.iter("{http://www.w3.org/2000/svg}line") if line.attrib.get("class") == "level")
        ticks = {found.text: float(found.attrib["y"]) for found in root.iter("{http://www.w3.org/2000/svg}text")}
        assert float(level.attrib["y1"]) == pytest.approx(ticks["100.0 %"] - 4, abs=0.2)


def test_marked_values_are_named_without_covering_each_other() -> None:
    picture = _tried(marks=[(4.48, "Young: 4.48"), (4.43, "Daly: 4.43"), (4.5, "best: 4.5")])
    root = ElementTree.fromstring(picture)
    places = [float(e.attrib["y"]) for e in root.iter("{http://www.w3.org/2000/svg}text") if ": 4.4" in (e.text or "")]
    assert len(places) == len(set(places)) == 2
    assert picture.count('class="mark"') == 3


def test_the_picture_stands_alone() -> None:
    picture = goodput.simulation(_simulated())
    root = ElementTree.fromstring(picture)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "<style>" in picture
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")


def test_bars_are_shares_of_the_wall_time() -> None:
    picture = goodput.shares({"run": SECONDS})
    for words in ("run: 90.0 %", "lost steps 6.0 %", "recovery 4.0 %", "10.0 %"):
        assert words in picture
    assert "planned" not in picture


def test_a_run_that_lost_nothing_is_drawn_too() -> None:
    ElementTree.fromstring(goodput.shares({"run": {"useful": 5.0}}))


def test_what_was_tried_is_drawn_in_order_with_its_band() -> None:
    picture = _tried()
    ElementTree.fromstring(picture)
    assert "minutes between checkpoints 60" in picture
    assert "of all devices paid for 80.0 %" in picture
