"""Observations with their time and evidence, the rule whether an observation ends a generation of ranks, and the evidence about a
generation's end."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megalith.control.outcome import Outcome
from megalith.control.watch import Hang
from megalith.fleet import commands, observations
from megalith.fleet.causes import Failure
from megalith.fleet.heartbeat import Beat
from megalith.fleet.observations import Observation
from megalith.fleet.rank_info import slot_of

OF_NODES = (observations.NodesLost, observations.NodeJoined, observations.HealthChecked, observations.Preempted)
NO_INCIDENT = (
    observations.Started, observations.Saved, observations.StopRequested, observations.NodeJoined, observations.HealthChecked,
    observations.Waited, observations.SaveWorks, observations.Ordered,
)  # fmt: skip
ALWAYS_TOLD = (observations.Straggler, observations.Nonfinite, observations.SaveFailed, observations.NodesLost)
"""Kinds of observations that are logged as incidents even if the policy answers them with no command."""

CHECKS, HELD_UP = (observations.Started, observations.HealthChecked), (commands.Wait, commands.CheckHealth)
"""The user is warned if the policy answers an observation of CHECKS with a command of HELD_UP, which delays the run or a node."""

_ENDING = (
    observations.NodesLost, observations.Nonfinite, observations.StateCorrupt, observations.CopyCorrupt, observations.CopyAway,
    observations.GradientWrong, observations.DataDamaged,
    observations.NotThisRun, observations.StoreAway,
)  # fmt: skip
"""Kinds of observations that can end a generation (see `ends`)."""


@dataclass(frozen=True)
class TimedObservation:
    """An observation, the time (seconds since the epoch) at which its cause began, and further evidence."""

    observation: Observation
    began: float
    evidence: dict[str, Any]


def ends(observation: Observation) -> bool:
    """True if this observation ends the generation. An observation does not end the generation if the ranks recover by
    themselves, by repeating the step or by reading another copy of a shard."""
    if isinstance(observation, observations.DataDamaged):
        return observation.other_copy is None
    if isinstance(observation, observations.Nonfinite):
        return observation.elsewhere != "not asked"
    return isinstance(observation, _ENDING)


@dataclass(frozen=True)
class GenerationEnd:
    """Evidence about a generation that has ended. `beats`: each rank's last heartbeat. `placement`: the node of each slot.
    `step`: the latest step that any generation began."""

    outcome: Outcome
    beats: Sequence[Beat]
    placement: tuple[str, ...]
    ranks: int
    step: int

    def failed(self, failure: Failure) -> TimedObservation:
        """Return the observation of a rank that failed."""
        slot = self.placement.index(failure.node) if failure.node in self.placement else self._slot_of(failure.rank or 0)
        step = self._step_of(failure.rank)
        observation = observations.of_failure(failure, time=time.time(), step=step, slot=slot, node=self.placement[slot])
        return TimedObservation(observation, failure.time, self.evidence())

    def hung(self, hang: Hang) -> TimedObservation:
        """Return the observation of a hang, with the stack and the collectives of each rank as evidence."""
        slot = self._slot_of(hang.rank) if hang.rank is not None else None
        observation = observations.Hang(
            time=time.time(), step=self._step_of(hang.rank), slot=slot, node=None if slot is None else self.placement[slot],
            rank=hang.rank, phase=hang.phase, silence=hang.silence, limit=hang.limit,
        )  # fmt: skip
        stacks = {str(rank): inspection.stack or "(no answer)" for rank, inspection in sorted(hang.inspections.items())}
        stands = {
            str(rank): {"begun": inspection.begun, "recorded": inspection.recorded}
            for rank, inspection in sorted(hang.inspections.items())
            if inspection.begun
        }
        return TimedObservation(
            observation, hang.since, self.evidence() | {"stacks": stacks, "collectives": stands, "behind_by_steps": hang.behind}
        )

    def evidence(self) -> dict[str, Any]:
        """Return the evidence for an incident: the first cause, and each rank's exit status and phase."""
        cause, found = self.outcome.first_cause, {}
        if cause is not None:
            found = {"first_cause": f"{cause.name} {cause.reason}", "traceback": cause.traceback}
        exits = {str(end.rank): end.code for end in self.outcome.exits}
        phases = {str(rank): f"{beat.phase} {beat.step}" for rank, beat in enumerate(self.beats)}
        return found | {"exits": exits, "phases": phases}

    def _step_of(self, rank: int | None) -> int:
        """The step that a rank (None: the rank that was furthest) had begun in this generation, even if an earlier generation
        finished that step."""
        steps = [beat.step for number, beat in enumerate(self.beats) if rank in (None, number)]
        begun = max(steps, default=-1)
        return begun if begun >= 0 else self.step

    def _slot_of(self, rank: int) -> int:
        return slot_of(rank, world=self.ranks, slots=len(self.placement))
