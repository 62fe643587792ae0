"""Waits of sites for each other, computed by hand and compared with measurements on a wire between two namespaces."""

from itertools import product
from typing import Any

import pytest

from megalith.cost.across import (
    CHOSEN,
    FRAGMENTS,
    GOOD,
    HEADERS,
    HEADROOM,
    INTERVALS,
    MAX_INTERVAL,
    MIN_ROUNDS,
    OVERLAPS,
    PACKET,
    ROUNDS,
    SPARSE,
    Across,
    across,
    choose,
)
from megalith.spec.sites import SitesSpec, fragments, verdict_bytes, wire_bytes

STEP = 0.8
QUICKSTART = {f"blocks.{n}.weight": (1300, 1000) for n in range(5)}
"""Five equal parts that together have the parameters of quickstart's model."""


def _predicted(
    shapes: dict[str, tuple[int, ...]] = QUICKSTART, step: float = STEP, *, steps: int | None = None, **given: Any
) -> Across:
    sites = SitesSpec.model_validate({"link": {"megabits": 10, "milliseconds": 100}} | given)
    found = across(shapes, sites, step, steps=steps)
    assert found is not None
    return found


RATE = 10e6 / 8 * (PACKET - HEADERS) / PACKET
SLOW_START = sum(0.1 - packets * PACKET / RATE for packets in (10, 20, 40, 80))
"""Seconds of round trips in which TCP sends 10 packets, then 20, 40 and 80: fewer than the link could carry."""


def _transfer(size: float) -> float:
    """Return the seconds until the reply to `size` bytes that are sent after a pause."""
    return size / RATE + SLOW_START + 0.1


def test_without_overlap_a_site_waits_for_the_transfer_and_a_round_trip() -> None:
    found = _predicted(inner_steps=30)
    (whole,) = fragments(QUICKSTART, SitesSpec())
    assert found.bytes == wire_bytes(whole) + verdict_bytes()
    seconds = _transfer(found.bytes)
    assert found.waited == pytest.approx(seconds) and found.use == pytest.approx(30 * STEP / (30 * STEP + seconds))
    assert found.use == pytest.approx(0.52, abs=0.01) and found.speed == pytest.approx(2 * found.use)


def test_data_parallelism_over_such_a_link_is_hopeless() -> None:
    assert _predicted(inner_steps=1).use < 0.05


def test_data_parallelism_sends_all_gradients_in_every_step() -> None:
    """A run that merges after each step has its own name, bytes and waits, and no other interval is proposed."""
    found, merged = _predicted(method="data-parallel"), _predicted(inner_steps=1)
    assert (found.bytes, found.waited, found.use) == (merged.bytes, merged.waited, merged.use)
    assert (found.method, merged.method) == ("data parallelism", "a merge after each step")
    quick = {"megabits": 1000, "milliseconds": 10}
    assert _predicted(method="data-parallel", link=quick).shortest is None
    assert _predicted(inner_steps=1, link=quick).shortest is not None


def test_a_transfer_hides_behind_the_steps_of_its_overlap() -> None:
    streaming: dict[str, Any] = {"fragments": 5, "bits": 4}
    assert _predicted(inner_steps=30, overlap=5, **streaming).use == 1.0
    found = _predicted(inner_steps=30, overlap=0, **streaming)
    assert found.waited == pytest.approx(5 * _transfer(found.bytes / 5)), "each of five merges waits"


def test_a_link_that_is_too_slow_holds_the_sites_to_its_rate() -> None:
    """Fragments queue: a round takes as long as its bytes, whatever the overlap."""
    found = _predicted(inner_steps=10, fragments=5, overlap=9)
    seconds = found.bytes / RATE
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


