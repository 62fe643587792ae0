"""Send a run's numbers to other tools (keys of `[log]`), from a separate process that follows the run's log.

Each run folder is one run in a tool, even if the run is stopped and resumed. `sinks.json` in the folder has the run's id, and how
much of the log each tool has received. Nothing leaves the machine unless `log.online` is set. If a tool fails, a warning is
logged, the tool is no longer used, and training continues.
"""

import fcntl
import json
import math
import os
import secrets
import select
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megalith import epochs, events
from megalith.events import Event, EventLog, Problem, Step, Validation
from megalith.spec.files import SPEC_FILE
from megalith.spec.run import SINKS, LogSpec

FILE = "sinks.json"
EVERY = 2.0  # seconds between looks
AT_ONCE = 1000  # events after which sinks.json is written


@dataclass(frozen=True)
class TrackedRun:
    """The description of the run for another tool."""

    id: str
    """Identifier of the run, which stays the same at every start."""
    name: str
    folder: Path
    values: Mapping[str, Any]
    """Every value of the run's specification."""
    log: LogSpec


class Sink(Protocol):
    """Interface to a tool that receives numbers. Every method may raise any exception."""

    def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Receive the numbers of a step, by name. `time`: seconds since the epoch."""
        ...

    def close(self) -> None:
        """Write the remaining data."""
        ...


class TensorBoard:
    """Sink for TensorBoard. The run is in RUN_DIR/tensorboard, and each start of the run adds a file."""

    def __init__(self, subject: TrackedRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2  # an extra
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._writer: Any = EventFileWriter(str(subject.folder / "tensorboard"))
        self._last: int | None = None  # step trained

    def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
        if "train/loss" in values and (
            self._last is None or step <= self._last
        ):  # removes the values shown of this step and later ones
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer.add_event(self._events.Event(wall_time=time, step=step, session_log=start))
        self._last = step if "train/loss" in values else self._last
        found = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._events.Event(wall_time=time, step=step, summary=self._summaries.Summary(value=found)))

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Sink for Weights & Biases. In Weights & Biases, the run has the same id as in Megalith. Offline, its files are in
    RUN_DIR/wandb, from where `wandb sync` uploads them."""

    def __init__(self, subject: TrackedRun) -> None:
        import wandb  # an extra  # pyright: ignore[reportMissingImports]

        self._run: Any = wandb.init(
            project=subject.log.project,
            id=subject.id,
            name=subject.name,
            dir=str(subject.folder),
            config=dict(subject.values),
            resume="allow",
            mode="online" if subject.log.online else "offline",
        )
        self._run.define_metric("*", step_metric="step")  # a step that is trained again after a fault is not refused

    def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Sink for Trackio. In Trackio, the run's name consists of this run's name and id. The files are in RUN_DIR/trackio; online
    they go to the Space that TRACKIO_SPACE_ID names."""

    def __init__(self, subject: TrackedRun) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(subject.folder / "trackio"))
        import trackio  # an extra, which reads TRACKIO_DIR now  # pyright: ignore[reportMissingImports]

        self._trackio: Any = trackio
        space = os.environ.get("TRACKIO_SPACE_ID") if subject.log.online else None
        if not subject.log.online:
            os.environ.pop("TRACKIO_SPACE_ID", None)
        trackio.init(
            project=subject.log.project,
            name=f"{subject.name}-{subject.id}",
            config=dict(subject.values),
            space_id=space,
            resume="allow",
        )

    def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


class Mlflow:
    """Sink for MLflow. In MLflow, the run has this run's id as a tag. The run is stored in RUN_DIR/mlflow.db; online, at
    MLFLOW_TRACKING_URI."""

    def __init__(self, subject: TrackedRun) -> None:
        from mlflow import MlflowClient  # an extra  # pyright: ignore[reportMissingImports]

        here = f"sqlite:///{subject.folder.resolve() / 'mlflow.db'}"
        self._client: Any = MlflowClient(tracking_uri=None if subject.log.online else here)
        project = subject.log.project
        known = self._client.get_experiment_by_name(project)
        experiment = self._client.create_experiment(project) if known is None else known.experiment_id
        found = self._client.search_runs([experiment], filter_string=f"tags.megalith = '{subject.id}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            made = self._client.create_run(experiment, tags={"megalith": subject.id}, run_name=subject.name)
            self._id = made.info.run_id
            self._client.set_tag(self._id, "spec", json.dumps(subject.values))

    def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
        for name, value in values.items():
            self._client.log_metric(self._id, name, value, timestamp=int(1000 * time), step=step)

    def close(self) -> None:
        self._client.set_terminated(self._id)


KINDS: dict[str, Callable[[TrackedRun], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": Mlflow,
}
"""The sinks by the tool's key in `[log]`."""
assert set(KINDS) == set(SINKS)


