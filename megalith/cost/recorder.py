"""Recorder of the operations that reach torch's dispatcher while meta tensors run through a part of a model: it counts
operations, bytes moved, and bytes of live storages."""

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megalith.cost.profile import Collective, Core, Exchanged, Layout, Phase, Product
from megalith.parallel.retain import place_now
from megalith.spec.state import Place

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"})
FREE = frozenset(
    {
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "detach",
        "alias",
        "new_empty_strided",
        "arange",
        "set_",
        "_unsafe_view",
    }
)
"""Operations that launch no kernel."""

FUSED = frozenset({"silu", "gelu", "silu_backward", "gelu_backward"})
"""Operations that are fused with the multiplication by the gate, so that no result passes through memory."""


SENT = frozenset(
    {"allreduce_", "_allgather_base_", "allgather_", "_reduce_scatter_base_", "reduce_scatter_", "alltoall_base_", "alltoall_", "send",
     "recv_", "broadcast_"}
)  # fmt: skip
"""torch's collectives and messages. A trace cannot run these operations, because it has no other ranks."""

WHOLE = frozenset({"add", "sub", "mul", "neg", "cumsum", "floor_divide"})
"""Elementwise operations whose result is an integer if all inputs are integers."""

PLAIN = frozenset({"div", "sigmoid", "sigmoid_backward", *WHOLE, *FUSED})
"""Elementwise operations whose result has the dtype of floating-point inputs."""

TWELVE_BITS = 1.5
"""Bytes of a number in E5M6."""


Region = Literal["attention", "router", "experts"]
"""Region of a block. "experts": between dispatch and combine; "router": the router and the permutation before dispatch."""