@pytest.mark.parametrize("given", [{"fragments": 5, "overlap": 5, "bits": 4}, {"bits": 4}], ids=str)
@pytest.mark.parametrize("steps", [100, 120, 1000])
def test_an_interval_that_is_named_helps_this_run_to_its_end(given: dict[str, Any], steps: int) -> None:
    """A short run's final merge counts, and an interval that is longer than the run is not named."""
    found = _predicted(inner_steps=30, steps=steps, **given)
    if found.shortest is not None:
        assert found.shortest <= steps and _predicted(inner_steps=found.shortest, steps=steps, **given).use >= GOOD
    assert steps > 120 or found.shortest is None


def test_the_method_chosen_for_a_short_run_counts_its_final_merge() -> None:
    sites = SitesSpec.model_validate({"link": {"megabits": 1000, "milliseconds": 100}})
    chosen = choose(QUICKSTART, sites, 0.2, free=CHOSEN, rounds_well=False, longest=300)
    assert across(QUICKSTART, chosen, 0.2, steps=300).use >= GOOD  # type: ignore[union-attr]


def test_it_is_near_what_was_measured() -> None:
    """1.3 MB of fp32 differences over 10 Mbit/s and 100 ms: 1.73 s are exposed in 16.8 s of 30 steps (DiLoCo). With five fragments in 4
    bits and five steps for each, nothing is exposed."""
    shapes = {f"blocks.{n}.weight": (260, 250) for n in range(5)}
    step = (16.8 - 1.73) / 30
    assert _predicted(shapes, step, inner_steps=30).use == pytest.approx(1 - 1.73 / 16.8, rel=0.05)
    assert _predicted(shapes, step, inner_steps=30, fragments=5, overlap=5, bits=4).waited == 0.0


def test_without_a_link_nothing_is_predicted() -> None:
    assert across(QUICKSTART, SitesSpec(), STEP) is None


LINKS = {"slow": (10, 100), "slower": (1, 100), "far": (1000, 400), "near": (100_000, 0.1)}


def _chosen(link: tuple[float, float], *, free: tuple[str, ...] = CHOSEN, rounds_well: bool = False, **given: Any) -> SitesSpec:
    megabits, milliseconds = link
    sites = SitesSpec.model_validate({"link": {"megabits": megabits, "milliseconds": milliseconds}} | given)
    return choose(QUICKSTART, sites, STEP, free=free, rounds_well=rounds_well)


def _use_of(sites: SitesSpec, *, share: float = 1.0) -> float:
    """The use at a share of the link's rate."""
    assert sites.link is not None
    link = sites.link.model_copy(update={"megabits": share * sites.link.megabits})
    found = across(QUICKSTART, sites.model_copy(update={"link": link}), STEP)
    assert found is not None
    return found.use


@pytest.mark.slow
@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_the_method_chosen_for_a_link_waits_little_and_no_shorter_interval_does(link: tuple[float, float]) -> None:
    """This compares every method of the search."""
    found = _chosen(link)
    assert _use_of(found, share=HEADROOM) >= GOOD
    for interval in INTERVALS[: INTERVALS.index(found.inner_steps)]:
        for overlap, parts, bits in product(OVERLAPS, FRAGMENTS, (4, 8, 32)):
            if overlap < interval and parts <= min(interval, len(QUICKSTART)):
                other = {"inner_steps": interval, "overlap": overlap, "fragments": parts, "bits": bits}
                assert _use_of(found.model_copy(update=other), share=HEADROOM) < GOOD, other
    least = found.model_copy(update={"overlap": 0, "fragments": 1})
    assert least == found or _use_of(least, share=HEADROOM) < GOOD, "no more is changed than the link asks for"


SLOWEST = (0.05, 100)


