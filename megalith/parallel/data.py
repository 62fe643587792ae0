"""Data parallelism: ZeRO 0 to 3 (Rajbhandari et al. 2019, arXiv:1910.02054) as one mechanism; the stages differ in when they gather and
reduce.

A parameter has two forms. The **master** (sharded) form is this rank's share of the master weights, a DTensor that knows its global shape;
the optimizer, checkpoints and norms use this form. The **compute** (unsharded) form is a plain tensor in the module, in the run's
precision, allocated only while it is needed. A bucket handles together all parameters of a part that lie on one mesh: one all-gather of the
weights before use, and one reduce-scatter of the gradients afterwards. torch's FSDP2 is not used, because here the pipeline program decides
when each exchange happens. Exchanges also happen between the two halves of a split backward, between the two copies of a stage in a
bidirectional pipeline, and on the separate mesh of the experts.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalith.kernels import halves
from megalith.kernels.multiply import Multiply
from megalith.kernels.numbers import Dtypes
from megalith.kernels.quantise import Scaling
from megalith.parallel.groups import wait_for
from megalith.parallel.parcel import Item, Parcel, chunks_to_rows, rows_to_chunks
from megalith.parallel.place import Place
from megalith.parallel.reduction import Reduction
from megalith.parallel.source import Put, Source
from megalith.spec.numbers import whole_tiles


def local(tensor: Tensor) -> Tensor:
    """Return this rank's share of a DTensor as a plain tensor with the same memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    with (
        torch.no_grad()
    ):  # before detaching, not after: on a mesh of four axes, torch takes a second to think of all layouts a DTensor might have
        return tensor.to_local()


