"""Mixture of experts, computed in steps whose inputs and outputs are tensors. Expert parallelism replaces the dispatch of tokens to
experts."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from megalith.kernels.draws import Tokens, tokens_at_work
from megalith.kernels.grouped import Sizes
from megalith.kernels.multiply import Multiply
from megalith.kernels.packed import pack, unpack
from megalith.kernels.permute import Order, permute, rows_of, unpermute
from megalith.kernels.quantise import Scaling
from megalith.models.batch import Batch
from megalith.models.linear import Linear
from megalith.models.mlp import ACTIVATIONS, Mlp
from megalith.models.router import BalanceSets, EvenRouting, LocalBalanceSets, Router, Routing
from megalith.spec.model import MlpSpec, MoeSpec


class Experts(nn.Module):
    """Several experts: each computes down(activation(gate x) * up x) or down(activation(up x)). A rank may hold only some experts, or only
    a part of each expert's matrices."""

    gate: nn.Parameter | None

    def __init__(self, dim: int, spec: MoeSpec) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        self.register_parameter("gate", nn.Parameter(torch.empty(spec.experts, spec.hidden, dim)) if spec.gated else None)
        self.up = nn.Parameter(torch.empty(spec.experts, spec.hidden, dim))
        self.down = nn.Parameter(torch.empty(spec.experts, dim, spec.hidden))
        self.multiply = Multiply()
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, rows: Float[Tensor, "rows dim"], sizes: Sizes) -> Float[Tensor, "rows dim"]:
        """`rows`: the first expert's rows, then the second's, and so on; `sizes`: the number of rows for each expert."""
        up = self.multiply(rows, self.up, sizes=sizes.of("up"))
        inner = self.multiply.activated(
            self.activation, None if self.gate is None else self.multiply(rows, self.gate, sizes=sizes.of("gate")), up
        )
        return self.multiply(inner, self.down, sizes=sizes.of("down"))


class Pending(Protocol):
    """Rows that are in transit between ranks."""

    def wait(self) -> Tensor:
        """The rows that arrived."""
        ...


@dataclass(frozen=True)
class LocalRows:
    """Rows of a process that has all experts, so that no message is sent."""

    rows: Tensor

    def wait(self) -> Tensor:
        return self.rows


@dataclass(frozen=True)
class Traffic:
    """Row counts of one microbatch's dispatch. `rows`: the number of rows that this rank sends; `sizes`: the number of received rows for
    each expert."""

    rows: int
    sizes: Sizes


class TokenDispatcher(Protocol):
    """Dispatch of tokens to experts, and combination of the results."""

    def enter(self, x: Tensor) -> Tensor:
        """Select from x [batch, seq, ...] the tokens that this rank sends to the experts. Differentiable."""
        ...

    def leave(self, x: Tensor) -> Tensor:
        """The inverse of `enter`."""
        ...

    def plan(self, counts: Tensor, kept: int | None, even: EvenRouting | None) -> Traffic:
        """Plan the exchange. `counts` [experts]: the number of rows to send to each expert; `kept`: the sum of `counts`, if the host knows
        it; `even`: given if tokens are distributed evenly, so that all counts are known without communication."""
        ...

    def dispatch(self, rows: Tensor, traffic: Traffic) -> Tensor:
        """Send rows [sent, dim], sorted by expert, to the ranks that hold the experts. Differentiable."""
        ...

    def combine(self, rows: Tensor, traffic: Traffic) -> Tensor:
        """Send the experts' results back to the ranks of the tokens. Differentiable."""
        ...

    def start_dispatch(self, rows: Tensor, traffic: Traffic) -> Pending:
        """Start `dispatch`, without autograd. The backward of `combine` also calls this method."""
        ...

    def start_combine(self, rows: Tensor, traffic: Traffic) -> Pending:
        """Start `combine`, without autograd. The backward of `dispatch` also calls this method."""
        ...

    def arrive(self, rows: Tensor, traffic: Traffic) -> Tensor:
        """Send rows [sent, n], sorted by expert, to the experts' ranks; return the rows that this rank's experts receive. Without
        autograd."""
        ...

    def run(self, experts: Experts, rows: Tensor, traffic: Traffic) -> Tensor:
        """Apply this rank's experts to the received rows; return one result per row, in the order of the rows."""
        ...


class LocalDispatcher:
    """Dispatcher of a process that has all experts."""

    def enter(self, x: Tensor) -> Tensor:
        return x

    def leave(self, x: Tensor) -> Tensor:
        return x

    def plan(self, counts: Tensor, kept: int | None, even: EvenRouting | None) -> Traffic:
        if even is not None:
            balanced = even.counts((range(even.seq),))
            return Traffic(sum(balanced), Sizes(balanced))
        sizes = Sizes(counts)
        return Traffic(sum(sizes.host) if kept is None else kept, sizes)

    def dispatch(self, rows: Tensor, traffic: Traffic) -> Tensor:
        return rows

    def combine(self, rows: Tensor, traffic: Traffic) -> Tensor:
        return rows

    def start_dispatch(self, rows: Tensor, traffic: Traffic) -> Pending:
        return LocalRows(rows)

    def start_combine(self, rows: Tensor, traffic: Traffic) -> Pending:
        return LocalRows(rows)

    def arrive(self, rows: Tensor, traffic: Traffic) -> Tensor:
        return rows

    def run(self, experts: Experts, rows: Tensor, traffic: Traffic) -> Tensor:
        return experts(rows, traffic.sizes)


