"""Stand-ins for the communication inside a part: messages are recorded instead of sent, and results have the right shapes."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.cost.cores import Note
from megalith.cost.profile import Core, Exchanged, Layout
from megalith.cost.recorder import Recorder, Region, bytes_of
from megalith.kernels.grouped import Sizes
from megalith.models.batch import Batch
from megalith.models.moe import Experts, LocalDispatcher, Moe, Traffic
from megalith.models.router import EvenRouting, LocalBalanceSets
from megalith.parallel.conjugate import conjugates
from megalith.parallel.context import heads_for_each
from megalith.parallel.expert import share_experts
from megalith.parallel.tensor import Split, split_part
from megalith.spec.numbers import SCALE_BYTES


class _Resize(torch.autograd.Function):
    """Effect of a boundary collective on shapes: `longer` is the factor by which dim 1 grows (below 0: by which it shrinks); backward
    restores the length."""

    @staticmethod
    def forward(ctx, x: Tensor, longer: int, recorder: Recorder, kinds: tuple[Exchanged, Exchanged], regather: bool) -> Tensor:
        ctx.recorder, ctx.kinds, ctx.shape = recorder, kinds, x.shape
        with torch._C._DisableTorchDispatch():
            length = x.shape[1] * longer if longer > 0 else x.shape[1] // -longer
            out = x.new_empty(x.shape[0], length, *x.shape[2:])
        whole = max(bytes_of(x), bytes_of(out))
        ctx.whole = whole
        recorder.exchange("tensor", kinds[0], whole)
        if regather:
            recorder.ignore(out)
            recorder.exchange("tensor", "gather", whole, "W")
        else:
            recorder.hold(out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.recorder.exchange("tensor", ctx.kinds[1], ctx.whole)
        return grad.new_empty(ctx.shape), None, None, None, None


def split(part: nn.Module, recorder: Recorder, layout: Layout) -> None:
    """Reduce a part to the first rank's share, split as in the trainer (`parallel.expert`, `parallel.tensor`). `recorder`
    records the messages."""
    for module in part.modules():
        if isinstance(module, Moe):
            share_experts(module.experts, (0, layout.expert), (0, layout.expert_tensor))
            module.dispatcher = away = RecordedDispatcher(recorder, layout)
            module.sets = EvenShare(away.shares)
            module.router.register_forward_pre_hook(
                lambda _, args: (Border.apply(args[0], recorder, "attention", "router"), *args[1:])
            )
    if layout.tensor > 1:
        split_part(part, RecordedSplit(recorder, layout))


class RecordedSplit(Split):
    """Split of the first tensor rank in a process without other ranks: messages are recorded instead of sent.

    Modules are split by the trainer's own layout table (`parallel.tensor.split_part`).
    """

    def __init__(self, recorder: Recorder, layout: Layout) -> None:
        super().__init__(dist.ProcessGroup(0, layout.tensor), layout.sequence)  # it knows its size, and has nothing to send by
        self.recorder, self.regather = recorder, layout.regather

    def enter(self, x: Tensor) -> Tensor:
        if not self.sequence:
            return _Copied.apply(x, self.recorder, False)  # pyright: ignore[reportReturnType]
        return _Resize.apply(x, self.size, self.recorder, ("gather", "scatter"), self.regather)  # pyright: ignore[reportReturnType]

    def leave(self, x: Tensor) -> Tensor:
        if not self.sequence:
            return _Copied.apply(x, self.recorder, True)  # pyright: ignore[reportReturnType]
        return _Resize.apply(x, -self.size, self.recorder, ("scatter", "gather"), False)  # pyright: ignore[reportReturnType]

    def reduce(self, values: Tensor, operation: str) -> Tensor:
        self.recorder.exchange("tensor", "sum", bytes_of(values))
        return values


class _Copied(torch.autograd.Function):
    """Boundary of tensor parallelism without sequence parallelism: a tensor that all ranks hold is all-reduced in forward or in
    backward."""

    @staticmethod
    def forward(ctx, x: Tensor, recorder: Recorder, leaving: bool) -> Tensor:
        ctx.recorder, ctx.leaving = recorder, leaving
        if leaving:
            recorder.exchange("tensor", "sum", bytes_of(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        if not ctx.leaving:
            ctx.recorder.exchange("tensor", "sum", bytes_of(grad))
        return grad, None, None


class _Dispatched(torch.autograd.Function):
    """All-to-all of tokens to experts or back. Routing is assumed to be even, so as many rows arrive as leave. `tile` (for
    rows) and `back` (for their gradients): how many numbers share a scale in 8-bit messages; 0: not sent in 8 bits."""

    @staticmethod
    def forward(ctx, x: Tensor, recorder: Recorder, tile: int, back: int) -> Tensor:
        ctx.recorder, ctx.back = recorder, back
        recorder.exchange("expert", "all_to_all", _sent(x, tile))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.recorder.exchange("expert", "all_to_all", _sent(grad, ctx.back))
        return grad, None, None, None


def _sent(rows: Tensor, tile: int) -> int:
    """Return the bytes of rows in a message; `tile`: how many 8-bit numbers share a scale; 0: rows are not sent in 8 bits."""
    return rows.numel() + len(rows) * SCALE_BYTES * -(-rows.shape[1] // tile) if tile else bytes_of(rows)


class _Shared(torch.autograd.Function):
    """Exchange of rows among ranks that split each expert: a gather of all ranks' rows (`parts` > 1), or a reduce-scatter of
    the results (`parts` < -1)."""

    @staticmethod
    def forward(ctx, rows: Tensor, parts: int, recorder: Recorder) -> Tensor:
        ctx.recorder, ctx.shape = recorder, rows.shape
        with torch._C._DisableTorchDispatch():
            out = rows.new_empty(rows.shape[0] * parts if parts > 0 else rows.shape[0] // -parts, *rows.shape[1:])
        ctx.whole = max(bytes_of(rows), bytes_of(out))
        recorder.exchange("expert_tensor", "all_to_all", ctx.whole)
        recorder.hold(out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.recorder.exchange("expert_tensor", "all_to_all", ctx.whole)
        return grad.new_empty(ctx.shape), None, None


class Border(torch.autograd.Function):
    """Border between two regions of a block, which backward crosses in the other direction."""

    @staticmethod
    def forward(ctx, rows: Tensor, recorder: Recorder, before: Region, after: Region) -> Tensor:
        ctx.recorder, ctx.before = recorder, before
        recorder.region = after
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.recorder.region = ctx.before
        return grad, None, None, None


class EvenShare(LocalBalanceSets):
    """Sets of tokens over which loads are measured, for a rank that dispatches only one of `shares` equal shares of the tokens."""

    def __init__(self, shares: int) -> None:
        self.shares = shares

    def own(self, choices: Tensor) -> Tensor:
        return choices.chunk(self.shares, 1)[0]


class RecordedDispatcher(LocalDispatcher):
    """Dispatcher for experts of several ranks: this rank's experts are traced, and messages are recorded.

    If all tensor ranks have the whole sequence, each rank dispatches a share of the tokens, and the results are gathered.
    """

    def __init__(self, recorder: Recorder, layout: Layout) -> None:
        self.recorder, self.ranks, self.parts = recorder, layout.expert, layout.expert_tensor
        self.shares = 1 if layout.sequence else layout.tensor
        self.tile, self.back = layout.dispatched, layout.returned

    def enter(self, x: Tensor) -> Tensor:
        return x if self.shares == 1 else _take(x, self)

    def leave(self, x: Tensor) -> Tensor:
        return x if self.shares == 1 else _join(x, self)

    def plan(self, counts: Tensor, kept: int | None, even: EvenRouting | None) -> Traffic:
        assert even is not None, "a trace has no router scores: tokens are routed evenly"
        rows = even.batch * even.seq * even.active
        held = even.experts // self.ranks
        each, left = divmod(rows * self.parts, held)
        return Traffic(rows, Sizes([each + (expert < left) for expert in range(held)]))

    def dispatch(self, rows: Tensor, traffic: Traffic) -> Tensor:
        return self._all_to_all(Border.apply(rows, self.recorder, "router", "experts"), there=self.tile)  # pyright: ignore[reportArgumentType]

    def combine(self, rows: Tensor, traffic: Traffic) -> Tensor:
        return Border.apply(self._all_to_all(rows, back=self.back), self.recorder, "experts", "attention")  # pyright: ignore[reportReturnType]

    def run(self, experts: Experts, rows: Tensor, traffic: Traffic) -> Tensor:
        if self.parts == 1:
            return super().run(experts, rows, traffic)
        seen: Tensor = _Shared.apply(rows, self.parts, self.recorder)  # pyright: ignore[reportAssignmentType]
        out = super().run(experts, seen, traffic)
        return _Shared.apply(out, -self.parts, self.recorder)  # pyright: ignore[reportReturnType]

    def _all_to_all(self, rows: Tensor, *, there: int = 0, back: int = 0) -> Tensor:
        return rows if self.ranks == 1 else _Dispatched.apply(rows, self.recorder, there, back)  # pyright: ignore[reportReturnType]


def _share(x: Tensor, away: RecordedDispatcher) -> Tensor:
    return x.chunk(away.shares, 1)[0].contiguous()


def _gathered(x: Tensor, away: RecordedDispatcher) -> Tensor:
    whole = x.new_empty(x.shape[0], away.shares * x.shape[1], *x.shape[2:])
    away.recorder.exchange("tensor", "gather", bytes_of(whole))
    return whole


_take, _join = conjugates(_share, _gathered)


class ByHeads(nn.Module):
    """Attention of Ulysses ranks, like `parallel.context.ContextCore`: a rank exchanges a part of the sequence with all heads
    for the whole sequence with some heads."""

    def __init__(self, core: nn.Module, recorder: Recorder, ranks: int) -> None:
        super().__init__()
        self.core, self.recorder, self.ranks = core, recorder, ranks

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        q, k, v = (_to_heads(x, self.ranks, self.recorder) for x in (q, *heads_for_each(self.ranks, q, k, v)))
        return _to_sequence(self.core(q, k, v, batch), self.ranks, self.recorder)


def _heads_for_sequence(x: Tensor, ranks: int, recorder: Recorder) -> Tensor:
    recorder.exchange("context", "all_to_all", bytes_of(x))
    return x.new_empty(x.shape[0], x.shape[1] * ranks, x.shape[2] // ranks, x.shape[3])


def _sequence_for_heads(x: Tensor, ranks: int, recorder: Recorder) -> Tensor:
    recorder.exchange("context", "all_to_all", bytes_of(x))
    return x.new_empty(x.shape[0], x.shape[1] // ranks, x.shape[2] * ranks, x.shape[3])


_to_heads, _to_sequence = conjugates(_heads_for_sequence, _sequence_for_heads)


def core_note(recorder: Recorder, layout: Layout, window: int | None) -> Note:
    """Return a function that records a fused attention and its context ranks' messages: keys and values that pass around a ring, or all
    gathered keys and values. In backward the gradients of keys and values are sent too; unfused software sums these gradients in fp32,
    like `parallel.context`."""
    ranks = layout.context // layout.ulysses
    wider = 1 if layout.fused else 4 / layout.width

    def note(phase: str, q: Tensor, k: Tensor, v: Tensor) -> None:
        sizes = (q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1] * ranks, q.shape[3], v.shape[3], window)
        recorder.cores.append(Core(recorder.phase, *sizes, again=phase == "F" and recorder.phase == "I"))
        recorder.kernels[recorder.phase] += 1 if phase == "F" else 3
        if ranks == 1:
            return
        block = bytes_of(k) + bytes_of(v)
        if layout.context_method == "ring":
            recorder.exchange("context", "ring", block * (1 if phase == "F" else 1 + wider))
            # a block and the next one; gradients of the own block, of the one at hand, and those that are sent and arrive
            held = block * (min(2, ranks - 1) + wider * min(4, ranks + 1))
        else:
            recorder.exchange("context", "gather", ranks * block)
            if phase == "I":
                recorder.exchange("context", "scatter", ranks * block * wider)
            held = 2 * ranks * block * wider  # gradients of all keys, and as they are sent
        if phase == "I" and layout.summed:
            k.new_empty(int(held + wider * bytes_of(q)), dtype=torch.uint8)  # the gradients of queries are sums too

    return note
