"""All data about one run, from its folder only: its log, and the seconds of each rank by use."""

import contextlib
import json
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from megalith import epochs, events, pyramid
from megalith.control import ledger, times
from megalith.events import (
    Checkpoint,
    EarlyUpdatesPaused,
    Event,
    Holding,
    Incident,
    Lowered,
    Merge,
    Order,
    PhaseBegan,
    PrecisionWatched,
    Problem,
    Recovery,
    Rewound,
    RunFinished,
    RunStarted,
    Sample,
    Skipped,
    Spans,
    Spike,
    Step,
    Validation,
)
from megalith.fleet.rank_info import slot_of
from megalith.mesh import Mesh
from megalith.pyramid import View
from megalith.report.history import Ending, heading, plan_of, tokens_a_byte
from megalith.spec.alerts import AlertsSpec
from megalith.spec.plan import Plan
from megalith.watch import index, predict

if TYPE_CHECKING:
    from megalith.watch.causes import CauseReport
    from megalith.watch.scaling_law import ScalingLaw

Answer = Skipped | Spike | Rewound | Lowered | PrecisionWatched | EarlyUpdatesPaused
"""A loss spike or another event that concerns updates: a skipped update, a rewind, a lowered learning rate, a rounding
comparison, or a pause of early updates."""

KEPT = 2000  # events of a kind that are held; the newest count
SAVES = 5  # checkpoints that the usual pause for one is known from
SPANS = 8  # drawings of the pipeline that are held
TAIL = 1 << 20  # bytes of a log in which its last step lies
ACCOUNT = 16 << 20  # bytes at the end of a log that the account of its time is made from


class MergeTotals(NamedTuple):
    """Totals over all merges of a run with sites, as the first site logged them."""

    merges: int = 0
    sent: int = 0
    """Bytes."""
    waited: float = 0.0
    """Seconds."""

    def and_one(self, merge: Merge) -> "MergeTotals":
        return MergeTotals(self.merges + 1, self.sent + merge.bytes_sent, self.waited + merge.waited)


