"""The event loop of the simulator: one site's run from its first start to the horizon.

Events are faults, not steps: between two faults, work proceeds at a known rate. `control.policy` decides the response to each fault, with
the same code as in a real run.
"""

import heapq
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from megalith.control import policy
from megalith.control.policy import Decision, State
from megalith.fleet import observations
from megalith.fleet.commands import CheckHealth, Command, Grow, Replace, RerunStep, Restart, SaveState, Shrink, Stop, Wait
from megalith.fleet.exit_codes import retryable
from megalith.fleet.observations import Observation
from megalith.fleet.tiers import BEGINNING, Copy, Source, Tier
from megalith.rehearse.arrivals import Fault, arrivals, planned_stops
from megalith.rehearse.scenario import DAY, HOUR, Scenario, TimeUse
from megalith.rehearse.tally import Effect, Tally

STORE_KEEP = 3  # checkpoints in the shared store
LIMIT = 2_000_000  # events of one life: more mean that the run never gets anywhere


class Site:
    """State of one site's simulated run: a clock, a queue of future events, and the policy's state."""

    def __init__(self, plan: Scenario, random: np.random.Generator) -> None:
        self.plan, self.random, self.horizon = plan, random, plan.days * DAY
        total = plan.nodes + plan.fleet.spares
        names = [f"node{i}" for i in range(total)]
        self.number = {name: i for i, name in enumerate(names)}
        self.state = State(placement=tuple(names[: plan.nodes]), spares=tuple(names[plan.nodes :]), fruitless=1)
        self.now, self.progress, self.rate = 0.0, 0.0, 1.0
        self.spending = TimeUse.RECOVERY
        self.running = False
        self.ended = False  # the command has ended: the next start is that of a new one
        self.seconds = dict.fromkeys(TimeUse, 0.0)
        self.broken: dict[str, float] = {}
        self.slow: dict[str, float] = {}
        self.wrong: list[tuple[str, float, Fault]] = []
        self.tally = Tally()
        self.order = 0
        self.least_spares = plan.fleet.spares
        self.curve = [(0.0, 1.0)]
        self.reached: list[tuple[float, float]] = [(0.0, 0.0)]
        self.starts: list[float] = []  # when it began to work, again
        self.turn = 0  # of the group: what was scheduled for an earlier one is void
        self.queue: list[tuple[float, int, Callable[[], object]]] = []
        self.overhead = self._overhead()
        self.detect: dict[str, Callable[[Fault, str, int], None]] = {
            "straggler": self._slow_down, "wrong gradient": self._compute_wrongly, "not finite": self._be_not_finite,
            "full disk": self._fill_disk,
        }  # fmt: skip

    def live(self) -> "Site":
        """Simulate from the first start to the horizon."""
        self._schedule_faults()
        self._at(self.plan.latencies.start, self._ready, of_group=True)
        for _ in range(LIMIT):
            if not self.queue or self.queue[0][0] >= self.horizon:
                break
            time, _, happen = heapq.heappop(self.queue)
            self._advance(time)
            happen()
        else:
            raise RuntimeError(
                f"{self.plan.name}: more than {LIMIT:,} events: with this policy and these rates of faults the run makes no progress"
            )
        self._advance(self.horizon)
        for _, _, fault in self.wrong:
            self.tally.settle(fault, Effect.UNSEEN)
        self.seconds[TimeUse.USEFUL] += self.progress
        self._note_curve()
        return self

    def first_reached(self) -> tuple[np.ndarray, np.ndarray]:
        """Return two rising series for interpolation: progress, and the time at which the run first reached it. Repeated work
        adds no progress."""
        times, progress = np.array(self.reached).T
        best = np.maximum.accumulate(progress)[:-1]
        begins, ends = progress[:-1], progress[1:]
        new = ends > best
        share = (best[new] - begins[new]) / (ends[new] - begins[new])  # of the stretch, after which it is beyond what was reached
        passed = times[:-1][new] + share * np.diff(times)[new]
        found = np.stack([best[new] + 1e-9, ends[new]], axis=1).ravel(), np.stack([passed, times[1:][new]], axis=1).ravel()
        return np.concatenate([[0.0], found[0]]), np.concatenate([[0.0], found[1]])

    # Time

    def _at(self, delay: float, happen: Callable[[], object], *, of_group: bool = False) -> None:
        """Schedule an event after a delay. With `of_group`, a restart or stop of the ranks cancels the event."""
        self.order += 1
        turn = self.turn
        chosen = (lambda: happen() if turn == self.turn else None) if of_group else happen
        heapq.heappush(self.queue, (self.now + delay, self.order, chosen))

    def _overhead(self) -> float:
        plan, fleet, stall = self.plan, self.plan.fleet, self.plan.latencies.stall
        memory = fleet.memory_every * plan.step_seconds
        every = {"memory": memory, "buddy": memory, "disk": fleet.disk_every * plan.step_seconds, "store": plan.store_every}
        return sum(stall[tier] / every[tier] for tier in fleet.tiers) + plan.latencies.verify * bool(fleet.verify_every)

    def _advance(self, time: float) -> None:
        passed, self.now = time - self.now, time
        if not self.running:
            self.seconds[self.spending] += passed
            return
        slow = self.plan.reliability.slow_factor if self.slow else 1.0
        full = passed / (1 + self.overhead) / slow  # seconds' worth of work if all nodes were there
        done = full * self.rate
        self.progress += done
        self.seconds[TimeUse.SHRUNK] += full - done
        self.seconds[TimeUse.CHECKPOINT] += full * self.overhead
        self.seconds[TimeUse.STRAGGLING] += full * (1 + self.overhead) * (slow - 1)
        self.reached.append((self.now, self.progress))

    def _note_curve(self) -> None:
        if self.now > 0:
            self.curve.append((float(self.now), float(self.progress / self.now)))

    # Faults

    def _schedule_faults(self) -> None:
        for fault in arrivals(self.plan, self.random, nodes=len(self.number)):
            self._at(fault.time, self._striking(fault))
        for time in planned_stops(self.plan, self.random):
            self._at(time, self._stop_as_planned)

    def _striking(self, fault: Fault) -> Callable[[], None]:
        return lambda: self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        """Apply a fault. A fault has no effect on nodes that are already away; on idle nodes only hardware fails, and less often."""
        names = [f"node{i}" for i in fault.nodes if f"node{i}" not in self.broken]
        slots = [slot for slot in map(self.state.slot, names) if slot is not None]
        idle = not slots or (not self.running and (self.state.stopped or self.state.waiting))
        quiet = fault.shows in self.detect and not idle
        if not names or (idle and not fault.idle) or (quiet and not self.running):
            return
        self.tally.count(fault)
        if quiet:
            self.detect[fault.shows](fault, names[0], slots[0])
            return
        if fault.hardware:
            self.broken |= dict.fromkeys(names, self.now + fault.hours * HOUR)
        if idle:
            self._decide(self._lost(names), fault=fault)
            if self.tally.fates[fault] is not Effect.RESTARTED:
                self.tally.settle(fault, Effect.IDLE)
        else:
            self._break(fault, names, slots[0])

    def _break(self, fault: Fault, names: list[str], slot: int) -> None:
        latency, plan = self.plan.latencies, self.plan
        node = names[0]
        if fault.shows == "preemption":
            self.tally.leaves(fault)
            self._decide(observations.Preempted(node=node, time=self.now, step=self._step()), fault=fault)
            return
        common: dict[str, Any] = {"slot": slot, "node": node, "rank": slot * plan.devices_per_node}
        seen: dict[str, tuple[float, Callable[[], Observation]]] = {
            "crash": (latency.crash, lambda: observations.RankFailed(**common, signature=fault.name, hardware=fault.hardware,
                                                             **self._when())),
            "bug": (latency.crash, lambda: observations.RankFailed(**common, signature=fault.name, blamed=False, **self._when())),
            "hang": (latency.hang, lambda: observations.Hang(**common, phase="step", silence=latency.hang, limit=latency.hang,
                                                      hardware=fault.hardware, **self._when())),
            "node lost": (latency.node_lost, lambda: self._lost(names)),
            "corrupt state": (plan.step_seconds, lambda: observations.StateCorrupt(**common, **self._when())),
        }  # fmt: skip
        seconds, observation = seen[fault.shows]
        self._stand_still()
        self._spend(TimeUse.DETECTION)
        self._at(seconds, lambda: self._see(observation(), fault))

    def _see(self, observation: Observation, fault: Fault) -> None:
        self._decide(observation, fault=fault)
        self.tally.settle(fault, Effect.TOGETHER, if_open=True)

    def _when(self) -> dict[str, Any]:
        return {"time": self.now, "step": self._step()}

    def _lost(self, names: list[str]) -> observations.NodesLost:
        for name in names:
            self._return_later(name)
        return observations.NodesLost(nodes=tuple(names), **self._when())

    def _return_later(self, name: str) -> None:
        """Schedule the return of a lost node: after its repair the node reports, and its health is checked."""
        if name in self.broken:
            self._at(max(0.0, self.broken[name] - self.now), lambda: self._announce(name))

    def _announce(self, name: str) -> None:
        if self.broken.get(name, float("inf")) <= self.now:
            del self.broken[name]
            self._decide(observations.NodeJoined(node=name, **self._when()))

    def _slow_down(self, fault: Fault, node: str, slot: int) -> None:
        """Slow a node down. The node stays in the run until its slowness has cost as much as a replacement; then it is reported."""
        latency, plan = self.plan.latencies, self.plan
        began = self.slow[node] = self.now
        replacing = latency.restart + latency.replace
        factor = plan.reliability.slow_factor
        seen = plan.fleet.straggler_steps * plan.step_seconds * factor
        until = max(seen, replacing * factor / (factor - 1)) if factor > 1 else seen
        self.tally.settle(fault, Effect.SLOWED)
        self._at(until, lambda: self._report_slow(fault, node, slot, replacing))
        self._at(fault.hours * HOUR, lambda: self.slow.get(node) == began and self.slow.pop(node))  # not a later fault's

    def _report_slow(self, fault: Fault, node: str, slot: int, replacing: float) -> None:
        if node not in self.slow or self.state.slot(node) != slot:
            return
        if not self.running:  # nobody can be seen to be slow now
            again = self.plan.step_seconds * self.plan.fleet.straggler_steps
            self._at(again, lambda: self._report_slow(fault, node, slot, replacing))
            return
        ratio = self.plan.reliability.slow_factor
        lost = (self.now - self.slow[node]) * (1 - 1 / ratio)
        rank = slot * self.plan.devices_per_node
        self.broken[node] = self.now + fault.hours * HOUR
        decision = self._decide(
            observations.Straggler(
                slot=slot, node=node, rank=rank, ratio=ratio, lost=lost + 1e-6, replacing=replacing, **self._when()
            ),
            fault=fault,
        )
        if not decision.commands:
            del self.broken[node]  # it is tolerated: it stays in the mesh although it is slow

    def _compute_wrongly(self, fault: Fault, node: str, slot: int) -> None:
        """Compute wrong gradients: the next verification, if there is one, detects them; until then every step is lost."""
        every = self.plan.fleet.verify_every * self.plan.step_seconds
        if not every:
            self.tally.settle(fault, Effect.UNSEEN)
            return
        good = self.progress // every * every
        self.wrong.append((node, good, fault))
        self._at((good + every - self.progress) * (1 + self.overhead) / self.rate, lambda: self._verify(node, good, fault))

    def _verify(self, node: str, good: float, fault: Fault) -> None:
        if (node, good, fault) not in self.wrong or not self.running:
            return
        self.wrong.remove((node, good, fault))
        if node not in self.state.placement:
            self.tally.settle(fault, Effect.TOGETHER)
            return
        self.broken[node] = self.now + fault.hours * HOUR
        step = int(good // self.plan.step_seconds)
        self._decide(observations.GradientWrong(good_step=step, suspects=(node,), **self._when()), fault=fault)
        if node in self.state.placement:
            del self.broken[node]  # there was no spare for it

    def _be_not_finite(self, fault: Fault, node: str, slot: int) -> None:
        observation = observations.Nonfinite(
            slot=slot, node=node, rank=slot * self.plan.devices_per_node, name="", **self._when()
        )
        self._decide(observation, fault=fault)

    def _fill_disk(self, fault: Fault, node: str, slot: int) -> None:
        self._decide(observations.SaveFailed(tier=Tier.DISK, error=fault.name, **self._when()), fault=fault)

    def _stop_as_planned(self) -> None:
        """Stop the run as a user planned: save the state first, then add the time of a restart."""
        if self.running:
            self._stand_still()
            self._spend(TimeUse.PLANNED)
            self._at(self.plan.latencies.save, self._restart_as_planned, of_group=True)

    def _restart_as_planned(self) -> None:
        self._decide(observations.Saved(**self._when()), copies=self._copies(saved=True), spending=TimeUse.PLANNED)

    # State of the run

    def _step(self) -> int:
        return int(self.progress / self.plan.step_seconds + 1e-9)

    def _copies(self, *, saved: bool = False) -> tuple[Copy, ...]:
        """Return the copies in each tier while the ranks run, computed from their progress. `saved`: the store also has a copy of
        the current state."""
        plan, fleet, step = self.plan, self.plan.fleet, self._step()
        base = self.state.restored.step
        found = []
        for tier in fleet.tiers:
            if tier == "store":
                continue
            every = fleet.disk_every if tier == "disk" else fleet.memory_every
            newest = step // every * every
            held = {newest - i * every for i in range(fleet.memory_keep)} if newest > base else {base}
            held = {at for at in held if at >= base or tier == "disk"}
            if fleet.verify_every and tier != "disk":  # the last verified step's is kept, through restarts from memory as well
                verified = (step - 1) // fleet.verify_every * fleet.verify_every
                held.add(max(0 if self.state.restored.tier is Tier.MEMORY else base, verified))
            found += [Copy(Tier(tier), at) for at in held]
        written = max(0.0, self.progress - plan.latencies.write)
        last = int(written // plan.store_every)
        marks = {max(0, last - i) * plan.store_every for i in range(STORE_KEEP)}
        steps = {int(mark / plan.step_seconds + 1e-9) for mark in marks} | ({step} if saved else set())
        return (*found, *(Copy(Tier.STORE, at) for at in steps))

    def _stand_still(self) -> None:
        """Stop all work from now on. After the stop, the run can continue only from the copies that are in the tiers now."""
        if self.running:
            self.state = replace(self.state, copies=self._copies())
        self.running = False
        self.turn += 1

    def _spend(self, what: TimeUse) -> None:
        self.spending = what

    def _decide(
        self,
        observation: Observation,
        *,
        fault: Fault | None = None,
        copies: tuple[Copy, ...] | None = None,
        spending: TimeUse = TimeUse.RECOVERY,
    ) -> Decision:
        """Ask the policy for a decision on an observation and carry it out. `fault`: the fault that caused the observation, if any."""
        if self.running:
            self.state = replace(self.state, copies=self._copies())
        if copies is not None:
            self.state = replace(self.state, copies=copies)
        decision = policy.decide(self.state, observation, fleet=self.plan.fleet)
        self.state = decision.state
        self.least_spares = min(self.least_spares, len(self.state.spares))
        self.tally.decided(observation, decision.commands, fault)
        replaced = any(isinstance(order, Replace) for order in decision.commands)
        for order in decision.commands:
            if isinstance(order, Command):
                self._obey(order, replaced=replaced, spending=spending)
        return decision

    def _obey(self, command: Command, *, replaced: bool, spending: TimeUse) -> None:
        latency = self.plan.latencies
        match command:
            case Restart(source, _, after):
                self._go_back(source)
                self.rate = 1.0
                self._begin(after + self._until_ranks(source) + latency.replace * replaced, spending)
            case Shrink(source, nodes) | Grow(source, nodes):
                self._go_back(source)
                self.rate = len(nodes) / self.plan.nodes
                self._begin(self._until_ranks(source), spending)
            case RerunStep():
                self._stand_still()
                self._begin(self.plan.step_seconds, TimeUse.LOST)
            case Wait() if self.ended:
                pass  # what would wait has ended
            case Wait(seconds):
                self._stand_still()
                self._spend(TimeUse.WAITING)
                self._at(seconds, lambda: self._decide(observations.Waited(**self._when())), of_group=True)
            case SaveState():
                self._stand_still()
                self._spend(TimeUse.CHECKPOINT)
                self._at(latency.save, self._saved, of_group=True)
            case CheckHealth(node):
                self._check(node)
            case Stop(code) if retryable(code) and self.state.vacant:
                self._end_until_nodes_come()
            case Stop():
                self._call_a_person()

    def _until_ranks(self, source: Source) -> float:
        """Return the seconds until ranks that start now resume from `source`. If the command has ended, these seconds include the whole
        start of the command."""
        latency, anew = self.plan.latencies, self.ended
        self.ended = False
        return (latency.start if anew else latency.restart) + latency.restored(source)

    def _begin(self, seconds: float, spending: TimeUse) -> None:
        """Begin a new generation, or the repetition of a step; training continues after `seconds`."""
        self.turn += 1
        self._spend(spending)
        self._at(seconds, self._ready, of_group=True)

    def _ready(self) -> None:
        self.running = True
        self.starts.append(self.now)
        self.reached.append((self.now, self.progress))
        self.state = replace(self.state, copies=self._copies())
        if self.state.fruitless or self.state.repeats or self.state.reruns or self.state.bad:
            self.state = policy.decide(
                self.state, observations.Progressed(time=self.now, step=self._step() + 1), fleet=self.plan.fleet
            ).state

    def _go_back(self, source: Source) -> None:
        """Discard the work done since `source`."""
        self._stand_still()
        self.tally.restored[source.tier.value if source.tier else "the beginning"] += 1
        at = min(self.progress, source.step * self.plan.step_seconds) if source != BEGINNING else 0.0
        self.seconds[TimeUse.LOST] += self.progress - at
        self.progress = at
        for _, good, fault in self.wrong:
            if good >= at:
                self.tally.settle(fault, Effect.TOGETHER)
        self.wrong = [one for one in self.wrong if one[1] < at]
        self.slow = {node: since for node, since in self.slow.items() if node in self.state.placement}
        self._note_curve()

    def _saved(self) -> None:
        self._decide(observations.Saved(**self._when()), fault=self.tally.left(), copies=self._copies(saved=True))

    def _check(self, node: str) -> None:
        """Check the health of a node. A broken node passes the check after its repair, a wrongly suspected node at once."""
        if node in self.state.placement:
            return
        repaired = self.broken.get(node, self.now)
        self._at(max(0.0, repaired - self.now) + self.plan.latencies.check, lambda: self._checked(node))

    def _checked(self, node: str) -> None:
        if self.broken.get(node, 0.0) > self.now:
            return self._check(node)  # it broke again meanwhile
        self.broken.pop(node, None)
        if node in self.state.quarantined:
            self._decide(observations.HealthChecked(node=node, passed=True, **self._when()))
        return None

    def _end_until_nodes_come(self) -> None:
        """End the command with the exit status that asks for a new start. An engine or a loop starts the command again once there
        are nodes."""
        self._stand_still()
        self.tally.ended += 1
        self.ended = True
        self._spend(TimeUse.WAITING)
        self.state = replace(self.state, stopped=False, waiting=True, repeats={}, reruns={}, fruitless=0)

    def _call_a_person(self) -> None:
        """Wait until a person has read the report and started the same command again: counters are reset, quarantines stay."""
        self._stand_still()
        self.tally.stops += 1
        self.ended = True
        self._spend(TimeUse.PERSON)
        self._at(self.plan.reliability.person_hours * HOUR, self._start_again, of_group=True)

    def _start_again(self) -> None:
        self.state = replace(self.state, stopped=False, repeats={}, reruns={}, fruitless=0)
        gone = [name for name in self.state.placement if self.broken.get(name, 0.0) > self.now]
        self._decide(self._lost(gone) if gone else observations.Started(**self._when()))
        for node in [name for name in self.state.quarantined if name not in self.broken]:
            self._decide(
                observations.HealthChecked(node=node, passed=True, **self._when())
            )  # nodes that returned while nobody listened
