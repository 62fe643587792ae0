"""The sites of a run on its report page: merges, losses, the first site's waits and sent bytes, and the distance between the sites' weights
at each merge."""

from collections.abc import Sequence
from html import escape

from megalith.events import Merge, of_kind
from megalith.report import units
from megalith.report.history import History
from megalith.report.style import curves, figure, figures
from megalith.report.summary import merges_of
from megalith.report.svg import Series

MAX_POINTS = 1000  # of a curve: of more merges, those at even distances
MAX_MOVES = 10  # of sites that left or joined: of more, the newest


def merge_section(run: History) -> str:
    """Return the report of a run's merges across sites as HTML: totals, and curves over the run. The result is empty for a run
    without sites."""
    found, made = merges_of(run), list(of_kind(run.events, Merge))
    if found is None:
        return ""
    rounds = len(made) / max(1, len({one.fragment for one in made}))
    words = [
        f"{found.count:,} merges of {found.sites} sites in {units.count(rounds)} rounds.",
        f"The first site sent {units.memory(found.bytes_sent)}{_saved(run, made)}.",
        f"The first site's ranks waited {units.duration(found.waited)} for other sites, {units.duration(found.waited / rounds)} a round: "
        f"{units.percent(found.used)} of the time in steps and merges was not spent waiting.",
    ]
    words += [f"{moves}." for moves in [_moves(made)] if moves]
    if run.validations:
        words.append(f"The merged weights' validation loss is {run.validations[-1].loss:.4f}.")
    shown = made[:: -(-len(made) // MAX_POINTS)]
    apart = [
        Series("norm of the mean difference", [(one.step, one.norm) for one in shown], 0, dots=True),
        Series("distance of the sites' differences from their mean", [(one.step, one.spread) for one in shown], 1, dots=True),
    ]
    losses = [
        Series(
            made[-1].named(site),
            [(one.step, loss) for one in shown for at, loss in _by_site(one) if at == site],
            site % 8,
            dots=True,
        )
        for site in sorted({site for one in shown for site, _ in _by_site(one)})
    ]
    waits = [Series("seconds waited", [(one.step, one.waited) for one in shown], 3, dots=True)]
    drawn = {
        "Distance between the sites": curves(apart, _digits, log=True, from_zero=True),
        "Wait of the first site at each merge (seconds)": curves(waits, units.duration, from_zero=True),
        "Loss of each site (nats a token), mean over the steps of a round": curves(losses, _digits, log=True),
    }
    return f"<p>{escape(' '.join(words))}</p>{figures(*(figure(name, chart) for name, chart in drawn.items()))}"


def _saved(run: History, made: Sequence[Merge]) -> str:
    sent = sum(one.bytes_sent for one in made)
    if run.start is None or not sent:
        return ""
    instead = 4 * run.start.parameters * made[-1].step * (made[-1].all_sites - 1)
    return f", {instead / sent:,.3g} times less than if it sent fp32 gradients after each step ({units.memory(instead)})"


def _moves(made: Sequence[Merge]) -> str:
    """Return the newest of the sites that left or joined, in words."""
    found = [
        f"{one.named(site)} {verb} at step {one.step:,}"
        for one in {one.number if one.number >= 0 else place: one for place, one in enumerate(made)}.values()
        for verb, sites in (("left", one.left), ("joined", one.joined))
        for site in sites
    ]
    earlier = f"{len(found) - MAX_MOVES} earlier ones, " if len(found) > MAX_MOVES else ""
    return f"Sites that left and joined: {earlier}{', '.join(found[-MAX_MOVES:])}" if found else ""


def _by_site(merge: Merge) -> list[tuple[int, float]]:
    """Return the loss of each site that has one; older logs do not name the sites."""
    numbers = merge.merged or range(len(merge.losses))
    return [(site, loss) for site, loss in zip(numbers, merge.losses, strict=False) if loss is not None]


def _digits(value: float) -> str:
    return f"{value:.3g}"
