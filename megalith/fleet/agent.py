"""The agent of one node: it starts and watches the node's ranks on the controller's orders, and sends the node's heartbeat.

All messages go through an authenticated store (`fleet.secure`). If an agent cannot reach the store, another node may replace its
node, so the agent first ends its ranks and then joins again.
"""

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple
from types import FrameType
from typing import Any

from pydantic import TypeAdapter

from megalith import disk
from megalith.fleet import messages, observations
from megalith.fleet.causes import Exit, Failure
from megalith.fleet.commands import QuarantineCopy
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.local import LocalNodes
from megalith.fleet.messages import UnreadableMessages
from megalith.fleet.nodes import Generation
from megalith.fleet.observations import HealthChecked, Observation, Preempted
from megalith.fleet.rank import heeded
from megalith.fleet.rendezvous import Store
from megalith.fleet.tiers.copies import Piece

POLL_SECONDS = 0.02
STORAGE_SECONDS = 1.0  # between looks whether a full disk has room again, or a store is back
BEATS, BEAT_SECONDS = 10, 0.2  # signs of life within the time after which a node counts as lost; at most that far apart

GENERATION: TypeAdapter[Generation] = TypeAdapter(Generation)
ORDER: TypeAdapter[QuarantineCopy] = TypeAdapter(QuarantineCopy)
FAILURE: TypeAdapter[Failure] = TypeAdapter(Failure)
PIECES: TypeAdapter[list[Piece]] = TypeAdapter(list[Piece])


