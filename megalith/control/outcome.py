"""How a run ended, as a value and as the text a person reads."""

from dataclasses import dataclass

from megalith.fleet.causes import Exit, Failure
from megalith.fleet.exit_codes import ORDERLY, ExitCode


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `code` is for the exit status (`exit_codes`); `stopped` says that a signal asked for the end.

    `consequences` are failures after the first cause, `ended` the ranks that the supervisor had to end, `ready_seconds` how long
    the ranks took to be ready (None: they never were). `report` says why the policy stopped the run, empty if it did not.
    """

    code: int
    stopped: bool
    first_cause: Failure | None
    consequences: tuple[Failure, ...]
    exits: tuple[Exit, ...]
    ended: tuple[int, ...]
    ready_seconds: float | None
    report: str = ""

    def message(self) -> str:
        """What a person should read: the first cause, its evidence, where to look on, and what else ended because of it."""
        cause = self.first_cause
        if cause is None:
            return self.report or _PEACEFUL[self.code]
        lines = [self.report, ""] if self.report else []
        lines.append(f"{cause.name} {cause.reason}" + (f"\n{cause.error}" if cause.error else ""))
        if cause.traceback:
            lines += ["", *(f"  {line}" for line in cause.traceback.splitlines()), ""]
        lines.append(f"output of {cause.name}: {cause.log}")
        after = [f"{failure.name} {failure.error or failure.reason}" for failure in self.consequences]
        if self.ended:
            after.append(f"ended by the supervisor: {_ranks(self.ended)}")
        if after:
            lines += ["as a consequence:", *(f"  {line}" for line in after)]
        early = [end.rank for end in self.exits if end.code in ORDERLY]
        if early:
            lines.append(f"had ended in order: {_ranks(early)}")
        return "\n".join(lines)


_PEACEFUL: dict[int, str] = {
    ExitCode.FINISHED: "finished",
    ExitCode.STOPPED: "stopped as asked, state saved: the same command goes on from there",
    ExitCode.INTERRUPTED: "interrupted twice and ended at once: the same command goes on from the newest checkpoint",
    ExitCode.TERMINATED: "stopped as asked while no ranks could save: the same command goes on from the newest copy of the state there is",
}


def _ranks(ranks: tuple[int, ...] | list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