@dataclass(frozen=True)
class PendingUnpack:
    """Rows that are sent in 8 bits; `wait` converts them to `dtype` when they have arrived."""

    pending: Pending
    columns: int
    scaling: Scaling
    dtype: torch.dtype

    def wait(self) -> Tensor:
        return unpack(self.pending.wait(), self.columns, self.scaling, self.dtype)


def _packed(rows: Tensor, scaling: Scaling, exchange: TokenDispatcher, traffic: Traffic) -> PendingUnpack:
    return PendingUnpack(exchange.start_dispatch(pack(rows, scaling), traffic), rows.shape[1], scaling, rows.dtype)


class _Packed(torch.autograd.Function):
    """Dispatch in 8 bits. Backward treats the rounding as the identity and sends the gradients in their own format, because gradients in 8
    bits would lose accuracy."""

    @staticmethod
    def forward(ctx, rows: Tensor, scaling: Scaling, exchange: TokenDispatcher, traffic: Traffic) -> Tensor:
        ctx.exchange, ctx.traffic = exchange, traffic
        return _packed(rows, scaling, exchange, traffic).wait()

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.exchange.start_combine(grad, ctx.traffic).wait(), None, None, None


class _RoundedGradient(torch.autograd.Function):
    """Returns `tokens` unchanged. Backward rounds the gradients of the tokens as if they were sent in 8 bits."""

    @staticmethod
    def forward(ctx, tokens: Tensor, scaling: Scaling) -> Tensor:
        ctx.scaling = scaling
        return tokens.view_as(tokens)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return unpack(pack(grad, ctx.scaling), grad.shape[1], ctx.scaling, grad.dtype), None


@dataclass(frozen=True)
class Destinations:
    """Destinations of one microbatch's tokens: the order of their rows by expert, the routing weights of the results, and the row
    counts."""

    order: Order
    weights: Tensor  # [tokens sent, active], fp32
    batch: int
    traffic: Traffic


