"""Traces a range of a run's steps with torch.profiler."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch


def idle_profile(asked: str, *, done: int, steps: int) -> str | None:
    """Return why --profile A:B will trace no step after `done` steps; None if some steps will be traced."""
    first, last = map(int, asked.split(":"))
    if done < min(last - 1, steps) and first <= steps:
        return None
    left = f"the remaining steps are {done + 1} to {steps}" if done < steps else "all steps are done"
    return f"--profile {asked} traces nothing: {left}. Name some of the remaining steps, or raise train.steps."


class Profile:
    """Run torch.profiler over some of a run's `steps`; yield a function to call after each step. Each traced step is a named span of
    the trace. `warn` is called if the trace cannot be written."""

    def __init__(
        self, folder: Path, asked: str | None, rank: int, *, steps: int, warn: Callable[[str], None] = lambda message: None
    ) -> None:
        first, last = map(int, asked.split(":")) if asked else (0, 0)
        self.traced = range(first, min(last, steps + 1))
        self.path = folder / "profile" / f"rank-{rank}.json"
        self.warn = warn
        self.profiler: torch.profiler.profile | None = None
        self.span: torch.profiler.record_function | None = None

    def __enter__(self):
        return self.after_step if self.traced else nullcontext

    def after_step(self, done: int) -> None:
        """End the span of the finished step, and begin the span of the next step if it is traced. `done`: the number of finished steps."""
        self._end_span()
        if done + 1 not in self.traced:
            self.__exit__()
            return
        if self.profiler is None:
            self.profiler = torch.profiler.profile(record_shapes=True, acc_events=True)
            self.profiler.__enter__()
        self.span = torch.profiler.record_function(f"step {done + 1}")
        self.span.__enter__()

    def _end_span(self) -> None:
        if self.span is not None:
            self.span.__exit__(None, None, None)
            self.span = None

    def __exit__(self, *_: object) -> None:
        self._end_span()
        if self.profiler is not None:
            self.profiler.__exit__(None, None, None)
            try:
                self.path.parent.mkdir(exist_ok=True)
                self.profiler.export_chrome_trace(str(self.path))
            except (OSError, RuntimeError) as error:  # torch raises the latter for a file that cannot be written
                self.warn(f"the trace {self.path} could not be written: {error}")
            self.profiler = None
