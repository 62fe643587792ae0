"""Megalith from Python: one run as a value that is loaded, changed, checked, planned, trained and read.

`from megalith import Run`. This module calls the same functions as the commands, and needs torch only where they do.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith.commands.shared.arguments import RunRequest

if TYPE_CHECKING:
    from megalith.commands.dryrun import DryRunReport
    from megalith.events import Event
    from megalith.planner.plan_result import PlanResult
    from megalith.report.summary import Summary
    from megalith.spec.plan import Plan
    from megalith.spec.problem import Problem
    from megalith.spec.run import RunSpec
    from megalith.train.evaluate import Score


class TrainingError(RuntimeError):
    """A training that ended without finishing the run. `code` is the exit status that `megalith train` would return; the message
    gives the reason."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Run:
    """A run: a run file, settings that override values of this file, and the folder for the run's output.

    Runs are values: `set` returns another one. Files are read only when a method needs them, so `check` reports a faulty file.
    """

    request: RunRequest

    @classmethod
    def load(cls, file: str | Path, *, run_dir: str | Path | None = None) -> "Run":
        """Return the run that a file describes. `run_dir`: the run's folder (default: runs/NAME)."""
        return cls(RunRequest(Path(file), (), Path(run_dir) if run_dir is not None else None))

    @classmethod
    def open(cls, run_dir: str | Path) -> "Run":
        """Return the run that a run folder holds. Raises FileNotFoundError for a folder without a run."""
        return cls(RunRequest.in_folder(Path(run_dir)))

    def set(self, values: Mapping[str, Any] | None = None, /, **tables: Mapping[str, Any]) -> "Run":
        """Return the run with these keys set to other values, as in `run.set({"train.steps": 100})` or `run.set(train={"steps":
        100})`."""
        from megalith.spec.toml import literal

        given = {**(values or {}), **{f"{table}.{key}": value for table, keys in tables.items() for key, value in keys.items()}}
        settings = [f"{key}={literal(value)}" for key, value in given.items()]
        return replace(self, request=replace(self.request, overrides=(*self.request.overrides, *settings)))

    def in_folder(self, run_dir: str | Path) -> "Run":
        """Return the same run with another folder for its output."""
        return replace(self, request=replace(self.request, run_dir=Path(run_dir)))

    def with_plan(self, plan: "Plan") -> "Run":
        """Return the run with another plan, such as one that `plan` found."""
        return self.set(plan={name: value for name, value in plan.model_dump(mode="json").items() if name != "state"})

    @property
    def spec(self) -> "RunSpec":
        """All values of the run, including defaults. Raises SpecErrors, with all problems, for a file or settings that cannot be
        read as a run."""
        from megalith.spec import files

        request = self.request
        return files.read(request.file, overrides=request.overrides, saved=request.saved).whole().spec

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self.request.run_dir or self.request.folder(self.spec)

    def check(self, *, ranks: int | None = None, here: bool = False) -> "list[Problem]":
        """Return everything in the run that is wrong or unwise: errors first, then advice. `ranks`: the number of ranks that will
        be started. `here`: also report, as errors, what the run needs but this machine does not have."""
        from megalith.commands.shared import runs
        from megalith.spec.problem import SpecErrors

        try:
            return runs.check_as_resumed(self.request, world=ranks, here="error" if here else None).problems
        except SpecErrors as errors:
            return errors.problems

    def plan(self, cluster: str | None = None, *, top: int = 10, offload: bool = False) -> "PlanResult":
        """Return the best layouts of the run on a cluster such as "h100:64" (default: the run's own cluster). The layouts are in
        the result's `.found.choices`, best first.

        Without `offload`, only plans are returned that keep state and activations on the device. Raises SpecErrors."""
        from megalith.planner import plan_result, request

        plan_request = request.PlanRequest(
            path=self.request.file, cluster=cluster, overrides=tuple(self.request.overrides), offload=offload
        )
        return plan_result.best_plans(request.resolve(plan_request), top=top)

    def dry_run(self, *, rank: int = 0, world: int | None = None) -> "DryRunReport":
        """Count the bytes, messages and FLOPs of a step on one rank, without running the other ranks. Raises SpecErrors."""
        from megalith.commands.dryrun import dryrun

        return dryrun(self.request, world=world, rank=rank)

    def train(
        self, on_event: "Callable[[Event], None] | None" = None, *, show: bool = False, profile: str | None = None
    ) -> "Summary":
        """Train the run, or resume it from its newest checkpoint, and return a summary.

        This method starts the ranks of this machine and waits until they end; under torchrun or srun, this process is one of the
        ranks. `on_event` is called in this process with each event soon after it is logged. An exception in `on_event` does not
        end the training, but is raised after it. `show`: print progress. `profile` = "A:B" traces steps A to B - 1. Call `train`
        from the main thread, because it handles SIGINT and SIGTERM.

        Raises SpecErrors before anything starts, InUseError if another process owns the folder, TrainingError if the run did not finish.
        """
        from rich.console import Console

        from megalith.commands.train import train

        trained = train(self.request, console=Console(quiet=not show), profile=profile, on_event=on_event)
        if trained.code:
            raise TrainingError(trained.message or f"ended with status {trained.code}", trained.code)
        if trained.raised is not None:
            raise trained.raised
        return self.in_folder(trained.run_dir).summary()

    def resume(self, on_event: "Callable[[Event], None] | None" = None, *, show: bool = False) -> "Summary":
        """Continue the run from its newest checkpoint. Raises FileNotFoundError if there is no checkpoint, and the errors of
        `train`."""
        from megalith.checkpoint.folder import committed, nothing_text, of_run

        if not committed(of_run(self.run_dir)):
            raise FileNotFoundError(nothing_text(self.run_dir))
        return self.train(on_event, show=show)

    def events(self) -> "Iterator[Event]":
        """Yield the run's events in the order in which they were logged, each as a value of its class in `megalith.events`; also during
        training."""
        from megalith import events

        return iter(events.read(self.run_dir))

    def summary(self) -> "Summary":
        """Return a summary of the run so far, in numbers."""
        from megalith.report import summary

        return summary.of_folder(self.run_dir)

    def report(self, out: str | Path | None = None) -> Path:
        """Write the run's report page (default: report.html in its folder) and return its path."""
        from megalith.commands.report import report

        return report(self.run_dir, out=Path(out) if out is not None else None)

    def generate(
        self,
        prompt: str = "",
        *,
        tokens: int = 100,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        step: int | None = None,
        own: Sequence[str] = (),
    ) -> str:
        """Return what the trained model writes after `prompt`; temperature 0 takes the likeliest token each time. `own`: names of
        the user's own parts that the model contains, such as "mine:BILINEAR"; these parts are imported first. Raises OwnPartError
        if the model contains own parts that `own` does not name."""
        from megalith.commands.shared.arguments import admit_parts
        from megalith.train.generate import generate

        admit_parts(own)
        return generate(
            self.run_dir, prompt, tokens=tokens, step=step, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
        )

    def evaluate(
        self, texts: str | Sequence[str], *, step: int | None = None, seq_len: int | None = None, own: Sequence[str] = ()
    ) -> "Score":
        """Return the trained model's loss on a text or on several texts, each as a separate document. `own`: as for `generate`."""
        from megalith.commands.shared.arguments import admit_parts
        from megalith.train.evaluate import evaluate

        admit_parts(own)
        documents = [texts] if isinstance(texts, str) else texts
        return evaluate(self.run_dir, documents, step=step, seq_len=seq_len)

    def export(self, out: str | Path, *, dtype: str = "fp32", step: int | None = None) -> Path:
        """Write the trained weights as a folder that Hugging Face transformers loads, and return the folder's path."""
        from megalith.commands.export import export

        return export(self.run_dir, out=Path(out), dtype=dtype, step=step)
