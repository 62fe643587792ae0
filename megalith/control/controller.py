"""Continues a run through faults, by restarting its ranks. `megalith train` runs this controller on one machine.

The controller collects observations, passes each to `policy.decide`, and carries out the commands returned by the policy. After a fault
from which ranks do not recover by themselves, all ranks are killed, and started again from the newest complete copy of the state.
If a controller is killed, another one can continue, because copies of the state are files, and `ranks/fleet.json` has the
controller's own state.
"""

import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megalith import epochs, sealed
from megalith.control import incidents, policy, supervisor
from megalith.control.memory import Memory
from megalith.control.observed import ALWAYS_TOLD, CHECKS, HELD_UP, NO_INCIDENT, OF_NODES, GenerationEnd, TimedObservation, ends
from megalith.control.orders import Orders
from megalith.control.outcome import Outcome, without_ranks
from megalith.control.owner import Owner, owned
from megalith.control.pace import Pace
from megalith.control.policy import Decision
from megalith.control.stop_response import Request, StopResponse, Store, print_line
from megalith.control.stores import Stores, StoresAwayError, await_list
from megalith.control.stragglers import Stragglers
from megalith.control.watch import Watch
from megalith.events import EventLog, Incident, Order, Problem, Recovery, RunFinished
from megalith.fleet import commands, local, observations
from megalith.fleet.commands import Command
from megalith.fleet.exit_codes import ORDERLY, ExitCode
from megalith.fleet.heartbeat import Beat
from megalith.fleet.job import Job
from megalith.fleet.local import LocalNodes
from megalith.fleet.nodes import Generation, Nodes
from megalith.fleet.observations import Observation
from megalith.fleet.tiers import Copy, roots
from megalith.spec.fleet import FleetSpec

IDLE_SECONDS = 0.02
STORAGE_SECONDS = 1.0  # between looks whether a full disk has room again, or a store is back

Start = commands.Restart | commands.Shrink | commands.Grow


@dataclass
class _Open:
    """An incident from which the run has not recovered yet."""

    number: int
    step: int
    in_place: bool


