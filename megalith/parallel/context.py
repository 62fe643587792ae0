"""Context parallelism: each rank has a part of each sequence, and the cores of attention exchange keys and values, or heads.

A causal token attends to all tokens before it, so later chunks cost more than earlier ones. The sequence is cut into 2n chunks, and rank i
has the i-th chunk from each end, so that all ranks score equally many pairs (zigzag; Brandon et al. 2023, arXiv:2311.09431, and Llama 3,
arXiv:2407.21783, section 3.3.2).

- **ring**: keys and values are passed from rank to rank; attention to the current part is computed while the next part is in flight (Liu et
  al. 2023, arXiv:2310.01889). In backward, keys and values are passed around again, together with their gradients.
- **gather**: every rank gathers all keys and values, and gathers them again in backward (Llama 3).
- **ulysses**: all-to-all from a part of the sequence with all heads to all of the sequence with some heads, and back (DeepSpeed-Ulysses,
  Jacobs et al. 2023, arXiv:2309.14509). Ulysses can be combined with ring or gather: neighbouring ranks exchange heads, and ranks with
  the same place in each group of neighbours exchange keys and values (Fang and Zhao 2024, arXiv:2405.07719).

For backward, ring and gather save only tensors of a rank's own part of the sequence. Ulysses alone saves tensors of all of the sequence,
but only for the rank's own heads, which takes as much memory as a part of the sequence with all heads. Ring and gather add up partial
sums, log-sum-exps and the gradients of keys and values in fp32, and send these gradients in fp32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from megalith.kernels.attention import Kernel, Running, add_backward, add_forward, kernel_for, work_dtype, zeros_for
from megalith.kernels.mask import MaskRows, Segments, mask_rows
from megalith.models.batch import Batch
from megalith.models.core import CausalCore
from megalith.models.mamba import MambaCore
from megalith.parallel.conjugate import conjugates
from megalith.parallel.groups import Groups, group_of, ranks_in
from megalith.spec.plan import Plan

# --- who has which part of a sequence ---


def parts(seq_len: int, ranks: int) -> list[Segments]:
    """Return the positions that each of `ranks` context ranks has: an early and a late chunk, joined to one range if they are adjacent.

    Raises ValueError if `seq_len` cannot be divided into two equal chunks per rank.
    """
    if seq_len % (2 * ranks) and ranks > 1:
        raise ValueError(
            f"seq_len = {seq_len} tokens cannot be cut into 2 x {ranks} equal chunks for plan.context={ranks}; "
            f"use a seq_len divisible by {2 * ranks}, or fewer context ranks"
        )
    if ranks == 1:
        return [((0, seq_len),)]
    chunk = seq_len // (2 * ranks)
    pairs = [(rank * chunk, seq_len - (rank + 1) * chunk) for rank in range(ranks)]
    return [
        ((early, early + chunk), (late, late + chunk)) if early + chunk < late else ((early, late + chunk),)
        for early, late in pairs
    ]


def take(x: Tensor, dim: int, *, rank: int, ranks: int) -> Tensor:
    """Cut a tensor of whole sequences along `dim`, and return the part of context rank `rank`. Raises ValueError like `parts`."""
    return torch.cat(_cuts(x, dim, rank=rank, ranks=ranks), dim)


def _cuts(x: Tensor, dim: int, *, rank: int, ranks: int) -> list[Tensor]:
    return [x.narrow(dim, first, end - first) for first, end in parts(x.shape[dim], ranks)[rank]]


def together(shares: Sequence[Tensor], dim: int) -> Tensor:
    """Join the parts of all context ranks, given in rank order, to whole sequences: the inverse of `take`."""
    if len(shares) == 1:
        return shares[0]
    halves = [share.chunk(2, dim) for share in shares]
    return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], dim)


# --- the ranks ---


@dataclass(frozen=True)
class Line:
    """A ring of context ranks: their process group, and this rank's place in it."""

    group: dist.ProcessGroup
    rank: int  # as they count themselves
    size: int

    @classmethod
    def of(cls, world: dist.ProcessGroup, ranks: Sequence[int]) -> "Line":
        """Return the ring of these `ranks` (numbered in `world`), in the given order."""
        group = group_of(world, ranks)
        return cls(group, group.rank(), group.size())

    def pass_on(self, block: Tensor) -> "PendingBlock":
        """Begin to send a block to the next rank of the ring, and to receive a block of the same shape from the previous rank."""
        arriving = torch.empty_like(block)
        following, previous = ((self.rank + step) % self.size for step in (1, -1))
        send = dist.P2POp(dist.isend, block, group=self.group, group_peer=following)
        receive = dist.P2POp(dist.irecv, arriving, group=self.group, group_peer=previous)
        return PendingBlock(arriving, block, dist.batch_isend_irecv([send, receive]))


@dataclass(frozen=True)
class PendingBlock:
    """A block on its way to this rank. The block that this rank sends at the same time must not change until `wait` returns."""

    block: Tensor
    sent: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.block


