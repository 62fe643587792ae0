"""Description of the ranks' work: an entry function, its arguments, and limits."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """Work of the ranks of a run.

    `entry` is "module:function", called on each rank as `function(**arguments)`; `arguments` must be storable as JSON. `preload`:
    modules that are imported once, before the ranks are forked. Every rank must send a heartbeat of phase `ready`
    (`heartbeat.Heartbeat.find().beat("ready")`) within `start_timeout` seconds; from then on, all ranks may be silent for at most
    `silence_timeout` seconds (None: no limit). `threads`: a rank's compute threads; 0: cores / ranks. `environment`: variables added to
    those that ranks inherit, before their interpreter starts. `fallback`: the job to start if too few nodes are left, with fewer ranks,
    but as many on each node. `sealed`: files that must not change (`megalith.sealed`); if there are any, the entry gets them as
    `sealed`. `burn_in` is a command that prints findings about a node's devices as JSON (`admission.burnt`). It runs before an excluded
    node returns, within `burn_in_timeout` seconds; empty: no burn-in. `keyed`: the ranks need the run's key.
    """

    entry: str
    arguments: dict[str, object]
    ranks: int
    run_dir: Path
    preload: tuple[str, ...] = ()
    start_timeout: float = 120.0
    silence_timeout: float | None = 600.0
    threads: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    fallback: "Job | None" = None
    sealed: dict[str, str] = field(default_factory=dict)
    burn_in: tuple[str, ...] = ()
    burn_in_timeout: float = 120.0
    keyed: bool = False

    def now(self, *, shrunk: bool) -> "Job":
        """Return the job to start: this one, or its fallback."""
        assert not shrunk or self.fallback is not None, "shrunk without a fallback"
        return self.fallback if shrunk and self.fallback is not None else self

    def problems(self) -> list[str]:
        """Return the problems of the job; empty if the job can be started."""
        found = []
        if not re.fullmatch(r"[\w.]+:\w+", self.entry):
            found.append(f'entry {self.entry!r} does not name a function. Write "module:function"')
        if self.ranks < 1:
            found.append(f"ranks = {self.ranks} starts nothing. Use 1 or more")
        if self.threads < 0:
            found.append(f"threads = {self.threads} is not a number of threads. Use 1 or more, or 0 for cores / ranks")
        for name in ("start_timeout", "silence_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                found.append(f"{name} = {value} leaves no time. Use a number of seconds above 0")
        try:
            json.dumps(self.arguments)
        except (TypeError, ValueError) as error:
            found.append(f"arguments cannot be passed to the ranks: {error}. Use numbers, text, lists and dictionaries")
        return found

    def check(self) -> None:
        """Raise ValueError with all problems of the job."""
        if problems := self.problems():
            raise ValueError("this job cannot be started:\n" + "\n".join(f"- {problem}" for problem in problems))
