"""A scaling law fitted to loss curves: the loss as a function of parameters and tokens, to predict the final loss of a run.

L(N, D) = E + A / N^a + B / D^b (Hoffmann et al. 2022, arXiv:2203.15556, approach 3). The law is linear in E, A and B, so only the
exponents are searched. The law treats the loss in the middle of a run like the final loss of a shorter run. If the learning rate
decays at the end, the real final loss is lower than the law predicts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.watch.source import Source

Floats = NDArray[np.float64]

MIN_POINTS = 50  # steps from which on a curve is fitted
BEGUN = 0.1  # share of the tokens at the beginning of a curve that is left out: warm-up, and no power law yet
BINS = 30  # points of a curve, evenly spread over the logarithm of tokens
DRAWN = 100  # points of the law in a drawing
EXPONENTS = (0.05, 1.2)  # searched
GRID, ZOOMS = 24, 3  # points of the first search on an axis; searches of a finer grid around the best
SIZES = 3  # numbers of parameters that runs must have for a law to hold for others


@dataclass(frozen=True)
class ScalingLaw:
    """The coefficients E, A, a, B, b of this module's formula, in this order. N is in units of `size` parameters, D in units of
    `tokens`. `runs`: the number of fitted curves."""

    floor: float
    by_size: float
    size_power: float
    by_tokens: float
    tokens_power: float
    size: float
    tokens: float
    runs: int
    sizes: int
    """Number of different model sizes among the fitted curves."""

    def holds_for(self, parameters: float) -> bool:
        """True if the law covers a model with this number of parameters."""
        return self.sizes > 1 or parameters == self.size

    def loss(self, parameters: float, tokens: Floats) -> Floats:
        """Return the losses, in nats a token, of a model with this number of parameters after these numbers of tokens."""
        return (
            self.floor
            + self.by_size * (parameters / self.size) ** -self.size_power
            + self.by_tokens * (tokens / self.tokens) ** -self.tokens_power
        )


@dataclass(frozen=True)
class LossCurve:
    """A run's loss as a function of tokens, averaged over ranges of steps. `steps`: the number of steps in each average."""

    parameters: float
    tokens: Floats
    loss: Floats
    steps: Floats


def curve_of(source: Source) -> LossCurve | None:
    """Return a run's training loss, averaged over ranges of steps; None while there are too few steps."""
    view = source.steps(["loss", "tokens_seen"])
    if source.start is None or not len(view):
        return None
    loss, tokens = view.mean[:, 0].astype(np.float64), view.mean[:, 1].astype(np.float64)
    after = np.append(np.minimum.accumulate(view.first[::-1])[::-1][1:], np.iinfo(np.int64).max)
    kept = np.isfinite(loss) & (view.last < after) & (tokens > BEGUN * np.nanmax(tokens))  # steps that were done again count once
    if view.steps[kept].sum() < MIN_POINTS:
        return None
    edges = np.geomspace(tokens[kept].min(), tokens[kept].max(), BINS + 1)
    bins = np.clip(np.searchsorted(edges, tokens[kept], side="right") - 1, 0, BINS - 1)
    weight = np.bincount(bins, view.steps[kept], BINS).astype(np.float64)
    full = weight > 0
    mean = lambda values: (np.bincount(bins, values[kept] * view.steps[kept], BINS)[full]) / weight[full]  # noqa: E731
    return LossCurve(float(source.start.parameters), mean(tokens), mean(loss), weight[full])


def fit(curves: Sequence[LossCurve]) -> ScalingLaw:
    """Fit a law to loss curves, by least squares of relative errors. If all curves are of models of one size, the law has no term
    for the size. Raises ValueError if the curves are of two model sizes, which do not determine the term for the size.
    """
    sizes = {curve.parameters for curve in curves}
    if len(sizes) not in (1, *range(SIZES, len(curves) + 1)):
        raise ValueError(
            f"a scaling law needs runs of one size, or of {SIZES} sizes or more; these runs have {len(sizes)}: "
            + ", ".join(f"{size:,.0f} parameters" for size in sorted(sizes))
        )
    size, tokens = max(sizes), max(curve.tokens.max() for curve in curves)
    n = np.concatenate([np.full_like(curve.tokens, curve.parameters / size) for curve in curves])
    d = np.concatenate([curve.tokens / tokens for curve in curves])
    loss = np.concatenate([curve.loss for curve in curves])
    weight = np.sqrt(np.concatenate([curve.steps / curve.steps.sum() for curve in curves])) / loss

    def tried(a: float, b: float) -> tuple[float, Floats]:
        columns = np.stack([np.ones_like(d), n**-a if len(sizes) > 1 else np.zeros_like(d), d**-b], axis=1)
        return _least_squares(columns * weight[:, None], loss * weight)

    powers = _search(lambda a, b: tried(a, b)[0], sized=len(sizes) > 1)
    floor, by_size, by_tokens = tried(*powers)[1].tolist()
    return ScalingLaw(floor, by_size, powers[0], by_tokens, powers[1], size, tokens, len(curves), len(sizes))


