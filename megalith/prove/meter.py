"""A meter of one rank at torch's dispatcher: it counts bytes held by category, collectives by axis, and FLOPs by kind.

The same meter counts real and dry runs, because both use the dispatcher. The meter does not see internal allocations of kernels.
"""

import weakref
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalith.parallel.data import Weight, local
from megalith.parallel.groups import Groups, ranks_in
from megalith.spec.state import CATEGORIES as STATE_CATEGORIES
from megalith.train.assemble import Trainer

Category: TypeAlias = Literal["weights", "gradients", "optimizer", "activations", "buffers"]
CATEGORIES: tuple[Category, ...] = (*STATE_CATEGORIES, "activations", "buffers")
ACTIVATIONS = CATEGORIES.index("activations")
ELSEWHERE = len(CATEGORIES)
"""Label of bytes off the device, which are not counted as its memory."""

KINDS = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "alltoall_": "all-to-all",
    "send": "send",
    "recv_": "receive",
    "broadcast_": "broadcast",
    "barrier": "barrier",
}
STATE_AXES = frozenset({"dp_shard", "dp_replicate", "expert dp_shard", "expert dp_replicate"})
REDUCTIONS = frozenset({"all-gather", "reduce-scatter", "all-reduce"})
"""The collectives and axes with which weights and gradients are communicated; the tensors of these collectives count as buffers.
"""

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"})
ATTENTION = {  # operation: matrix products of queries by keys that it takes; forward two, backward five
    "blocked_attention": 2,
    "_scaled_dot_product_flash_attention_for_cpu": 2,
    "_scaled_dot_product_flash_attention": 2,
    "_scaled_dot_product_efficient_attention": 2,
    "_scaled_dot_product_cudnn_attention": 2,
    "blocked_attention_backward": 5,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 5,
    "_scaled_dot_product_flash_attention_backward": 5,
    "_scaled_dot_product_efficient_attention_backward": 5,
    "_scaled_dot_product_cudnn_attention_backward": 5,
}


@dataclass(frozen=True)
class Traffic:
    """Collective calls of one kind along one axis. `bytes`: the sum over all calls of the size of the whole tensor, which is the
    output of a gather or the input of a reduce-scatter."""

    kind: str
    axis: str
    calls: int
    bytes: int


@dataclass(frozen=True)
class Memory:
    """Bytes of live tensors. `peak`: bytes by category at the moment when their total was largest during the step; `most`: the
    peak of each category by itself; `between`: bytes by category after the step; `building`: the largest total before the step.
    """

    peak: dict[str, int]
    most: dict[str, int]
    between: dict[str, int]
    building: int

    @property
    def total(self) -> int:
        """The largest total of bytes, before the step or in it."""
        return max(self.building, sum(self.peak.values()))


@dataclass(frozen=True)
class Work:
    """FLOPs of products and of attention (a multiply-add is two; causal attention counts only unmasked pairs), and the bytes that
    all other operations read and write."""

    products: int
    attention: int
    moved: int


