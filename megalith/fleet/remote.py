"""The nodes of a run on many machines. The controller reaches them through their agents, by messages in the store."""

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megalith.fleet import messages, observations
from megalith.fleet.agent import FAILURE, GENERATION, ORDER, PIECES
from megalith.fleet.causes import Exit, Failure
from megalith.fleet.commands import QuarantineCopy
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.heartbeat import Beat
from megalith.fleet.job import Job
from megalith.fleet.messages import Messages, UnreadableMessages
from megalith.fleet.nodes import Generation, RankInspection
from megalith.fleet.observations import HealthChecked, NodeJoined, NodesLost, Observation
from megalith.fleet.rank_info import ranks_of
from megalith.fleet.rendezvous import RunStore
from megalith.fleet.tiers import Copy
from megalith.fleet.tiers.copies import in_place, together
from megalith.spec.fleet import FleetSpec

POLL_SECONDS = 0.02
LOOK_SECONDS = 12.0  # that agents may take to collect stacks, also of ranks that get no processor (`evidence.MAX_STARVED`)
QUEUED_SECONDS = 1.0  # that they may take to read how long ranks waited for processors
LEAVE_SECONDS = 10.0  # that agents may take to read that the run is over
ROOM_BYTES = 1 << 16  # that a node's part of a start takes in the run folder, and more
SURVEY_SECONDS = 60.0  # that agents may take to read all their copies in memory


@dataclass
class Member:
    """An agent that joined. `number`: the agent's number in the order of joining, from 1. `seen`: time, on this process's clock,
    at which the agent's heartbeat last changed."""

    number: int
    name: str
    order: int
    orders: Messages
    answers: Messages
    seen: float
    life: str = ""
    generation: str = ""
    beats: dict[int, Beat] = field(default_factory=dict)


