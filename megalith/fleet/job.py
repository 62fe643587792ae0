"""Description of what ranks run: an entry function, its arguments, and time limits."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """The work of a run's ranks, and its limits.

    `entry` is "module:function", called on each rank as `function(**arguments)`; `arguments` must be storable as JSON. `preload`: modules
    that the fork server imports once, before it forks ranks, and functions ("module:function") that it calls then. Every rank must send a
    heartbeat of phase `ready` (`heartbeat.Heartbeat.find().beat("ready")`) within `start_timeout` seconds; after that, a rank's heartbeats
    may be at most `silence_timeout` seconds apart (None: no limit). `threads`: compute threads per rank; 0: cores / ranks. `environment`:
    environment variables that ranks have in addition to inherited ones. `fallback`: the job that is started if too few nodes are left; it
    has fewer ranks, but the same number per node. `sealed`: files that must not change (`megalith.sealed`), which the entry function gets
    as its argument `sealed`. `burn_in`: command that prints findings about a node's devices as JSON (`admission.burnt`), before an excluded
    node returns and within `burn_in_timeout` seconds; empty: no burn-in. `keyed`: the ranks need the run's key.
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
        """Return this job, or its fallback if the run is `shrunk`."""
        assert not shrunk or self.fallback is not None, "shrunk without a fallback"
        return self.fallback if shrunk and self.fallback is not None else self

    def problems(self) -> list[str]:
        """Return the problems of the job; empty if the job can be started."""
        found = []
        if not re.fullmatch(r"[\w.]+:\w+", self.entry):
            found.append(f'entry {self.entry!r} does not name a function. Write "module:function"')
        if self.ranks < 1:
            found.append(f"ranks = {self.ranks} would start no process. Use 1 or more")
        if self.threads < 0:
            found.append(
                f"threads = {self.threads} is not a number of threads. Use 1 or more, or 0 for the number of cores divided by ranks"
            )
        for name in ("start_timeout", "silence_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                found.append(f"{name} = {value} is not a time limit. Use a number of seconds above 0")
        try:
            json.dumps(self.arguments)
        except (TypeError, ValueError) as error:
            found.append(f"arguments cannot be passed to the ranks: {error}. Use numbers, text, lists and dictionaries")
        return found

    def check(self) -> None:
        """Raise ValueError with all problems of the job."""
        if problems := self.problems():
            raise ValueError("this job cannot be started:\n" + "\n".join(f"- {problem}" for problem in problems))
