"""The progress of a run across sites, and the outcome of the merges after a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megalith.events import Merge
from megalith.spec.sites.deal import Deal, Portion
from megalith.train.sites.messages import CheckpointOffer, Verdict


class StopAsked(Exception):  # noqa: N818  # no error
    """This site was asked to stop while it waited for other sites. All ranks of the site raise this exception together."""


class Midway(NamedTuple):
    """The point at which a stop interrupted the merges after a step. The remaining merges must still be made."""

    taken: tuple[int, ...]
    """The fragments whose weight differences were taken after this step, before the stop."""
    ends: bool
    """True if all fragments must be merged after this step, because no samples are left."""


@dataclass
class Progress:
    """The progress of a run across sites, equal on all sites that have made the same merges."""

    deal: Deal
    merges: int = 0
    mark: str = ""
    """The digest of all merges so far."""
    midway: Midway | None = None
    """Set if a stop interrupted the merges after the newest step; else None."""

    def ended(self, total: int) -> bool:
        """True if a run of `total` samples has neither samples nor merges left."""
        return self.deal.left(total) == 0 and self.midway is None

    def cut(self, step: int, total: int) -> CheckpointOffer:
        """Describe the checkpoint of step `step` for other sites. `total`: the number of samples of the run."""
        members = tuple(sorted(self.deal.members))
        return CheckpointOffer(step, self.mark, self.deal.dealt, members, self.merges, self.ended(total))

    def record(self) -> dict[str, Any]:
        """Return the progress as JSON values."""
        found = {"merges": self.merges, "mark": self.mark, "deal": self.deal.record()}
        return found | ({} if self.midway is None else {"midway": self.midway._asdict()})

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Progress":
        """Return the progress that `record` describes."""
        midway = record.get("midway")
        between = None if midway is None else Midway(tuple(midway["taken"]), midway["ends"])
        return cls(Deal.of(record["deal"]), record["merges"], record["mark"], between)


@dataclass(frozen=True)
class Round:
    """The outcome of the merges after a step. `made`: the events of these merges, on the leading rank. `stop`: the site must stop now.
    `refused`: the number of connections since the last round that did not prove possession of the run's key. `said`: a sentence about each
    site that left or joined."""

    made: Sequence[Merge] = ()
    stop: bool = False
    refused: int = 0
    said: Sequence[str] = ()


@dataclass(frozen=True)
class StepShare:
    """The samples of one step. `share`: those that this site reads; None: none. `samples`: the number of samples that all sites
    together read. `schedule`: the step's number in the learning-rate schedule, computed from the samples read before this step."""

    share: Portion | None
    samples: int
    schedule: int


class MergeResult(NamedTuple):
    """A merge that was made: its verdict, sentences about sites that left or joined and, on the leading rank only, its event."""

    verdict: Verdict
    event: Merge | None
    said: Sequence[str] = ()