def _search(error: Callable[[float, float], float], *, sized: bool) -> tuple[float, float]:
    """Return the exponents with the smallest error, found by a search on a grid, and then on finer grids around the best point."""
    low, high = EXPONENTS
    grid = np.linspace(low, high, GRID)
    step = grid[1] - grid[0]
    best = min(((a, b) for a in (grid if sized else grid[:1]) for b in grid), key=lambda at: error(*at))
    for _ in range(ZOOMS):
        near = np.linspace(-step, step, 9)
        a_s = np.clip(best[0] + near, low, high) if sized else best[:1]
        best = min(((float(a), float(b)) for a in a_s for b in np.clip(best[1] + near, low, high)), key=lambda at: error(*at))
        step /= 4
    return best


def _least_squares(columns: Floats, wanted: Floats) -> tuple[float, Floats]:
    """Return the squared error and the coefficients of the best fit of the columns to `wanted`, among fits without negative
    coefficients."""
    number, best = columns.shape[1], (np.inf, np.zeros(columns.shape[1]))
    for kept in (kept for size in range(number, 0, -1) for kept in combinations(range(number), size)):
        found = np.zeros(number)
        found[list(kept)] = np.linalg.lstsq(columns[:, kept], wanted, rcond=None)[0]
        if (found >= 0).all() and (error := float(((columns @ found - wanted) ** 2).sum())) < best[0]:
            best = error, found
            if len(kept) == number:  # nothing is closer
                break
    return best


def of_runs(sources: Iterable[Source]) -> ScalingLaw:
    """Fit a law to the losses of other runs. Raises ValueError if a run is too short, and in the cases in which `fit` does."""
    curves = list(_curves(sources))
    if not curves:
        raise ValueError("a scaling law needs at least one run to be fitted to")
    return fit(curves)


def _curves(sources: Iterable[Source]) -> Iterator[LossCurve]:
    for source in sources:
        if (curve := curve_of(source)) is None:
            raise ValueError(
                f"{source.run_dir} is too short for a scaling law: it has fewer than {MIN_POINTS} steps after its warm-up"
            )
        yield curve


def _of_itself(source: Source, curve: LossCurve, step: int) -> ScalingLaw:
    """Return the law fitted to the run's own curve. To save CPU time, the law is fitted again only once the run has 1 % more
    steps."""
    known = source.own_law
    if known is None or not known[0] <= step < 1.01 * known[0] + 1:
        known = source.own_law = step, fit([curve])
    return known[1]


def drawn(source: Source) -> dict[str, Any] | None:
    """Return the losses that a law expects over the whole run, by `source.law` if given, else by the law of the run's own curve.
    `off`: the newest loss's relative deviation from the law. The result is None if there is no law yet.
    """
    curve, total, step = curve_of(source), source.setting("train", "steps"), source.last_step()
    if curve is None or not total or not step:
        return None
    law = source.law if source.law is not None and source.law.holds_for(curve.parameters) else None
    of = "its own curve" if law is None else f"{law.runs} other run{'s' if law.runs > 1 else ''}"
    law = law or _of_itself(source, curve, step)
    past = source.steps(["tokens_seen"], most=2 * DRAWN)
    steps = np.unique(np.linspace(step / DRAWN, max(total, step), DRAWN).round())
    newest = float(past.mean[-1, 0])
    tokens = np.where(steps <= step, np.interp(steps, past.last, past.mean[:, 0]), newest * steps / step)
    shown = tokens >= curve.tokens[0]
    expected = law.loss(curve.parameters, tokens[shown])
    return {
        "of": of,
        "step": steps[shown].tolist(),
        "loss": [float(f"{value:.6g}") for value in expected],
        "end": float(expected[-1]),
        "off": float(curve.loss[-1] / law.loss(curve.parameters, curve.tokens[-1:])[0] - 1),
        "law": asdict(law),
    }
