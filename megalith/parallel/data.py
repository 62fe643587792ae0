"""Data parallelism: ZeRO 0 to 3 (Rajbhandari et al. 2019, arXiv:1910.02054) as one mechanism with different moments of gather and reduce.

A parameter has two faces. What is **kept** is this rank's share of the master weights, a DTensor that knows its name's global shape: the
optimizer, checkpoints and norms work on it. What **computes** is a plain tensor in the module, whole along the shards, in the run's
precision, whose memory is there only while it is needed. A bucket moves all parameters of a part between the two at once: one all-gather
before use, one reduce-scatter of the gradients after. Written here, rather than taken from FSDP2, because a program says when each
happens, also between the two halves of a split backward, between the two copies of a stage in a bidirectional pipeline, and for experts on
a mesh of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from megalith.kernels import halves
from megalith.kernels.multiply import Multiply
from megalith.kernels.numbers import Dtypes
from megalith.kernels.quantise import Scaling
from megalith.parallel.groups import wait_for
from megalith.parallel.parcel import Item, Parcel
from megalith.spec.numbers import whole_tiles


def local(tensor: Tensor) -> Tensor:
    """This rank's share as a plain tensor that shares its memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    with (
        torch.no_grad()
    ):  # before detaching, not after: on a mesh of four axes, torch takes a second to think of all layouts a DTensor might have
        return tensor.to_local()


@dataclass(frozen=True)
class Place:
    """Location of a parameter's shares: mesh axes (copies, shards, then the axes that split it for computing), and how these axes
    split it."""

    mesh: DeviceMesh
    split: tuple[Placement, ...]
    dim: int = 0  # along which the shards cut it

    def placements(self) -> tuple[Placement, ...]:
        """Placements of the sharded (master) DTensor. The shard axis splits what the axes to its right leave: along the same dimension that
        is a strided shard."""
        parts = [self.mesh.size(2 + axis) for axis, p in enumerate(self.split) if isinstance(p, Shard) and p.dim == self.dim]
        factor = prod(parts)
        shard = _StridedShard(self.dim, split_factor=factor) if factor > 1 else Shard(self.dim)
        return (Replicate(), shard, *self.split)

    def shape(self, computes: Sequence[int]) -> tuple[int, ...]:
        """The whole parameter's, from that of the tensor that computes."""
        sizes = list(computes)
        for axis, placement in enumerate(self.split):
            if isinstance(placement, Shard):
                sizes[placement.dim] *= self.mesh.size(2 + axis)
        return tuple(sizes)


