"""Runs a block whose experts are on other ranks as several autograd graphs, with the exchanges of tokens between the graphs.

There are four graphs: attention with routing, the shared expert, the experts, and the final sum. While rows are in flight, the executor
runs another microbatch, or at least the shared expert. Backward exchanges the gradients in the reverse order.

Rows of tokens are the largest tensors. A rank keeps the rows that its experts received, for the gradients of the experts' weights, and its
experts' results, for the gradients of the routing weights. Results that come back to a token's rank are not kept there, although the
gradients of its routing weights depend on them. Instead, each routing weight is sent to the expert's rank, which computes the weight's
gradient and sends it back. The operations have the same order as in a plain backward, so the gradients have the same bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn

from megalith.kernels.deferred import Queue
from megalith.kernels.permute import by_token, factors_of, rows_of, sums_of
from megalith.models.batch import Batch
from megalith.models.block import Block
from megalith.models.moe import Destinations, LocalDispatcher, Moe, Pending
from megalith.parallel.passes import Graph, Piece, Steps, record
from megalith.parallel.recompute import is_checkpointed, unwrapped
from megalith.parallel.retain import STAYS, SavedTensor, Shelf, unpack_saved


def dispatches_tokens(part: nn.Module) -> TypeGuard[Block]:
    """True for a block that sends tokens to experts on other ranks, unless the block is compiled: a compiled block is a single graph."""
    if not isinstance(part, Block) or not isinstance(part.mlp, Moe) or isinstance(part.mlp.dispatcher, LocalDispatcher):
        return False
    return part._compiled_call_impl is None


class BlockComputations:
    """The computations of a block between its exchanges, for one microbatch."""

    def __init__(self, block: Block, batch: Batch) -> None:
        assert isinstance(block.mlp, Moe)
        self.block, self.moe, self.batch = block, block.mlp, batch
        self._destinations: Destinations | None = None

    @property
    def destinations(self) -> Destinations:
        """The destinations of the tokens, with detached routing weights."""
        assert self._destinations is not None
        return self._destinations

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return x plus the attention's output, the MLP's input, the tokens of the MLP's input that this rank sends, and the routing
        weights of these tokens."""
        residual, normal = unwrapped(self.block, "attend")(x, self.batch)
        routing = self.moe.route(normal, self.batch)
        own, weights = self.moe.enter(normal, routing)
        if self._destinations is None:  # other ranks are asked once
            self._destinations = self.moe.plan_dispatch(routing, weights.detach())
        return residual, normal, own, weights

    def shared_expert(self, normal: Tensor) -> tuple[Tensor, ...]:
        """Return the shared expert's output; empty if the block has no shared expert."""
        made = unwrapped(self.moe, "shared_expert")(normal)
        return () if made is None else (made,)

    def experts(self, rows: Tensor) -> tuple[Tensor]:
        """Apply the experts to the received rows."""
        return (unwrapped(self.moe, "run")(rows, self.destinations),)

    def join(self, residual: Tensor, tokens: Tensor, *shared_expert: Tensor) -> tuple[Tensor]:
        """Return the block's output, from each token's weighted sum over its experts, `tokens`."""
        out = self.moe.leave(tokens, self.destinations)
        return (self.block.join(residual, out + shared_expert[0] if shared_expert else out),)


@dataclass(frozen=True)
class RecomputeChoice:
    """A choice of the computations of a block that run again in backward, from their saved inputs. `rows`: the rows are also dispatched to
    their experts again."""

    attend: bool
    shared_expert: bool
    experts: bool
    rows: bool

    @classmethod
    def of(cls, computations: BlockComputations) -> "RecomputeChoice":
        """Return the choice that `parallel.recompute` made for the block."""
        block, moe = computations.block, computations.moe
        mixture = is_checkpointed(block) or is_checkpointed(moe)
        return cls(
            attend=is_checkpointed(block) or is_checkpointed(block, "attend"),
            shared_expert=mixture or is_checkpointed(moe, "shared_expert"),
            experts=mixture or is_checkpointed(moe, "run"),
            rows=mixture,
        )


