"""What a run's events say, put in order: one list a kind, resumed and repeated steps sorted out."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import ValidationError

from megalith import events
from megalith.spec.plan import Plan

Record = dict[str, Any]
"""One event as it stands in the log."""


@dataclass(frozen=True)
class History:
    """The events of a run by kind, oldest first.

    A resumed run goes back to a checkpoint: what it had recorded beyond it counts as `repeated`, and only what came after the
    last return is in `steps`, `validations` and `samples`.
    """

    starts: list[Record] = field(default_factory=list)
    steps: list[Record] = field(default_factory=list)
    repeated: list[Record] = field(default_factory=list)
    validations: list[Record] = field(default_factory=list)
    samples: list[Record] = field(default_factory=list)
    spans: list[Record] = field(default_factory=list)
    holdings: list[Record] = field(default_factory=list)
    checkpoints: list[Record] = field(default_factory=list)
    problems: list[Record] = field(default_factory=list)
    finished: Record | None = None
    last_time: float | None = None

    @property
    def spec(self) -> Record:
        """The resolved specification of the newest start; empty if the run never started."""
        return self.starts[-1]["spec"] if self.starts else {}

    @property
    def plan(self) -> Plan | None:
        """The newest plan, if one is recorded."""
        try:
            return Plan.model_validate(self.spec["plan"])
        except (KeyError, ValidationError):  # an early or foreign log: the report goes without what depends on the plan
            return None

    @property
    def microbatches(self) -> int | None:
        """Microbatches a data rank computes in one step."""
        plan, batch = self.plan, self.spec.get("train", {}).get("global_batch")
        return batch // (plan.data * plan.microbatch) if plan and batch else None

    @property
    def total_steps(self) -> int | None:
        """Steps the run is to take."""
        return self.spec.get("train", {}).get("steps")

    @property
    def state(self) -> str:
        """How the run stands: finished, stopped, lost, failed, or that its end is not recorded."""
        if not self.starts and not self.steps:
            return "not started"
        return self.finished["reason"] if self.finished else "running, or ended without a word"

    def usual(self, name: str) -> float | None:
        """Median of a number over the steps, without the first steps of each start: they warm up."""
        warm = {start["resumed_step"] + i for start in self.starts for i in (1, 2)}
        values = [s[name] for s in self.steps if s["step"] not in warm] or [s[name] for s in self.steps]
        known = [value for value in values if value is not None]
        return median(known) if known else None


def history(run_dir: Path) -> History:
    """The history of the run in a folder; empty if the folder has no events."""
    return gather(events.read(run_dir))


def gather(records: Iterable[Record]) -> History:
    """The history that events in the order of their writing tell."""
    starts: list[Record] = []
    latest: dict[str, dict[int, Record]] = {
        kind: {} for kind in ("step", "validation", "sample", "spans", "holding", "checkpoint")
    }
    repeated: list[Record] = []
    problems: list[Record] = []
    finished: Record | None = None
    last_time: float | None = None
    moved = (
        False  # ranks started again, perhaps on another mesh: the first of them to say what it holds ends what was held before
    )
    for record in records:
        last_time = record.get("time", last_time)
        match record["type"]:
            case "run_started":
                starts.append(record)
                finished, moved = None, True
                for kind in ("step", "validation", "sample", "spans"):
                    late = [step for step in latest[kind] if step > record["resumed_step"]]
                    dropped = [latest[kind].pop(step) for step in late]
                    repeated += dropped if kind == "step" else []
            case "step" | "validation" | "sample" | "spans" | "checkpoint" as kind:
                latest[kind][record["step"]] = record
            case "holding":
                if moved:
                    latest["holding"].clear()
                    moved = False
                latest["holding"][record["rank"]] = record
            case "problem":
                problems.append(record)
            case "run_finished":
                finished = record
    ordered = {kind: [found[key] for key in sorted(found)] for kind, found in latest.items()}
    return History(
        starts=starts,
        steps=ordered["step"],
        repeated=repeated,
        validations=ordered["validation"],
        samples=ordered["sample"],
        spans=ordered["spans"],
        holdings=ordered["holding"],
        checkpoints=ordered["checkpoint"],
        problems=problems,
        finished=finished,
        last_time=last_time,
    )
