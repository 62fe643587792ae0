"""The tensors that a rank keeps for its parameters between steps, by slot and parameter. `spec.state` has the table of slots."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from megalith.checkpoint.shares import OffDeviceShare, StreamedShare
from megalith.kernels.numbers import DTYPE
from megalith.parallel.data import Weight, local
from megalith.spec.numbers import NUMBERS
from megalith.spec.state import CATEGORIES, GRADIENT, LOWER, MASTER, UPPER, Category, Slot, bytes_each
from megalith.train.masters import JoinedMasters
from megalith.train.offload.behind import Behind
from megalith.train.offload.home import Disk, Host
from megalith.train.optimizers.rule import Part
from megalith.train.stability.history import History
from megalith.train.stability.loss_scale import Scale

SCALE = "loss_scale"
"""The key of the loss scale and its counters: a tensor, fp32 [4], with the fields of `Scale`, the same on every rank."""
USUAL = "usual_norms"
"""The key of the usual gradient norms of all parameters of the model: an fp32 tensor, the same on every rank
(`stability.adaptive_clip`)."""


class State:
    """This rank's shares of the training state. Keys have the form `SLOT.PARAMETER`, as in checkpoints and copies."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        slots: Mapping[str, Sequence[Slot]],
        scale: Scale | None = None,
        home: Host | Disk | None = None,
        usual: Tensor | None = None,
        halved: Mapping[str, Weight] | None = None,
        gradient: Slot = GRADIENT,
    ) -> None:
        """`buffers`: tensors other than parameters that training changes, such as routers' biases. `slots`: the slots of each parameter for
        tensors that the optimizer keeps, initially zeros. `scale`: the initial loss scale; None: the run has none. `home` holds the
        offloaded state. `usual`: the usual gradient norms for adaptive clipping. `halved`: the weights whose master weights are stored in
        two halves. `gradient`: the slot for summed gradients."""
        self.parameters, self.buffers, self.slots, self.home = parameters, buffers, slots, home
        self.updates = 0
        """Number of updates made, which determines bias correction and the learning rate."""
        self.skipped = 0
        """Number of skipped updates. `updates` + `skipped` is the number of steps tried."""
        self.history = History()
        """The watched numbers of the last updates, and the record of spikes. The history is a part of the run's position."""
        self.usual: dict[str, Tensor] = {} if usual is None else {USUAL: usual}
        """The usual norms of gradients, under their key in checkpoints, copies and digests; empty without adaptive clipping."""
        self.scaling: dict[str, Tensor] = {}
        """The loss scale, under its key in checkpoints, copies and digests; empty if the run has none."""
        self._scale = scale
        self._shares = {name: local(parameter).detach() for name, parameter in parameters.items()}
        self._halved, self._gradient = halved or {}, gradient
        self.behind = Behind(next(iter(self._shares.values())))
        """The thread that updates state off the device while the next forward computes (`train.offload.ahead`)."""
        away = home.held if home is not None else {}
        named = dict.fromkeys([MASTER, *(slot for name in self._shares for slot in slots[name])])
        self._held: dict[Slot, dict[str, Tensor | StreamedShare]] = {slot: {} for slot in named}
        for name in self._shares:
            for slot in (MASTER, *slots[name]):
                kept = away.get((slot, name))
                self._held[slot][name] = self._first(slot, name) if kept is None else kept
            for slot in (slot for slot in slots[name] if name in self._halved and slot in LOWER.values()):
                bits = NUMBERS[slot.number].bits
                self._held[MASTER][name] = JoinedMasters(self._halved[name], self._held[slot][name], bits)
        if scale is not None:
            device = next(iter(self._shares.values())).device
            self.scaling[SCALE] = torch.tensor(scale, dtype=torch.float32, device=device)

    def _first(self, slot: Slot, name: str) -> Tensor:
        if slot == MASTER:
            return self._shares[name]
        if name in self._halved and slot in LOWER.values():
            return self._halved[name].split(NUMBERS[slot.number].bits)
        return _zeros(slot, self._shares[name])

    @property
    def scale(self) -> Scale | None:
        """The loss scale of the next step; None: the run has none."""
        return self._scale

    @scale.setter
    def scale(self, scale: Scale | None) -> None:
        if scale is not None:
            self.scaling[SCALE].copy_(torch.tensor(scale, dtype=torch.float32))
        self._scale = scale

    def read_scale(self) -> None:
        """After the loss scale's tensor was loaded, take over its value."""
        if self.scaling:
            self._scale = Scale(*map(int, self.scaling[SCALE].tolist()))

    @property
    def unusable(self) -> int:
        """The number of skipped updates that count against `stability.skips`: all except those skipped because of a spike or a loss-scale
        overflow."""
        return self.skipped - self.history.left_out - (self._scale.overflows if self._scale is not None else 0)

    def complete(self) -> None:
        """Wait until the newest update is complete. Raises what it raised. Every method that gives others access to values does this."""
        self.behind.wait()

    def parts(self) -> list[Part]:
        """Return every parameter's share on this rank, with its gradient. A share that is empty on this rank may have no gradient."""
        return [self.part(name) for name in self._shares]

    def part(self, name: str) -> Part:
        """Return one parameter's share, with its gradient."""
        share, gradient = self._shares[name], self.parameters[name].grad
        assert gradient is not None or not share.numel(), f"{name} is a parameter without a gradient"
        gradient = torch.zeros_like(share) if gradient is None else local(gradient)
        share = self._upper(name, share)
        if self.home is not None and name in self.home.lots:
            return Part(name, share, gradient, {}, home=self.home)
        kept = {slot.name: self._held[slot][name] for slot in self.slots[name]}
        return Part(name, share, gradient, {key: held for key, held in kept.items() if isinstance(held, Tensor)})

    def tile(self, name: str, first: int, gradient: Tensor) -> Part:
        """Return the tile of a parameter's share, whose state is on disk, that begins with element `first` and has this flat gradient."""
        return Part(name, self._shares[name], gradient, {}, home=self.home, first=first)

    def _upper(self, name: str, share: Tensor) -> Tensor:
        moved = self._halved[name].moved if name in self._halved else None
        return share if moved is None else moved

    def settle(self) -> None:
        """Make an update that is complete on this rank valid."""
        if self.home is not None:
            self.home.settle()

    def drop_update(self) -> None:
        """Discard an update that is not valid yet. Requires all of the state to be on disk."""
        assert isinstance(self.home, Disk), "state in memory has no second slot"
        self.home.drop()

    def undo(self) -> None:
        """Undo the newest update in the offloaded state; the caller restores the tensors of `changed`."""
        self.complete()
        if self.home is not None:
            self.home.undo()

    def forget_moments(self) -> None:
        """Fill the optimizer's slots with zeros, on the device and off it."""
        for _, _, share, _ in self._walk(("optimizer",)):
            if isinstance(share, Tensor):
                share.zero_()
            else:
                share.fill((0,) * len(share.shape), torch.zeros(share.shape, dtype=share.dtype))

    def loaded(self) -> None:
        """Take over master weights and a loss scale that were loaded."""
        self.read_scale()
        if self.home is not None:
            self.home.publish()

    def updated(self) -> list[Tensor]:
        """Return the shares in memory to which an update writes."""
        self.complete()
        held = [share for kept in self._held.values() for share in kept.values() if isinstance(share, Tensor)]
        return [*held, *_moved(self._halved.values())]

    def changed(self) -> list[Tensor]:
        """Return all tensors in memory that an update changes: shares, and compute weights whose master weights are off the device."""
        away = self.home.lots.items() if self.home is not None else ()
        return [*self.updated(), *_moved(lot.weight for name, lot in away if name not in self._halved)]

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def shares(self, *categories: Category) -> dict[str, Tensor]:
        """Return the shares in memory as plain tensors; buffers count as weights. `categories`: return only shares of these categories,
        without tensors common to all ranks."""
        found = {f"{slot.name}.{name}": share for slot, name, share, _ in self._walk(categories) if isinstance(share, Tensor)}
        if not categories or UPPER.category in categories:
            found |= {
                f"{UPPER.name}.{name}": self._upper(name, share) for name, share in self._shares.items() if name in self._halved
            }
        return found | self._common(categories)

    def tensors(self, *categories: Category) -> dict[str, Tensor]:
        """Return all shares as sharded tensors of the whole shape. All state must be on the device, with master weights in fp32; otherwise
        use `laid`."""
        found = {key: tensor for key, tensor in self.laid(*categories).items() if isinstance(tensor, Tensor)}
        assert self.home is None, "offloaded state has no sharded tensors"
        return found

    def laid(self, *categories: Category) -> dict[str, Tensor | OffDeviceShare]:
        """Return all shares of a checkpoint, including offloaded ones. Master weights in two halves are returned as one fp32 tensor."""
        found = {
            f"{slot.name}.{name}": self._laid(slot, name, share, whole)
            for slot, name, share, whole in self._walk(categories)
            if slot.lasting
        }
        return found | self._common(categories)

    def put(self, slot: Slot, name: str, values: Tensor) -> None:
        """Write `values` to this rank's share of a slot, even if it is off the device."""
        self.complete()
        share = self._held[slot][name]
        if isinstance(share, Tensor):
            share.copy_(values)
        else:
            share.fill((0,) * values.dim(), values.cpu())

    @property
    def masters(self) -> list[str]:
        """The parameters and buffers of which this rank holds a share."""
        return [*self._shares, *self.buffers]

    def master(self, name: str) -> Tensor:
        """Return this rank's share of the master weights of a parameter, or of a buffer, on the device: the tensor that training changes,
        or a copy if the master weights are off the device or in two halves."""
        self.complete()
        if name in self.buffers:
            return self.buffers[name]
        share = self._held[MASTER][name]
        if not isinstance(share, Tensor):
            share = torch.cat([piece.clone() for _, piece in share.pieces()]).view(share.shape)
        return share.to(self._shares[name].device)

    def put_master(self, name: str, values: Tensor) -> None:
        """Write `values` to the share that `master` returns, even if it is off the device, and make the compute weights from them."""
        if name in self.buffers:
            self.buffers[name].copy_(values)
            return
        self.put(MASTER, name, values)
        if self.home is not None and (MASTER, name) in self.home.held:
            self.home.lots[name].weight.take_over(0, values)

    def _laid(self, slot: Slot, name: str, share: Tensor | StreamedShare, whole: Tensor) -> Tensor | OffDeviceShare:
        if isinstance(share, Tensor) and (self.home is None or (slot, name) not in self.home.held):
            return like(slot, share, whole)
        cut = like(slot, torch.empty(tuple(share.shape), dtype=share.dtype, device="meta"), whole)
        return OffDeviceShare.of(f"{slot.name}.{name}", cut, share)

    def _common(self, categories: Sequence[Category]) -> dict[str, Tensor]:
        return {} if categories else self.scaling | self.usual

    @property
    def on_host(self) -> list[Tensor]:
        """The shares that are in the host's memory."""
        return [*self.home.held.values()] if isinstance(self.home, Host) else []

    @property
    def streamed(self) -> list[Tensor]:
        """Return the memory through which state on disk is streamed."""
        return self.home.buffers if isinstance(self.home, Disk) else []

    @property
    def all_in_memory(self) -> bool:
        """True if no share is on disk."""
        return self.home is None or not isinstance(self.home, Disk)

    @property
    def sum(self) -> int:
        """The sum of all words of the shares on disk, from which digests are computed; 0 if all shares are in memory. The thread that
        updates may ask for it, so it does not wait."""
        return 0 if self.home is None else self.home.sum

    def bytes(self) -> dict[str, int]:
        """Return the bytes of the shares on the device by category, and of other shares by tier. All gradients count, even if they do not
        exist now; buffers do not count."""
        away = self.home.held if self.home is not None else {}
        found: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        found[GRADIENT.category] = int(sum(share.numel() for share in self._shares.values()) * bytes_each([self._gradient]))
        for slot, kept in self._held.items():
            here = (share for name, share in kept.items() if (slot, name) not in away and not isinstance(share, JoinedMasters))
            found[slot.category] += sum(map(_bytes, here))
        apart = (weight for weight in self._halved.values() if weight.mesh.size(1) > 1)  # else they are the compute weights
        found[UPPER.category] += sum(_bytes(weight.moved) for weight in apart if weight.moved is not None)
        found["optimizer"] += sum(map(_bytes, self.usual.values()))
        return found | (self.home.bytes if self.home is not None else {})

    def _walk(self, categories: Sequence[Category]) -> Iterator[tuple[Slot, str, Tensor | StreamedShare, Tensor]]:
        """Yield, for each share of this rank: the slot, the parameter's name, the share, and the parameter's tensor, which is sharded in
        the same way. Buffers come after the weights."""
        self.complete()
        for slot, kept in self._held.items():
            if categories and slot.category not in categories:
                continue
            for name, share in kept.items():
                yield slot, name, share, self.parameters[name]
            if slot == MASTER:
                yield from ((MASTER, name, buffer, buffer) for name, buffer in self.buffers.items())


