"""Runs one rank's row of a Program on its stages, for every schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.kernels.cross_entropy import Loss
from megalith.kernels.draws import Tokens, working_on
from megalith.models.batch import Batch
from megalith.models.moe import Pending
from megalith.parallel.clock import Clock
from megalith.parallel.groups import MESSAGES_ONLY, Groups, group_of, wait_for
from megalith.parallel.passes import ForwardState, Rest, Runner, Steps
from megalith.parallel.reduction import Reducer
from megalith.schedule.action import COMPUTATIONS, MESSAGES, Action, Row, RowEntry, parts
from megalith.schedule.lower import WEIGHT_GRADIENTS, Channel, Program, channel_of
from megalith.schedule.restart import head, unmet

Key = tuple[int, int]  # stage, microbatch


@dataclass(frozen=True)
class Hidden:
    """Tensors that stages send each other: activations in forward, their gradients in backward."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@dataclass
class _Flight:
    batches: Sequence[Batch]
    graphs: dict[Key, list[ForwardState]] = field(default_factory=dict)  # state that a forward saved for its backward
    rests: dict[Key, list[Rest]] = field(default_factory=dict)  # state of a split backward's first half for its second half
    arrived: dict[tuple[str, int, int], Tensor] = field(
        default_factory=dict
    )  # ("F" | "B", stage, microbatch): received, or being received
    waiting: dict[tuple[str, int, int], Any] = field(default_factory=dict)  # receives not yet waited for
    leaving: list[tuple[Any, Tensor]] = field(default_factory=list)  # sends in flight; a tensor must live until its send ends
    losses: list[Tensor] = field(default_factory=list)
    marks: list[tuple[str, Any, Any]] = field(default_factory=list)


@dataclass
class _Turn:
    name: str
    steps: Steps[None]
    work: Tokens | None
    pending: Pending | None = None

    def begin(self) -> Pending | None:
        with working_on(self.work):
            return next(self.steps, None)

    def go_on(self, arrived: Tensor) -> Pending | None:
        try:
            with working_on(self.work):
                return self.steps.send(arrived)
        except StopIteration:
            return None


@dataclass(frozen=True)
class RowResult:
    """The result of a step on this rank: the sum of scaled losses (0 on ranks without the last stage), and when each action ran."""

    nll: Tensor
    marks: list[tuple[str, Any, Any]]


class Check(Protocol):
    """A deferred check of the weights with which a step begins, resolved before the step's first backward. All ranks get the same
    result."""

    def holds(self) -> bool:
        """Wait for the result of the check; return True if the weights are right."""
        ...

    def correct(self) -> None:
        """Correct the weights. Called if the check failed, when no computation is in progress. Raises an error if the weights cannot be
        corrected."""
        ...

    def batches(self, begun: Sequence[Batch]) -> Sequence[Batch]:
        """Return the batches with which the step restarts after a correction: the batches `begun`, perhaps with another loss scale."""
        ...