class Weight:
    """One parameter in its master and compute forms. `total`: the sum of gradients before the reduction, if gradients are summed in another
    dtype than they are computed in."""

    def __init__(
        self, compute: nn.Parameter, place: Place, dtypes: Dtypes, *, partial: bool = False, recipe: Multiply | None = None
    ) -> None:
        """`partial`: the gradient on each tensor rank is only one term of a sum over these ranks. `recipe`: the recipe of the products with
        this weight; None: no recipe."""
        self.recipe = recipe
        self.compute, self.dim, self.mesh, self.partial, self.sums = compute, place.dim, place.mesh, partial, dtypes.reduce
        shards, index = place.mesh.size(1), place.mesh.get_local_rank(1)
        whole = compute.detach().movedim(self.dim, 0)
        self.chunk = -(-whole.shape[0] // shards)  # torch.chunk: equal chunks, the last ones shorter or empty
        start = min(index * self.chunk, whole.shape[0])
        share = whole[start : start + self.chunk].movedim(0, self.dim)
        self.aliased = shards == 1 and share.dtype == dtypes.compute == dtypes.master
        if not self.aliased:
            share = share.to(dtypes.master, copy=True, memory_format=torch.contiguous_format)
        shape = place.shape(compute.shape)
        stride = torch.empty(shape, device="meta").stride()
        self._wrap = lambda t: DTensor.from_local(
            t, place.mesh, place.placements(), run_check=False, shape=torch.Size(shape), stride=stride
        )
        master: Any = self._wrap(share).requires_grad_()
        if dtypes.reduce != dtypes.master:
            master.grad_dtype = dtypes.reduce
        master._is_param = (
            True  # nn.Parameter's mark; its constructor detaches, which is slow on a mesh of four axes: see `local`
        )
        self.master: nn.Parameter = master
        self.shared = False  # other modules of this rank compute with it too
        self.total: Tensor | None = None
        self.narrow = dtypes.compute != dtypes.master
        """True if products use weights of a lower precision than the master weights."""
        self._moved: Tensor | None = None  # the share in the compute format, once the master weights are elsewhere
        self._aside: Callable[[], Tensor] | None = None  # brings the master weights back, which wait elsewhere
        self.source: Source | None = None
        """The master weights from which each gather computes the share; None if the share is kept between gathers."""
        self.cut = False
        """True if the weight is read in tiles (`parallel.tables`), and never gathered."""
        if dtypes.compute != compute.dtype:
            compute.data = compute.data.to(dtypes.compute)
        self.bytes = compute.numel() * compute.element_size()
        self.row = compute.shape[: self.dim] + compute.shape[self.dim + 1 :]  # the shape of one slice along dim

    @property
    def numbers(self) -> int:
        """The number of elements of a share, padded to the size of the largest share."""
        return self.chunk * prod(self.row)

    @property
    def resident(self) -> bool:
        """True if the weight is never gathered, because the compute tensor is always whole, or never."""
        return self.aliased or self.cut or (self._moved is not None and self.mesh.size(1) == 1)

    @property
    def gathered_as(self) -> Scaling | None:
        """Return the low-precision format in which shares are gathered now; None if they are gathered in their own format, for instance
        because a tile would span two shares."""
        scaling = None if self.recipe is None else self.recipe.gathered_as
        if scaling is None:
            return None
        tile = scaling.block[self.dim - self.compute.dim()]
        return scaling if whole_tiles(self.compute.shape[self.dim], self.mesh.size(1), tile) else None

    @property
    def rows(self) -> int:
        """The size of this rank's share along the sharded dimension."""
        return local(self.master).shape[self.dim]

    def write(self, into: Tensor) -> None:
        """Copy into the tensor `into` the share that the next gather sends."""
        if self.source is None:
            into.copy_(local(self.master) if self._moved is None else self._moved)
        else:
            self.source.read(into)

    def share(self) -> Tensor:
        """Return the share that the next gather sends, in the compute format, with the sharded dimension first."""
        made = self.compute.new_empty(local(self.master).shape)
        self.write(made)
        return made.movedim(self.dim, 0)

    def put_aside(self, put: Put) -> None:
        """Move the master weights off the device with `put`, until `move_out` or `bring_back` is called."""
        share = local(self.master)
        self._aside = put(share)
        share.untyped_storage().resize_(0)

    def bring_back(self) -> None:
        """Move the master weights back to the device, if `put_aside` moved them away."""
        if self._aside is not None:
            share = local(self.master)
            share.untyped_storage().resize_(share.nbytes)
            share.copy_(self._aside())
            self._aside = None

    def move_out(self, source: Source | None = None) -> Tensor:
        """Return the master weights, in the share's shape, and drop them here. Afterwards, the compute tensor is gathered from a share in
        its own format, or stays whole if there is only one shard. With a `source`, each gather computes the share from the source."""
        master = local(self.master).clone(memory_format=torch.contiguous_format) if self._aside is None else self._aside()
        self._aside, self.source = None, source
        if source is None:
            self._compute_from(master)
        else:
            local(self.master).untyped_storage().resize_(0)
        return master

    def split(self, bits: int) -> Tensor:
        """Split the master weights into two halves (`kernels.halves`): keep the upper half as the compute share `moved`, and return the
        lower half of `bits` bits, in the share's shape, to the caller, who must keep it."""
        upper, lower = halves.split(local(self.master), bits)
        self._compute_from(upper)
        return lower

    def _compute_from(self, share: Tensor) -> None:
        if self.mesh.size(1) == 1:
            self.compute.untyped_storage().resize_(self.bytes)
            self._moved = self.compute.detach()
            self._moved.copy_(share)
        else:
            self._moved = share.to(self.compute.dtype)
        local(self.master).untyped_storage().resize_(0)

    def take_over(self, first: int, masters: Tensor) -> None:
        """Overwrite the compute share, from element `first` on, with these master weights."""
        if self.source is not None:  # the next gather reads them
            return
        assert self._moved is not None
        numbers = masters.reshape(-1)
        self._moved.view(-1)[first : first + len(numbers)].copy_(numbers)

    @property
    def moved(self) -> Tensor | None:
        """The share in the compute format, if it is kept: after `move_out` without a source, or after `split`."""
        return self._moved

    def add(self, share: Tensor) -> None:
        """Add a reduced gradient [rows, *row] to the master's gradient."""
        # laid out like the weight, for a fused optimizer walks both alike
        share = share.movedim(0, self.dim).to(self.sums).contiguous()
        if self.master.grad is None:
            self.master.grad = self._wrap(share)
        else:
            local(self.master.grad).add_(share)

    def add_rows(self, rows: range, gradient: Tensor) -> None:
        """Add a reduced gradient of these rows of the share to the master's gradient."""
        if self.master.grad is None:
            self.master.grad = self._wrap(torch.full_like(local(self.master), -0.0, dtype=self.sums))  # -0 + x is x, bit for bit
        local(self.master.grad)[rows.start : rows.stop].add_(gradient)

    def accumulate_gradient(self) -> None:
        """After a backward, add its gradient to `total`, if gradients are summed in another dtype."""
        if self.compute.grad is None or self.compute.dtype == self.sums:
            return
        if self.total is None:
            self.total = self.compute.grad.to(self.sums)
        else:
            self.total.add_(self.compute.grad)
        self.compute.grad = None

    def pop_gradient(self) -> Tensor | None:
        """Return the gradient before the reduction, with the sharded dimension first, and drop it here."""
        self.accumulate_gradient()
        grad, self.total = (self.compute.grad if self.total is None else self.total), None
        self.compute.grad = None
        return None if grad is None else grad.movedim(self.dim, 0)


Probe = Callable[[Sequence[Tensor]], bool]
"""Inspects this rank's gradients of a bucket, one by one or concatenated, before they are reduced. If the function returns False, the
gradients are dropped."""


Observe = Callable[[Sequence[Tensor | None]], None]
"""Observes the gradients of a bucket's weights, in order, just before they are reduced."""


@dataclass
class PendingGather:
    """A gather of weights in progress. `mine`: this rank's message until it is sent; None if there is only one shard. `everyone`: the
    messages of all ranks."""

    mine: Tensor | None
    parcel: Parcel | None = None
    reading: Future[None] | None = None
    everyone: Tensor | None = None
    sending: Any = None


class Bucket:
    """The parameters of a part that lie on one mesh; they are gathered and reduced together."""

    def __init__(self, weights: Sequence[Weight], *, often: bool = False, late: bool = False) -> None:
        """`often`: the weights are gathered several times a step, so their shares in 8 bits are kept until the step's end. `late`: ranks
        read their shares from a disk, which may take long, so all ranks start each all-gather only when the program needs the weights."""
        self.weights, self.often, self.late, mesh = tuple(weights), often, late, weights[0].mesh
        self.replicate_group, self.shard_group = mesh.get_group(0), mesh.get_group(1)
        self.size = self.shard_group.size()
        ends = list(accumulate(weight.numbers for weight in weights))
        self.slices = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        self.numbers = ends[-1]
        self.whole = True
        self._arriving: PendingGather | None = None
        self._packed: tuple[Parcel, Tensor] | None = None  # this rank's message, kept for the next gather
        self.probe: Probe | None = None
        self.observe: Observe | None = None
        self.ready: Callable[[], None] | None = None
        """Function that waits until this rank's shares are updated."""
        self.done: Callable[[Bucket], None] | None = None
        """Function that is called when the reduction of the parameters' gradients is complete."""
        self.free()  # the weights to compute with are made from those kept, even if these are loaded later

    # --- weights ---

    @property
    def resident(self) -> bool:
        """True if nothing needs to be gathered."""
        return all(weight.resident for weight in self.weights)

    def start(self) -> None:
        """Begin to gather, unless the weights are whole or a gather is in progress."""
        if self.whole or self._arriving or self.resident:
            return
        self.await_update()
        if self._packed is not None:
            parcel, message = self._packed
            self._arriving = PendingGather(message, parcel)
        else:
            self._arriving = self._read()
        if not self.late:
            self._send(self._arriving)

    def await_update(self) -> None:
        """Wait until this rank's shares are updated."""
        if self.ready is not None:
            self.ready()

    def _read(self) -> PendingGather:
        """Begin to convert this rank's shares to the format in which they are gathered. With only one shard, `_read` writes the whole
        weights."""
        formats = [weight.gathered_as if self.size > 1 else None for weight in self.weights]
        arrival = PendingGather(None)
        if self.size == 1:
            self._make_room()
            fill = self._fill_whole
        elif any(formats):
            items = (Item(w.compute, w.dim, w.chunk, scaling) for w, scaling in zip(self.weights, formats, strict=True))
            arrival.parcel = parcel = Parcel(items)
            arrival.mine = message = parcel.message()
            fill = partial(self._pack, parcel, message)
            if self.often:
                self._packed = parcel, message
        else:
            arrival.mine = self.weights[0].compute.new_empty(self.numbers)
            fill = partial(self._fill, arrival.mine)
        reader = next((weight.source.reader for weight in self.weights if weight.source is not None), None)
        if reader is None:
            fill()
        else:
            arrival.reading = reader.submit(fill)
        return arrival

    def _make_room(self) -> None:
        for weight in self.weights:
            if not weight.resident:
                weight.compute.untyped_storage().resize_(weight.bytes)

    @torch.no_grad()
    def _fill_whole(self) -> None:
        for weight in self.weights:
            if not weight.resident:
                weight.write(weight.compute.data)  # .data: saved views stay valid

    @torch.no_grad()
    def _fill(self, mine: Tensor) -> None:
        for weight, where in zip(self.weights, self.slices, strict=True):
            if not weight.resident:
                table = mine[where].view(weight.chunk, *weight.row)
                weight.write(table[: weight.rows].movedim(0, weight.dim))
                table[weight.rows :].zero_()

    @torch.no_grad()
    def _pack(self, parcel: Parcel, message: Tensor) -> None:
        parcel.pack(message, (weight.share() for weight in self.weights))

    def _send(self, arrival: PendingGather) -> None:
        mine, arrival.mine = arrival.mine, None  # from now on the collective's alone
        if mine is not None:
            arrival.everyone = mine.new_empty(self.size * len(mine))
            arrival.sending = dist.all_gather_into_tensor(arrival.everyone, mine, group=self.shard_group, async_op=True)

    def forget(self) -> None:
        """Drop the kept shares in 8 bits, because the weights are about to change."""
        self._packed = None

    def gather(self) -> None:
        """Make the weights whole."""
        self.await_update()  # also of resident weights
        self.start()
        arrival = self._arriving
        if arrival is None:
            return
        if arrival.reading is not None:
            arrival.reading.result()
        if self.late:
            self._send(arrival)
        if arrival.sending is not None:
            wait_for(arrival.sending)
        if arrival.everyone is not None:
            self._make_room()
            self._unfold(arrival.everyone.view(self.size, -1), arrival.parcel)
        self.whole, self._arriving = True, None

    def _unfold(self, table: Tensor, parcel: Parcel | None) -> None:
        if parcel is not None:
            parcel.unpack(table)
            return
        for weight, where in zip(self.weights, self.slices, strict=True):
            if not weight.resident:
                chunks_to_rows(
                    weight.compute.data.movedim(weight.dim, 0), table[:, where], weight.chunk
                )  # .data: saved views stay valid

    def free(self) -> None:
        """Free the unsharded weights, after waiting for a gather that is in progress."""
        arrival, self._arriving = self._arriving, None
        if arrival is not None:
            if arrival.reading is not None:
                arrival.reading.result()
            if arrival.sending is not None:
                wait_for(arrival.sending)
        if self.resident or not (self.whole or arrival):
            return
        for weight in self.weights:
            if not weight.resident:
                weight.compute.untyped_storage().resize_(0)
        self.whole = False

    # --- gradients ---

    def reduce(self) -> Reduction | None:
        """Start the reduction of the gradients over all ranks that hold these weights; it gives each rank the sum for its share."""
        grads = [weight.pop_gradient() for weight in self.weights]
        there = [grad for grad in grads if grad is not None]
        if not there:
            return None
        if self.size == 1 and self.replicate_group.size() == 1:
            if self.take_in(there, grads):
                for weight, grad in zip(self.weights, grads, strict=True):
                    if grad is not None:
                        weight.add(grad)
                self._hand_on()
            return None
        flat = self._together(grads)  # looked at while it is in the cache
        return Reduction(flat, self.shard_group, self.replicate_group, self.finish) if self.take_in([flat], grads) else None

    def take_in(self, looked_at: Sequence[Tensor], grads: Sequence[Tensor | None]) -> bool:
        """Pass gradients to `probe` and `observe`; return False if they must be dropped."""
        if self.probe is not None and not self.probe(looked_at):
            return False
        if self.observe is not None:
            self.observe(grads)
        return True

    def _together(self, grads: Sequence[Tensor | None]) -> Tensor:
        first = self.weights[0]
        flat = torch.empty(self.size, self.numbers, dtype=first.sums, device=first.compute.device)
        for weight, where, grad in zip(self.weights, self.slices, grads, strict=True):
            if grad is None:
                flat[:, where].zero_()
            else:
                rows_to_chunks(flat[:, where], grad, weight.chunk)
        return flat

    def finish(self, mine: Tensor) -> None:
        """Add the reduced sums `mine` [numbers] to the gradients of this rank's shares."""
        for weight, where in zip(self.weights, self.slices, strict=True):
            weight.add(mine[where].view(weight.chunk, *weight.row)[: weight.rows])
        self._hand_on()

    def _hand_on(self) -> None:
        if self.done is not None:
            self.done(self)
