"""Parts of a model built from the trainer's own modules on the meta device, run forward and backward, and counted.

Nothing is computed: shapes alone go through. Counted are the operations that reach the dispatcher, the collectives that stand at
the boundaries of split modules, and the storages that are alive, so that what a recomputation policy keeps is measured and not
derived from its name.
"""

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from math import gcd
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megalith.cost.cores import (
    FusedCore,
    FusedMamba,
    Note,
    NoteRecurrence,
    PairedExperts,
    PlainCore,
    fused_collect,
    fused_norm,
    fused_rotate,
    fused_spread,
)
from megalith.cost.profile import (
    DENSE_MLP,
    EXPERTS_ACTIVATION,
    UP_PROJECTION,
    Core,
    Exchange,
    Exchanged,
    Layout,
    Phase,
    Product,
    Profile,
)
from megalith.kernels import grouped
from megalith.kernels.cross_entropy import Loss
from megalith.kernels.deferred import Queue, deferring
from megalith.kernels.grouped import Sizes
from megalith.kernels.linear import linear
from megalith.models import attention, latent, moe
from megalith.models.batch import Batch
from megalith.models.moe import Experts, Here, Moe, Traffic
from megalith.models.norm import RMSNorm
from megalith.models.router import Dealing
from megalith.models.stage import Stage
from megalith.parallel.recompute import SEAMS, apply_recompute
from megalith.spec.model import AttentionSpec, BlockSpec, MambaSpec, MlpSpec, ModelSpec, MoeSpec
from megalith.spec.plan import Plan

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
"""Operations that start no kernel."""

FUSED = frozenset({"silu", "gelu", "silu_backward", "gelu_backward"})
"""Parts of one kernel with the product that follows or precedes them, where activation and gate are fused: nothing passes between."""


WHOLE = frozenset({"add", "sub", "mul", "neg", "cumsum", "floor_divide"})
"""Operations on each element, which give whole numbers for whole numbers;"""

PLAIN = frozenset({"div", "sigmoid", "sigmoid_backward", *WHOLE, *FUSED})
"""and those that give 16 or 32 bits for as many."""

TWELVE_BITS = 1.5
"""Bytes of a number in E5M6."""


Region = Literal["attention", "router", "experts"]
"""Of a block: between dispatch and return are the experts; before them the router, and what puts rows in their order."""