@dataclass(frozen=True)
class ContextGroups:
    """The context ranks of one sequence, in two kinds of groups. The ranks of an `inner` group are neighbours and exchange heads for parts
    of the sequence. An `outer` group has one rank of each inner group; its ranks exchange keys and values."""

    inner: Line
    outer: Line
    method: Literal["ring", "gather"]

    @classmethod
    def build(cls, plan: Plan, groups: Groups) -> "ContextGroups":
        """Make this rank's inner and outer process groups. All ranks call this once, at the same time."""
        assert plan.context % plan.ulysses == 0, (plan.context, plan.ulysses)
        ranks, world = ranks_in(groups.world, groups.context), groups.world
        here, inner = ranks.index(groups.rank), plan.ulysses
        first = here - here % inner
        lines = Line.of(world, ranks[first : first + inner]), Line.of(world, ranks[here % inner :: inner])
        return cls(*lines, plan.context_method)

    @property
    def size(self) -> int:
        return self.inner.size * self.outer.size


def split_context(part: nn.Module, groups: ContextGroups) -> None:
    """Make every attention in `part` work on parts of sequences: replace each `core` that is a CausalCore.

    Raises TypeError for Mamba-2, because its state would have to be passed from rank to rank.
    """
    for module in list(part.modules()):
        core = getattr(module, "core", None)
        if isinstance(core, MambaCore):
            raise TypeError("Mamba-2 needs whole sequences. Use plan.context = 1")
        if isinstance(core, CausalCore):
            module.core = ContextCore(core, groups)


