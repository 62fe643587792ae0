"""The run that a command names: read its file, and find what is wrong with it. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalith.check import check as find_problems
from megalith.check import check_resume
from megalith.checkpoint.folder import committed
from megalith.commands.arguments import RunRequest
from megalith.spec import files
from megalith.spec.files import Resolved
from megalith.spec.problem import Problem, SpecErrors


@dataclass(frozen=True)
class Checked:
    """A run and everything found in it."""

    resolved: Resolved
    problems: list[Problem]

    @property
    def errors(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "error"]

    def as_json(self) -> dict[str, Any]:
        """Return every value of the run and where each came from."""
        return {"spec": self.resolved.spec.model_dump(mode="json"), "provenance": self.resolved.provenance}


def check(request: RunRequest, *, world: int | None = None, look: bool = True) -> Checked:
    """Read a run file and find everything that is wrong with it, or unwise.

    `world` is the number of ranks there will be, to compare with the plan. With `look`, files and folders that the run names are looked
    for; a run that its folder already holds does not need what only a first start does. Raises SpecErrors, with everything that was
    found, if the file cannot be read as a run.
    """
    reading = files.read(request.file, overrides=request.overrides)
    resolved = reading.resolved
    named = request.run_dir is not None or hasattr(resolved.spec, "name")
    begun = look and named and bool(committed(request.folder(resolved.spec) / "checkpoints"))
    found = find_problems(resolved.spec, world=world, files=look, begun=begun, provenance=resolved.provenance)
    if reading.problems:
        known = {problem.key for problem in reading.problems}
        faulty = {_table(key) for key in known}  # a default in one may stand for what a faulty key meant
        others = (p for p in found if p.key not in known and (p.source != "default" or _table(p.key) not in faulty))
        raise SpecErrors([*reading.problems, *others])
    return Checked(resolved, found)


def _table(name: str) -> str:
    return name.rpartition(".")[0]


def differences(resolved: Resolved, folder: Path) -> list[Problem]:
    """Return why this run cannot resume the one in `folder`. Without a checkpoint there is nothing to resume, and any run may start."""
    if not (folder / files.FILE).is_file() or not committed(folder / "checkpoints"):
        return []
    saved = files.read(folder / files.FILE).resolved.spec  # its cluster's file need not be there any more
    return check_resume(saved, resolved.spec, provenance=resolved.provenance)
