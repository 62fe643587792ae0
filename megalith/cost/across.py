"""Simulation of the time that sites wait for each other at merges over a link, choice of a merge method that keeps waits short, and the
gain over a single site. Arithmetic only, no torch."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megalith.check.sites import made_apart
from megalith.spec.model import MoeSpec
from megalith.spec.run import RunSpec
from megalith.spec.sites import FULL, Fragment, SitesSpec, fragments, part_of, sent_after, verdict_bytes, wire_bytes
from megalith.spec.sizes import model_parameters

ROUNDS = 20
"""Number of rounds that are simulated. A link that is too slow falls further behind in each round."""
LONG = 100
"""Number of rounds beyond which the merge at the end of a run is neglected."""
INTERVALS = (1, 2, 5, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 750, 1000)
GOOD = 0.99
"""A method is good if a site computes during at least this share of the time."""
HEADROOM = 0.8
"""Share of a link's rate that the choice of a method assumes; lost packets and other traffic take the rest."""
CHOSEN = ("inner_steps", "fragments", "overlap", "bits")
"""Keys of `[sites]` that are chosen if a run file leaves them out."""
SPARSE: dict[str, Any] = {"top_k": 64, "bits": 2, "lr": 1.0, "momentum": 0.0, "feedback_decay": 0.95}
"""Values of the sparse method (SparseLoCo, arXiv:2508.15706), which are only chosen together."""
MIN_ROUNDS = 640
"""Minimum number of rounds of a run with the sparse method: ten times the number of rounds that send every element once."""
MAX_INTERVAL = 100
"""Largest interval, in steps, at which sending all elements is preferred to the sparse method."""
FRAGMENTS, OVERLAPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16), (0, 1, 2, 3, 5, 7, 10)
"""Values of `fragments` and `overlap` that are tried; weights arrive at most ten steps late."""
EAGER_OVERLAPS = (15, 20, 30, 50, 75, 100)
"""Values of `overlap` that are also tried with `eager`, because eager sites lose no training while they wait."""

KEPT = ("count", "site", "addresses", "each", "link", "tls")
"""Keys of `[sites]` with the same meaning whether weights or gradients are exchanged."""

