"""Pictures of goodput: well-formed, self-contained, and true to the numbers."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

from megalith.control.ledger import Cause
from megalith.rehearse.latencies import PROFILES
from megalith.rehearse.scenario import Spent, scenario
from megalith.rehearse.simulate import Life, Simulated, Tried
from megalith.report import goodput
from megalith.spec import cluster as clusters

SECONDS = {"useful": 90.0, "lost steps": 6.0, "recovery": 4.0, "planned": 0.0}
CURVES = (((0.0, 1.0), (86_400.0, 0.95), (172_800.0, 0.9)), ((0.0, 1.0), (86_400.0, 0.91), (172_800.0, 0.92)))


def _simulated() -> Simulated:
    seconds = {Spent(name): value for name, value in SECONDS.items()}
    plan = replace(scenario(clusters.load("h100:64"), days=2, latencies=PROFILES["warm"]), name="16,384 x H100 & more")
    lives = tuple(Life(i, 0.9, seconds, {}, 0, {}, 0, 0, 0, curve) for i, curve in enumerate(CURVES))
    return Simulated(plan, lives, 0.9, (0.85, 0.95), 0.01, seconds)


def test_every_thing_that_time_goes_to_has_a_colour() -> None:
    assert {cause.value for cause in [*Cause, *Spent]} == set(goodput.COLOURS)


def test_the_picture_stands_alone() -> None:
    picture = goodput.simulated(_simulated())
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
    points = [Tried(value, goodput=0.9, band=(0.85, 0.95), per_device=0.8) for value in (600.0, 60.0)]
    picture = goodput.tried(points, x_label="seconds between checkpoints")
    ElementTree.fromstring(picture)
    assert "seconds between checkpoints 60" in picture
    assert "of all devices paid for 80.0 %" in picture
