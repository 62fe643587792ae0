"""Forward and backward of a stage, part by part: each part has its own graph. Between two parts, the runner can gather and drop weights and
reduce gradients, and it can split a backward into two halves.

A graph holds only the tensors that autograd saved. The inputs and outputs of a part are not leaves and roots of the part's graph, so the
graph does not keep them in memory; with many microbatches in flight, this saves much memory.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalith.kernels.cross_entropy import Loss
from megalith.kernels.deferred import Queue, deferring
from megalith.models.batch import Batch
from megalith.models.moe import Pending
from megalith.models.stage import Stage
from megalith.parallel.data import Bucket, Weight
from megalith.parallel.reduction import Reducer
from megalith.parallel.retain import STAYS, Retention, SavedTensor, Shelf, unpack_saved

# --- graphs ---


T = TypeVar("T")
Steps: TypeAlias = Generator[Pending, Tensor, T]
"""A computation in steps: it yields a pending exchange of rows, and resumes with the received rows."""


def finish(steps: Steps[T]) -> T:
    """Run all steps, waiting for the received rows wherever a step yields, and return the result."""
    try:
        pending = next(steps)
        while True:
            pending = steps.send(pending.wait())
    except StopIteration as end:
        return end.value


class Graph(Protocol):
    """The autograd graph that one part's forward left for its backward."""

    @property
    def differentiable(self) -> bool:
        """True if the part's input has a gradient; token ids have no gradient."""
        ...

    def backward(self, grad: Tensor | None, queue: Queue | None) -> Steps[Tensor | None]:
        """Return the gradient of the part's input, and accumulate the weights' gradients. With a `queue`, weight gradients that can be
        deferred are put into the queue instead."""
        ...


class Inlet:
    """An input of a graph: `enter` passes a tensor into the graph, and `take` returns the tensor's gradient."""

    def __init__(self) -> None:
        self._grad: Tensor | None = None

    def enter(self, x: Tensor) -> Tensor:
        """Return x as a tensor of the graph."""
        anchor = torch.empty(0, requires_grad=True)  # so that autograd records the graph; x itself is no leaf of the graph
        return _Enter.apply(anchor, x.detach(), self)  # pyright: ignore[reportReturnType]

    def give(self, grad: Tensor) -> None:
        """Store the gradient; the graph's backward calls this."""
        self._grad = grad

    def take(self) -> Tensor | None:
        """Return the gradient and drop it here; None if there is no gradient."""
        grad, self._grad = self._grad, None
        return grad


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, inlet: Inlet) -> Tensor:
        ctx.inlet = inlet
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.inlet.give(grad)
        return None, None, None


@dataclass(frozen=True)
class Piece:
    """A part of a forward, with an autograd graph of its own."""

    inlets: tuple[Inlet, ...]
    outs: tuple[GradientEdge, ...]

    @property
    def differentiable(self) -> bool:
        return bool(self.inlets)

    def gradients(self, grads: Sequence[Tensor | None], queue: Queue | None) -> list[Tensor | None]:
        """Return the gradients of the inputs from the gradients of the outputs. In `grads`, None means that the output was not used; for a
        single scalar output, None stands for a gradient of 1."""
        asked = [(out, grad) for out, grad in zip(self.outs, grads, strict=True) if grad is not None or len(grads) == 1]
        with deferring(queue) if queue is not None else nullcontext():
            torch.autograd.backward([out for out, _ in asked], [grad for _, grad in asked])
        return [inlet.take() for inlet in self.inlets]

    def backward(self, grad: Tensor | None, queue: Queue | None) -> Steps[Tensor | None]:
        """Run the backward of a piece that is a whole part of the model: see `Graph`."""
        found = self.gradients([grad], queue)
        yield from ()
        return found[0] if found else None


