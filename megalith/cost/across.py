"""Time that sites wait for each other at merges over a link: step by step, as the trainer sends and merges. Arithmetic only, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megalith.spec.sites import Fragment, SitesSpec, sent_after, verdict_bytes, wire_bytes

ROUNDS = 20
"""Rounds that are followed: a link that is too slow falls behind by more in each."""
INTERVALS = (1, 2, 5, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 750, 1000)
GOOD = 0.99
"""Share of the time in which a site computes that is good enough."""


@dataclass(frozen=True)
class Across:
    """Prediction for a run across sites. `bytes`: those that a site sends in a round of `inner_steps` steps; `waited`: mean seconds that it
    waits in one; `use`: share of the time in which it computes."""

    sites: int
    inner_steps: int
    bytes: int
    waited: float
    use: float
    shortest: int | None
    """The shortest of INTERVALS with a use of GOOD, everything else as it is; None if none is."""

    @property
    def speed(self) -> float:
        """Tokens a second of all sites over those of one alone."""
        return self.sites * self.use

    def to_json(self) -> dict[str, Any]:
        """Return everything by name."""
        return {**vars(self), "speed": self.speed}


def across(fragments: Sequence[Fragment], sites: SitesSpec, step: float) -> Across | None:
    """Predict a run whose sites take `step` seconds for a step; None where the run file names no link."""
    if sites.link is None:
        return None
    fitting = (n for n in INTERVALS if n >= sites.fragments and n > sites.overlap)
    candidates = (sites.model_copy(update={"inner_steps": n}) for n in fitting)
    shortest = next((one.inner_steps for one in candidates if _use(fragments, one, step) >= GOOD), None)
    size, use = sum(_bytes(one, sites) for one in fragments), _use(fragments, sites, step)
    waited = sites.inner_steps * step * (1 / use - 1)
    return Across(sites.count, sites.inner_steps, size, waited, use, shortest)


def _bytes(fragment: Fragment, sites: SitesSpec) -> int:
    """Return the most that a site sends at a merge: its difference to each other site, and, if it decides, the verdict."""
    return (sites.count - 1) * (wire_bytes(fragment) + verdict_bytes())


def _use(fragments: Sequence[Fragment], sites: SitesSpec, step: float) -> float:
    """Follow ROUNDS rounds. What is sent queues for the link; a merge needs it and the verdict, which follows it back: a round trip."""
    assert sites.link is not None
    rate, delay = 1e6 * sites.link.megabits / 8, 1e-3 * sites.link.milliseconds
    now = free = waited = 0.0
    under_way: dict[int, tuple[int, float]] = {}  # fragment -> the step that merges it, and when it has arrived
    for done in range(1, ROUNDS * sites.inner_steps + 1):
        now += step
        merging = [under_way.pop(number)[1] for number, (due, _) in list(under_way.items()) if due == done]
        for arrived in merging:
            waited += max(0.0, arrived - now)
            now = max(now, arrived)
        for number in sent_after(done, sites):
            free = max(free, now) + _bytes(fragments[number], sites) / rate
            if sites.overlap:
                under_way[number] = done + sites.overlap, free + delay
            else:
                waited, now = waited + free + delay - now, free + delay
    return (now - waited) / now