class Weight:
    """One parameter's two faces. `total`: sums of gradients not yet reduced, where these are computed in another dtype than they are
    added up in."""

    def __init__(
        self, computes: nn.Parameter, place: Place, dtypes: Dtypes, *, partial: bool = False, recipe: Multiply | None = None
    ) -> None:
        """`partial`: a tensor rank's gradient is only its part of the sum. `recipe`: that of the products with it, if there is one."""
        self.recipe = recipe
        self.computes, self.dim, self.mesh, self.partial, self.sums = computes, place.dim, place.mesh, partial, dtypes.reduce
        shards, index = place.mesh.size(1), place.mesh.get_local_rank(1)
        whole = computes.detach().movedim(self.dim, 0)
        self.chunk = -(-whole.shape[0] // shards)  # torch.chunk: equal chunks, the last ones shorter or empty
        start = min(index * self.chunk, whole.shape[0])
        share = whole[start : start + self.chunk].movedim(0, self.dim)
        self.aliased = shards == 1 and share.dtype == dtypes.compute == dtypes.master
        if not self.aliased:
            share = share.to(dtypes.master, copy=True, memory_format=torch.contiguous_format)
        shape = place.shape(computes.shape)
        stride = torch.empty(shape, device="meta").stride()
        self._wrap = lambda t: DTensor.from_local(
            t, place.mesh, place.placements(), run_check=False, shape=torch.Size(shape), stride=stride
        )
        kept: Any = self._wrap(share).requires_grad_()
        if dtypes.reduce != dtypes.master:
            kept.grad_dtype = dtypes.reduce
        kept._is_param = True  # nn.Parameter's mark; its constructor detaches, which is slow on a mesh of four axes: see `local`
        self.kept: nn.Parameter = kept
        self.shared = False  # other modules of this rank compute with it too
        self.total: Tensor | None = None
        self.narrow = dtypes.compute != dtypes.master
        """True if products compute with other numbers than the master weights."""
        self._moved: Tensor | None = None  # the share in the format that computes, once the master weights are elsewhere
        if dtypes.compute != computes.dtype:
            computes.data = computes.data.to(dtypes.compute)
        self.bytes = computes.numel() * computes.element_size()
        self.row = computes.shape[: self.dim] + computes.shape[self.dim + 1 :]  # the shape of one slice along dim

    @property
    def numbers(self) -> int:
        """Elements of a share, padded to a whole chunk."""
        return self.chunk * prod(self.row)

    @property
    def resident(self) -> bool:
        """True if the weights to compute with are always whole, so that nothing is gathered."""
        return self.aliased or (self._moved is not None and self.mesh.size(1) == 1)

    @property
    def gathered_as(self) -> Scaling | None:
        """Return the format in which shares are gathered now, if no tile lies across two of them; None: the shares' own
        format."""
        scaling = None if self.recipe is None else self.recipe.gathered_as
        if scaling is None:
            return None
        tile = scaling.block[self.dim - self.computes.dim()]
        return scaling if whole_tiles(self.computes.shape[self.dim], self.mesh.size(1), tile) else None

    def share(self) -> Tensor:
        """The share that is gathered, its cut dimension first."""
        return (local(self.kept) if self._moved is None else self._moved).movedim(self.dim, 0)

    def move_out(self) -> Tensor:
        """Hand over the master weights, in the share's shape; the caller keeps them from now on. The weights to compute with are
        gathered from shares in their own format, or stay whole if there is one shard."""
        master = local(self.kept).clone(memory_format=torch.contiguous_format)
        self._compute_from(master)
        return master

    def split(self, bits: int) -> Tensor:
        """Keep the master weights as the share that computes, and return the lower half of `bits` bits, of the share's shape
        (`kernels.halves`). It is the caller's from now on, and `moved` the upper half."""
        upper, lower = halves.split(local(self.kept), bits)
        self._compute_from(upper)
        return lower

    def _compute_from(self, share: Tensor) -> None:
        """Gather what computes from this share, in its own format, and drop the master weights."""
        if self.mesh.size(1) == 1:
            self.computes.untyped_storage().resize_(self.bytes)
            self._moved = self.computes.detach()
            self._moved.copy_(share)
        else:
            self._moved = share.to(self.computes.dtype)
        local(self.kept).untyped_storage().resize_(0)

    def take_over(self, first: int, masters: Tensor) -> None:
        """Compute with these master weights from the share's number `first` on."""
        assert self._moved is not None
        numbers = masters.reshape(-1)
        self._moved.view(-1)[first : first + len(numbers)].copy_(numbers)

    @property
    def moved(self) -> Tensor | None:
        """The share in the format that computes, if the master weights are elsewhere, or this is their upper half."""
        return self._moved

    def add(self, share: Tensor) -> None:
        """Add a reduced gradient [rows, *row] to the kept one."""
        # laid out like the weight, for a fused optimizer walks both alike
        share = share.movedim(0, self.dim).to(self.sums).contiguous()
        if self.kept.grad is None:
            self.kept.grad = self._wrap(share)
        else:
            local(self.kept.grad).add_(share)

    def collect(self) -> None:
        """After a backward: add gradients up in the dtype of sums, if they are computed in another."""
        if self.computes.grad is None or self.computes.dtype == self.sums:
            return
        if self.total is None:
            self.total = self.computes.grad.to(self.sums)
        else:
            self.total.add_(self.computes.grad)
        self.computes.grad = None

    def take(self) -> Tensor | None:
        """The gradient not yet reduced, its cut dimension first; it is dropped here."""
        self.collect()
        grad, self.total = (self.computes.grad if self.total is None else self.total), None
        self.computes.grad = None
        return None if grad is None else grad.movedim(self.dim, 0)


def _put(flat: Tensor, rows: Tensor, chunk: int) -> None:
    """flat [ranks, chunk * ...] <- rows [up to ranks * chunk, ...], dealt in chunks; places without a row become 0."""
    table = flat.view(flat.shape[0], chunk, *rows.shape[1:])
    full, rest = divmod(rows.shape[0], chunk)
    table[:full].copy_(rows[: full * chunk].unflatten(0, (full, chunk)))
    if full < table.shape[0]:
        table[full, :rest].copy_(rows[full * chunk :])
        table[full, rest:].zero_()
        table[full + 1 :].zero_()


def _get(rows: Tensor, flat: Tensor, chunk: int) -> None:
    """rows <- flat: the inverse of `_put`."""
    table = flat.view(flat.shape[0], chunk, *rows.shape[1:])
    full, rest = divmod(rows.shape[0], chunk)
    rows[: full * chunk].unflatten(0, (full, chunk)).copy_(table[:full])
    if rest:
        rows[full * chunk :].copy_(table[full, :rest])


Probe = Callable[[Sequence[Tensor]], bool]
"""Inspects a bucket's gradients of this rank before they are reduced, one by one or concatenated; False drops them."""


Observe = Callable[[Sequence[Tensor | None]], None]
"""Looks at the gradients of a bucket's weights that are about to be reduced, in their order."""


class Bucket:
    """The parameters of a part that lie on one mesh; they are gathered and reduced together."""

    def __init__(self, weights: Sequence[Weight], *, often: bool = False) -> None:
        """`often`: they are gathered several times a step, so what is rounded for it is kept until the step's end."""
        self.weights, self.often, mesh = tuple(weights), often, weights[0].mesh
        self.copies, self.shards = mesh.get_group(0), mesh.get_group(1)
        self.size = self.shards.size()
        ends = list(accumulate(weight.numbers for weight in weights))
        self.slices = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        self.numbers = ends[-1]
        self.whole = True
        self._arriving: tuple[Any, Tensor, Parcel | None] | None = None
        self._packed: tuple[Parcel, Tensor] | None = None  # this rank's message, kept for the next gather
        self.probe: Probe | None = None
        self.observe: Observe | None = None
        self.done: Callable[[Bucket], None] | None = None
        """Called when the reduced gradients are on the parameters."""
        self.free()  # the weights to compute with are made from those kept, even if these are loaded later

    # --- weights ---

    @property
    def resident(self) -> bool:
        """True if nothing is to be gathered."""
        return all(weight.resident for weight in self.weights)

    def start(self) -> None:
        """Begin to gather, if the weights are not whole and not on their way."""
        if self.whole or self._arriving or self.resident:
            return
        parcel, mine = self._message()
        if self.size == 1:
            self._arriving = None, mine, None
            return
        everyone = mine.new_empty(self.size * len(mine))
        self._arriving = dist.all_gather_into_tensor(everyone, mine, group=self.shards, async_op=True), everyone, parcel

    def _message(self) -> tuple[Parcel | None, Tensor]:
        """This rank's shares as they are gathered, and their places where some travel in 8 bits."""
        if self._packed is not None:
            return self._packed
        formats = [weight.gathered_as if self.size > 1 else None for weight in self.weights]
        if any(formats):
            items = (Item(w.computes, w.dim, w.chunk, scaling) for w, scaling in zip(self.weights, formats, strict=True))
            parcel = Parcel(items)
            message = parcel.pack([weight.share() for weight in self.weights])
            if self.often:
                self._packed = parcel, message
            return parcel, message
        mine = torch.empty(self.numbers, dtype=self.weights[0].computes.dtype, device=self.weights[0].computes.device)
        for weight, where in zip(self.weights, self.slices, strict=True):
            if not weight.resident:
                _put(mine[where][None], weight.share(), weight.chunk)
        return None, mine

    def forget(self) -> None:
        """Drop what was rounded: the weights are about to change."""
        self._packed = None

    def gather(self) -> None:
        """Make the weights whole."""
        self.start()
        if self._arriving is None:
            return
        work, flat, parcel = self._arriving
        if work is not None:
            wait_for(work)
        table = flat.view(self.size, -1)
        for weight in self.weights:
            if not weight.resident:
                weight.computes.untyped_storage().resize_(weight.bytes)
        if parcel is not None:
            parcel.unpack(table)
        for weight, where in zip(self.weights, self.slices, strict=True):
            if parcel is None and not weight.resident:
                _get(weight.computes.data.movedim(weight.dim, 0), table[:, where], weight.chunk)  # .data: saved views stay valid
        self.whole, self._arriving = True, None

    def free(self) -> None:
        """Free the unsharded weights, and those being gathered."""
        if self._arriving is not None:
            work, *_ = self._arriving
            if work is not None:
                wait_for(work)
            self._arriving = None
        if self.resident or not self.whole:
            return
        for weight in self.weights:
            if not weight.resident:
                weight.computes.untyped_storage().resize_(0)
        self.whole = False

    # --- gradients ---

    def reduce(self) -> "Reduction | None":
        """Start the reduction of the gradients over all ranks that hold these weights; once finished, each rank has the sum for
        its share."""
        grads = [weight.take() for weight in self.weights]
        there = [grad for grad in grads if grad is not None]
        if not there:
            return None
        if self.size == 1 and self.copies.size() == 1:
            if self._take_in(there, grads):
                for weight, grad in zip(self.weights, grads, strict=True):
                    if grad is not None:
                        weight.add(grad)
                self._hand_on()
            return None
        flat = self._together(grads)  # looked at while it is in the cache
        return Reduction(self, flat) if self._take_in([flat], grads) else None

    def _take_in(self, looked_at: Sequence[Tensor], grads: Sequence[Tensor | None]) -> bool:
        if self.probe is not None and not self.probe(looked_at):
            return False
        if self.observe is not None:
            self.observe(grads)
        return True

    def _together(self, grads: Sequence[Tensor | None]) -> Tensor:
        """All gradients, in the rows of the ranks that get them."""
        first = self.weights[0]
        flat = torch.empty(self.size, self.numbers, dtype=first.sums, device=first.computes.device)
        for weight, where, grad in zip(self.weights, self.slices, grads, strict=True):
            if grad is None:
                flat[:, where].zero_()
            else:
                _put(flat[:, where], grad, weight.chunk)
        return flat

    def finish(self, mine: Tensor) -> None:
        """Hand out the sums: mine [numbers], this rank's shares."""
        for weight, where in zip(self.weights, self.slices, strict=True):
            weight.add(mine[where].view(weight.chunk, *weight.row)[: weight.share().shape[0]])
        self._hand_on()

    def _hand_on(self) -> None:
        if self.done is not None:
            self.done(self)


class Reduction:
    """Gradients of a bucket under way: a reduce-scatter over the shards, then an all-reduce over the copies."""

    def __init__(self, bucket: Bucket, flat: Tensor) -> None:
        self.bucket = bucket
        self.flat: Tensor | None = flat  # what the first half sums, which must live until then
        self.mine = flat[0] if bucket.size == 1 else flat.new_empty(bucket.numbers)
        self.work: Any = None
        if bucket.size > 1:
            self.work = dist.reduce_scatter_tensor(self.mine, flat.flatten(), group=bucket.shards, async_op=True)
        else:
            self.second()

    def second(self) -> None:
        """Wait for the first half, begin the second."""
        if self.work is not None:
            wait_for(self.work)
        self.work = self.flat = None
        copies = self.bucket.copies
        self.work = dist.all_reduce(self.mine, group=copies, async_op=True) if copies.size() > 1 else None

    def finish(self) -> None:
        """Wait for the sums and hand them out."""
        if self.work is not None:
            wait_for(self.work)
        self.bucket.finish(self.mine)


class Reducer:
    """A rank's reductions in progress: at most one in each half, so that their memory does not grow with their number."""

    def __init__(self) -> None:
        self.first: Reduction | None = None
        self.last: Reduction | None = None

    def add(self, reduction: Reduction | None) -> None:
        """Add a reduction. The previous one starts its second half, and the one before that is finished."""
        if reduction is None:
            return
        self._advance()
        self.first = reduction

    def _advance(self) -> None:
        if self.first is None:
            return
        if self.first.bucket.size > 1:
            self.first.second()
        if self.last is not None:
            self.last.finish()
        self.first, self.last = None, self.first

    def finish(self) -> None:
        """Wait for all."""
        self._advance()
        if self.last is not None:
            self.last.finish()
        self.last = None
