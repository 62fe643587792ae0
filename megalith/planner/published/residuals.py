"""Published rows and their predictions. A residual is the logarithm of a row's measured over its predicted value."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log

from megalith.cost.calibrate import choose
from megalith.cost.constants import Calibration
from megalith.cost.doubt import Residual
from megalith.cost.estimate import Estimate
from megalith.cost.memory import by_rank
from megalith.cost.parts import parts
from megalith.cost.workload import Workload
from megalith.planner.published.express import ExpressedRow, express, measured_seconds
from megalith.planner.published.rows import Row


@dataclass(frozen=True)
class Result:
    """One row, predicted."""

    row: Row
    kind: str
    """dense, expert or hybrid."""
    workload: Workload
    estimate: Estimate
    seconds: float | None
    """Measured seconds of a step."""
    memory: float
    """Predicted peak bytes of the rank that the source reports."""

    @property
    def time_error(self) -> float | None:
        return None if self.seconds is None else self.estimate.time.step / self.seconds - 1

    @property
    def memory_error(self) -> float | None:
        measured = self.row.memory
        return None if measured is None else self.memory / measured - 1

    def residuals(self) -> Iterator[Residual]:
        """Yield the residual of each quantity that the row measured: time, memory or both."""
        if self.seconds is not None:
            yield Residual(self.row.name, self.row.group, f"time.{self.kind}", log(self.seconds / self.estimate.time.step))
        if self.row.memory is not None:
            yield Residual(self.row.name, self.row.group, "memory", log(self.row.memory / self.memory))


def predict(said: ExpressedRow, figures: Calibration) -> Result:
    """Predict a row with the workload that the planner would choose among all workloads that the row can mean."""
    workload, found = choose([(choice, parts(choice)) for choice in said.choices], figures)
    seconds = measured_seconds(said.row, workload)
    kind = "hybrid" if not said.transformer else "expert" if said.expert else "dense"
    return Result(said.row, kind, workload, found, seconds, _memory(said.row, workload, found, figures))


def _memory(row: Row, workload: Workload, found: Estimate, figures: Calibration) -> float:
    kind, overheads = row.text("peak_mem_kind").lower(), figures.overheads[workload.software_profile.overheads]
    if "last rank" not in kind and "rank-0" not in kind:
        return found.memory.allocated
    ranks = by_rank(workload, parts(workload), overheads)
    return ranks[-1 if "last rank" in kind else 0].allocated


def residuals(rows: Sequence[Row], left_out: Mapping[str, Calibration], whole: Calibration) -> list[Residual]:
    """Return the residuals of the scored rows of transformers that have a workload, each from the fit without the row's source group (from
    `whole` for groups that no fit used)."""
    found = []
    for said in (express(row) for row in rows if row.scored):
        if said.choices and said.transformer:
            found += predict(said, left_out.get(said.row.group, whole)).residuals()
    return found