def record(lines: Callable[..., tuple[Tensor, ...]], *inputs: Tensor, shelf: Shelf = STAYS) -> tuple[tuple[Tensor, ...], Piece]:
    """Run the function `lines`, and return its detached outputs and its graph. Floating-point inputs get gradients. `shelf` keeps the
    tensors that the graph saves."""
    inlets = [Inlet() if x.is_floating_point() else None for x in inputs]
    entered = (x if inlet is None else inlet.enter(x) for x, inlet in zip(inputs, inlets, strict=True))
    with shelf.saving():
        outs = lines(*entered)
    through = tuple(inlet for inlet in inlets if inlet is not None)
    return tuple(out.detach() for out in outs), Piece(through, tuple(get_gradient_edge(out) for out in outs))


# --- stages ---


Forward: TypeAlias = Callable[[Tensor, Batch, Shelf], Steps[tuple[Tensor, Graph]]]
"""The forward of a part in steps. The function returns the detached output and the graph; its last argument, a shelf, keeps the tensors
that the graph saves."""


@dataclass(frozen=True)
class Segment:
    """Consecutive parts for which forward saved only the first part's input. Before their backward, the parts run again and build their
    graphs."""

    parts: range
    x: Tensor | SavedTensor
    batch: Batch


class ForwardState(NamedTuple):
    """State that forward left for the backward of a part, or of a segment."""

    left: Graph | Segment
    shelf: Shelf = STAYS
    recomputed: bool = False
    """True if the graph was built in backward, when a segment ran again."""


@dataclass
class Rest:
    """State that the first half of a part's backward leaves for the second half: the queue of deferred weight gradients (`queue`), weight
    gradients that are already computed (`early`), or the whole backward of a part whose input needs no gradient (`late`)."""

    queue: Queue
    late: tuple[Graph, Tensor | None] | None = None
    early: list[tuple[Weight, Tensor]] = field(default_factory=list)  # weight gradients that could not be deferred