class Recorder(TorchDispatchMode):
    """Dispatch mode that records operations and counts the bytes of live storages."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and its guard costs every operation something

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.phase: Phase = "F"
        self.products: Counter[Product] = Counter()
        self.cores: list[Core] = []
        self.exchanges: Counter[Collective] = Counter()
        self.moved: dict[Phase, float] = {"F": 0.0, "I": 0.0, "W": 0.0}
        self.kernels: dict[Phase, int] = {"F": 0, "I": 0, "W": 0}
        self.apart: dict[Phase, int] = {"F": 0, "I": 0, "W": 0}
        self.apart_moved: dict[Phase, float] = {"F": 0.0, "I": 0.0, "W": 0.0}
        self.routed: dict[Phase, int] = {"F": 0, "I": 0, "W": 0}
        self.region: Region = "attention"
        self.parameters: dict[int, bool] = {}
        self.alive = 0
        self.formed = 0
        """Bytes of weight gradients"""
        self.peak = 0
        """Most bytes of live tensors"""
        self.alive_then = self.formed_then = 0
        """Bytes of live tensors, and of weight gradients, when both together were most"""
        self._seen: set[int] = set()
        self._held: dict[int, int] = {}
        self._results: set[int] = set()
        self._factors: Counter[int] = Counter()
        self._packed: Counter[int] = Counter()
        self._places: dict[int, Place] = {}
        self.rest: Place = "host"
        """The place for tensors that no named part of a block keeps"""
        self._inner: set[int] = set()
        self.rounded: set[int] = set()
        """Storages that were kept in 8 bits"""
        self.fused = frozenset[str]()
        self.merged = False
        self.rides = False

    def know(self, module: nn.Module) -> None:
        """Record which storages are weights, and which weights are experts' weights."""
        for name, parameter in module.named_parameters():
            key = parameter.untyped_storage()._cdata
            self.parameters[key] = ".experts." in f".{name}"
            self._seen.add(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in SENT:
            raise TypeError(
                f"the collective or message {name} reached a trace, which has no cost for this operation. Let the module send "
                "through its parallel.tensor.Split or its token dispatcher, whose counterparts are in cost/exchanges.py"
            )
        out = _at_once(name, args) if name in PLAIN and not kwargs else None
        out = func(*args, **(kwargs or {})) if out is None else out
        inputs = [a for a in leaves(args) if isinstance(a, Tensor)]
        outputs = [a for a in leaves(out) if isinstance(a, Tensor)]
        if name in self.fused or (self.rides and name == "add" and self._is_bias(inputs[-1])):
            self.ignore(outputs[0])
            return out
        for tensor in outputs:
            self.hold(tensor)
        if name in PRODUCTS:
            self._product(name, inputs, outputs[0])
            self._results.add(outputs[0].untyped_storage()._cdata)
        elif self._accumulated(name, inputs):
            self._results.add(outputs[0].untyped_storage()._cdata)
        elif name not in FREE and not func.is_view and any(map(bytes_of, outputs)):
            moved = sum(map(bytes_of, inputs)) + sum(map(bytes_of, outputs))
            self.moved[self.phase] += moved
            self.apart_moved[self.phase] += moved if self.region == "experts" else 0.0
            self._start()
        return out

    def _is_bias(self, tensor: Tensor) -> bool:
        return tensor.dim() == 1 and tensor.untyped_storage()._cdata in self.parameters

    def _start(self) -> None:
        self.kernels[self.phase] += 1
        self.apart[self.phase] += self.region == "experts"
        self.routed[self.phase] += self.region == "router"

    def _accumulated(self, name: str, inputs: list[Tensor]) -> bool:
        """True for the sum of two products' results, if the software computes all products of one input as one product, or adds their
        results inside the products."""
        if not self.merged or name != "add" or len(inputs) != 2 or self.phase != "I":
            return False
        return all(tensor.untyped_storage()._cdata in self._results for tensor in inputs)

    def _product(self, name: str, inputs: list[Tensor], out: Tensor) -> None:
        first, second = inputs[-2:] if name in ("addmm", "baddbmm") else inputs[:2]
        weights = [self.parameters[key] for t in (first, second) if (key := t.untyped_storage()._cdata) in self.parameters]
        rows, inner = first.shape[-2:]
        columns, count = second.shape[-1], 1
        if name == "_grouped_mm" and out.dim() == 3:  # the weights' gradients: groups of the inner dimension
            count, rows, columns = out.shape
            inner = inner // count
        elif name == "_grouped_mm":
            count = second.shape[0]
            rows = rows // count
        elif first.dim() == 3:
            count = first.shape[0]
        weight = bool(weights) or self.phase == "W"
        expert = any(weights) or (self.phase == "W" and count > 1)
        if self.phase == "F" and weights:
            self._factors.update(key for t in (first, second) if (key := t.untyped_storage()._cdata) not in self.parameters)
            self._inner.update({out.untyped_storage()._cdata} if self.region == "experts" else ())
        self.products[Product(self.phase, rows, inner, columns, count, weight, expert)] += 1
        self._start()

    def hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        size = storage.nbytes()
        self._held[key] = size
        self.alive += size
        self._look()
        weakref.finalize(storage, self._release, key)

    def _look(self) -> None:
        self.peak = max(self.peak, self.alive)
        if self.alive + self.formed >= self.alive_then + self.formed_then:
            self.alive_then, self.formed_then = self.alive, self.formed

    def begin(self) -> None:
        """Begin to look for the peaks, from now on."""
        self.peak = self.alive_then = self.formed_then = 0
        self._look()

    def form(self, gradient: Tensor) -> None:
        """Count a tensor as a weight's gradient from now on, no more as a live tensor."""
        self.formed += self.forget(gradient)
        self._look()

    def _release(self, key: int) -> None:
        self._seen.discard(key)
        self._results.discard(key)
        self._factors.pop(key, None)
        self._packed.pop(key, None)
        self.rounded.discard(key)
        self._places.pop(key, None)
        self._inner.discard(key)
        self.alive -= self._held.pop(key, 0)

    def forget(self, tensor: Tensor) -> int:
        """Count a result as freed although it is alive, and return its bytes; 0 for other tensors and for results already
        counted as freed."""
        freed = self._held.pop(tensor.untyped_storage()._cdata, 0)
        self.alive -= freed
        return freed

    def kept(self, tensor: Tensor) -> Tensor:
        """Record that autograd keeps this tensor for backward."""
        key = tensor.untyped_storage()._cdata
        self._packed[key] += 1
        place = place_now(self.rest)
        known = self._places.get(key, place)
        self._places[key] = known if get_args(Place).index(known) < get_args(Place).index(place) else place  # the nearest
        return tensor

    def keeps(self, x: Tensor) -> bool:
        """Return False if the input `x` is kept for backward in 8 bits only."""
        key = x.untyped_storage()._cdata
        return key in self._packed or key not in self.rounded

    def lives(self, key: int) -> bool:
        """Return True if a storage that was held or ignored is not freed yet."""
        return key in self._seen

    def packed_bytes(self, x: Tensor, place: Place) -> int:
        """Return the bytes that autograd keeps for backward off the device, at `place` (host or disk). They include the part's input `x` if
        it is kept there, although live tensors do not include `x`."""
        leaving = {key for key in self._packed if self._places[key] == place}
        return sum(self._held.get(key, 0) for key in leaving) + (bytes_of(x) if x.untyped_storage()._cdata in leaving else 0)

    def spared(self, layout: Layout) -> float:
        """Bytes saved by keeping the inputs of products in a narrow format: the wide tensor is only kept if another operation
        keeps it too."""
        found = 0.0
        for key, times in self._factors.items():
            both = TWELVE_BITS if layout.low_precision_kept else layout.width + layout.kept
            kept = both if self._packed[key] > times else layout.kept
            found += self._held.get(key, 0) * (1 - kept / layout.width)
        for key in self._inner - self._factors.keys() if layout.low_precision_kept else ():
            found += self._held.get(key, 0) * (1 - layout.kept / layout.width)
        return found

    def is_product(self, tensor: Tensor) -> bool:
        """True if the tensor is the result of a matrix product."""
        return tensor.untyped_storage()._cdata in self._results

    def formed_again(self, size: int) -> None:
        """Count a kernel that writes `size` bytes from two tensors of that size."""
        self.moved[self.phase] += 3 * size
        self.apart_moved[self.phase] += 3 * size if self.region == "experts" else 0
        self._start()

    def ignore(self, tensor: Tensor) -> None:
        """Do not count this tensor as live."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._seen:
            self._seen.add(key)
            weakref.finalize(storage, self._release, key)  # forget it once it is freed: another tensor may get its address

    def exchange(self, axis: Any, kind: Exchanged, size: float, phase: Phase | None = None) -> None:
        self.exchanges[Collective(phase or self.phase, axis, kind, size)] += 1


def _at_once(name: str, args: Sequence[Any]) -> Tensor | None:
    """Return the output of a plain operation on contiguous tensors of one dtype. torch's shape rules for such operations
    would take half of a trace's time."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    first = tensors[0]
    if not first.dtype.is_floating_point and not (first.dtype == torch.int64 and name in WHOLE):
        return None
    kinds = (Tensor, int, float) if first.dtype.is_floating_point else (Tensor, int)
    if any(not isinstance(a, kinds) for a in args) or any(t.dtype != first.dtype or not t.is_contiguous() for t in tensors):
        return None
    shape = first.shape if all(t.shape == first.shape for t in tensors) else torch.broadcast_shapes(*(t.shape for t in tensors))
    return torch.empty(shape, dtype=first.dtype, device="meta")


def leaves(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