class Moe(nn.Module):
    """The weighted sum of each token's `active` experts, plus a shared expert if the model has one. A token skips an expert that is full.

    An executor may run each step of `forward` in an autograd graph of its own, and do other work while rows are in flight. The steps of
    `forward` are, in order, `route`, `enter`, `plan_dispatch`, `start_dispatch`, `run` (the experts), `dispatcher.start_combine`, and
    `leave`; `shared_expert` may run at any time. Backward begins with `start_combine_backward`. The backward of a combine is a dispatch,
    and vice versa.
    """

    def __init__(self, dim: int, spec: MoeSpec) -> None:
        super().__init__()
        self.router = Router(dim, spec.experts, spec.router)
        self.experts = Experts(dim, spec)
        shared = MlpSpec(hidden=spec.shared, activation=spec.activation, gated=spec.gated) if spec.shared else None
        self.shared = None if shared is None else Mlp(dim, shared)
        self.shared_gate = Linear(dim, 1) if spec.shared_gate and spec.shared else None
        self.dispatcher: TokenDispatcher = LocalDispatcher()
        self.sets: BalanceSets = LocalBalanceSets()
        self.permute, self.unpermute = permute, unpermute  # seams: a trace swaps them for fused kernels

    @torch.compiler.disable  # how many rows an expert gets differs in every batch: compiled code would be compiled again for each
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Float[Tensor, "batch seq dim"], batch: Batch
    ) -> Float[Tensor, "batch seq dim"]:
        rows, destinations = self.prepare_dispatch(x, self.route(x, batch))
        arrived = self.dispatch(rows, destinations.traffic)
        returned = self.dispatcher.combine(self.run(arrived, destinations), destinations.traffic)
        out = self.finish_combine(returned, destinations)
        shared_expert = self.shared_expert(x)
        return out if shared_expert is None else out + shared_expert

    def route(self, x: Tensor, batch: Batch) -> Routing:
        """Route the tokens of x [batch, seq, dim]."""
        return self.router(x, batch, self.sets)

    def prepare_dispatch(self, x: Tensor, routing: Routing) -> tuple[Tensor, Destinations]:
        """Return the rows [sent, dim] to dispatch, sorted by expert, and their destinations."""
        own, weights = self.enter(x, routing)
        destinations = self.plan_dispatch(routing, weights)
        return self.permute(own, destinations.order), destinations

    def enter(self, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Return the tokens [tokens, dim] that this rank sends, and their routing weights [tokens, active]."""
        return self.dispatcher.enter(x).flatten(0, 1), self.dispatcher.enter(routing.weights).flatten(0, 1)

    def plan_dispatch(self, routing: Routing, weights: Tensor) -> Destinations:
        """Order the routed tokens by expert, and plan their dispatch."""
        choices = self.sets.own(routing.choices)
        batch, seq, active = choices.shape
        choices = choices.flatten(0, 1)  # [tokens, active]
        experts = self.router.weight.shape[0]
        counts = choices.new_zeros(experts + 1)
        if routing.kept is not None:  # dropped copies come last, as if of one more expert
            choices = choices.where(self.sets.own(routing.kept).flatten(0, 1), experts)
        counts.scatter_add_(0, choices.flatten(), torch.ones_like(choices.flatten()))
        even = EvenRouting(batch, seq, active, experts) if routing.balanced else None
        traffic = self.dispatcher.plan(counts[:-1], choices.numel() if routing.kept is None else None, even)
        order = Order.sorted_by(choices, traffic.rows)
        work = tokens_at_work()
        if work is not None and self.experts.multiply.draws:
            traffic.sizes.tokens = self._tokens_of(work, routing.choices.shape[1], order, traffic)
        return Destinations(order, weights, batch, traffic)

    def _tokens_of(self, work: Tokens, seq: int, order: Order, traffic: Traffic) -> Tensor:
        """Return, for each row that this rank's experts receive, the number of its token."""
        spans = (torch.arange(span.start, span.stop, device=work.samples.device) for span in self.sets.spans(seq))
        numbers = self.sets.own(replace(work, positions=torch.cat([*spans])).numbers)
        return self.dispatcher.arrive(rows_of(numbers.reshape(-1, 1), order), traffic).flatten()

    def dispatch(self, rows: Tensor, traffic: Traffic) -> Tensor:
        """Send rows [sent, dim] to the ranks of their experts, in the format to which the experts round them. Differentiable: the gradients
        of the received rows are sent back unrounded."""
        scaling = self.experts.multiply.dispatched_as
        if scaling is None:
            return self.dispatcher.dispatch(rows, traffic)
        return _Packed.apply(rows, scaling, self.dispatcher, traffic)  # pyright: ignore[reportReturnType]

    def start_dispatch(self, rows: Tensor, traffic: Traffic) -> Pending:
        """Start `dispatch`, without autograd."""
        scaling = self.experts.multiply.dispatched_as
        return (
            self.dispatcher.start_dispatch(rows, traffic) if scaling is None else _packed(rows, scaling, self.dispatcher, traffic)
        )

    def run(self, rows: Tensor, destinations: Destinations) -> Tensor:
        """Apply the experts to the received rows."""
        return self.dispatcher.run(self.experts, rows, destinations.traffic)

    def start_combine_backward(self, grads: Tensor, traffic: Traffic) -> Pending:
        """Start to send the gradients [sent, dim] of the weighted results to the ranks of their experts, in the format in which the run
        dispatches gradients. Without autograd."""
        scaling = self.experts.multiply.gradients_dispatched_as
        return (
            self.dispatcher.start_dispatch(grads, traffic)
            if scaling is None
            else _packed(grads, scaling, self.dispatcher, traffic)
        )

    def finish_combine(self, rows: Tensor, destinations: Destinations) -> Tensor:
        """Return, for each token, the weighted sum [batch, seq, dim] of the experts' results that came back. If gradients are dispatched in
        8 bits, backward first rounds the gradient of a token once, so that all experts of the token get the same gradient."""
        tokens, scaling = (
            self.unpermute(rows, destinations.weights, destinations.order),
            self.experts.multiply.gradients_dispatched_as,
        )
        tokens = tokens if scaling is None else _RoundedGradient.apply(tokens, scaling)
        return self.leave(tokens, destinations)  # pyright: ignore[reportArgumentType]

    def leave(self, tokens: Tensor, destinations: Destinations) -> Tensor:
        """Turn the tokens [tokens, dim] that this rank sent into [batch, seq, dim]: the inverse of `enter`."""
        return self.dispatcher.leave(tokens.unflatten(0, (destinations.batch, -1)))

    def shared_expert(self, x: Tensor) -> Tensor | None:
        """Return the shared expert's output [batch, seq, dim]; None if the model has no shared expert."""
        if self.shared is None:
            return None
        out = self.shared(x)
        return out if self.shared_gate is None else out * F.sigmoid(self.shared_gate(x))

    def end_of_step(self, counts: Tensor) -> None:
        """Update the router after a step from `counts`, the step's choices of each expert summed over all ranks."""
        self.router.end_of_step(counts)

    def metrics(self) -> dict[str, float]:
        """Return statistics of the newest step's global batch: "max_load" (largest over mean), "entropy" of the loads (1: even), and the
        fraction of choices "dropped". The result is empty before the first step."""
        return self.router.metrics()