class RemoteNodes:
    """Nodes that agents represent. An agent that sends no heartbeat for `fleet.node_timeout` seconds is lost, and its later
    messages are ignored. If a second agent with the name of a present one joins, the first one counts as lost. Unreadable
    messages of an agent are dropped, counted and reported; they never end a run.
    """

    def __init__(self, store: RunStore, job: Job, fleet: FleetSpec, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._job, self._fleet, self._clock = store, job, fleet, clock
        self._members: dict[str, Member] = {}
        self._joined = self._refusals = self._questions = 0
        self._refused: dict[str, str] = {}
        self._unreadable = UnreadableMessages()
        self._generation = Generation("none", ())
        self._running: set[int] = set()
        self._found: list[Observation] = []

    def await_nodes(self, least: int, wanted: int, *, seconds: float) -> tuple[str, ...]:
        """Wait until `wanted` nodes have joined, or, after `seconds`, at least `least` nodes. Raises TimeoutError if fewer than
        `least` have joined. Nodes are returned in the launcher's order, so that neighbouring nodes get neighbouring ranks.
        """
        end = self._clock() + seconds
        while len(self.there()) < wanted and self._clock() < end:
            self.wait(POLL_SECONDS)
        there = self.there()
        if len(there) < least:
            names = ", ".join(there) or "none"
            refused = "".join(f"; {name} was refused: {why}" for name, why in self._refused.items())
            raise TimeoutError(
                f"{len(there)} of {least} nodes joined within {seconds:g} s ({names}{refused}). Find out why the agents of "
                f"other nodes do not start, or increase launch.start_timeout"
            )
        return there

    def there(self) -> tuple[str, ...]:
        return tuple(member.name for member in sorted(self._members.values(), key=lambda member: (member.order, member.number)))

    def start(self, generation: Generation) -> None:
        self._try_storage()
        self._store.delete_prefix(f"{self._generation.name}/")  # what the last ranks met by: many starts would fill the store
        self._generation, self._running = generation, set()
        for member in self._members.values() if generation.shrunk else ():  # also those that have no part in it
            member.orders.put({"forget": True})
        record = GENERATION.dump_python(generation, mode="json")
        for member in self._of(set(generation.placement)):
            member.beats = {}
            member.orders.put({"start": record})

    def _try_storage(self) -> None:
        """Raise OSError if the run folder cannot be written, so that the controller waits for storage instead of counting a
        failed start. On one machine, writing the job file raises this error."""
        probe = self._job.run_dir / "ranks" / "room"
        try:
            probe.write_bytes(bytes(ROOM_BYTES))
        finally:
            probe.unlink(missing_ok=True)

    def wait(self, seconds: float) -> list[Exit | Failure | Observation]:
        end = self._clock() + seconds
        while True:
            happened: list[Exit | Failure | Observation] = [*self._turned_away(), *self._newcomers()]
            for member in list(self._members.values()):
                for message in member.answers.take():
                    with self._dropping(f"answers/{member.number}"):
                        happened += [what] if (what := self._understand(member, message)) is not None else []
            happened += self._silent()
            happened, self._found = [*happened, *self._found], []
            left = end - self._clock()
            if happened or left <= 0:
                return happened
            time.sleep(min(POLL_SECONDS, left))

    @contextlib.contextmanager
    def _dropping(self, where: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._unreadable.drop(where, error)

    def _turned_away(self) -> list[Observation]:
        """Return observations of the nodes that failed their health check when they tried to join. A node that was refused may
        try to join again later."""
        found: list[Observation] = []
        while self._store.check([messages.refused_key(self._refusals + 1)]):
            self._refusals += 1
            with self._dropping(key := messages.refused_key(self._refusals)):
                record = messages.load(self._store.get(key))
                name, why = str(record["name"]), str(record["why"])
                print(f"node {name} is not admitted: {why}", file=sys.stderr, flush=True)
                self._refused[name] = why
                found.append(HealthChecked(time=time.time(), node=name, passed=False, there=False, text=why))
        return found

    def _newcomers(self) -> list[Observation]:
        found: list[Observation] = []
        while self._store.check([messages.member_key(self._joined + 1)]):
            self._joined += 1
            with self._dropping(key := messages.member_key(self._joined)):
                record = messages.load(self._store.get(key))
                member = Member(
                    number=self._joined,
                    name=str(record["name"]),
                    order=int(record["order"]),
                    orders=messages.orders(self._store, self._joined, self._unreadable),
                    answers=messages.answers(self._store, self._joined, self._unreadable),
                    seen=self._clock(),
                )
                if (before := self._members.get(member.name)) is not None:
                    found.append(self._lose([before]))
                self._members[member.name] = member
                self._refused.pop(member.name, None)
                found.append(NodeJoined(time=time.time(), node=member.name))
        return found

    def _understand(self, member: Member, message: dict[str, Any]) -> Exit | Failure | Observation | None:
        if "sign" not in message and message["generation"] not in (self._generation.name, ""):
            return None
        match message:
            case {"forked": ranks}:
                self._running |= set(ranks)
                return None
            case {"exit": end}:
                self._running.discard(end["rank"])
                return Exit(**end)
            case {"failure": record}:
                failure = FAILURE.validate_python(record)
                if failure.rank is None:
                    return replace(failure, reason=f"{failure.reason} (on {member.name})", node=member.name)
                self._running.discard(failure.rank)
                return failure
            case {"sign": record}:
                return observations.load(record)
        raise ValueError(f"this version does not know the message {message} from the agent of {member.name}")

    def _silent(self) -> list[Observation]:
        late = []
        for member in self._members.values():
            life = self._store.get(messages.beat_key(member.number)).decode(errors="replace") if self._has_beaten(member) else ""
            now = self._clock()
            if life != member.life:
                member.life, member.seen = life, now
                with self._dropping(messages.beat_key(member.number)):
                    record = messages.load(life.encode())
                    member.generation = record["generation"]
                    member.beats = {int(rank): Beat.of(beat) for rank, beat in record["ranks"].items()}
            elif now - member.seen > self._fleet.node_timeout:
                late.append(member)
        return [self._lose(late)] if late else []

    def _has_beaten(self, member: Member) -> bool:
        return bool(member.life) or self._store.check([messages.beat_key(member.number)])

    def _lose(self, members: Sequence[Member]) -> NodesLost:
        for member in members:
            self._store.set(messages.expelled_key(member.number), "")
            self._running -= self._ranks_on(member.name)
            del self._members[member.name]
        return NodesLost(time=time.time(), nodes=tuple(member.name for member in members))

    def _ranks_on(self, node: str) -> set[int]:
        placement = self._generation.placement
        slots = [slot for slot, name in enumerate(placement) if name == node]
        return {rank for slot in slots for rank in ranks_of(slot, world=self._world, slots=len(placement))}

    @property
    def _world(self) -> int:
        return self._job.now(shrunk=self._generation.shrunk).ranks

    def _node_of(self, rank: int) -> str:
        return next(name for name in self._generation.placement if rank in self._ranks_on(name))

    def _of(self, names: Collection[str]) -> list[Member]:
        return [member for name, member in self._members.items() if name in names]

    def _holders(self, ranks: Iterable[int]) -> list[tuple[Member, list[int]]]:
        wanted = set(ranks)
        found = [(member, sorted(wanted & self._ranks_on(member.name))) for member in self._members.values()]
        return [(member, mine) for member, mine in found if mine]

    def running(self) -> frozenset[int]:
        return frozenset(self._running)

    def beats(self) -> list[Beat]:
        beats = [Beat()] * self._world
        for member in self._members.values():
            if member.generation == self._generation.name:
                for rank, beat in member.beats.items():
                    beats[rank] = beat
        return beats

    def send(self, number: int, ranks: Collection[int]) -> None:
        for member, mine in self._holders(ranks):
            member.orders.put({"send": int(number), "ranks": mine})

    def inspect(self, ranks: Collection[int]) -> dict[int, RankInspection]:
        asked = [(member, {"look": mine}) for member, mine in self._holders(ranks)]
        found = dict[int, RankInspection]()
        for answer in self._ask(asked, LOOK_SECONDS):
            with self._dropping("look"):
                found |= {int(rank): RankInspection(**look) for rank, look in (answer or {}).items()}
        return {rank: found.get(rank, RankInspection("")) for rank in ranks}

    def queued(self) -> dict[str, float]:
        asked = self._of(set(self._generation.placement))
        answers = self._ask([(member, {"queued": True}) for member in asked], QUEUED_SECONDS)
        told = zip(asked, answers, strict=True)
        return {member.name: seconds for member, seconds in told if isinstance(seconds, int | float)}

    def unstarted(self) -> Failure:
        asked = [(member, {"unstarted": True}) for member in self._of(set(self._generation.placement))]
        for (member, _), answer in zip(asked, self._ask(asked, LOOK_SECONDS), strict=True):
            if answer is not None:
                with self._dropping("unstarted"):
                    return replace(FAILURE.validate_python(answer), node=member.name)
        reason = f"did not start the ranks within {self._job.start_timeout:g} s, and no agent reported the reason"
        return Failure(None, reason, "", "", self._job.run_dir / "ranks", time.time(), ExitCode.LOST, process="the agents")

    def _ask(self, asked: Sequence[tuple[Member, dict[str, Any]]], seconds: float) -> list[Any]:
        """Send a question to each of these agents, and return the answers in the same order; None if an agent is lost or does not
        answer in time."""
        keys = []
        for member, question in asked:
            self._questions += 1
            keys.append(f"answer/{self._questions}")
            member.orders.put(question | {"answer": keys[-1]})
        left = {key: member for key, (member, _) in zip(keys, asked, strict=True)}
        end, found = self._clock() + seconds, dict[str, Any]()
        while left and self._clock() < end:
            for key in [key for key in left if self._store.check([key])]:
                with self._dropping(key):
                    found[key] = json.loads(self._store.get(key))
                self._store.delete_key(key)
                del left[key]
            self._found += self._silent()
            left = {key: member for key, member in left.items() if self._members.get(member.name) is member}
            time.sleep(POLL_SECONDS if left else 0)
        return [found.get(key) for key in keys]

    def log(self, rank: int) -> Path:
        return node_logs(self._job.run_dir, self._node_of(rank)) / f"rank-{rank}.log"

    def survey(self, placement: Sequence[str]) -> tuple[Copy, ...]:
        members = self._of(set(placement))
        answers = self._ask([(member, {"survey": True}) for member in members], SURVEY_SECONDS)
        world, slots, found = self._job.ranks, len(placement), []
        for member, answer in zip(members, answers, strict=True):
            pieces, slot = [], placement.index(member.name)
            with self._dropping("survey"):
                pieces = PIECES.validate_python(answer or [])
            found += in_place(pieces, slot, world=world, slots=slots, distance=self._fleet.buddy_distance(slots))
        return together(found, world=world, slots=slots)

    def set_aside(self, order: QuarantineCopy) -> None:
        for member in self._of(set(self._generation.placement)):
            member.orders.put({"set_aside": ORDER.dump_python(order, mode="json")})

    def check(self, node: str) -> None:
        for member in self._of({node}):
            member.orders.put({"check": True})
        if node not in self._members:
            self._found.append(HealthChecked(time=time.time(), node=node, passed=False, there=False))

    def close(self, *, forget: bool) -> None:
        self.leave(ExitCode.LOST, forget=forget)

    def leave(self, code: int, *, forget: bool) -> None:
        """Make all agents exit with status `code`. `forget`: the agents also delete their copies of the state."""
        self.send(signal.SIGKILL, self.running())
        for member in self._members.values():
            member.orders.put({"leave": int(code), "forget": forget})
        end = self._clock() + LEAVE_SECONDS  # the store may end once all have read this
        while any(member.orders.pending() for member in self._members.values()) and self._clock() < end:
            time.sleep(POLL_SECONDS)
        self._members.clear()


def node_logs(run_dir: Path, node: str) -> Path:
    """Return the folder for the logs of a node's agent and ranks."""
    return run_dir / "ranks" / f"node-{node}"