def _moved(weights: Iterable[Weight]) -> list[Tensor]:
    return [weight.moved for weight in weights if weight.moved is not None]


def _bytes(share: Tensor | StreamedShare) -> int:
    return share.numel() * share.element_size()


def _zeros(slot: Slot, share: Tensor) -> Tensor:
    if slot.dropped(share.dim()) is None and not slot.block:
        return torch.zeros_like(share, dtype=DTYPE[slot.number])
    return share.new_zeros(slot.shape_of(share.shape), dtype=DTYPE[slot.number])


def like(slot: Slot, share: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's `share` of a slot as a sharded tensor of the slot's whole shape, sharded like `parameter`."""
    if not isinstance(parameter, DTensor):
        return share
    dropped = slot.dropped(parameter.dim())
    placements, shape, stride = parameter.placements, parameter.shape, parameter.stride()
    if dropped is not None:
        placements = [_without(dropped, placement) for placement in parameter.placements]
    if dropped is not None or slot.block:  # cuts lie between blocks, so those of a row with its scales are the same ones
        shape = torch.Size(slot.shape_of(parameter.shape))
        stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(share, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def _without(dropped: int, placement: Placement) -> Placement:
    if not isinstance(placement, Shard | _StridedShard):
        return placement
    if placement.dim == dropped:
        return Replicate()
    dim = placement.dim - (placement.dim > dropped)
    return _StridedShard(dim, split_factor=placement.split_factor) if isinstance(placement, _StridedShard) else Shard(dim)
