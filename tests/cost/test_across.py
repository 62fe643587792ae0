"""Waits of sites for each other, by hand and beside what was measured on a wire between two namespaces."""

from typing import Any

import pytest

from megalith.cost.across import GOOD, INTERVALS, ROUNDS, Across, across
from megalith.spec.sites import SitesSpec, fragments, verdict_bytes, wire_bytes

STEP = 0.8
QUICKSTART = {f"blocks.{n}.weight": (1300, 1000) for n in range(5)}
"""Five equal parts, with the parameters of quickstart's model together."""


def _predicted(shapes: dict[str, tuple[int, ...]] = QUICKSTART, step: float = STEP, **given: Any) -> Across:
    sites = SitesSpec.model_validate({"link": {"megabits": 10, "milliseconds": 100}} | given)
    found = across(fragments(shapes, sites), sites, step)
    assert found is not None
    return found


def test_without_overlap_a_site_waits_for_the_transfer_and_a_round_trip() -> None:
    found = _predicted(inner_steps=30)
    (whole,) = fragments(QUICKSTART, SitesSpec())
    assert found.bytes == wire_bytes(whole) + verdict_bytes()
    seconds = found.bytes * 8 / 10e6 + 0.1
    assert found.waited == pytest.approx(seconds) and found.use == pytest.approx(30 * STEP / (30 * STEP + seconds))
    assert found.use == pytest.approx(0.53, abs=0.01) and found.speed == pytest.approx(2 * found.use)


def test_data_parallelism_over_such_a_link_is_hopeless() -> None:
    assert _predicted(inner_steps=1).use < 0.05


def test_a_transfer_hides_behind_the_steps_of_its_overlap() -> None:
    streaming = {"fragments": 5, "bits": 4}
    assert _predicted(inner_steps=30, overlap=5, **streaming).use == 1.0
    found = _predicted(inner_steps=30, overlap=0, **streaming)
    assert found.waited == pytest.approx(found.bytes * 8 / 10e6 + 5 * 0.1), "each of five merges waits"


def test_a_link_that_is_too_slow_holds_the_sites_to_its_rate() -> None:
    """Fragments queue: a round takes as long as its bytes, however much may overlap."""
    found = _predicted(inner_steps=10, fragments=5, overlap=9)
    seconds = found.bytes * 8 / 10e6
    assert 10 * STEP + found.waited == pytest.approx(seconds, rel=2 / ROUNDS)


def test_each_further_site_is_sent_to() -> None:
    two, four = _predicted(inner_steps=30), _predicted(inner_steps=30, count=4)
    assert four.bytes == 3 * two.bytes and four.waited > 2.9 * two.waited


def test_the_shortest_interval_that_pays() -> None:
    found = _predicted(inner_steps=30, fragments=5, overlap=5, bits=4)
    assert found.shortest in INTERVALS and _predicted(inner_steps=found.shortest, fragments=5, overlap=5, bits=4).use >= GOOD
    below = [n for n in INTERVALS if 5 < n < found.shortest]
    assert all(_predicted(inner_steps=n, fragments=5, overlap=5, bits=4).use < GOOD for n in below)
    assert _predicted(inner_steps=30, link={"megabits": 0.01, "milliseconds": 100}).shortest is None


def test_it_is_near_what_was_measured() -> None:
    """1.3 MB of fp32 differences over 10 Mbit/s and 100 ms: 1.73 s exposed of 16.8 s in 30 steps (DiLoCo); none where five fragments in
    4 bits have five steps each."""
    shapes = {f"blocks.{n}.weight": (260, 250) for n in range(5)}
    step = (16.8 - 1.73) / 30
    assert _predicted(shapes, step, inner_steps=30).use == pytest.approx(1 - 1.73 / 16.8, rel=0.05)
    assert _predicted(shapes, step, inner_steps=30, fragments=5, overlap=5, bits=4).waited == 0.0


def test_without_a_link_nothing_is_predicted() -> None:
    assert across(fragments(QUICKSTART, SitesSpec()), SitesSpec(), STEP) is None