class Feed:
    """Sends the log of one run to the tools of its `[log]`. Its methods catch all exceptions that the tools raise."""

    def __init__(self, run_dir: Path, log: LogSpec, *, warn: Callable[[str], None]) -> None:
        self._folder, self._warn = run_dir, warn
        self._kept = _read(run_dir / FILE) or {"id": secrets.token_hex(4), "done": {}}
        _write(run_dir / FILE, self._kept)
        values = _read(epochs.newest(run_dir, SPEC_FILE)) or {}
        subject = TrackedRun(self._kept["id"], str(values.get("name") or run_dir.name), run_dir, values, log)
        self._sinks: dict[str, Sink] = {}
        for name in SINKS:
            if getattr(log, name):
                self._try(name, lambda name=name: self._sinks.update({name: KINDS[name](subject)}))

    def poll(self) -> None:
        """Send the part of the log that is new since the last call."""
        path = epochs.newest(self._folder, events.FILE)
        for name in list(self._sinks):
            done = self._kept["done"].get(name, {})
            at = done.get("bytes", 0)
            if done and done["file"] != path.name:
                at = _in_common(self._folder / done["file"], path, at)
                self._kept["done"][name] = {"file": path.name, "bytes": at}
            for number, (event, end) in enumerate(_events(path, at), start=1):
                if values := numbers_of(event):
                    self._try(name, lambda name=name, event=event, values=values: self._send(name, event, values))
                if name not in self._sinks:
                    break
                self._kept["done"][name] = {"file": path.name, "bytes": end}
                if number % AT_ONCE == 0:
                    _write(self._folder / FILE, self._kept)
        _write(self._folder / FILE, self._kept)

    def close(self) -> None:
        """Send the remaining part of the log, and close each tool."""
        self.poll()
        for name, sink in list(self._sinks.items()):
            self._try(name, sink.close)

    def _send(self, name: str, event: Event, values: Mapping[str, float]) -> None:
        assert isinstance(event, Step | Validation)
        self._sinks[name].numbers(values, event.step, event.time)

    def _try(self, name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            self._sinks.pop(name, None)
            self._warn(f"log.{name}: no more numbers are sent to it: {type(error).__name__}: {error}. Training continues")


def numbers_of(event: Event) -> dict[str, float]:
    """Return the numbers of an event that tools receive, by name; unknown and non-finite numbers are left out."""
    found: dict[str, float | None] = {}
    match event:
        case Step():
            names = ("loss", "grad_norm", "lr", "tokens_per_second", "mfu", "tokens_seen", "seconds", "scale")
            found = {f"train/{name}": getattr(event, name) for name in names}
            found |= {f"seconds/{name}": seconds for name, seconds in event.breakdown.items()}
            found |= {f"experts/{name}": value for name, value in event.experts.items()}
        case Validation():
            found = {"validation/loss": event.loss, **{f"validation/{name}": loss for name, loss in event.domains.items()}}
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def _in_common(old: Path, new: Path, end: int) -> int:
    """Return how many bytes of whole lines the log `old` and its successor `new` have in common at their beginning, at most
    `end`; 0 if a log is missing."""
    try:
        with old.open("rb") as one, new.open("rb") as other:
            at = 0
            for line, again in zip(one, other, strict=False):
                if line != again or at + len(line) > end:
                    break
                at += len(line)
            return at
    except FileNotFoundError:
        return 0


def _events(path: Path, at: int) -> Iterator[tuple[Event, int]]:
    """Yield the events in whole lines from offset `at` on, each with the offset of its end."""
    if not path.exists() or path.stat().st_size < at:
        at = 0  # the log was emptied
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(at)
        for line in file:
            if not line.endswith(b"\n"):
                return
            at += len(line)
            event = events.parse(line.decode("utf-8", "replace"))
            if event is not None:
                yield event, at


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write(path: Path, values: Mapping[str, Any]) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(values), encoding="utf-8")
    unfinished.replace(path)


def main(run_dir: Path) -> None:
    """Feed the tools until the training command closes standard input, whose first line is the run's `[log]` as JSON."""

    def warn(text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)
        log = EventLog(run_dir)
        log.write(Problem("warning", text))
        log.close()

    lock = (run_dir / "sinks.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # the process of an earlier start may still be sending
    feed = Feed(run_dir, LogSpec.model_validate_json(sys.stdin.buffer.raw.readline()), warn=warn)  # type: ignore[attr-defined]
    while not select.select([sys.stdin], [], [], EVERY)[0]:
        feed.poll()
    feed.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
