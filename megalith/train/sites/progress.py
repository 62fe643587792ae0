"""How far a run across sites is, and the outcome of the merges after a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megalith.events import Merge
from megalith.spec.sites.deal import Deal, Share
from megalith.train.sites.messages import CheckpointOffer, Verdict


class StopAsked(Exception):  # noqa: N818  # no error
    """This site was asked to stop while it waited for other sites. All of its ranks raise this together."""


class Midway(NamedTuple):
    """The place in the merges after a step at which a stop interrupted them: the next merge there is not made yet."""

    taken: tuple[int, ...]
    """Fragments whose differences were taken after this step."""
    ends: bool
    """True if all fragments are merged after this step, because no sample was left."""


@dataclass
class Progress:
    """How far a run across sites is. It is equal on all sites that have made the same merges."""

    deal: Deal
    merges: int = 0
    mark: str = ""
    """The digest of all merges so far."""
    midway: Midway | None = None
    """None unless merges that are due after the last step are still to be made."""

    def ended(self, total: int) -> bool:
        """True if no sample of a run of `total` and no merge is left."""
        return self.deal.left(total) == 0 and self.midway is None

    def cut(self, step: int, total: int) -> CheckpointOffer:
        """Return the checkpoint of `step` as other sites know it. `total`: samples of the run."""
        members = tuple(sorted(self.deal.members))
        return CheckpointOffer(step, self.mark, self.deal.dealt, members, self.merges, self.ended(total))

    def record(self) -> dict[str, Any]:
        """Return it as JSON."""
        found = {"merges": self.merges, "mark": self.mark, "deal": self.deal.record()}
        return found | ({} if self.midway is None else {"midway": self.midway._asdict()})

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Progress":
        """Return what `record` returned."""
        midway = record.get("midway")
        between = None if midway is None else Midway(tuple(midway["taken"]), midway["ends"])
        return cls(Deal.of(record["deal"]), record["merges"], record["mark"], between)


@dataclass(frozen=True)
class Round:
    """The outcome of the merges after a step: those that were made, on the rank that leads; True if the site is to stop here; and how many
    connections have not proved the run's key since the last time."""

    made: Sequence[Merge] = ()
    stop: bool = False
    refused: int = 0


@dataclass(frozen=True)
class StepShare:
    """A step as it is dealt out: what this site reads in it (None: nothing), how many samples all read, and how many steps came before it
    in the schedule of learning rates, which follows the samples dealt out."""

    share: Share | None
    samples: int
    schedule: int


class MergeResult(NamedTuple):
    """A merge: as it was decided, and on the rank that leads, its event."""

    verdict: Verdict
    event: Merge | None
