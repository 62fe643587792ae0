"""Runs one rank's row of a Program on its stages: the same interpreter for every schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.kernels.cross_entropy import Loss
from megalith.models.batch import Batch
from megalith.models.stage import Stage
from megalith.parallel import data
from megalith.parallel.clock import Clock
from megalith.parallel.groups import Groups, group_of
from megalith.schedule.action import COMPUTATIONS, MESSAGES, Action, parts
from megalith.schedule.lower import BACKWARDS, Channel, Program, channel_of

Key = tuple[int, int]  # stage, microbatch


@dataclass(frozen=True)
class Hidden:
    """What travels between stages: activations one way, their gradients the other."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


@dataclass
class _Flight:
    """What one step holds between its actions."""

    batches: Sequence[Batch]
    inputs: dict[Key, Tensor] = field(default_factory=dict)  # what a forward read, until its backward
    outputs: dict[Key, Tensor] = field(default_factory=dict)  # what it gave (the objective on the last stage), until its backward
    arrived: dict[tuple[str, int, int], Tensor] = field(
        default_factory=dict
    )  # ("F" | "B", stage, microbatch): here, or on its way
    waiting: dict[tuple[str, int, int], Any] = field(default_factory=dict)  # receives not yet waited for
    leaving: list[tuple[Any, Tensor]] = field(default_factory=list)  # sends under way; a tensor must live until it has left
    losses: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Executed:
    """One step's outcome on this rank: its sum of scaled losses (0 off the last stage), and when each action ran."""

    nll: Tensor
    marks: list[tuple[str, Any, Any]]


class Executor:
    """Interprets this rank's row of `program`. `stages` holds the stages the program places here."""

    def __init__(self, program: Program, stages: Mapping[int, Stage], *, groups: Groups, hidden: Hidden) -> None:
        self.program = program
        self.stages = stages
        self.groups = groups
        self.hidden = hidden
        self.rank = groups.coordinates["pipeline"]
        self.clock = Clock(hidden.device)
        self._lanes = self._make_lanes()
        self._last_backward = {
            action.stage: action.microbatch
            for slot in program.rows[self.rank]
            for action in parts(slot)
            if action.kind in BACKWARDS
        }
        self._handlers: Mapping[str, Callable[[Action, _Flight], None]] = {
            "F": self._forward,
            "B": self._backward,
            "SEND_F": self._send,
            "SEND_B": self._send,
            "RECV_F": self._receive,
            "RECV_B": self._receive,
            "GATHER": self._by_data_parallel,
            "REDUCE": self._by_data_parallel,
        }
        kinds = {action.kind for slot in program.rows[self.rank] for action in parts(slot)}
        assert kinds <= set(self._handlers), f"no handler for {kinds - set(self._handlers)}"

    def run(self, batches: Sequence[Batch]) -> Executed:
        """Run the row once over `batches`, one a microbatch. Gradients are left on the parameters."""
        assert len(batches) == self.program.microbatches, (len(batches), self.program.microbatches)
        flight = _Flight(batches)
        marks: list[tuple[str, Any, Any]] = []
        for slot in self.program.rows[self.rank]:
            for action in parts(slot):
                start = self.clock.mark()
                if work := flight.waiting.pop((_reads(action), *_key(action)), None) if action.kind in COMPUTATIONS else None:
                    work.wait()
                    marks.append(("WAIT", start, start := self.clock.mark()))
                self._handlers[action.kind](action, flight)
                marks.append((str(action), start, self.clock.mark()))
        start = self.clock.mark()
        for work, _ in flight.leaving:
            work.wait()
        marks.append(("WAIT", start, self.clock.mark()))
        assert not flight.inputs and not flight.arrived, "a program that leaves work undone"
        if not torch.is_grad_enabled():  # with gradients, the last backward drops the gathered weights
            for stage in self.stages.values():
                data.release(stage)
        nll = torch.stack(flight.losses).sum() if flight.losses else torch.zeros((), device=self.hidden.device)
        return Executed(nll, marks)

    # --- computation ---

    def _forward(self, action: Action, flight: _Flight) -> None:
        key = _key(action)
        batch = flight.batches[key[1]]
        first, last = action.stage == 0, action.stage == self.program.stages - 1
        x = batch.tokens if first else flight.arrived.pop(("F", *key)).requires_grad_(torch.is_grad_enabled())
        out = self.stages[action.stage](x, batch)
        if last:
            assert isinstance(out, Loss)
            flight.losses.append(out.nll)
            out = out.objective
        if torch.is_grad_enabled():
            flight.inputs[key], flight.outputs[key] = x, out
        if not last:
            flight.arrived["F", action.stage + 1, key[1]] = out.detach()  # here for the next stage, or for `_send`

    def _backward(self, action: Action, flight: _Flight) -> None:
        key = _key(action)
        stage = self.stages[action.stage]
        data.before_backward(stage, zero=self.program.zero, last=self._last_backward[action.stage] == key[1])
        x, out = flight.inputs.pop(key), flight.outputs.pop(key)
        out.backward(None if action.stage == self.program.stages - 1 else flight.arrived.pop(("B", *key)))
        if action.stage > 0:
            assert x.grad is not None
            flight.arrived["B", action.stage - 1, key[1]] = x.grad

    def _by_data_parallel(self, action: Action, flight: _Flight) -> None:
        """FSDP gathers and reduces inside the computation next to this action, as `data.before_backward` told it."""

    # --- messages ---

    def _send(self, action: Action, flight: _Flight) -> None:
        stage, microbatch = _key(action)
        carries = action.kind[-1]
        target = stage + 1 if carries == "F" else stage - 1
        tensor = flight.arrived.pop((carries, target, microbatch)).contiguous()
        channel = channel_of(action, self.program.placement)
        lane, tag = self._lanes[_lane(channel)], self._tag(carries, target, microbatch)
        work = dist.isend(tensor, self.groups.line[channel.destination], group=lane, tag=tag)
        flight.leaving = [(w, t) for w, t in flight.leaving if not w.is_completed()] + [(work, tensor)]

    def _receive(self, action: Action, flight: _Flight) -> None:
        stage, microbatch = _key(action)
        carries = action.kind[-1]
        tensor = self.hidden.empty()
        channel = channel_of(action, self.program.placement)
        lane, tag = self._lanes[_lane(channel)], self._tag(carries, stage, microbatch)
        work = dist.irecv(tensor, self.groups.line[channel.source], group=lane, tag=tag)
        flight.arrived[carries, stage, microbatch] = tensor
        flight.waiting[carries, stage, microbatch] = work

    def _tag(self, carries: str, stage: int, microbatch: int) -> int:
        """One number a message, so that gloo matches by name rather than by order (NCCL goes by order, which `lower` keeps)."""
        return ((microbatch * self.program.stages) + stage) * 2 + (carries == "B")

    def _make_lanes(self) -> dict[tuple[str, bool], dist.ProcessGroup]:
        """A communicator for each direction of activations and of gradients that the program uses, so that none waits for another."""
        messages = (a for row in self.program.rows for slot in row for a in parts(slot) if a.kind in MESSAGES)
        used = sorted({_lane(channel_of(message, self.program.placement)) for message in messages})
        return {lane: group_of(self.groups.line) for lane in used}


def _lane(channel: Channel) -> tuple[str, bool]:
    return channel.carries, channel.source < channel.destination


def _reads(action: Action) -> str:
    """What a computation reads: activations or gradients."""
    return "F" if action.kind == "F" else "B"


def _key(action: Action) -> Key:
    assert action.microbatch is not None
    return action.stage, action.microbatch