class Agent:
    """The agent of a node. `order`: the launcher's number of the node; nodes get their first ranks in this order. `store` and
    `beating`: two connections to one store, so that a wait on the first does not delay heartbeats on the second. `cut_off` is
    called, perhaps in a thread, if the store fails or is not reached for `seconds`, or if the controller declares the node lost;
    it must end the process, because a call to the store may never return. `pieces` returns the copies of the state on this node.
    """

    def __init__(
        self, name: str, nodes: LocalNodes, *, order: int, store: Store, beating: Store, seconds: float,
        cut_off: Callable[[str], None], pieces: Callable[[], Sequence[Piece]] = tuple,
    ) -> None:  # fmt: skip
        self._name, self._nodes, self._pieces = name, nodes, pieces
        self._store, self._beating = store, beating
        self._seconds, self._cut_off = seconds, cut_off
        self._order, self._unreadable = order, UnreadableMessages()
        self._generation = ""
        self._ordered: Generation | None = None  # its ranks are still to be started here
        self._start_at = 0.0
        self._forked: frozenset[int] = frozenset()
        self._life: dict[str, Any] = {"generation": "", "ranks": {}}  # the last signs of life, as this thread read them
        self._asked_to_go = self._told_so = False
        self._reached, self._contact = time.monotonic(), True
        self._done = threading.Event()

    def run(self) -> int:
        """Carry out orders until the controller ends the run; return the exit status that the controller sends."""
        self._nodes.warm()  # before it joins: ranks of a node that is there start at once
        try:
            self._join()
            for loop in (self._show_life, self._watch_contact):
                threading.Thread(target=loop, daemon=True).start()
            while self._contact:
                for order in self._orders.take():
                    if isinstance(order.get("leave"), int):
                        self._nodes.close(forget=order.get("forget") is True)
                        return order["leave"]
                    self._take(order)
                self._start()
                self._tell_what_happened()
        except RuntimeError as error:  # the store is away
            self._lose_contact(f"the run's store no longer answers: {error}")
        finally:
            self._done.set()
        self._nodes.close(forget=False)
        return ExitCode.LOST

    def _join(self) -> None:
        self._member = self._store.add(messages.JOINED, 1)
        self._orders = messages.orders(self._store, self._member, self._unreadable)
        self._answers = messages.answers(self._store, self._member)
        self._store.set(messages.member_key(self._member), json.dumps({"name": self._name, "order": self._order}))
        self._reached = time.monotonic()

    def take_requests(self) -> None:
        """From now on, report to the controller that the scheduler takes this node away, if SIGTERM, SIGUSR1, SIGINT or (unless
        it was ignored) SIGHUP arrives. Call this in the main thread."""

        def note(number: int, frame: FrameType | None) -> None:
            self._asked_to_go = True

        for number in heeded():
            signal.signal(number, note)

    def _lose_contact(self, why: str) -> None:
        if self._contact:
            self._contact = False
            self._cut_off(why)

    def _take(self, order: dict[str, Any]) -> None:
        try:
            what = self._read(order)
        except (ValueError, TypeError) as error:
            self._unreadable.drop(f"orders/{self._member}", error)
        else:
            self._obey(order | what)

    def _read(self, order: dict[str, Any]) -> dict[str, Any]:
        match order:
            case {"start": generation}:
                return {"start": GENERATION.validate_python(generation)}
            case {"set_aside": what}:
                return {"set_aside": ORDER.validate_python(what)}
            case {"send": int(), "ranks": list(ranks)} | {"look": list(ranks), "answer": str()}:
                if all(isinstance(rank, int) for rank in ranks):
                    return {}
            case {"unstarted": True, "answer": str()} | {"queued": True, "answer": str()} | {"survey": True, "answer": str()}:
                return {}
            case {"forget": True} | {"check": True} if "leave" not in order:
                return {}
        raise ValueError(f"this agent does not know the order {order}")

    def _obey(self, order: dict[str, Any]) -> None:
        match order:
            case {"start": generation}:
                self._ordered, self._start_at = generation, 0.0
                self._start()
            case {"send": int(number), "ranks": ranks}:
                self._nodes.send(number, ranks)
            case {"look": ranks, "answer": key}:
                self._answer(key, {rank: asdict(look) for rank, look in self._nodes.inspect(ranks).items()})
            case {"unstarted": True, "answer": key}:
                self._answer(key, FAILURE.dump_python(self._unstarted(), mode="json"))
            case {"queued": True, "answer": key}:
                self._answer(key, sum(self._nodes.queued().values()))
            case {"survey": True, "answer": key}:
                self._answer(key, PIECES.dump_python(list(self._pieces()), mode="json"))
            case {"set_aside": what}:
                self._nodes.set_aside(what)
            case {"forget": True}:
                self._nodes.forget()
            case {"check": True} if self._asked_to_go:  # however sound it is, it will be gone
                self._tell(_record(HealthChecked(time=time.time(), node=self._name, passed=False, there=False)))
            case {"check": True}:
                self._nodes.check(self._name)

    def _start(self) -> None:
        if self._ordered is None or time.monotonic() < self._start_at:
            return
        self._generation, self._forked = self._ordered.name, frozenset()
        try:
            self._nodes.start(self._ordered)
            self._ordered = None
        except OSError as error:
            if not disk.is_away(error):
                raise
            if not self._start_at:
                print(f"the ranks cannot be started until storage is back: {error}", file=sys.stderr, flush=True)
            self._start_at = time.monotonic() + STORAGE_SECONDS

    def _unstarted(self) -> Failure:
        if self._ordered is None:
            return self._nodes.unstarted()
        reason = "could not write the files that ranks need to start, because their storage is full or unavailable"
        return Failure(None, reason, "", "", self._nodes.log(0), time.time(), ExitCode.LOST, process="the agent")

    def _answer(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _tell_what_happened(self) -> None:
        happened = self._nodes.wait(POLL_SECONDS)
        running = self._nodes.running()
        forked = running | {
            what.rank for what in happened if not isinstance(what, observations.Observation) and what.rank is not None
        }
        if forked - self._forked:
            self._forked |= forked
            self._tell({"forked": sorted(forked)})
        beats = self._nodes.beats()
        mine = {rank: astuple(beats[rank]) for rank in sorted(self._forked)}
        self._life = {"generation": self._generation, "ranks": mine}
        for what in happened:
            self._tell(_record(what))
        if self._asked_to_go and not self._told_so:
            self._told_so = True
            self._tell(_record(Preempted(time=time.time(), node=self._name)))

    def _tell(self, what: dict[str, Any]) -> None:
        self._answers.put({"generation": self._generation, **what})

    def _show_life(self) -> None:
        """Write this node's heartbeat and those of its ranks to the store. A separate thread does this, so that a busy main
        thread does not delay heartbeats."""
        count = 0
        while not self._done.wait(min(self._seconds / BEATS, BEAT_SECONDS)):
            count += 1
            try:
                self._beating.set(messages.beat_key(self._member), json.dumps({"count": count, **self._life}))
                if self._beating.check([messages.expelled_key(self._member)]):
                    self._lose_contact("the controller declared this node lost, because its heartbeats did not arrive in time")
            except RuntimeError:
                continue  # the thread that watches the contact decides how long that may go on
            self._reached = time.monotonic()

    def _watch_contact(self) -> None:
        """End this node's ranks if the store is not reached for too long. A separate thread checks this, because a call to the
        store may never return."""
        while not self._done.wait(min(self._seconds / BEATS, BEAT_SECONDS)):
            if time.monotonic() - self._reached > self._seconds:
                self._lose_contact(f"the run's store was not reached for {self._seconds:g} s")


def _record(what: Exit | Failure | Observation) -> dict[str, Any]:
    if isinstance(what, Exit):
        return {"exit": asdict(what)}
    if isinstance(what, Failure):
        return {"failure": FAILURE.dump_python(what, mode="json")}
    return {"sign": observations.dump(what)}