class Replay:
    """A function whose graph is built in forward or, with `recompute`, built from the saved inputs shortly before backward. `shelf` keeps
    the tensors that forward saves."""

    def __init__(self, computations: Callable[..., tuple[Tensor, ...]], *, recompute: bool, shelf: Shelf) -> None:
        self.computations, self.recompute, self.shelf = computations, recompute, shelf
        self._piece: Piece | None = None
        self._inputs: tuple[Tensor | SavedTensor, ...] = ()

    def run(self, *inputs: Tensor, keep: bool = True) -> tuple[Tensor, ...]:
        """Run the forward. If not `keep`, the inputs are not saved, and the caller must pass them to `rerun`."""
        if not self.recompute:
            return self._make(inputs, self.shelf)
        self._inputs = tuple(map(self.shelf.put, inputs)) if keep else ()
        with torch.no_grad():
            return self.computations(*inputs)

    def rerun(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the forward again, and build its graph."""
        inputs, self._inputs = inputs or tuple(map(unpack_saved, self._inputs)), ()
        return self._make(inputs, STAYS)

    def _make(self, inputs: tuple[Tensor, ...], shelf: Shelf) -> tuple[Tensor, ...]:
        outs, self._piece = record(self.computations, *inputs, shelf=shelf)
        return outs

    def gradients(self, grads: Sequence[Tensor | None], queue: Queue | None) -> list[Tensor | None]:
        """Return the gradients of the inputs; see `Piece.gradients`."""
        assert self._piece is not None
        return self._piece.gradients(grads, None if queue is None else queue.unless(self.recompute))


@dataclass
class BlockGraphs:
    """The graphs of one block."""

    computations: BlockComputations
    recompute: RecomputeChoice
    attend: Replay
    shared_expert: Replay
    experts: Replay
    join: Piece
    normal: Tensor | SavedTensor | None  # recomputation starts from it
    sent: Tensor | SavedTensor | None  # back by the experts

    differentiable = True

    def backward(self, grad: Tensor | None, queue: Queue | None) -> Steps[Tensor | None]:
        """See `Graph`."""
        destinations, dispatcher = self.computations.destinations, self.computations.moe.dispatcher
        of_residual, of_tokens, *of_shared = self.join.gradients([grad], queue)
        assert of_tokens is not None
        factors = dispatcher.start_dispatch(
            factors_of(destinations.weights, destinations.order).unsqueeze(-1), destinations.traffic
        )
        moving = self.computations.moe.start_combine_backward(rows_of(of_tokens, destinations.order), destinations.traffic)
        if self.recompute.attend:
            self.normal = self.attend.rerun()[1]
        coming = self._send_again() if self.recompute.rows else None
        of_normal = self._shared_backward(of_shared, queue)
        if self.recompute.experts:
            (self.sent,) = self.experts.rerun() if coming is None else self.experts.rerun((yield coming))
        of_sent = yield moving
        products = dispatcher.start_combine(self._weigh(of_sent, factors.wait()), destinations.traffic)
        (of_arrived,) = self.experts.gradients([of_sent], queue)
        assert of_arrived is not None
        of_rows = yield dispatcher.start_combine(of_arrived, destinations.traffic)
        of_weights = by_token(products.wait().squeeze(-1), destinations.order)
        return self.attend.gradients([of_residual, of_normal, sums_of(of_rows, None, destinations.order), of_weights], queue)[0]

    def _send_again(self) -> Pending:
        computations = self.computations
        assert self.normal is not None
        own = computations.moe.dispatcher.enter(unpack_saved(self.normal)).flatten(0, 1)
        return computations.moe.start_dispatch(rows_of(own, computations.destinations.order), computations.destinations.traffic)

    def _shared_backward(self, of_shared: Sequence[Tensor | None], queue: Queue | None) -> Tensor | None:
        if not of_shared:
            return None
        if self.recompute.shared_expert:
            assert self.normal is not None
            self.shared_expert.rerun(unpack_saved(self.normal))
        self.normal = None
        return self.shared_expert.gradients(of_shared, queue)[0]

    def _weigh(self, of_sent: Tensor, factors: Tensor) -> Tensor:
        """Multiply `of_sent`, the gradients of the weighted results [rows, dim], by the routing weights `factors`, in place: this gives the
        gradients of the experts' results. Return the gradients of the routing weights [rows, 1]."""
        assert self.sent is not None
        products = (unpack_saved(self.sent) * of_sent).sum(-1, keepdim=True, dtype=torch.float32)
        self.sent = None
        of_sent.mul_(factors)  # in fp32, rounded once
        return products


def forward(block: Block, x: Tensor, batch: Batch, shelf: Shelf = STAYS) -> Steps[tuple[Tensor, Graph]]:
    """Run `block(x, batch)` in steps; return the output and the graphs. `shelf` keeps the tensors that the graphs save."""
    computations = BlockComputations(block, batch)
    recompute, dispatcher = RecomputeChoice.of(computations), computations.moe.dispatcher
    attend, shared_expert, experts = (
        Replay(computations.attend, recompute=recompute.attend, shelf=shelf),
        Replay(computations.shared_expert, recompute=recompute.shared_expert, shelf=shelf),
        Replay(computations.experts, recompute=recompute.experts, shelf=shelf),
    )
    residual, normal, own, weights = attend.run(x)
    destinations = computations.destinations
    pending = computations.moe.start_dispatch(rows_of(own, destinations.order), destinations.traffic)
    made = shared_expert.run(normal, keep=False)
    (sent,) = experts.run((yield pending), keep=not recompute.rows)
    returned = yield dispatcher.start_combine(sent, destinations.traffic)
    (out,), join = record(computations.join, residual, sums_of(returned, weights, destinations.order), *made, shelf=shelf)
    made_from = (recompute.shared_expert or recompute.rows) and not recompute.attend
    return out, BlockGraphs(
        computations,
        recompute,
        attend,
        shared_expert,
        experts,
        join,
        normal=shelf.put(normal) if made_from else None,
        sent=None if recompute.experts else shelf.put(sent),
    )
