"""Compare a run under a plan with one process, using the limits that the run's precision has."""

from collections.abc import Callable
from dataclasses import dataclass

from megalith.prove import compare, rounding
from megalith.prove.compare import Recording, Row
from megalith.spec.numbers import PRECISIONS, PrecisionSpec, Reordered, Rounded, formats_of
from megalith.spec.run import RunSpec

Alone = Callable[[RunSpec], Recording]
"""Function that returns the recording of a run on one process, in the precision of its spec."""


@dataclass(frozen=True)
class Verdict:
    """The comparison of a run with one process."""

    rows: tuple[Row, ...]
    tokens_tied: int = 0
    """The number of tokens sent to other experts because two experts had nearly equal scores. If `tokens_tied` is not 0, the
    rows prove nothing."""

    @property
    def equal(self) -> bool:
        """True if every quantity is within its limit."""
        return all(row.equal for row in self.rows)


def judge(found: Recording, *, spec: RunSpec, alone: Alone) -> Verdict:
    """Compare the run of `spec` with one process."""
    match parity_of(spec.precision, spec.train.precision):
        case Reordered() as limits:
            expected = alone(spec)
            rows = compare.compare(expected, found, spec=spec, limits=limits)
            return Verdict(tuple(rows), compare.ties(expected, found, tie=limits.tie))
        case Rounded() as limits:
            exact = alone(in_precision(spec, "fp32"))
            return Verdict(tuple(rounding.compare(exact, alone(spec), found, spec=spec, limits=limits)))


def parity_of(choices: PrecisionSpec, precision: str) -> Reordered | Rounded:
    """Return the limits of parity for a run: those of the precision whose products have the fewest bits."""
    names = formats_of(choices, precision) or (precision,)
    return PRECISIONS[min(names, key=lambda name: PRECISIONS[name].factors.bits)].parity


def in_precision(spec: RunSpec, precision: str) -> RunSpec:
    """Return the same run in another precision."""
    return spec.model_copy(update={"train": spec.train.model_copy(update={"precision": precision})})