class Executor:
    """Runs this rank's row of `program`. `stages` holds the stages that the program places on this rank."""

    def __init__(
        self, program: Program, stages: Mapping[int, Runner], *, reducer: Reducer, groups: Groups, hidden: Hidden
    ) -> None:
        self.stages = stages
        self.reducer = reducer
        self.groups = groups
        self.rank = groups.coordinates["pipeline"]
        self.clock = Clock(hidden.device)
        self._lanes: dict[tuple[str, bool], dist.ProcessGroup] = {}
        self.adopt(program, hidden)
        self._computations: Mapping[str, Callable[[Action, _Flight], Steps[None]]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._input_backward,
            "W": self._weight_backward,
        }
        self._handlers: Mapping[str, Callable[[Action, _Flight], None]] = {
            "SEND_F": self._send,
            "SEND_B": self._send,
            "RECV_F": self._receive,
            "RECV_B": self._receive,
            "GATHER": self._gather,
            "REDUCE": self._reduce,
            "OFFLOAD": self._offload,
            "FETCH": self._fetch,
        }
        kinds = {action.kind for entry in program.rows[self.rank] for action in parts(entry)}
        assert kinds <= {*self._computations, *self._handlers}, (
            f"no handler for actions {kinds - {*self._computations, *self._handlers}}"
        )

    def adopt(self, program: Program, hidden: Hidden) -> None:
        """Switch to another program for the same stages, for instance with more microbatches or with another activation shape. All ranks
        call `adopt` together, between two steps, because communicators may have to be created."""
        self.program, self.hidden = program, hidden
        self._make_lanes()
        self._last = {
            action.stage: action.microbatch
            for entry in program.rows[self.rank]
            for action in parts(entry)
            if action.kind in WEIGHT_GRADIENTS
        }
        self._unmet = unmet(program, self.rank)

    def run(self, batches: Sequence[Batch], *, check: Check | None = None) -> RowResult:
        """Run this rank's row once over `batches`, which holds one batch per microbatch, and leave the gradients on the parameters. If
        `check` finds wrong weights, it corrects them, and the row starts again."""
        assert len(batches) == self.program.microbatches, (len(batches), self.program.microbatches)
        row = self.program.rows[self.rank]
        begin = head(row)
        flight = self._play(begin, _Flight(batches))
        if check is not None and not self._mark("CHECK", check.holds, flight):
            flight = self._play(begin, self._begin_again(check, flight))
        self._play(row[len(begin) :], flight)
        self._mark("WAIT", partial(self._let_leave, flight), flight)
        assert not flight.graphs and not flight.rests and not flight.arrived, (
            "the program ended before all its computations were done"
        )
        self.reducer.finish()
        for runner in self.stages.values():
            runner.free()
        nll = torch.stack(flight.losses).sum() if flight.losses else torch.zeros((), device=self.hidden.device)
        return RowResult(nll, flight.marks)

    def _play(self, row: Row, flight: _Flight) -> _Flight:
        for entry in row:
            if isinstance(entry, Action) and entry.kind not in COMPUTATIONS:
                self._mark(str(entry), partial(self._handlers[entry.kind], entry, flight), flight)
            else:
                self._compute(entry, flight)
        return flight

    def _let_leave(self, flight: _Flight) -> None:
        for work, _ in flight.leaving:
            wait_for(work)

    # --- restart ---

    def _begin_again(self, check: Check, flight: _Flight) -> _Flight:
        """Prepare to run the row again with correct weights: complete all messages that another rank has begun, discard all computed
        tensors, and correct the weights. Return a new `_Flight` that records the lost time. No backward has run yet, so no gradient was
        reduced, and no router has counted tokens."""
        for message in self._unmet:
            if message.kind.startswith("SEND"):
                flight.arrived[_target(message)] = self.hidden.empty().zero_()  # the receiving rank may still compute with it
            self._handlers[message.kind](message, flight)
        for work in flight.waiting.values():
            wait_for(work)
        self._let_leave(flight)
        for runner in self.stages.values():
            runner.free()
        fresh = _Flight(flight.batches, marks=[("LOST", flight.marks[0][1], self.clock.mark())])
        self._mark("UNDO", check.correct, fresh)
        fresh.batches = check.batches(flight.batches)
        return fresh

    # --- computation ---

    def _compute(self, entry: RowEntry, flight: _Flight) -> None:
        for action in parts(entry):
            if work := flight.waiting.pop((_reads(action), *_key(action)), None):
                self._mark("WAIT", partial(wait_for, work), flight)
        turns = [
            _Turn(str(action), self._computations[action.kind](action, flight), flight.batches[_key(action)[1]].work)
            for action in parts(entry)
        ]
        while turns:
            for turn in list(turns):
                if turn.pending is None:
                    turn.pending = self._mark(turn.name, turn.begin, flight)
                else:
                    arrived = self._mark("WAIT", turn.pending.wait, flight)
                    turn.pending = self._mark(turn.name, partial(turn.go_on, arrived), flight)
                if turn.pending is None:
                    turns.remove(turn)

    def _mark(self, name: str, do: Callable[[], Any], flight: _Flight) -> Any:
        start = self.clock.mark()
        done = do()
        flight.marks.append((name, start, self.clock.mark()))
        return done

    def _forward(self, action: Action, flight: _Flight) -> Steps[None]:
        key = _key(action)
        batch = flight.batches[key[1]]
        x = batch.tokens if action.stage == 0 else flight.arrived.pop(("F", *key))
        out, graphs = yield from self.stages[action.stage].forward(x, batch)
        if torch.is_grad_enabled():
            flight.graphs[key] = graphs
        if isinstance(out, Loss):
            flight.losses.append(out.nll)
        else:
            flight.arrived["F", action.stage + 1, key[1]] = out  # for the next stage on this rank, or for `_send`

    def _gradient(self, action: Action, flight: _Flight) -> Tensor | None:
        return None if action.stage == self.program.stages - 1 else flight.arrived.pop(("B", *_key(action)))

    def _hand_back(self, action: Action, grad: Tensor | None, flight: _Flight) -> None:
        if action.stage > 0:
            assert grad is not None
            flight.arrived["B", action.stage - 1, _key(action)[1]] = grad

    def _backward(self, action: Action, flight: _Flight) -> Steps[None]:
        graphs = flight.graphs.pop(_key(action))
        grad = yield from self.stages[action.stage].backward(graphs, self._gradient(action, flight), reduce=self._reduces(action))
        self._hand_back(action, grad, flight)

    def _input_backward(self, action: Action, flight: _Flight) -> Steps[None]:
        graphs = flight.graphs.pop(_key(action))
        grad, rests = yield from self.stages[action.stage].input_backward(graphs, self._gradient(action, flight))
        flight.rests[_key(action)] = rests
        self._hand_back(action, grad, flight)

    def _weight_backward(self, action: Action, flight: _Flight) -> Steps[None]:
        yield from self.stages[action.stage].weight_backward(flight.rests.pop(_key(action)), reduce=self._reduces(action))

    # --- weights ---

    def _reduces(self, action: Action) -> bool:
        """True if this computation also reduces the gradients, part by part, because a REDUCE follows the computation in the program."""
        if self.program.schedule.mirrored is not None:  # ranks of a pair order stages differently, so reduce at the row's end
            return False
        return self.program.zero >= 2 or self._last[action.stage] == action.microbatch

    def _gather(self, action: Action, flight: _Flight) -> None:
        """With ZeRO 1 and 2, begin to gather the stage's weights. With ZeRO 3, do nothing: the next computation gathers the weights of each
        part."""
        with working_on(flight.batches[0].work):  # the batch determines the format of the gather
            self.stages[action.stage].gather(all_parts=self.program.schedule.mirrored is not None)

    def _reduce(self, action: Action, flight: _Flight) -> None:
        """In a bidirectional pipeline, reduce all gradients now. In other pipelines, do nothing: the previous computation has reduced each
        part's gradients as soon as they were complete."""
        if self.program.schedule.mirrored is not None:
            self.stages[action.stage].reduce()

    # --- saved tensors ---

    def _offload(self, action: Action, flight: _Flight) -> None:
        """No-op: the previous computation has moved each block's saved tensors off the device at the end of the block's forward."""

    def _fetch(self, action: Action, flight: _Flight) -> None:
        """Begin to bring back the saved tensors of the stage's last block. Each block's backward begins to bring back the saved tensors of
        the block before it."""
        self.stages[action.stage].fetch(flight.graphs[_key(action)])

    # --- messages ---

    def _send(self, action: Action, flight: _Flight) -> None:
        target = _target(action)
        tensor = flight.arrived.pop(target).contiguous()
        channel = channel_of(action, self.program.schedule)
        lane, tag = self._lanes[_lane(channel)], self._tag(*target)
        work = dist.isend(tensor, group=lane, group_dst=channel.destination, tag=tag)
        flight.leaving = [(w, t) for w, t in flight.leaving if not w.is_completed()] + [(work, tensor)]

    def _receive(self, action: Action, flight: _Flight) -> None:
        stage, microbatch = _key(action)
        carries = action.kind[-1]
        tensor = self.hidden.empty()
        channel = channel_of(action, self.program.schedule)
        lane, tag = self._lanes[_lane(channel)], self._tag(carries, stage, microbatch)
        work = dist.irecv(tensor, group=lane, group_src=channel.source, tag=tag)
        flight.arrived[carries, stage, microbatch] = tensor
        flight.waiting[carries, stage, microbatch] = work

    def _tag(self, carries: str, stage: int, microbatch: int) -> int:
        """Return the tag of a message, by which gloo matches sends and receives. NCCL ignores tags and matches messages by their order,
        which `lower` makes equal at both ends."""
        return ((microbatch * self.program.stages) + stage) * 2 + (carries == "B")

    def _make_lanes(self) -> None:
        """Make a communicator for each kind of message (activations or gradients) and direction in the program, so that messages of
        different kinds or directions do not wait for each other."""
        messages = (a for row in self.program.rows for entry in row for a in parts(entry) if a.kind in MESSAGES)
        used = sorted({_lane(channel_of(message, self.program.schedule)) for message in messages})
        for lane in used:
            if lane not in self._lanes:
                self._lanes[lane] = group_of(self.groups.world, self.groups.line, purpose=MESSAGES_ONLY)


def _lane(channel: Channel) -> tuple[str, bool]:
    return channel.carries, channel.source < channel.destination


def _reads(action: Action) -> str:
    return "F" if action.kind == "F" else "B"


def _target(send: Action) -> tuple[str, int, int]:
    stage, microbatch = _key(send)
    carries = send.kind[-1]
    return carries, stage + 1 if carries == "F" else stage - 1, microbatch


def _key(action: Action) -> Key:
    assert action.microbatch is not None
    return action.stage, action.microbatch