@pytest.mark.slow
def test_few_elements_are_sent_where_all_would_need_a_long_interval() -> None:
    found = _chosen(SLOWEST)
    assert SPARSE.items() <= found.model_dump().items() and _use_of(found, share=HEADROOM) >= GOOD
    assert found.inner_steps <= MAX_INTERVAL
    sites, least = SitesSpec.model_validate({"link": found.link}), MIN_ROUNDS * found.inner_steps
    ends = (MIN_ROUNDS - 1, least)
    short, long = (choose(QUICKSTART, sites, STEP, free=CHOSEN, rounds_well=False, longest=n) for n in ends)
    assert short.top_k is None and long == found, "a short run would end before most elements were sent"
    for key, value in (("momentum", 0.9), ("error_feedback", True), ("top_k", None)):
        all_of_them = _chosen(SLOWEST, **{key: value})
        assert all_of_them.top_k is None and all_of_them.inner_steps > MAX_INTERVAL, f"the run file sets {key}"
    assert _chosen(LINKS["slower"]).top_k is None


@pytest.mark.slow
def test_sites_are_eager_where_a_round_trip_takes_many_steps() -> None:
    """Each of the two keys keeps sites from that. Waits are those of any method with this overlap."""
    far: dict[str, Any] = {"link": {"megabits": 1000, "milliseconds": 900}, "lr": 0.7}

    def found(**given: Any) -> SitesSpec:
        return choose(QUICKSTART, SitesSpec.model_validate(far | given), 0.1, free=CHOSEN, rounds_well=False)

    assert not found(staleness=2).eager, "merges that may miss a site cannot correct its step"
    eager = found()
    assert eager.eager and eager.overlap > max(OVERLAPS) and not _chosen(LINKS["slow"]).eager
    for given in ({"mixing": 0.5}, {"eager": False}):
        without = found(**given)
        assert not without.eager and without.overlap <= max(OVERLAPS)
        assert across(QUICKSTART, without, 0.1).use < GOOD < across(QUICKSTART, eager, 0.1).use  # type: ignore[union-attr]
    same = eager.model_copy(update={"eager": False})
    assert across(QUICKSTART, same, 0.1).use == across(QUICKSTART, eager, 0.1).use  # type: ignore[union-attr]


def test_what_a_run_file_says_is_kept() -> None:
    kept = {"inner_steps": 7, "bits": 8, "lr": 0.5}
    found = _chosen(LINKS["slow"], free=("fragments", "overlap"), **kept)
    assert kept.items() <= found.model_dump().items() and found.overlap > 0
    assert _chosen(LINKS["slow"], free=(), inner_steps=3).inner_steps == 3


def test_two_bits_are_for_differences_that_bear_them() -> None:
    fits = {"free": ("bits",), "inner_steps": 20, "fragments": 5, "overlap": 3}
    assert _chosen(LINKS["slower"], **fits).bits == 4
    assert _chosen(LINKS["slower"], rounds_well=True, **fits).bits == 2


@pytest.mark.slow
def test_a_link_that_is_too_slow_for_all_gets_the_method_with_the_most_use() -> None:
    found = _chosen((0.01, 100))
    assert _use_of(found) < GOOD and found.inner_steps == INTERVALS[-1] and SPARSE.items() <= found.model_dump().items()


def test_the_end_of_a_run_merges_all_of_the_model() -> None:
    sites = SitesSpec.model_validate(
        {"link": {"megabits": 10, "milliseconds": 100}, "inner_steps": 6, "fragments": 5, "overlap": 2, "bits": 4}
    )
    found = across(QUICKSTART, sites, STEP, steps=12)
    assert found is not None and _use_of(sites) == 1.0
    waited = _transfer(found.bytes / 5) + 4 * (found.bytes / 5 / RATE + 0.1)
    assert 12 * STEP * (1 / found.use - 1) == pytest.approx(waited, rel=0.05), "what the last step sent, and four more one by one"


def test_bytes_are_those_saved_against_gradients_after_each_step() -> None:
    found = _predicted(inner_steps=30, fragments=5, overlap=5, bits=2)
    assert found.instead == 30 * 4 * 5 * 1300 * 1000 and 400 < found.instead / found.bytes < 30 * 16
    assert found.method == "Streaming DiLoCo" and _predicted(inner_steps=30).method == "DiLoCo"