class ContextCore(nn.Module):
    """Context-parallel counterpart of `CausalCore` for this rank's part of each sequence (`take`)."""

    def __init__(self, causal: CausalCore, groups: ContextGroups) -> None:
        super().__init__()
        self.causal = causal
        self.groups = groups

    def forward(
        self,
        q: Float[Tensor, "batch part heads channels"],
        k: Float[Tensor, "batch part kv_heads channels"],
        v: Float[Tensor, "batch part kv_heads v_channels"],
        batch: Batch,
    ) -> Float[Tensor, "batch part heads v_channels"]:
        """Raises ValueError if the heads cannot be divided among the ranks that exchange them."""
        return self._attend(q, k, v, batch)  # pyright: ignore[reportCallIssue]

    @torch.compiler.disable  # documents, and with them who sees whom, differ in every batch
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        inner = self.groups.inner
        if inner.size > 1:
            q, k, v = (_to_heads(x, inner) for x in (q, *heads_for_each(inner.size, q, k, v)))
        out = self.causal(q, k, v, batch) if self.groups.outer.size == 1 else self._exchange_keys(q, k, v, batch)
        return _to_sequence(out, inner) if inner.size > 1 else out

    def _exchange_keys(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        outer, causal = self.groups.outer, self.causal
        seen = _Seen(parts(q.shape[1] * outer.size, outer.size), outer.rank, q.shape[0], batch.segments, causal.window)
        function = {"ring": _Ring, "gather": _Gather}[self.groups.method]
        return function.apply(q, k, v, outer, seen, kernel_for(q, v, causal.softcap), causal.scale_of(q))  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class _Seen:
    """Determines which keys, on each rank, this rank's queries attend to."""

    parts: list[Segments]
    rank: int
    batch: int
    segments: tuple[tuple[int, ...], ...] | None
    window: int | None

    def of(self, rank: int) -> tuple[MaskRows, ...]:
        return self._of(self.parts[rank])

    def of_all(self) -> tuple[MaskRows, ...]:
        return self._of(((0, max(end for runs in self.parts for _, end in runs)),))

    def _of(self, keys: Segments) -> tuple[MaskRows, ...]:
        return mask_rows(self.parts[self.rank], keys, batch=self.batch, segments=self.segments, window=self.window)


# --- keys and values as one message ---


def _pack(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat((k.reshape(-1), v.reshape(-1)))


def _unpack(block: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    of_k, of_v = block.split((k.numel(), v.numel()))
    return of_k.view(k.shape), of_v.view(v.shape)


def _heads_first(*tensors: Tensor) -> Iterator[Tensor]:
    return (x.transpose(1, 2) for x in tensors)


# --- ring ---


def _around(block: Tensor, line: Line) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank's block with its rank: this rank's own block, then the previous rank's, and so on around the ring. While the caller
    uses a block, the next block is in flight."""
    for step in range(line.size):
        arriving = line.pass_on(block) if step < line.size - 1 else None
        yield (line.rank - step) % line.size, block
        if arriving is not None:
            block = arriving.wait()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, line: Line, seen: _Seen, kernel: Kernel, scale: float) -> Tensor:
        (queries,) = _heads_first(q)
        running = Running.start(queries, v.transpose(1, 2))
        for rank, block in _around(_pack(k, v), line):
            keys, values = _heads_first(*_unpack(block, k, v))
            add_forward(running, queries, keys, values, rows=seen.of(rank), kernel=kernel, scale=scale)
        out = running.out.to(q.dtype).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, running.lse)
        ctx.how = line, seen, kernel, scale
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (q, k, v, out, lse), (line, seen, kernel, scale) = ctx.saved_tensors, ctx.how
        queries, out, grad = _heads_first(q, out, grad)
        of_q = zeros_for(queries)
        own = in_transit = None
        for rank, block in _around(_pack(k, v), line):
            keys, values = _heads_first(*_unpack(block, k, v))
            of_block = torch.zeros_like(block, dtype=work_dtype(block.dtype))
            of_keys, of_values = _heads_first(*_unpack(of_block, k, v))
            sums = (of_q, of_keys, of_values)
            add_backward(sums, (grad, queries, keys, values, out, lse), rows=seen.of(rank), kernel=kernel, scale=scale)
            if own is None:  # of this rank's keys: they need not be sent
                own = of_block
                continue
            if in_transit is not None:
                of_block += in_transit.wait()
            in_transit = line.pass_on(of_block)
        assert own is not None and in_transit is not None, line
        own += in_transit.wait()  # has met all other ranks' queries and is home
        of_k, of_v = _unpack(own, k, v)
        return of_q.transpose(1, 2).to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None, None, None, None


# --- gather ---


def _gather(k: Tensor, v: Tensor, line: Line) -> Iterator[Tensor]:
    block = _pack(k, v)
    whole = block.new_empty(line.size * block.numel())
    dist.all_gather_into_tensor(whole, block, group=line.group)
    shares = [_unpack(share, k, v) for share in whole.chunk(line.size)]
    return _heads_first(*(together(each, 1) for each in zip(*shares, strict=True)))


def _scatter(of_keys: Tensor, of_values: Tensor, k: Tensor, v: Tensor, line: Line) -> tuple[Tensor, Tensor]:
    whole = of_keys.new_empty(of_keys.numel() + of_values.numel())
    for rank, share in enumerate(whole.chunk(line.size)):
        for x, part in zip((of_keys, of_values), _unpack(share, k, v), strict=True):
            torch.cat(_cuts(x, 1, rank=rank, ranks=line.size), 1, out=part)
    own = whole.new_empty(whole.numel() // line.size)
    dist.reduce_scatter_tensor(own, whole, group=line.group)
    return _unpack(own, k, v)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, line: Line, seen: _Seen, kernel: Kernel, scale: float) -> Tensor:
        (queries,) = _heads_first(q)
        running = Running.start(queries, v.transpose(1, 2))
        keys, values = _gather(k, v, line)
        add_forward(running, queries, keys, values, rows=seen.of_all(), kernel=kernel, scale=scale)
        out = running.out.to(q.dtype).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, running.lse)  # not the gathered: memory would not fall with more ranks
        ctx.how = line, seen, kernel, scale
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (q, k, v, out, lse), (line, seen, kernel, scale) = ctx.saved_tensors, ctx.how
        queries, out, grad = _heads_first(q, out, grad)
        keys, values = _gather(k, v, line)
        sums = (zeros_for(queries), zeros_for(keys), zeros_for(values))
        add_backward(sums, (grad, queries, keys, values, out, lse), rows=seen.of_all(), kernel=kernel, scale=scale)
        del keys, values  # the largest things here
        of_q, of_keys, of_values = _heads_first(*sums)
        of_k, of_v = _scatter(of_keys, of_values, k, v, line)
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None, None, None, None


# --- ulysses ---


def heads_for_each(ranks: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v, with repeated heads if `ranks` does not divide their number. Raises ValueError if `ranks` does not divide the heads
    of q."""
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % ranks:
        raise ValueError(
            f"plan.ulysses={ranks} does not divide the {heads} heads of a tensor rank; use a divisor of {heads}, "
            f"and ring or gather for the rest of plan.context"
        )
    copies = ranks // gcd(ranks, kv_heads)
    return (k, v) if copies == 1 else (k.repeat_interleave(copies, dim=2), v.repeat_interleave(copies, dim=2))


def _heads_for_sequence(x: Tensor, line: Line) -> Tensor:
    outgoing = x.unflatten(2, (line.size, -1)).movedim(2, 0).contiguous()
    arrived = torch.empty_like(outgoing)
    dist.all_to_all_single(arrived, outgoing, group=line.group)
    return together(arrived.unbind(), 1)


def _sequence_for_heads(x: Tensor, line: Line) -> Tensor:
    outgoing = torch.stack([take(x, 1, rank=rank, ranks=line.size) for rank in range(line.size)])
    arrived = torch.empty_like(outgoing)
    dist.all_to_all_single(arrived, outgoing, group=line.group)
    return arrived.movedim(0, 2).flatten(2, 3)


_to_heads, _to_sequence = conjugates(_heads_for_sequence, _sequence_for_heads)