class Meter(TorchDispatchMode):
    """The meter counts while its context is active. Call `follow` once the trainer exists, and `begin_step` when building is
    over."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and its guard would double the cost of each operation

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}  # a live storage's address -> its number
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}  # bytes of live storages, by number
        self._labels = bytearray()  # category of each storage, by number; a storage has one for all its life, the last given
        self._changes = array("q"), array("q")  # number of a storage, bytes more or less: all that happened, in order
        self._step = 0  # changes before the step
        self._axes: Axes | None = None
        self._calls: Counter[tuple[str, str]] = Counter()
        self._sent: Counter[tuple[str, str]] = Counter()
        self._flops: Counter[str] = Counter()
        self._resize = torch.UntypedStorage.resize_
        self._open = False

    # --- what there is to know ---

    def follow(self, trainer: Trainer) -> None:
        """Record which tensors are weights, moments and buffers, how to label gradients, and the axis of each group."""
        for category in STATE_CATEGORIES:
            for tensor in trainer.state.shares(category).values():
                self.label(tensor, category)
        for tensor in trainer.state.streamed:
            self.label(tensor, "buffers")
        for tensor in trainer.state.on_host:
            self.pass_over(tensor)
        for tier in trainer.tiers.values():
            tier.counted.observe = self.pass_over
        for table in trainer.tables.values():
            table.observe = partial(self.label, category="buffers")
        for stage in trainer.stages.values():
            for tensor in stage.buffers():
                self.label(tensor, "buffers")
        for weight in {w for r in trainer.runners.values() for used in r.buckets for bucket in used for w in bucket.weights}:
            self.label(weight.compute, "weights")
            self.label(weight.moved, "weights")
            self._follow_gradient(weight)
        self._axes = Axes(trainer.groups)

    def _follow_gradient(self, weight: Weight) -> None:
        accumulate, add, add_rows = weight.accumulate_gradient, weight.add, weight.add_rows

        def accumulated() -> None:
            self.label(weight.compute.grad, "gradients")
            accumulate()
            self.label(weight.total, "gradients")

        def added(share: Tensor) -> None:
            add(share)
            assert weight.master.grad is not None
            self.label(local(weight.master.grad), "gradients")

        def added_rows(rows: range, gradient: Tensor) -> None:
            add_rows(rows, gradient)
            assert weight.master.grad is not None
            self.label(local(weight.master.grad), "gradients")

        weight.accumulate_gradient, weight.add, weight.add_rows = accumulated, added, added_rows

    def label(self, tensor: Tensor | None, category: Category) -> None:
        """Label a tensor's storage with its use."""
        if tensor is not None:
            number = self._number(tensor.untyped_storage())
            self._labels[number] = CATEGORIES.index(category)

    def pass_over(self, tensor: Tensor) -> None:
        """Label a tensor's storage as not on the device."""
        self._labels[self._number(tensor.untyped_storage())] = ELSEWHERE

    def begin_step(self) -> None:
        """End the building phase: calls and FLOPs are counted after this."""
        self._step = len(self._changes[0])
        self._calls.clear()
        self._sent.clear()
        self._flops.clear()

    # --- what was counted ---

    def memory(self) -> Memory:
        """Bytes held while the meter was active. Call this after the meter has ended."""
        held = self._held()
        step = held[:, max(0, self._step - 1) :]
        before = held[:, : self._step].sum(0)
        top = step[:, step.sum(0).argmax()]
        named = partial(zip, CATEGORIES, strict=True)
        return Memory(
            peak={name: int(size) for name, size in named(top)},
            most={name: int(size) for name, size in named(step.max(1))},
            between={name: int(size) for name, size in named(held[:, -1])},
            building=int(before.max()) if before.size else 0,
        )

    def memory_timeline(self, moments: int = 240) -> list[dict[str, int]]:
        """Return the bytes by category along the step. The step is cut into `moments` ranges with equally many changes of memory,
        and each range is represented by its peak."""
        step = self._held()[:, max(0, self._step - 1) :]
        stretches = np.array_split(step, min(moments, step.shape[1]), axis=1) if step.shape[1] else []
        peaks = (stretch[:, stretch.sum(0).argmax()] for stretch in stretches)
        return [{name: int(size) for name, size in zip(CATEGORIES, sizes, strict=True)} for sizes in peaks]

    def _held(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[categories, changes]: bytes held after each change."""
        assert not self._open, "the meter is still active; leave its context before reading the memory"
        numbers, changes = (np.frombuffer(a, dtype=np.int64) if a else np.zeros(0, np.int64) for a in self._changes)
        labels = np.frombuffer(self._labels, dtype=np.uint8)[numbers]
        return np.stack([np.cumsum(np.where(labels == c, changes, 0)) for c in range(len(CATEGORIES))])

    def traffic(self) -> list[Traffic]:
        """Return the collectives and messages since `begin_step`, by axis and kind."""
        return [Traffic(kind, axis, calls, self._sent[axis, kind]) for (axis, kind), calls in sorted(self._calls.items())]

    def work(self) -> Work:
        """Return the FLOPs, and the bytes that other operations moved, since `begin_step`."""
        return Work(self._flops["products"], self._flops["attention"], self._flops["moved"])

    # --- counting ---

    def __enter__(self) -> "Meter":
        resize = self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            out = resize(storage, size)
            self._change(self._number(storage), storage.nbytes())
            return out

        # weights come and go by it, which no dispatcher sees
        torch.UntypedStorage.resize_ = resized  # pyright: ignore[reportAttributeAccessIssue]  # its first argument's name
        super().__enter__()
        self._open = True
        return self

    def __exit__(self, *error: Any) -> None:
        self._open = False
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":
            return func(*args)
        if DTensor in types:
            return NotImplemented  # called again for the share, which has the memory
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            self._communicate(name, args)
            return out
        if _makes_new(func):
            for tensor in _tensors(out):
                if not _on_meta(tensor):
                    self._number(tensor.untyped_storage())
        if not func.is_view:
            self._compute(name, args, kwargs or {}, out)
        return out

    def _number(self, storage: torch.UntypedStorage) -> int:
        """Return the storage's number; a new storage counts as held from now on."""
        key = storage._cdata
        if (known := self._numbers.get(key)) is not None:
            return known
        number = self._numbers[key] = len(self._labels)
        self._labels.append(ACTIVATIONS)
        self._watched[key] = weakref.ref(storage, partial(self._release, key))
        self._change(number, storage.nbytes())
        return number

    def _release(self, key: int, _: Any) -> None:
        if not self._open:
            return
        number = self._numbers.pop(key)
        del self._watched[key]
        self._change(number, 0)
        del self._sizes[number]

    def _change(self, number: int, size: int) -> None:
        numbers, changes = self._changes
        numbers.append(number)
        changes.append(size - self._sizes.get(number, 0))
        self._sizes[number] = size

    def _communicate(self, name: str, args: Any) -> None:
        tensors = [tensor for arg in args for tensor in _tensors(arg)]
        group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        axes = self._axes.of(group) if self._axes else ("building",)
        key = (" / ".join(axes), KINDS.get(name, name))
        self._calls[key] += 1
        self._sent[key] += max(map(_bytes, tensors), default=0)
        if key[1] in REDUCTIONS and not STATE_AXES.isdisjoint(axes):
            for tensor in tensors:
                self.label(tensor, "buffers")

    def _compute(self, name: str, args: Any, kwargs: Mapping[str, Any], out: Any) -> None:
        if name in PRODUCTS:
            first, second = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
            self._flops["products"] += product_flops(first, second, grouped=name == "_grouped_mm")
        elif name in ATTENTION:
            q, k, v = args[1:4] if "backward" in name else args[:3]
            self._flops["attention"] += attention_flops(q, k, v, ATTENTION[name], causal=any(a is True for a in args))
        elif not name.startswith(("empty", "new_empty", "set_")):
            touched = [tensor for arg in args for tensor in _tensors(arg)] + _tensors(out)
            self._flops["moved"] += sum(map(_bytes, touched))


def product_flops(first: Tensor, second: Tensor, *, grouped: bool = False) -> int:
    """Return the FLOPs of the product of [.., m, k] and [.., k, n]. In a grouped product, only one matrix of the group multiplies each row
    of `first`, or only one product of the group uses each index k."""
    batch = first.shape[0] if first.dim() == 3 and not grouped else 1
    return 2 * batch * first.shape[-2] * first.shape[-1] * second.shape[-1]


def attention_flops(q: Tensor, k: Tensor, v: Tensor, products: int, *, causal: bool) -> int:
    """Return the FLOPs of attention on [batch, heads, seq, channels]. Half of the `products` matrix products run over q's
    channels and half over v's; if their number is odd, one more runs over q's."""
    batch, heads, queries, channels = q.shape
    keys = k.shape[2]
    pairs = queries * (queries + 1) // 2 + queries * (keys - queries) if causal and keys >= queries else queries * keys
    over_v = products // 2
    return 2 * batch * heads * pairs * ((products - over_v) * channels + over_v * v.shape[-1])


class Axes:
    """Names process groups after the axes of the mesh. A group that is no axis of its own gets a name by its ranks ("pipeline" or
    "context"), or else the name "other". If several axes have the same group, for instance because one of them has all ranks, their names
    are joined: "world / dp_shard"."""

    def __init__(self, groups: Groups) -> None:
        self._world, self._line = groups.world, list(groups.line)
        self._context = set(ranks_in(groups.world, groups.context))
        named = {
            "data x context": groups.data,
            "context": groups.context,
            "context x tensor": groups.sequence,
            "data x context x tensor": groups.tokens,
            "place": groups.place,
            "ends": groups.ends,
            "dp_replicate": groups.state.get_group("dp_replicate"),
            "dp_shard": groups.state.get_group("dp_shard"),
            "tensor": groups.tensor,
            "expert dp_replicate": groups.experts.get_group("dp_replicate"),
            "expert dp_shard": groups.experts.get_group("dp_shard"),
            "expert": groups.expert,
            "expert_tensor": groups.expert_tensor,
        }
        self._names: dict[str, tuple[str, ...]] = {groups.world.group_name: ("world",)}
        for axis, group in named.items():
            self._names[group.group_name] = (*self._names.get(group.group_name, ()), axis)

    def of(self, group: dist.ProcessGroup) -> tuple[str, ...]:
        """Return the names of the axes of a process group."""
        name = group.group_name
        if name not in self._names:
            self._names[name] = self._by_ranks(ranks_in(self._world, group))
        return self._names[name]

    def _by_ranks(self, ranks: list[int]) -> tuple[str, ...]:
        if ranks == self._line:
            return ("pipeline",)
        return ("context",) if self._context.issuperset(ranks) else ("other",)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


@cache
def _makes_new(func: Any) -> bool:
    """True if an operation returns new memory. The result of a view or of an in-place operation may be memory that another
    operation allocated internally, as when gloo reduces; such memory is not counted."""
    return all(returned.alias_info is None for returned in func._schema.returns)


def _on_meta(tensor: Tensor) -> bool:
    """True for a tensor that never has memory. A fake tensor's own attribute costs nothing; `device` would cost another dispatch."""
    return tensor.fake_device.type == "meta" if isinstance(tensor, FakeTensor) else tensor.is_meta


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