class Source:
    """A live view of one run, from its folder. Several threads may use a Source: a thread that reads it holds
    `lock`, and `poll` takes `lock` itself."""

    def __init__(self, run_dir: Path, *, predicts: bool = True) -> None:
        """`predicts`: request the planner's prediction once the run's plan is known. Raises FileNotFoundError for a folder that holds no
        run."""
        if not run_dir.is_dir() or not (
            epochs.newest(run_dir, events.FILE).exists() or epochs.newest(run_dir, "run.toml").exists()
        ):
            raise FileNotFoundError(
                f"{run_dir} holds no run: there is no {events.FILE} and no run.toml. Give the --run-dir of a run."
            )
        self.run_dir, self.lock = run_dir, threading.RLock()
        self.starts: deque[RunStarted] = deque(maxlen=KEPT)
        self.validations: deque[Validation] = deque(maxlen=KEPT)
        self.watched: deque[PrecisionWatched] = deque(maxlen=KEPT)
        self.checkpoints: deque[Checkpoint] = deque(maxlen=KEPT)
        self.samples: deque[Sample] = deque(maxlen=20)
        self.spans: deque[Spans] = deque(maxlen=SPANS)
        self.incidents: deque[Incident] = deque(maxlen=KEPT)
        self.recoveries: dict[int, Recovery] = {}
        self.problems: deque[Problem | Answer] = deque(maxlen=KEPT)
        self.phases: deque[PhaseBegan] = deque(maxlen=KEPT)  # but the first
        self.merges: deque[Merge] = deque(maxlen=KEPT)
        self.merged = MergeTotals()
        self.holdings: dict[int, Holding] = {}
        self._ending = Ending()
        self.last_time = 0.0  # of the newest event
        self._came = 0.0  # when the newest event came, by this machine's clock; 0: it was there before
        self.revision = 0
        self.behind = True  # the log is being read for the first time
        self._base = epochs.newest(run_dir, index.FOLDER)
        self._base_steps = pyramid.Reader(self._base)
        self._timed = pyramid.Reader(epochs.newest(run_dir, times.FOLDER))
        found = self._base_steps.newest()
        self._until = found and (found[0], found[1])
        begin = index.end_of(self._base)
        self.last_time = found[3] if found else 0.0
        self.left_out = _left_out(epochs.newest(run_dir, events.FILE), begin)
        """Number of updates that the run has skipped so far, by which it makes more steps than train.steps."""
        for at, event in index.notes(self._base):
            if at <= begin:
                self._take(event)
        self._scratch = Path(tempfile.mkdtemp(prefix="megalith-watch-"))
        self._own_steps = pyramid.Reader(self._scratch)
        self._remove = weakref.finalize(self, shutil.rmtree, self._scratch, True)
        self._index = index.Index(run_dir, self._scratch, begin=begin)
        self._account: tuple[int, float, ledger.Goodput] | None = None
        self.predicted: dict[str, Any] | None = None
        self.causes: tuple[int, float, CauseReport] | None = None  # at which revision, until when, what was found
        self.law: ScalingLaw | None = None  # fitted to other runs: the loss is drawn beside it
        self.own_law: tuple[int, ScalingLaw] | None = None  # of `watch.scaling_law`: fitted to this run up to a step
        self.rules: AlertsSpec | None = None  # the rules given to the process that follows the run
        self.served = False  # whether a server follows the run, and so looks for causes
        self._places: tuple[tuple[float, int], dict[str, NDArray[np.int64]]] | None = None
        self._predicts, self._asked = predicts, ""
        self._asking: threading.Thread | None = None

    def close(self) -> None:
        """Remove the temporary index of the run."""
        self._index.close()
        self._remove()

    def poll(self) -> bool:
        """Read one portion of the log; return True if it had new events. The caller must call `poll` again until it returns
        False."""
        with self.lock:
            found = self._index.poll()
            for event in found:
                self._take(event)
            if not self.behind and any(not isinstance(event, Sample) for event in found):
                self._came = time.time()
            self.revision += bool(found)
            self.behind = self.behind and bool(found)
        self._predict()
        return bool(found)

    def _predict(self) -> None:
        """Request a prediction, computed in a thread, once for each plan and phase."""
        plan, phase = self.plan, self.phase_at(self.last_step() or 0)
        number = phase.number if phase else 0
        key = f"{number} {plan.model_dump_json()}" if plan else ""
        if self._predicts and plan and key != self._asked and not self.behind:
            self._asked = key

            def work() -> None:
                found = predict.ask(self.run_dir, plan, number)
                with self.lock:
                    self.predicted = found
                    self.revision += 1

            self._asking = threading.Thread(target=work, name="predict", daemon=True)
            self._asking.start()

    def await_prediction(self) -> None:
        """Wait until a requested prediction is ready."""
        self._predict()
        if self._asking is not None:
            self._asking.join(predict.LIMIT)

    def _take(self, event: Event) -> None:
        if not isinstance(event, Sample):  # `generate` adds these when the run is over
            self.last_time = max(self.last_time, event.time)
        self._ending.take(event)
        match event:
            case Step():
                self.left_out = event.left_out
            case RunStarted():
                self.starts.append(event)
                self.holdings = {}
            case Validation():
                self.validations.append(event)
            case PrecisionWatched():
                self.watched.append(event)
                self.problems.extend([event] if event.raised else [])
            case Checkpoint():
                self.checkpoints.append(event)
            case Sample():
                self.samples.append(event)
            case Spans():
                self.spans.append(event)
            case Incident():
                self.incidents.append(event)
            case Recovery():
                self.recoveries[event.incident] = event
            case Problem() | Skipped() | Spike() | Rewound() | Lowered() | EarlyUpdatesPaused():
                self.problems.append(event)
            case Order():
                words = f"ordered: {event.what} {event.node}".rstrip() + f": {event.answer}"
                self.problems.append(Problem("warning", words, time=event.time))
            case PhaseBegan():
                self.phases.extend([event] if event.number else [])
            case Merge():
                self.merges.append(event)
                self.merged = self.merged.and_one(event)
            case Holding():
                self.holdings[event.rank] = event

    # What the run is

    @property
    def finished(self) -> RunFinished | None:
        """The end of the run; None if it has not ended, or recovers from the end of its ranks."""
        return self._ending.event

    @property
    def start(self) -> RunStarted | None:
        """The newest start."""
        return self.starts[-1] if self.starts else None

    @property
    def spec(self) -> dict[str, Any]:
        """The resolved specification of the newest start; before the first start, spec.json of the folder."""
        if self.start is not None:
            return self.start.spec
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(epochs.newest(self.run_dir, "spec.json").read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else {}
        return {}

    @property
    def name(self) -> str:
        return str(self.spec.get("name") or self.run_dir.resolve().name)

    @property
    def title(self) -> str:
        return heading(self.name, self.run_dir)

    @property
    def plan(self) -> Plan | None:
        return plan_of(self.start) if self.start else None

    @property
    def alerts(self) -> AlertsSpec:
        """Limits at which signs of trouble are reported: from `rules`, else from the run's specification, else the defaults."""
        if self.rules is not None:
            return self.rules
        with contextlib.suppress(ValidationError):
            return AlertsSpec.model_validate(self.spec.get("alerts") or {})
        return AlertsSpec()

    def forget_end(self, before: float) -> None:
        """Count the run as not ended if its end was logged before the time `before`."""
        with self.lock:
            if self.finished is not None and self.finished.time < before:
                self._ending = Ending()

    def setting(self, table: str, key: str) -> Any:
        """Return a value of the run's specification; None if it is not set."""
        found = self.spec.get(table)
        return found.get(key) if isinstance(found, dict) else None

    @property
    def world(self) -> int:
        return self.start.world if self.start else 0

    def places(self) -> dict[str, NDArray[np.int64]]:
        """Each rank's position on each axis of the mesh, and its node."""
        key = (self.start.time, len(self.holdings)) if self.start else (0.0, 0)
        if self._places is None or self._places[0] != key:
            self._places = key, self._find_places()
        return self._places[1]

    def _find_places(self) -> dict[str, NDArray[np.int64]]:
        plan, world = self.plan, self.world
        if plan is None or plan.ranks != world:  # an unreadable plan, or other ranks: the log has the placement
            axes = ("pipeline", "data", "context", "tensor")
            rows = [
                [self.holdings[rank].coordinates.get(axis, 0) if rank in self.holdings else 0 for axis in axes]
                for rank in range(world)
            ]
            table = np.array(rows, dtype=np.int64).reshape(world, len(axes))
        else:
            mesh = Mesh.of(plan)
            found = [mesh.coordinates(rank) for rank in range(world)]
            axes = tuple(found[0]) if found else ()
            table = np.array([[place[axis] for axis in axes] for place in found], dtype=np.int64)
        nodes = int(self.setting("fleet", "nodes") or 1)
        nodes = nodes if nodes > 1 else max(1, world // 8)
        node = np.array([slot_of(rank, world=world, slots=nodes) for rank in range(world)], dtype=np.int64)
        return {axis: table[:, at] for at, axis in enumerate(axes)} | {"node": node}

    # What was measured

    def last_step(self) -> int | None:
        """The number of the newest step."""
        own = self._own_steps.newest()
        return own[1] if own else self._until[1] if self._until else None

    def phase_at(self, step: int) -> PhaseBegan | None:
        """Return the phase to which a step belongs; None in the run's first phase."""
        return next((one for one in reversed(self.phases) if one.step <= step), None)

    def steps(self, names: Sequence[str], *, first: int = 0, last: int = 2**62, most: int = 600) -> View:
        """Return the numbers `names` of the steps from `first` to `last`, in about `most` records. A repeated step occurs each
        time that it was computed."""
        at = [index.VALUES.index(name) for name in names]
        values = [slice(i, i + 1) for i in at]
        base = self._base_steps.read(values, first=first, last=last, most=most, until=self._until)
        own = self._own_steps.read(values, first=first, last=last, most=most)
        return _joined(base, own) if self._until else own

    def recent(self, names: Sequence[str], number: int) -> dict[str, NDArray[np.float64]]:
        """Return the numbers `names`, "step" and "time" of each of the newest steps. Only steps since the newest start and of the
        newest phase are included."""
        newest = self.last_step()
        if newest is None:
            return {name: np.zeros(0) for name in (*names, "step", "time")}
        phase = self.phase_at(newest)
        view = self.steps(names, first=max(newest - number + 1, phase.step if phase else 0), most=2 * number)
        kept = (view.steps == 1) & (view.piece == view.piece[-1]) if len(view) else np.zeros(0, dtype=bool)
        found = {name: view.mean[kept, at].astype(np.float64) for at, name in enumerate(names)}
        return found | {"step": view.first[kept].astype(np.float64), "time": view.time[kept]}

    def ranks(self, row: str, *, first: int = 0, last: int = 2**62, most: int = 400) -> tuple[View, int]:
        """Return one row of `control.times` (a kind of seconds, or memory) of all ranks in the newest generation's plan, and the
        number of ranks."""
        timed = self._times()
        world = timed.width() // len(times.ROWS)
        return timed.read([times.block(row, world)], first=first, last=last, most=most), world

    def times_span(self) -> tuple[int, int] | None:
        """The first and the last step that all ranks have reported; None if there is no such step."""
        return self._times().span()

    def _times(self) -> pyramid.Reader:
        """Return the reader of the ranks' times, which another owner of the run folder keeps in another folder."""
        if (folder := epochs.newest(self.run_dir, times.FOLDER)) != self._timed.folder:
            self._timed = pyramid.Reader(folder)
        return self._timed

    def goodput(self) -> tuple[ledger.Goodput, float] | None:
        """Return the use of the run's time, and how many seconds it covers. Only the end of a long log is read. The result is
        None while there is no log."""
        with contextlib.suppress(OSError):
            path = epochs.newest(self.run_dir, events.FILE)
            size = path.stat().st_size
            if self._account is None or (size != self._account[0] and time.monotonic() - self._account[1] > 5):
                with path.open("rb") as file:
                    file.seek(max(0, size - ACCOUNT))
                    lines = file.read(ACCOUNT).split(b"\n")[1 if size > ACCOUNT else 0 :]
                found = [event for line in lines if (event := events.parse(line.decode("utf-8", "replace") + "\n"))]
                self._account = size, time.monotonic(), ledger.goodput(found)
        if self._account is None or not self._account[2].wall:
            return None
        return self._account[2], self._account[2].wall

    def nodes(self) -> dict[str, Any]:
        """Return the nodes that hold ranks, spare nodes and quarantined nodes, as the run's controller last recorded them; empty
        if the run has no controller."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            found = json.loads(epochs.newest(self.run_dir, "ranks/fleet.json").read_text(encoding="utf-8"))
            state = found.get("state", found)
            return {
                "placement": list(state["placement"]),
                "spares": list(state["spares"]),
                "quarantined": list(state["quarantined"]),
            }
        return {}

    def tokens_a_byte(self) -> dict[str, float]:
        """Return the tokens a byte of the held-out text: see `report.history.tokens_a_byte`."""
        return tokens_a_byte({"data": {"path": self.setting("data", "path")}})

    def saving(self) -> float | None:
        """Return how long a checkpoint pauses training, averaged over the newest checkpoints and divided by the number of steps
        between two checkpoints; None without checkpoints."""
        every, saved = self.setting("checkpoint", "every"), list(self.checkpoints)[-SAVES:]
        return sum(one.wait_seconds for one in saved) / len(saved) / every if every and saved else None

    def age(self) -> float | None:
        """Seconds since the newest event. The event's logged time may come from another machine's clock. An event that arrived
        while this process watched is therefore dated by its arrival."""
        return max(0.0, time.time() - (self._came or self.last_time)) if self.last_time else None

    def free(self) -> int | None:
        """Return the free bytes on the disk of the run folder."""
        with contextlib.suppress(OSError):
            found = os.statvfs(self.run_dir)
            return found.f_bavail * found.f_frsize
        return None


def _left_out(log: Path, end: int) -> int:
    """Return the number of skipped updates in the last step event of a log before offset `end`."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, end - TAIL))
        for line in reversed(file.read(min(end, TAIL)).split(b"\n")):
            event = events.parse(line.decode("utf-8", "replace") + "\n")
            if isinstance(event, Step):
                return event.left_out
    return 0


def _joined(one: View, other: View) -> View:
    """Join two views. The second view's first piece continues the last piece of the first view, unless the second view begins at
    or before the last step of the first."""
    if not len(one) or not len(other):
        return one if len(one) else other
    whole = {name: np.concatenate([getattr(one, name), getattr(other, name)]) for name in View.__dataclass_fields__}
    back = int(other.first[0] <= one.last[-1])
    whole["piece"] = np.concatenate([one.piece, other.piece - other.piece[0] + one.piece[-1] + back])
    return View(**whole)