class Runner:
    """Runs forwards and backwards of one stage. The ZeRO stage `zero` determines when weights are gathered and dropped."""

    def __init__(
        self,
        stage: Stage,
        buckets: Sequence[Sequence[Bucket]],
        *,
        zero: int,
        reducer: Reducer,
        segments: Sequence[range] = (),
        dispatched: Mapping[int, Forward] = MappingProxyType({}),
        retention: Retention | None = None,
    ) -> None:
        """`segments`: ranges of parts for which forward saves only the first part's input, and which run again before their backward.
        `dispatched`: the forwards of parts that send tokens to other ranks, by the number of the part. `retention`: the parts whose saved
        tensors leave the device; None: all saved tensors stay on the device."""
        self.stage, self.zero, self.dispatched, self._retention = stage, zero, dispatched, retention
        self.segments = {number: segment for segment in segments for number in segment}
        self.parts = [part for _, part in stage.parts()]
        self.buckets = [list(each) for each in buckets]  # for each part, the buckets that it uses
        self.reducer = reducer
        firsts: dict[Bucket, int] = {}
        for number, used in enumerate(self.buckets):
            for bucket in used:
                firsts.setdefault(bucket, number)
        self._reduced_after = [[b for b, first in firsts.items() if first == number] for number in range(len(self.parts))]

    # --- weights ---

    def gather(self, *, all_parts: bool) -> None:
        """With ZeRO 0 to 2, begin to gather the first part's weights. The computation of each part starts the gather of the next part, so
        that only a few gathers are in flight at once. `all_parts`: begin to gather the weights of all parts now, because ranks compute the
        parts in different orders.
        """
        if self.zero < 3:
            for used in self.buckets if all_parts else self.buckets[:1]:
                for bucket in used:
                    bucket.start()

    def reduce(self) -> None:
        """Reduce all gradients now."""
        for buckets in self._reduced_after:
            for bucket in buckets:
                self.reducer.add(bucket.reduce())

    def free(self) -> None:
        """Drop the gathered weights and the rounded 8-bit shares, because the weights are about to change."""
        for used in self.buckets:
            for bucket in used:
                bucket.free()
                bucket.forget()

    def _enter(self, number: int, then: int | None) -> None:
        for bucket in self.buckets[number]:
            bucket.gather()
        if then is not None and 0 <= then < len(self.parts):
            for bucket in self.buckets[then]:
                bucket.start()

    def _leave(self, number: int, then: int | None) -> None:
        if self.zero == 3:
            kept = self.buckets[then] if then is not None and 0 <= then < len(self.parts) else ()
            for bucket in self.buckets[number]:
                if bucket not in kept:
                    bucket.free()

    # --- computation ---

    def forward(self, x: Tensor, batch: Batch) -> Steps[tuple[Tensor | Loss, list[ForwardState]]]:
        """Return the stage's detached output, or its loss, and the saved state of each part for backward."""
        batch = self.stage.prepare(batch)
        kept: list[ForwardState] = []
        out: Tensor | Loss = x
        for number in range(len(self.parts)):
            assert isinstance(out, Tensor)
            self._enter(number, number + 1)
            segment, shelf = self.segments.get(number), self._shelf(number, batch)
            if segment is None:
                out, graph = yield from self._compute(number, out, batch, shelf)
                kept += [ForwardState(graph, shelf)] if graph else []
            else:
                if number == segment.start and torch.is_grad_enabled():
                    kept.append(ForwardState(Segment(segment, shelf.put(out), batch), shelf))
                out = yield from self._pass(number, out, batch)
            shelf.leave()
            self._leave(number, number + 1)
        return out, kept

    def _shelf(self, number: int, batch: Batch) -> Shelf:
        return STAYS if self._retention is None else self._retention.shelf(number, batch)

    def _compute(self, number: int, x: Tensor, batch: Batch, shelf: Shelf = STAYS) -> Steps[tuple[Tensor | Loss, Graph | None]]:
        part = self.parts[number]
        if not torch.is_grad_enabled():
            return part(x, batch), None
        if (forward := self.dispatched.get(number)) is not None:
            return (yield from forward(x, batch, shelf))
        return _whole(part, x, batch, shelf)

    def _pass(self, number: int, x: Tensor, batch: Batch) -> Steps[Tensor]:
        """Run a part without saving anything for its backward; return its output. A part that dispatches tokens runs with gradients
        enabled, and its graph is dropped at the end: if it paused inside `no_grad`, gradients would be disabled for other computations."""
        if torch.is_grad_enabled() and (forward := self.dispatched.get(number)) is not None:
            return (yield from forward(x, batch, STAYS))[0]
        with torch.no_grad():
            return self.parts[number](x, batch)

    def _rerun(self, segment: Segment) -> Steps[list[Graph]]:
        """Run a segment again from its input; return the graphs of its parts. The weights of the segment's last part stay gathered, because
        backward begins with this part."""
        graphs: list[Graph] = []
        x: Tensor | Loss = unpack_saved(segment.x)
        for number in segment.parts:
            assert isinstance(x, Tensor)
            then = number + 1 if number + 1 < segment.parts.stop else None
            self._enter(number, then)
            x, graph = yield from self._compute(number, x, segment.batch)
            assert graph is not None
            graphs.append(graph)
            if then is not None:
                self._leave(number, then)
        return graphs

    def fetch(self, kept: list[ForwardState]) -> None:
        """Begin to move saved tensors back to the device, for the last part in `kept` whose saved tensors have left it."""
        shelf = next((each.shelf for each in reversed(kept) if each.shelf.moves), STAYS)
        shelf.fetch()

    def _next_graph(self, kept: list[ForwardState]) -> Steps[tuple[Graph, bool]]:
        """Remove the last part from `kept`; return its graph, and True if the graph belongs to a segment that ran again. Begin to move the
        saved tensors of this part, and of the part before it, back to the device. If the last entry is a segment, the segment's parts run
        again first."""
        last = kept.pop()
        last.shelf.fetch()
        self.fetch(kept)
        if isinstance(last.left, Segment):
            kept += [ForwardState(graph, recomputed=True) for graph in (yield from self._rerun(last.left))]
            last = kept.pop()
        assert not isinstance(last.left, Segment)
        return last.left, last.recomputed

    def _before(self, number: int, kept: list[ForwardState]) -> int:
        return kept[-1].left.parts.start if kept and isinstance(kept[-1].left, Segment) else number - 1

    def backward(self, kept: list[ForwardState], grad: Tensor | None, *, reduce: bool) -> Steps[Tensor | None]:
        """Run the backward of all parts in `kept`, which is emptied; return the gradient of the stage's input (None for token ids).
        `reduce`: also reduce the weights' gradients, after the last microbatch or, with ZeRO 2 and 3, after each microbatch."""
        for number in reversed(range(len(self.parts))):
            graph, _ = yield from self._next_graph(kept)
            then = self._before(number, kept)
            self._enter(number, then)
            grad = yield from graph.backward(grad, None)
            self._leave(number, then)
            self._collect(number, reduce)
        return grad

    def input_backward(self, kept: list[ForwardState], grad: Tensor | None) -> Steps[tuple[Tensor | None, list[Rest]]]:
        """Run the first half of a backward: return the gradient of the stage's input, and the state for the second half. `kept` is
        emptied."""
        rests: list[Rest] = []
        for number in reversed(range(len(self.parts))):
            graph, recomputed = yield from self._next_graph(kept)
            # With ZeRO 2 and 3 a gradient that is computed now would be held until this microbatch's second half.
            rest = Rest(Queue(recomputed=self.zero >= 2))
            rests.append(rest)
            if not graph.differentiable:
                rest.late = (graph, grad)
                return None, rests
            then = self._before(number, kept)
            self._enter(number, then)
            grad = yield from graph.backward(grad, rest.queue.unless(recomputed))
            self._leave(number, then)
            rest.early = self._set_aside(number)
        return grad, rests

    def weight_backward(self, rests: list[Rest], *, reduce: bool) -> Steps[None]:
        """Run the second half of a backward: compute the weights' gradients."""
        for number, rest in zip(reversed(range(len(self.parts))), rests, strict=True):
            if rest.late is not None:
                self._enter(number, None)
                graph, grad = rest.late
                yield from graph.backward(grad, None)
                self._leave(number, None)
            for weight, gradient in rest.early:
                made = weight.compute.grad
                weight.compute.grad = gradient if made is None else made.add_(gradient)
            rest.queue.run_all()
            self._collect(number, reduce)

    def _set_aside(self, number: int) -> list[tuple[Weight, Tensor]]:
        """Take the weight gradients that the first half of a microbatch's backward has already computed. With ZeRO 0 and 1, add these
        gradients to the sums over microbatches now. With ZeRO 2 and 3, return them, unadded, for the second half of the backward: gradients
        are reduced separately for each microbatch, and first halves of later microbatches run before this second half."""
        weights = [weight for bucket in self.buckets[number] for weight in bucket.weights]
        if self.zero < 2:
            for weight in weights:
                weight.accumulate_gradient()
            return []
        early = [(weight, gradient) for weight in weights if (gradient := weight.compute.grad) is not None]
        for weight, _ in early:
            weight.compute.grad = None
        return early

    def _collect(self, number: int, reduce: bool) -> None:
        for bucket in self._reduced_after[number]:
            for weight in bucket.weights:
                weight.accumulate_gradient()
            if reduce:
                self.reducer.add(bucket.reduce())


def _whole(part: nn.Module, x: Tensor, batch: Batch, shelf: Shelf) -> tuple[Tensor | Loss, Piece]:
    loss: Loss | None = None

    def run(x: Tensor) -> tuple[Tensor]:
        nonlocal loss
        out = part(x, batch)
        loss = out if isinstance(out, Loss) else None
        return (out.objective if isinstance(out, Loss) else out,)

    (out,), graph = record(run, x, shelf=shelf)
    return (out if loss is None else Loss(out, loss.nll)), graph