class Recorder(TorchDispatchMode):
    """Writes down what reaches the dispatcher, and keeps count of the bytes alive."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and its guard costs every operation something

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.phase: Phase = "F"
        self.products: Counter[Product] = Counter()
        self.cores: list[Core] = []
        self.exchanges: Counter[Exchange] = Counter()
        self.moved: dict[Phase, float] = {"F": 0.0, "I": 0.0, "W": 0.0}
        self.kernels: dict[Phase, int] = {"F": 0, "I": 0, "W": 0}
        self.apart: dict[Phase, int] = {"F": 0, "I": 0, "W": 0}
        self.apart_moved: dict[Phase, float] = {"F": 0.0, "I": 0.0, "W": 0.0}
        self.routed: dict[Phase, int] = {"F": 0, "I": 0, "W": 0}
        self.region: Region = "attention"
        self.parameters: dict[int, bool] = {}
        self.alive = 0
        self.peak = 0
        self._seen: set[int] = set()
        self._held: dict[int, int] = {}
        self._results: set[int] = set()
        self._factors: Counter[int] = Counter()
        self._packed: Counter[int] = Counter()
        self._inner: set[int] = set()
        self.fused = frozenset[str]()
        self.merged = False

    def know(self, module: nn.Module) -> None:
        """Remember which storages are weights, and which of them the experts'."""
        for name, parameter in module.named_parameters():
            key = parameter.untyped_storage()._cdata
            self.parameters[key] = ".experts." in f".{name}"
            self._seen.add(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        out = _at_once(name, args) if name in PLAIN and not kwargs else None
        out = func(*args, **(kwargs or {})) if out is None else out
        inputs = [a for a in _flat(args) if isinstance(a, Tensor)]
        outputs = [a for a in _flat(out) if isinstance(a, Tensor)]
        if name in self.fused:
            self.ignore(outputs[0])
            return out
        for tensor in outputs:
            self._hold(tensor)
        if name in PRODUCTS:
            self._product(name, inputs, outputs[0])
            self._results.add(outputs[0].untyped_storage()._cdata)
        elif self._accumulated(name, inputs):
            self._results.add(outputs[0].untyped_storage()._cdata)
        elif name not in FREE and not func.is_view and any(map(_bytes, outputs)):
            moved = sum(map(_bytes, inputs)) + sum(map(_bytes, outputs))
            self.moved[self.phase] += moved
            self.apart_moved[self.phase] += moved if self.region == "experts" else 0.0
            self._start()
        return out

    def _start(self) -> None:
        self.kernels[self.phase] += 1
        self.apart[self.phase] += self.region == "experts"
        self.routed[self.phase] += self.region == "router"

    def _accumulated(self, name: str, inputs: list[Tensor]) -> bool:
        """Is this the sum of two products' results, in software that computes all products of one input as one, or adds in them?"""
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

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        size = storage.nbytes()
        self._held[key] = size
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self._seen.discard(key)
        self._results.discard(key)
        self._factors.pop(key, None)
        self._packed.pop(key, None)
        self._inner.discard(key)
        self.alive -= self._held.pop(key, 0)

    def forget(self, tensor: Tensor) -> int:
        """Count a result as freed though it lives on: its bytes; 0 for what is no result, or is forgotten already."""
        freed = self._held.pop(tensor.untyped_storage()._cdata, 0)
        self.alive -= freed
        return freed

    def kept(self, tensor: Tensor) -> Tensor:
        """Autograd keeps this tensor for backward."""
        self._packed[tensor.untyped_storage()._cdata] += 1
        return tensor

    def spared(self, layout: Layout) -> float:
        """Bytes by which what is alive shrinks where products keep their factors in a narrow format: the wide tensor stays only where
        something else keeps it too."""
        found = 0.0
        for key, times in self._factors.items():
            both = TWELVE_BITS if layout.sparing else layout.width + layout.kept
            kept = both if self._packed[key] > times else layout.kept
            found += self._held.get(key, 0) * (1 - kept / layout.width)
        for key in self._inner - self._factors.keys() if layout.sparing else ():
            found += self._held.get(key, 0) * (1 - layout.kept / layout.width)
        return found

    def is_product(self, tensor: Tensor) -> bool:
        """Did a matrix product give this?"""
        return tensor.untyped_storage()._cdata in self._results

    def formed_again(self, size: int) -> None:
        """One kernel writes `size` bytes from two tensors of that size."""
        self.moved[self.phase] += 3 * size
        self.apart_moved[self.phase] += 3 * size if self.region == "experts" else 0
        self._start()

    def ignore(self, tensor: Tensor) -> None:
        """Do not count this tensor among the living."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._seen:
            self._seen.add(key)
            weakref.finalize(storage, self._release, key)  # all that is known of it: another may get its place in memory

    def exchange(self, axis: Any, kind: Exchanged, size: float, phase: Phase | None = None) -> None:
        self.exchanges[Exchange(phase or self.phase, axis, kind, size)] += 1


def _at_once(name: str, args: Sequence[Any]) -> Tensor | None:
    """What a plain operation gives, where all is of one type and in order: to find that by torch's own rules takes half of a trace."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    first = tensors[0]
    if not first.dtype.is_floating_point and not (first.dtype == torch.int64 and name in WHOLE):
        return None
    kinds = (Tensor, int, float) if first.dtype.is_floating_point else (Tensor, int)
    if any(not isinstance(a, kinds) for a in args) or any(t.dtype != first.dtype or not t.is_contiguous() for t in tensors):
        return None
    shape = first.shape if all(t.shape == first.shape for t in tensors) else torch.broadcast_shapes(*(t.shape for t in tensors))
    return torch.empty(shape, dtype=first.dtype, device="meta")


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Resize(torch.autograd.Function):
    """What a collective at a boundary does to shapes: `dim` 1 becomes `forward` times as long, and back in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, longer: int, recorder: Recorder, kinds: tuple[Exchanged, Exchanged], regather: bool) -> Tensor:
        ctx.recorder, ctx.kinds, ctx.shape = recorder, kinds, x.shape
        with torch._C._DisableTorchDispatch():
            length = x.shape[1] * longer if longer > 0 else x.shape[1] // -longer
            out = x.new_empty(x.shape[0], length, *x.shape[2:])
        whole = max(_bytes(x), _bytes(out))
        ctx.whole = whole
        recorder.exchange("tensor", kinds[0], whole)
        if regather:
            recorder.ignore(out)
            recorder.exchange("tensor", "gather", whole, "W")
        else:
            recorder._hold(out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.recorder.exchange("tensor", ctx.kinds[1], ctx.whole)
        return grad.new_empty(ctx.shape), None, None, None, None


def _split(module: nn.Module, recorder: Recorder, layout: Layout) -> None:
    """The boundary of a module whose products are split over `tensor`: gathered on entry, summed on leaving."""
    times, whole = layout.tensor, layout.sequence
    enter: tuple[Exchanged, Exchanged] = ("gather", "scatter")
    leave: tuple[Exchanged, Exchanged] = ("scatter", "gather")

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if whole:
            return _Resize.apply(args[0], times, recorder, enter, layout.regather), *args[1:]
        return _Copied.apply(args[0], recorder, False), *args[1:]

    def after(_: nn.Module, args: Any, out: Any) -> Any:
        if not isinstance(out, Tensor) or out.dim() < 3:
            return out
        return _Resize.apply(out, -times, recorder, leave, False) if whole else _Copied.apply(out, recorder, True)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


class _Copied(torch.autograd.Function):
    """Without sequence parallelism: the same tensor everywhere, summed on one of the two ways."""

    @staticmethod
    def forward(ctx, x: Tensor, recorder: Recorder, leaving: bool) -> Tensor:
        ctx.recorder, ctx.leaving = recorder, leaving
        if leaving:
            recorder.exchange("tensor", "sum", _bytes(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        if not ctx.leaving:
            ctx.recorder.exchange("tensor", "sum", _bytes(grad))
        return grad, None, None


class _Dispatched(torch.autograd.Function):
    """Tokens on their way to experts of other ranks, or back: as many arrive as leave, since the router is even."""

    @staticmethod
    def forward(ctx, x: Tensor, recorder: Recorder) -> Tensor:
        ctx.recorder = recorder
        recorder.exchange("expert", "all_to_all", _bytes(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.recorder.exchange("expert", "all_to_all", _bytes(grad))
        return grad, None


class _Shared(torch.autograd.Function):
    """Rows for experts that several ranks hold parts of: each sees the rows of all (`parts` > 1), and in the end has the sum of its own
    (`parts` < -1)."""

    @staticmethod
    def forward(ctx, rows: Tensor, parts: int, recorder: Recorder) -> Tensor:
        ctx.recorder, ctx.shape = recorder, rows.shape
        with torch._C._DisableTorchDispatch():
            out = rows.new_empty(rows.shape[0] * parts if parts > 0 else rows.shape[0] // -parts, *rows.shape[1:])
        ctx.whole = max(_bytes(rows), _bytes(out))
        recorder.exchange("expert_tensor", "all_to_all", ctx.whole)
        recorder._hold(out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.recorder.exchange("expert_tensor", "all_to_all", ctx.whole)
        return grad.new_empty(ctx.shape), None, None


class _Border(torch.autograd.Function):
    """From one region of a block into another; crossed the other way in backward."""

    @staticmethod
    def forward(ctx, rows: Tensor, recorder: Recorder, before: Region, after: Region) -> Tensor:
        ctx.recorder, ctx.before = recorder, before
        recorder.region = after
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.recorder.region = ctx.before
        return grad, None, None, None


class Away(Here):
    """Experts of several ranks: those of this one are traced, and what travels is written down."""

    def __init__(self, recorder: Recorder, layout: Layout) -> None:
        self.recorder, self.ranks, self.parts = recorder, layout.expert, layout.expert_tensor

    def plan(self, counts: Tensor, kept: int | None, dealing: Dealing | None) -> Traffic:
        assert dealing is not None, "a trace knows no scores: the router deals tokens out"
        rows = dealing.batch * dealing.seq * dealing.active
        each, left = divmod(rows * self.parts, dealing.experts // self.ranks)
        return Traffic(rows, Sizes([each + (expert < left) for expert in range(dealing.experts // self.ranks)]))

    def dispatch(self, rows: Tensor, traffic: Traffic) -> Tensor:
        return self._travel(_Border.apply(rows, self.recorder, "router", "experts"))  # pyright: ignore[reportArgumentType]

    def combine(self, rows: Tensor, traffic: Traffic) -> Tensor:
        return _Border.apply(self._travel(rows), self.recorder, "experts", "attention")  # pyright: ignore[reportReturnType]

    def run(self, experts: Experts, rows: Tensor, traffic: Traffic) -> Tensor:
        if self.parts == 1:
            return super().run(experts, rows, traffic)
        seen: Tensor = _Shared.apply(rows, self.parts, self.recorder)  # pyright: ignore[reportAssignmentType]
        out = super().run(experts, seen, traffic)
        return _Shared.apply(out, -self.parts, self.recorder)  # pyright: ignore[reportReturnType]

    def _travel(self, rows: Tensor) -> Tensor:
        return rows if self.ranks == 1 else _Dispatched.apply(rows, self.recorder)  # pyright: ignore[reportReturnType]


@contextmanager
def as_on_a_device(layout: Layout) -> Iterator[None]:
    """Kernels chosen as on an accelerator, though the tensors are on the meta device: one grouped product, and, in software that has
    them, fused rotations, and fused ways of tokens to their experts and back."""
    kept = grouped._torch_can, moe.spread, moe.collect, attention.rotate, latent.rotate
    grouped._torch_can = lambda one, other: True
    if layout.fused and layout.rotary:
        attention.rotate = latent.rotate = fused_rotate
    if layout.fused and layout.permute:
        moe.spread, moe.collect = fused_spread, fused_collect
    try:
        yield
    finally:
        grouped._torch_can, moe.spread, moe.collect, attention.rotate, latent.rotate = kept


def _note(recorder: Recorder, layout: Layout, window: int | None) -> Note:
    def note(phase: str, q: Tensor, k: Tensor, v: Tensor) -> None:
        keys, apart = k.shape[1] * layout.context, layout.ulysses
        copies = apart // gcd(apart, k.shape[2])  # so that each rank has heads of keys of its own
        heads, kv_heads = q.shape[2] // apart, k.shape[2] * copies // apart
        sizes = (q.shape[0], heads, kv_heads, q.shape[1] * apart, keys, q.shape[3], v.shape[3], window)
        recorder.cores.append(Core(recorder.phase, *sizes, again=phase == "F" and recorder.phase == "I"))
        recorder.kernels[recorder.phase] += 1 if phase == "F" else 3
        if layout.context > apart:
            recorder.exchange("context", "ring", copies * (_bytes(k) + _bytes(v)) * (1 if phase == "F" else 2))
        if apart > 1:  # queries, keys, values and output, or their gradients
            for size in (_bytes(q), copies * _bytes(k), copies * _bytes(v), _bytes(q) / q.shape[3] * v.shape[3]):
                recorder.exchange("context", "all_to_all", size)

    return note


def _note_recurrence(recorder: Recorder, mamba: MambaSpec) -> NoteRecurrence:
    """The products of section 6 of Mamba-2's paper, and the bytes that pass between its kernels: the convolution's, those of the states
    on their way from chunk to chunk, and the norm's. Backward computes the chunks' scores and states again, and twice what forward has.
    """
    channels, state, chunk = mamba.head_dim, mamba.state, mamba.chunk

    def note(phase: str, x: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        here, chunks = recorder.phase, x.shape[0] * -(-x.shape[1] // chunk)
        heads, groups = x.shape[2] // channels, b.shape[2] // state
        scores = Product(here, chunk, state, chunk, chunks * groups, weight=False)
        states = Product(here, channels, chunk, state, chunks * heads, weight=False)
        inside = Product(here, chunk, chunk, channels, chunks * heads, weight=False)
        read = Product(here, chunk, state, channels, chunks * heads, weight=False)
        forward, backward = (1, 1, 1, 1), (3, 3, 2, 2)
        for product, times in zip((scores, states, inside, read), forward if phase == "F" else backward, strict=True):
            recorder.products[product] += times
            recorder.kernels[here] += times
        held = tuple(x.new_empty(chunks, heads, channels, state, dtype=torch.float32) for _ in range(1 if phase == "F" else 2))
        once = 2 * (_bytes(x) + 2 * _bytes(b)) + 2 * _bytes(held[0]) + 3 * _bytes(x)
        recorder.moved[here] += once if phase == "F" else 3 * once
        recorder.kernels[here] += 4 if phase == "F" else 12  # convolution, sums of decays, states passed on, norm
        return held

    return note


def local(block: BlockSpec, layout: Layout) -> BlockSpec:
    """The block with the sizes a rank of the tensor axis holds of it."""
    t = layout.tensor
    attention, mamba, mlp = block.attention, block.mamba, block.mlp
    if attention is not None:
        sizes = {"heads": max(1, attention.heads // t)}
        if isinstance(attention, AttentionSpec):
            sizes |= {"kv_heads": max(1, attention.kv_heads // t)}
        attention = attention.model_copy(update=sizes)
    if mamba is not None:
        mamba = mamba.model_copy(update={"heads": mamba.heads // t, "groups": max(1, mamba.groups // t)})
    if isinstance(mlp, MlpSpec):
        mlp = mlp.model_copy(update={"hidden": mlp.hidden // t})
    elif mlp is not None:
        router = mlp.router.model_copy(update={"balanced": True, "capacity": None})
        hidden = {"hidden": mlp.hidden // layout.expert_tensor, "shared": mlp.shared // t, "router": router}
        mlp = mlp.model_copy(update=hidden)
    return block.model_copy(update={"attention": attention, "mamba": mamba, "mlp": mlp})


def trace_block(model: ModelSpec, number: int, layout: Layout) -> Profile:
    """Block `number` of the model on one rank."""
    block = model.blocks[number]
    one = model.model_copy(update={"blocks": (local(block, layout),)})
    with torch.device("meta"), _default(layout.width), as_on_a_device(layout):
        stage = _unfilled(one, 1, 2)
        recorder = Recorder(layout.width)
        module = stage.blocks["0"]
        if isinstance(here := one.blocks[0].mlp, MoeSpec):
            own = here.model_copy(update={"experts": here.experts // layout.expert})
            held = moe.Experts(model.dim, own)
            paired = PairedExperts(held) if layout.fused and own.gated else held
            module.get_submodule("mlp").experts = paired  # pyright: ignore[reportAttributeAccessIssue]
        _seams(module, block, recorder, layout)
        if layout.recompute != "none":
            _recompute(module, recorder, layout)
        return _run(stage, module, recorder, layout, model, inputs=_activation(layout, model.dim), block=block)


def _seams(module: nn.Module, block: BlockSpec, recorder: Recorder, layout: Layout) -> None:
    """Mixers as the device runs them, and what stands at the boundaries of split modules."""
    window = block.attention.window if isinstance(block.attention, AttentionSpec) else None
    _fuse_norms(module)
    recorder.merged = layout.fused
    if layout.fused and block.mlp is not None and block.mlp.gated:
        recorder.fused = FUSED
    if block.attention is not None:
        core = FusedCore(_note(recorder, layout, window)) if layout.attention == "fused" else PlainCore()
        module.get_submodule("attention").core = core  # pyright: ignore[reportAttributeAccessIssue]
    if block.mamba is not None:
        mamba = module.get_submodule("mamba")
        mamba.core = FusedMamba(mamba.get_submodule("core"), _note_recurrence(recorder, block.mamba))  # pyright: ignore[reportAttributeAccessIssue]
    if layout.tensor > 1:
        whole = {"attention": block.attention, "mamba": block.mamba, "mlp": isinstance(block.mlp, MlpSpec)}
        for name in (name for name, there in whole.items() if there):
            _split(module.get_submodule(name), recorder, layout)
    if isinstance(block.mlp, MoeSpec):
        mixture = module.get_submodule("mlp")
        assert isinstance(mixture, Moe)
        mixture.exchange = Away(recorder, layout)
        route = mixture.route
        mixture.route = lambda x, batch: route(_Border.apply(x, recorder, "attention", "router"), batch)  # pyright: ignore
        if layout.tensor > 1 and mixture.shared is not None:
            _split(mixture.shared, recorder, layout)


def _fuse_norms(module: nn.Module) -> None:
    """On the meta device torch takes an RMS norm apart into kernels of fp32; devices have one."""
    for norm in module.modules():
        if isinstance(norm, RMSNorm):
            norm.forward = lambda x, norm=norm: fused_norm(x, norm.weight)


def _recompute(module: nn.Module, recorder: Recorder, layout: Layout) -> None:
    if layout.recompute == "full":
        apply_recompute(module, 0, blocks=1, plan=Plan(recompute="full"))
        return
    names = layout.recompute.split(",")
    mlp = getattr(module, "mlp", None)
    if DENSE_MLP in names:
        names[names.index(DENSE_MLP)] = "" if isinstance(mlp, Moe) else "mlp"
    if EXPERTS_ACTIVATION in names and isinstance(mlp, Moe):
        _form_again(mlp.experts, recorder)
    if UP_PROJECTION in names and _has(module, "attention.core"):
        names += ["attention.q_up", "attention.kv_up"]
        _forget_inputs(module.get_submodule("attention.core"), recorder)
    wanted = [name for name in names if name and _has(module, name)]
    apply_recompute(module, 0, blocks=1, plan=Plan(recompute="selective", recompute_parts=tuple(wanted)))


def _forget_inputs(core: nn.Module, recorder: Recorder) -> None:
    """Queries, keys and values are not kept for attention's backward: what made them runs again."""
    once = core.forward

    def forward(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        out = once(q, k, v, batch)
        for tensor in (q, k, v):
            recorder.forget(tensor)
        return out

    core.forward = forward


def _form_again(experts: nn.Module, recorder: Recorder) -> None:
    """The product of activation and gate is not kept for the last product's weight gradients, but formed again from its factors."""
    once = experts.forward

    def forward(rows: Tensor, sizes: Sizes) -> Tensor:
        def pack(tensor: Tensor) -> tuple[Tensor, int]:
            other = recorder.is_product(tensor) or tensor.untyped_storage()._cdata == rows.untyped_storage()._cdata
            return recorder.kept(tensor), 0 if other else recorder.forget(tensor)

        def unpack(packed: tuple[Tensor, int]) -> Tensor:
            if packed[1]:
                recorder.formed_again(packed[1])
            return packed[0]

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return once(rows, sizes)

    experts.forward = forward


def _has(module: nn.Module, name: str) -> bool:
    if name in SEAMS:
        return True
    try:
        return module.get_submodule(name) is not None
    except AttributeError:
        return False


def _activation(layout: Layout, dim: int) -> tuple[int, int, int]:
    split = layout.tensor if layout.sequence else 1
    return layout.microbatch, layout.seq_len // layout.context // split, dim


class _Softmax(torch.autograd.Function):
    """The loss of all rows from their logits, which become probabilities in place: Megatron-LM's, in fp32 (`whole`: three passes), or
    one kernel each way in 16 bits."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, whole: bool) -> Tensor:
        ctx.type = logits.dtype
        kept = logits.float() if whole else logits
        if whole:
            top = kept.amax(-1, keepdim=True)
            kept = kept.sub_(top).exp_()
        ctx.save_for_backward(kept, targets)
        return kept.sum().float()

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        kept, _ = ctx.saved_tensors
        return kept.mul_(2).to(ctx.type), None, None


class LossAtOnce(nn.Module):
    """The loss of all tokens at once, as most software computes it."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: Tensor, weight: Tensor, batch: Batch, **finishing: float) -> Loss:
        assert batch.targets is not None
        logits = linear(x.flatten(0, 1), weight)
        loss = _Softmax.apply(logits, batch.targets.flatten(), self.whole)
        return Loss(loss, loss.detach())  # pyright: ignore


class Copied(nn.Module):
    """torch's own loss of the logits in fp32, which copies them at each step."""

    def forward(self, x: Tensor, weight: Tensor, batch: Batch, **finishing: float) -> Loss:
        assert batch.targets is not None
        logits = linear(x.flatten(0, 1), weight).float()
        loss = F.cross_entropy(logits, batch.targets.flatten(), reduction="sum")
        return Loss(loss, loss.detach())


def trace_head(model: ModelSpec, layout: Layout) -> Profile:
    """Final norm, output and loss on one rank; the forward also forms the gradients."""
    head = model.head.model_copy(update={"vocab": -(-model.head.vocab // layout.tensor), "tied": False, "ahead": None})
    one = model.model_copy(update={"head": head})
    with torch.device("meta"), _default(layout.width), as_on_a_device(layout):
        parts = len(model.part_names)
        stage = _unfilled(one, parts - 1, parts)
        recorder = Recorder(layout.width)
        _fuse_norms(stage.head)
        output = stage.head.output
        if layout.loss != "chunked":
            seam = Copied() if layout.loss == "copied" else LossAtOnce(layout.loss == "whole")
            output.loss = seam  # pyright: ignore[reportAttributeAccessIssue]
        if layout.tensor > 1:
            _split(output, recorder, layout)
        return _run(stage, stage.head, recorder, layout, model, inputs=_activation(layout, model.dim), block=None)


def trace_embedding(model: ModelSpec, layout: Layout) -> Profile:
    """The look-up on one rank."""
    embedding = model.embedding.model_copy(update={"vocab": -(-model.embedding.vocab // layout.tensor)})
    one = model.model_copy(update={"embedding": embedding})
    with torch.device("meta"), _default(layout.width), as_on_a_device(layout):
        stage = _unfilled(one, 0, 1)
        recorder = Recorder(layout.width)
        if layout.tensor > 1:
            size = layout.microbatch * (layout.seq_len // layout.context) * model.dim * layout.width
            recorder.exchange("tensor", "scatter" if layout.sequence else "sum", size)
            if layout.sequence:
                recorder.exchange("tensor", "gather", size, "I")
        return _run(stage, stage.embedding, recorder, layout, model, inputs=None, block=None)


class _Unfilled(TorchFunctionMode):
    """Weights are not given their first values: only their shapes count."""

    FILLS = frozenset({Tensor.normal_, Tensor.uniform_, Tensor.fill_, Tensor.zero_})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in self.FILLS else func(*args, **(kwargs or {}))


def _unfilled(model: ModelSpec, first: int, last: int) -> Stage:
    """Parts `first` up to `last` of the model."""
    with _Unfilled():
        return Stage(model, first, last)


def _default(width: int) -> AbstractContextManager[None]:
    return _Dtype(torch.bfloat16 if width == 2 else torch.float32)


class _Dtype(AbstractContextManager[None]):
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)


def _run(
    stage: Stage, module: nn.Module, recorder: Recorder, layout: Layout, model: ModelSpec,
    *, inputs: tuple[int, int, int] | None, block: BlockSpec | None,
) -> Profile:  # fmt: skip
    """Forward, backward of the input, weight gradients; then what was written down, as a profile."""
    tokens = torch.empty(layout.microbatch, layout.seq_len // layout.context, dtype=torch.long)
    x = tokens if inputs is None else torch.empty(*inputs, requires_grad=True)
    batch = stage.prepare(Batch(tokens, targets=tokens))
    recorder.know(module)
    recorder.ignore(tokens)
    recorder.ignore(x)
    for tensor in _flat(batch.rotary):
        recorder.ignore(tensor)
    queue = Queue()
    with recorder:
        with torch.autograd.graph.saved_tensors_hooks(recorder.kept, lambda tensor: tensor):
            out = module(x, batch)
        result = out.objective if isinstance(out, Loss) else out
        given = 0 if isinstance(out, Loss) else _bytes(result)
        saved = recorder.alive - given + (0 if inputs is None else _bytes(x))
        spared = recorder.spared(layout) if layout.kept < layout.width else 0.0
        grad = torch.empty_like(result)
        del out
        recorder.phase = "I"
        recorder.peak = recorder.alive
        with deferring(queue):
            torch.autograd.backward(result, grad)
        working = recorder.peak - saved
        recorder.phase = "W"
        queue.drain()
    return _profile(module, recorder, layout, saved - spared, working, given, block)


def _profile(
    module: nn.Module, recorder: Recorder, layout: Layout, saved: float, working: float, output: float, block: BlockSpec | None
) -> Profile:
    products = [replace(product, times=times) for product, times in recorder.products.items()]
    named = list(module.named_parameters())
    experts = sum(p.numel() for name, p in named if ".experts." in f".{name}")
    return Profile(
        products=tuple(products),
        cores=tuple(recorder.cores),
        exchanges=tuple(replace(exchange, times=times) for exchange, times in recorder.exchanges.items()),
        moved=recorder.moved,
        kernels=recorder.kernels,
        apart=recorder.apart,
        apart_moved=recorder.apart_moved,
        routed=recorder.routed,
        saved=float(saved),
        working=float(max(0, working)),
        weights=sum(p.numel() for _, p in named) - experts,
        expert_weights=experts,
        output=float(output),
    )