class Controller:
    """Controls one run, from the first start of its ranks to the run's end. `store` lists the checkpoints that all nodes can
    read. `notify` receives messages for the user. `epoch`: the number in the file names of the run folder's owner (`megalith.epochs`)."""

    def __init__(
        self,
        job: Job,
        *,
        fleet: FleetSpec,
        nodes: Nodes,
        store: Store,
        requests: list[Request],
        tick: Callable[[], None] = lambda: None,
        notify: Callable[[str], None] = print_line,
        epoch: int = 0,
    ) -> None:
        self._job, self._fleet, self._nodes, self._store = job, fleet, nodes, store
        self._requests, self._tick = requests, tick
        self._stop_response = StopResponse(requests, notify, beats=lambda: nodes.beats(), copies=self._copies)
        self._epoch = epoch
        self._log = EventLog(job.run_dir, epoch=epoch)
        self._memory, self._stores, self._orders = Memory(job, fleet, epoch), Stores(job.run_dir), Orders(job.run_dir)
        self._checks: list[tuple[float, str]] = []  # monotonic seconds, node: health checks still to be made
        self._pace = Pace(job.start_timeout, job.silence_timeout, fleet)
        self._stragglers = Stragglers(fleet)
        self._state = self._memory.recall(nodes.there())
        self._incidents = incidents.count(job.run_dir)
        self._listed: tuple[Copy, ...] | None = None  # the checkpoints that there were when the store could last be read
        self._open: list[_Open] = []
        self._next: Start | None = None
        self._shrunk, self._placement = False, self._state.placement  # of this generation
        self._wait_until: float | None = None
        self._watch: Watch | None = None
        self._outcome: Outcome | None = None
        self._report = ""
        self._stop_code: int | None = None
        self._done = -1  # steps this generation has done
        self._restored = 0  # steps in the copy that it restored
        self._begun = -1  # the furthest step any generation began
        self._end_now = False
        self._seen: list[TimedObservation] = []

    # The loop

    def run(self) -> Outcome:
        """Control the run until its last step, a request to stop, or a fault that a person must repair."""
        try:
            if self._await_store():
                self._take(TimedObservation(observations.Started(time=time.time()), time.time(), {}))
            else:
                self._outcome = without_ranks(ExitCode.TERMINATED)
            while self._outcome is None:
                if self._next is not None:
                    self._generation(self._next)
                else:
                    self._idle()
            return self._outcome
        finally:
            self._log.close()

    def _await_store(self) -> bool:
        """Wait until the checkpoints can be listed (`stores.await_list`). Return False if a stop is requested before."""
        if not self._requests:
            self._listed = await_list(self._store, limit=self._fleet.wait_limit, notify=self._warn, pause=self._pause_for_storage)
        return self._listed is not None

    def _generation(self, order: Start) -> None:
        self._next, self._done, self._end_now, self._restored = None, -1, False, order.source.step
        self._shrunk = isinstance(order, commands.Shrink)
        self._placement = order.nodes[: self._state.least] if isinstance(order, commands.Shrink) else order.placement
        self._pause(order.after if isinstance(order, commands.Restart) else 0.0)
        self._stragglers.begin()
        self._watch = watch = Watch(
            self._now, self._nodes, self._requests, source=order.source, limits=self._pace, observe=self._observe,
            stop_response=self._stop_response, epoch=self._epoch,
        )  # fmt: skip
        try:
            started = self._start(Generation(secrets.token_hex(4), self._placement, order.source, self._shrunk, self._epoch))
        except sealed.AlteredError as error:
            self._log.write(Problem("error", str(error)))
            self._log.write(RunFinished(reason="failed", step=-1))
            self._outcome = without_ranks(ExitCode.FAILED, report=str(error))
            return
        except StoresAwayError as error:
            self._outcome = without_ranks(ExitCode.LOST, report=str(error))
            return
        if not started:
            self._outcome = without_ranks(ExitCode.TERMINATED)
            return
        outcome, before = watch.until_all_ended(self._turn), self._incidents
        self._progress(self._nodes.beats())
        for seen in self._after(watch, outcome):
            self._take(seen)
        if self._incidents > before and not self._stores.run_folder_away:
            outcome = incidents.write(outcome, self._job.run_dir, number=self._incidents, epoch=self._epoch)
        if self._next is None and self._wait_until is None and self._outcome is None:
            self._outcome = self._final(outcome)

    def _start(self, generation: Generation) -> bool:
        """Start all ranks as soon as the run's storage is available. Return False if a stop is requested before the start. Raises
        StoresAwayError after the waiting limit, and AlteredError if a sealed file has changed."""

        def start() -> None:
            sealed.check(self._job.sealed)
            self._nodes.start(generation)

        return self._stores.start(start, limit=self._fleet.wait_limit, notify=self._warn, pause=self._pause_for_storage)

    def _warn(self, text: str) -> None:
        self._log.write(Problem("warning", text))

    def _pause_for_storage(self) -> bool:
        """Pause between two looks at storage. Return False, without a pause, if a stop is requested."""
        if self._requests:
            return False
        self._pause(STORAGE_SECONDS)
        return True

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._requests:
            self._turn()
            time.sleep(IDLE_SECONDS)

    def _idle(self) -> None:
        if self._requests:
            self._outcome = without_ranks(ExitCode.TERMINATED)
            return
        self._turn()
        for observation in self._nodes.wait(IDLE_SECONDS):
            if isinstance(observation, Observation):
                self._take(TimedObservation(observation, observation.time, {}))
        if self._wait_until is not None and time.monotonic() >= self._wait_until:
            self._wait_until = None
            self._take(TimedObservation(observations.Waited(time=time.time(), step=self._step), time.time(), {}))
        if self._stop_code is not None:
            self._outcome = without_ranks(self._stop_code, report=self._report)

    def _turn(self) -> None:
        self._tick()
        for order in self._orders.take() if self._done >= 0 or self._state.waiting else ():  # ranks that start cannot save yet
            self._take_now_or_later(TimedObservation(order, order.time, {}))
        due = [node for at, node in self._checks if time.monotonic() >= at]
        self._checks = [(at, node) for at, node in self._checks if node not in due]
        for node in due:
            self._nodes.check(node)

    def _final(self, outcome: Outcome) -> Outcome:
        if self._stop_code is None or self._requests:
            return outcome
        return replace(outcome, code=self._stop_code, report=self._report)

    # While ranks run

    @property
    def _now(self) -> Job:
        return self._job.now(shrunk=self._shrunk)

    @property
    def _step(self) -> int:
        return max(self._begun, 0)

    def _observe(self, heard: list[Observation], beats: list[Beat]) -> bool:
        for observation in heard:
            self._handle(observation)
        self._progress(beats)
        slow = self._stragglers.note(beats, nodes=self._placement, replacing=self._pace.usual_start())
        if slow is not None:
            self._take_now_or_later(TimedObservation(slow, slow.time - slow.lost, {}))
        return self._end_now

    def _take_now_or_later(self, seen: TimedObservation) -> None:
        decision = policy.decide(self._state, seen.observation, fleet=self._fleet)
        if any(isinstance(command, Start | commands.Wait) for command in decision.commands):
            self._seen.append(seen)
            self._end_now = True
        else:
            self._take(seen)

    def _handle(self, observation: Observation) -> None:
        """Handle a rank's report or an observation of a node. If the observation ends the generation of ranks, the policy decides
        on it after all ranks have ended."""
        if _is_ours(observation, self._watch):
            return
        if isinstance(observation, observations.NodesLost) and not set(observation.nodes) & set(self._state.placement):
            self._take(TimedObservation(observation, observation.time, {}))
            return
        if ends(observation):
            self._seen.append(TimedObservation(observation, observation.time, {}))
            self._end_now = True
            return
        self._take_now_or_later(TimedObservation(observation, observation.time, {}))

    def _progress(self, beats: Sequence[Beat]) -> None:
        steps = [beat.step for beat in beats if beat.ready]
        if len(steps) < len(beats) or not steps:
            return
        least = min(steps)
        if least >= 0 and self._done < 0:
            self._close_incidents(least)
            self._done = min(least, self._restored)  # the ranks may have finished steps since the last poll
        self._begun = max(self._begun, *steps)
        if least > self._done:
            self._done = least
            self._close_incidents(least, in_place=True)
            self._state = policy.decide(
                self._state, observations.Progressed(time=time.time(), step=least), fleet=self._fleet
            ).state

    def _close_incidents(self, step: int, *, in_place: bool = False) -> None:
        """Close incidents: after a restart, once all ranks have begun a step; without a restart (`in_place`), once all ranks have
        finished the incident's step."""
        for one in [one for one in self._open if one.in_place == in_place and (not in_place or step > one.step)]:
            self._open.remove(one)
            restored = None if in_place else str(self._state.restored)
            lost = 0 if in_place else max(0, self._begun - step)
            self._log.write(Recovery(incident=one.number, step=step, restored=restored, lost_steps=lost))

    # After a generation

    def _after(self, watch: Watch, outcome: Outcome) -> list[TimedObservation]:
        """Return the observations that explain why a generation ended: lost nodes, else reports of ranks, else exits of ranks.
        In the list, other events, such as a repaired node, precede the observations that explain the end."""
        late = [TimedObservation(one, one.time, {}) for one in watch.late_observations if not _is_ours(one, watch)]
        ended_by = [*self._seen, *(one for one in late if ends(one.observation))]
        news = [one for one in late if not ends(one.observation)]
        seen, self._seen = [*news, *ended_by], []
        if self._requests:
            return [TimedObservation(observations.StopRequested(time=time.time(), step=self._step), time.time(), {})]
        if self._next is not None or self._wait_until is not None or self._stop_code is not None:
            return [one for one in seen if isinstance(one.observation, OF_NODES)]  # it was ended on purpose
        lost = [one for one in seen if isinstance(one.observation, observations.NodesLost)]
        if lost:
            return [one for one in seen if isinstance(one.observation, OF_NODES)]
        if ended_by:
            evidence = self._ended(outcome).evidence()
            return [*news, *(replace(one, evidence=evidence) for one in ended_by)]
        if outcome.first_cause is None:
            return [*news, *self._after_order(outcome)]
        if why := self._stores.run_folder_away:
            away = observations.StoreAway(time=time.time(), step=self._step, path=str(self._job.run_dir), error=why)
            return [*news, TimedObservation(away, away.time, self._ended(outcome).evidence())]
        if watch.hang is not None:
            return [*news, self._ended(outcome).hung(watch.hang)]
        return [*news, self._ended(outcome).failed(outcome.first_cause)]

    def _after_order(self, outcome: Outcome) -> list[TimedObservation]:
        if outcome.code == ExitCode.STOPPED or (outcome.code == ExitCode.TERMINATED and self._state.leaving):
            return [TimedObservation(observations.Saved(time=time.time(), step=self._step), time.time(), {})]
        return []

    def _ended(self, outcome: Outcome) -> GenerationEnd:
        return GenerationEnd(outcome, self._nodes.beats(), self._placement, self._now.ranks, self._step)

    # Deciding and obeying

    def _take(self, seen: TimedObservation) -> None:
        if seen.observation.step == 0:  # its observer does not know the step
            seen = replace(seen, observation=replace(seen.observation, step=self._step))
        if self._end_now or not isinstance(seen.observation, observations.Straggler):  # a tolerated one needs no survey of copies
            self._state = replace(self._state, copies=self._copies())
        if isinstance(seen.observation, observations.StoreAway):
            self._stores.add(seen.observation.path)
        decision = policy.decide(self._state, seen.observation, fleet=self._fleet)
        before, self._state = self._state, decision.state
        self._memory.note(before, self._state, at=seen.observation.time, reason=decision.reason)
        if not isinstance(seen.observation, NO_INCIDENT) and (decision.commands or isinstance(seen.observation, ALWAYS_TOLD)):
            self._log_decision(seen, decision)
        if isinstance(seen.observation, observations.Ordered):
            self._log.write(Order(what=seen.observation.what, node=seen.observation.node, answer=decision.reason))
        if isinstance(seen.observation, CHECKS) and any(isinstance(command, HELD_UP) for command in decision.commands):
            self._log.write(Problem("warning", f"{decision.reason} (`megalith doctor` shows what is wrong)"))
        for order in decision.commands:
            if isinstance(order, Command):
                self._obey(order)
        self._memory.keep(self._state)

    def _copies(self) -> tuple[Copy, ...]:
        return (*self._nodes.survey(self._state.placement), *self._checkpoints())

    def _checkpoints(self) -> tuple[Copy, ...]:
        """List the checkpoints in the shared store. If the store is unreadable or suddenly empty, the last listing is returned,
        because the store may only be unavailable. Raises OSError if the store could never be listed."""
        try:
            self._listed = self._store() or self._listed or ()
        except OSError as error:
            if self._listed is None:
                raise
            self._log.write(
                Problem("warning", f"checkpoints cannot be listed, so the previous list of checkpoints is used: {error}")
            )
        return self._listed

    def _log_plan(self, order: Start) -> None:
        if isinstance(order, commands.Shrink) and not self._shrunk:
            nodes = ", ".join(order.nodes[: self._state.least])
            words = (
                f"the run continues from {order.source} under fleet.fallback, on {nodes}: results are not bitwise equal to "
                f"those of its own plan"
            )
            self._log.write(Problem("warning", words))
        elif isinstance(order, commands.Grow):
            self._log.write(Problem("warning", f"the run continues from {order.source} under its own plan again"))

    def _log_decision(self, seen: TimedObservation, decision: Decision) -> None:
        self._incidents += 1
        restarts = any(isinstance(command, Start | commands.Wait | commands.SaveState) for command in decision.commands)
        self._open.append(_Open(self._incidents, seen.observation.step, in_place=not restarts))
        self._log.write(
            Incident(
                incident=self._incidents,
                began=min(seen.began, time.time()),
                step=seen.observation.step,
                cause=seen.observation.kind,
                reason=decision.reason,
                node=decision.blamed,
                rank=decision.blamed_rank,
                evidence=observations.dump(seen.observation) | seen.evidence,
                commands=[commands.dump(command) for command in decision.commands],
            )
        )

    def _obey(self, command: Command) -> None:
        match command:
            case commands.Restart() | commands.Shrink() | commands.Grow():
                self._next, self._wait_until, self._end_now = command, None, True
                self._log_plan(command)
            case commands.Wait(seconds=seconds):
                self._next, self._wait_until, self._end_now = None, time.monotonic() + seconds, True
            case commands.SaveState():
                if self._watch is not None and not self._end_now:
                    self._watch.stop()
            case commands.EndInOrder():
                self._requests.append((signal.SIGTERM, time.monotonic()))
            case commands.CheckHealth(node=node, after=after):
                self._checks.append((time.monotonic() + after, node))
            case commands.QuarantineCopy():
                self._nodes.set_aside(command)
            case commands.Stop(code=code, report=report):
                self._next, self._wait_until, self._stop_code, self._report = None, None, code, report
                self._end_now = True
            case commands.SkipTier(because=because):
                self._log.write(Problem("warning", because))
            case commands.ReadElsewhere(shard=shard, path=path):
                self._log.write(
                    Problem("warning", f"data shard {shard} is damaged, and is read from {path}: copy the shard back from there")
                )
            case commands.RerunStep():
                pass  # the ranks run it again by themselves