PACKET, HEADERS, WINDOW, PAUSE = 1500, 52, 10, 0.2
"""Bytes of a packet; bytes of a packet's IP and TCP headers; packets in TCP's initial window (RFC 6928); and the length of a pause, in
seconds beyond a round trip, after which TCP starts with the initial window again (RFC 5681, section 4.1; Linux's minimum time-out)."""

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of every merged tensor, by its name in the whole model."""


@dataclass(frozen=True)
class Across:
    """Prediction for a run across sites. `bytes`: bytes that a site sends in a round of `inner_steps` steps; `instead`: bytes that data
    parallelism with fp32 gradients sends in this number of steps; `waited`: mean seconds that a site waits per round; `use`: share of the
    time in which a site computes."""

    sites: int
    inner_steps: int
    fragments: int
    overlap: int
    bits: int
    top_k: int | None
    eager: bool
    bytes: int
    instead: int
    waited: float
    use: float
    shortest: int | None
    """The shortest of INTERVALS with which sites compute for at least the share GOOD of the time, if nothing else changes; None if no
    interval is long enough, or if sites exchange gradients."""
    gradients: bool = False
    """True if gradients are exchanged."""

    @property
    def method(self) -> str:
        """The published name of the method."""
        if self.gradients:
            return "data parallelism"
        if self.fragments > 1 or self.overlap:
            return "Streaming DiLoCo" if self.top_k is None else "Streaming SparseLoCo"
        if self.top_k is not None:
            return "SparseLoCo"
        return "DiLoCo" if self.inner_steps > 1 else "a merge after each step"

    @property
    def speed(self) -> float:
        """Tokens a second of all sites, divided by the tokens a second of a single site."""
        return self.sites * self.use

    def to_json(self) -> dict[str, Any]:
        """Return everything by name."""
        return {**vars(self), "method": self.method, "speed": self.speed}


@dataclass(frozen=True)
class LinkChoice:
    """Predictions for a run across sites. `said`: prediction with the run file's table [sites]. `chosen`: the run file's table, with
    missing keys chosen for the link, and `proposed`: the prediction with `chosen`; both are None if no key is missing. `gain`: tokens/s
    of all sites (as proposed, else as in the file), divided by the tokens/s of one site that trains the whole batch; None if one site
    cannot train it. `together`: prediction if sites exchange gradients in every step; None if the run cannot exchange gradients, or
    already does. `merging`: prediction if sites merge weights instead of exchanging gradients, with keys chosen for the link; None if
    they already merge weights, or compute for nearly all of the time."""

    said: Across
    chosen: SitesSpec | None
    proposed: Across | None
    gain: float | None
    together: Across | None = None
    merging: Across | None = None

    def to_json(self) -> dict[str, Any]:
        """Return everything by name."""
        return {
            "across": self.said.to_json(),
            "proposed": None if self.proposed is None else self.proposed.to_json(),
            "gain": self.gain,
            "together": None if self.together is None else self.together.to_json(),
            "merging": None if self.merging is None else self.merging.to_json(),
        }


def across(shapes: Shapes, sites: SitesSpec, step: float, *, steps: int | None = None, packet: int = PACKET) -> Across | None:
    """Predict a run whose sites take `step` seconds for a step; None for one site, or if the run file names no link.

    `steps`: number of steps of the run. The last step merges the whole model; this merge is predicted only if the run has at most LONG
    rounds. `steps` = None: the run has more than LONG rounds. `packet`: bytes of the link's packets.
    """
    if sites.link is None or sites.count == 1:
        return None
    longest = 10**9 if steps is None else steps
    fitting = (n for n in INTERVALS if max(sites.fragments, sites.overlap + 1) <= n <= longest and not sites.exchanges_gradients)
    cut = fragments(shapes, sites)
    candidates = (sites.model_copy(update={"inner_steps": n}) for n in fitting)
    shortest = next((one.inner_steps for one in candidates if _use(cut, one, step, _end(one, longest), packet) >= GOOD), None)
    use = _use(cut, sites, step, _end(sites, longest), packet)
    return Across(
        sites.count, sites.inner_steps, sites.fragments, sites.overlap, sites.bits, sites.top_k, sites.eager,
        bytes=sum(_bytes(one, sites) for one in cut),
        instead=(sites.count - 1) * sites.inner_steps * sum(4 * piece.numel for one in cut for piece in one.pieces),
        waited=sites.inner_steps * step * (1 / use - 1), use=use, shortest=shortest,
        gradients=sites.exchanges_gradients,
    )  # fmt: skip


def link_choice(run: RunSpec, step: float, alone: Callable[[], float | None], *, exact: bool = True) -> LinkChoice | None:
    """Predict the sites of a run whose slowest site takes `step` seconds for a step; None without a link or with one site.
    `alone` returns the seconds of a step of one site that trains the whole batch, or None if no site can. `exact`: also choose data
    parallelism, where it suits the link and the run file sets no key of merges."""
    model, sites, steps = run.model.build(), run.sites, run.train.steps
    shapes = {name: each.shape for name, each in model_parameters(model).items()}
    said = None if sites is None else across(shapes, sites, step, steps=steps)
    if sites is None or said is None:
        return None
    rounds_well, free = run.optimizer.kind == "muon", left_out(sites)
    chosen = choose(shapes, sites, step, free=free, rounds_well=rounds_well, longest=steps) if free else None
    together = _together(run, sites, experts=any(isinstance(block.mlp, MoeSpec) for block in model.blocks))
    if exact and together is not None and chosen is not None and sites.model_fields_set <= {*KEPT} and _is_every_step(chosen):
        chosen = together  # the same bytes, and no outer optimizer
    merging = None
    if said.gradients and said.use < GOOD:
        merging = choose(shapes, _with_kept(sites), step, free=CHOSEN, rounds_well=rounds_well, longest=steps)
    proposed, beside, instead = (
        None if one is None else across(shapes, one, step, steps=steps) for one in (chosen, together, merging)
    )
    single = alone()
    gain = None if single is None else single * (proposed or said).use / step
    return LinkChoice(said, chosen, proposed, gain, beside, instead)


def left_out(sites: SitesSpec) -> tuple[str, ...]:
    """Return the keys that a table of sites leaves out, so that values are chosen for its link."""
    if sites.link is None or sites.count == 1 or sites.exchanges_gradients:
        return ()
    return tuple(key for key in CHOSEN if key not in sites.model_fields_set)


def _with_kept(sites: SitesSpec, **values: Any) -> SitesSpec:
    """A table of sites with the keys in KEPT of another one, and with `values`."""
    return SitesSpec(**{key: getattr(sites, key) for key in KEPT if key in sites.model_fields_set}, **values)


def _together(run: RunSpec, sites: SitesSpec, *, experts: bool) -> SitesSpec | None:
    """The run's table of sites, changed to exchange gradients; None if sites already exchange gradients, or if the run cannot exchange
    them. `experts`: True if the model has experts."""
    guarded = run.fleet.recover and run.fleet.verify_every > 0
    if sites.exchanges_gradients or guarded or any(made_apart(run, experts=experts)):
        return None
    return _with_kept(sites, method="data-parallel")


def _is_every_step(sites: SitesSpec) -> bool:
    """True if sites exchange all weights after each step and wait for the merge."""
    return (sites.inner_steps, sites.fragments, sites.overlap, sites.bits, sites.top_k) == (1, 1, 0, FULL, None)


def choose(
    shapes: Shapes, sites: SitesSpec, step: float, *, free: Collection[str], rounds_well: bool, longest: int = 10**9
) -> SitesSpec:
    """Choose values of those keys of CHOSEN that are in `free`, for the link of `sites` and steps of `step` seconds. If `inner_steps`
    is in `free`, also choose the keys of SPARSE, if the run file has none of them, and `eager`, if the run file leaves it out.

    Loss grows with the interval, so the shortest interval is chosen with which sites compute for the share GOOD of the time at HEADROOM
    of the link's rate; then the most bits, the least overlap, and the fewest fragments. If the chosen interval would exceed MAX_INTERVAL,
    runs of at least MIN_ROUNDS rounds get the sparse method. If no interval reaches GOOD, because a round trip takes many steps, sites
    are eager; if eager sites do not reach GOOD either, the method with the highest share of computing time is chosen. `rounds_well`: True
    if 2 bits suffice for differences, as with Muon (Thérien et al. 2025, arXiv:2505.23725). `longest`: the number of steps of the run,
    which is the largest possible interval.
    """
    assert sites.link is not None
    counted_on = sites.link.model_copy(update={"megabits": HEADROOM * sites.link.megabits})
    best: tuple[float, SitesSpec] | None = None
    for tried in _intervals(sites, free, longest):
        variants = _variants(shapes, tried, free, rounds_well)
        found = [
            (_use(fragments(shapes, one), one.model_copy(update={"link": counted_on}), step, _end(one, longest)), one)
            for one in variants
        ]
        good = next((one for use, one in found if use >= GOOD), None)
        if good is not None:
            return good
        for use, one in found:
            if best is None or use > best[0]:
                best = use, one
    return sites if best is None else best[1]


def _intervals(sites: SitesSpec, free: Collection[str], longest: int) -> Iterator[SitesSpec]:
    """Yield the possible intervals, the best first: intervals that send all elements, the sparse method, longer intervals that send all
    elements, eager sites. If the run file sets the interval, yield only the method in the run file."""
    if "inner_steps" not in free:
        yield sites
        return
    dense = [sites.model_copy(update={"inner_steps": n}) for n in INTERVALS if n <= longest]
    yield from (one for one in dense if one.inner_steps <= MAX_INTERVAL)
    if not {*SPARSE, "error_feedback"} & sites.model_fields_set:
        yield from (one.model_copy(update=SPARSE) for one in dense if MIN_ROUNDS * one.inner_steps <= longest)
    yield from (one for one in dense if one.inner_steps > MAX_INTERVAL)
    if "overlap" in free and not sites.staleness and not {"eager", "mixing"} & sites.model_fields_set:
        yield from (one.model_copy(update={"eager": True}) for one in dense)


def _variants(shapes: Shapes, sites: SitesSpec, free: Collection[str], rounds_well: bool) -> Iterator[SitesSpec]:
    """Yield the possible methods with one interval, beginning with methods that change the least."""
    parts = len({part_of(name) for name in shapes})
    overlaps = (*OVERLAPS[1:], *EAGER_OVERLAPS) if sites.eager else OVERLAPS
    open_ = "bits" in free and "bits" not in sites.model_fields_set  # SPARSE has its own
    for bits in (FULL, 8, 4, 2)[: 4 if rounds_well else 3] if open_ else (sites.bits,):
        for overlap in overlaps if "overlap" in free else (sites.overlap,):
            for count in FRAGMENTS if "fragments" in free else (sites.fragments,):
                if overlap < sites.inner_steps and count <= min(sites.inner_steps, parts):
                    yield sites.model_copy(update={"bits": bits, "overlap": overlap, "fragments": count})


def _bytes(fragment: Fragment, sites: SitesSpec) -> int:
    """Return the largest number of bytes that a site sends at a merge: its difference, once to each other site, and, if this site decides,
    the list of merged sites."""
    return (sites.count - 1) * (wire_bytes(fragment) + verdict_bytes())


def _end(sites: SitesSpec, steps: int) -> int | None:
    """Return the last step of a run of `steps` steps; None if the run has so many rounds that its final merge does not count."""
    return steps if steps <= LONG * sites.inner_steps else None


def _use(cut: tuple[Fragment, ...], sites: SitesSpec, step: float, steps: int | None = None, packet: int = PACKET) -> float:
    """Simulate ROUNDS rounds, or all `steps`, and return the share of time in which a site computes. Differences queue for the link; a
    merge waits for all differences, and one more round trip for the decision."""
    assert sites.link is not None
    line = _Line(1e6 * sites.link.megabits / 8 * (packet - HEADERS) / packet, 1e-3 * sites.link.milliseconds, WINDOW * packet)
    sizes = [_bytes(fragment, sites) for fragment in cut]
    last = steps or ROUNDS * sites.inner_steps
    sends = {done: list(sent_after(done, sites)) for done in _sending(sites, last)}
    now = waited = 0.0
    before = 0
    under_way: dict[int, float] = {}  # fragment -> when it has arrived
    for done in sorted({*sends, *(one + sites.overlap for one in sends), last}):
        if done > last:
            break
        now, before = now + (done - before) * step, done
        for number in sends.get(done - sites.overlap, ()) if sites.overlap else ():
            arrived = under_way.pop(number)
            waited, now = waited + max(0.0, arrived - now), max(now, arrived)
        for number in sends.get(done, ()):
            arrived = line.send(sizes[number], now)
            if sites.overlap:
                under_way[number] = arrived
            else:
                waited, now = waited + arrived - now, arrived
    computed, fresh = now - waited, sends.get(last, ())
    if steps is not None:  # the end: all that is under way, then what the last step did not send, one fragment after the other
        now = max([now, *under_way.values()])
        for number in (number for number in range(len(cut)) if number not in fresh):
            now = line.send(sizes[number], now)
    return computed / now


@dataclass
class _Line:
    """A TCP connection over the link: bytes/s, seconds of a round trip, and the bytes of the initial window, which doubles with each
    acknowledgement."""

    rate: float
    delay: float
    window: float
    free: float = 0.0
    """Time at which the link is idle again."""

    def send(self, size: int, now: float) -> float:
        """Send bytes, and return the time at which their acknowledgement arrives."""
        paused = self.free == 0.0 or now > self.free + self.delay + PAUSE
        self.free = max(self.free, now) + size / self.rate + (self._slow_start(size) if paused else 0.0)
        return self.free + self.delay

    def _slow_start(self, size: int) -> float:
        window, sent, lost = self.window, 0.0, 0.0
        while window < self.rate * self.delay and sent + window < size:
            sent, lost, window = sent + window, lost + self.delay - window / self.rate, 2 * window
        return lost


def _sending(sites: SitesSpec, last: int) -> Iterator[int]:
    """Yield the steps after which differences are sent."""
    for number in range(sites.fragments):
        yield from range((number + 1) * sites.inner_steps // sites.fragments, last + 1, sites.inner_steps)