def _is_ours(seen: Observation, watch: Watch | None) -> bool:
    """True if a rank reports the signal by which this controller stopped it."""
    return isinstance(seen, observations.Preempted) and seen.rank is not None and watch is not None and watch.stopping


def run_here(
    job: Job,
    *,
    fleet: FleetSpec,
    identity: str,
    store: Store,
    tick: Callable[[], None] = lambda: None,
    notify: Callable[[str], None] = print_line,
    owner: Owner | None = None,
) -> Outcome:
    """Run a job on this machine, and recover from faults. `identity` distinguishes this run's copies of the state from another
    run's. Signals, `owner` and exceptions are those of `supervisor.run`. Copies are deleted if the run ended normally, because
    its state is then in a checkpoint.
    """
    job.check()
    with owned(job.run_dir, owner) as own, supervisor.requests_to_stop() as requests:
        memory = roots.memory_root(job.run_dir, identity)
        roots.clear_memory(job.run_dir, keep=memory)
        disk = roots.disk_root(job.run_dir, identity, fleet)
        roots.clear_disk(job.run_dir, fleet, keep=disk)
        notes = epochs.of_ranks(job.run_dir, own.epoch)
        nodes = LocalNodes(job, names=local.node_names(fleet), memory=memory, disk=disk, folder=notes)
        outcome = None
        try:
            how: dict[str, Any] = {"tick": own.checked(tick), "notify": notify, "epoch": own.epoch}
            controller = Controller(job, fleet=fleet, nodes=nodes, store=store, requests=requests, **how)
            outcome = controller.run()
            return outcome
        finally:
            nodes.close(forget=outcome is not None and outcome.code in ORDERLY)
