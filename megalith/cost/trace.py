"""Trace of parts of a model: the trainer's own modules run forward and backward on the meta device.

Nothing is computed: the trace needs only shapes. A trace counts the operations that reach the dispatcher, the collectives at the
boundaries of split modules, and the live storages. The bytes that a recomputation policy keeps are therefore measured, not
derived from its name.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megalith.cost.cores import FusedCore, FusedMamba, NoteRecurrence, PlainCore
from megalith.cost.exchanges import ByHeads, core_note, split
from megalith.cost.other_software import Copied, KeepsPacked, LossAtOnce, recompute, swap_kernels
from megalith.cost.profile import Layout, MultipliedWeight, Product, Profile
from megalith.cost.recorder import FUSED, Recorder, bytes_of, leaves
from megalith.kernels.cross_entropy import Loss
from megalith.kernels.deferred import Queue, deferring
from megalith.kernels.permute import Order
from megalith.kernels.tiled import ResidentTable
from megalith.models.batch import Batch
from megalith.models.core import CausalCore
from megalith.models.embedding import Lookup
from megalith.models.stage import Stage
from megalith.parallel.expert import SPLITS
from megalith.spec.model import AttentionSpec, BlockSpec, MambaSpec, ModelSpec, MoeSpec


def _note_recurrence(recorder: Recorder, mamba: MambaSpec) -> NoteRecurrence:
    """Record the products of section 6 of Mamba-2's paper, and the bytes that its kernels write for each other: of the convolution, of
    the states that pass from chunk to chunk, and of the norm. Backward recomputes the chunks' scores and states, and computes twice the
    products of forward.
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
        once = 2 * (bytes_of(x) + 2 * bytes_of(b)) + 2 * bytes_of(held[0]) + 3 * bytes_of(x)
        recorder.moved[here] += once if phase == "F" else 3 * once
        recorder.kernels[here] += 4 if phase == "F" else 12  # convolution, sums of decays, states passed on, norm
        return held

    return note


def trace_block(model: ModelSpec, number: int, layout: Layout) -> Profile:
    """Trace block `number` of the model on one rank."""
    block = model.blocks[number]
    one = model.model_copy(update={"blocks": (block,)})
    with torch.device("meta"), _default(layout.width):
        stage = _unfilled(one, 1, 2)
        recorder = Recorder(layout.width)
        module = stage.blocks["0"]
        split(module, recorder, layout)
        for layer in layout.packed:
            rounded = recorder if layout.packed_activations else None
            module.get_submodule(layer).multiply = KeepsPacked(layout.packed_tile, rounded)
        _swap_mixers(module, block, recorder, layout)
        swap_kernels(module, layout)
        recompute(module, recorder, layout)
        if layout.weighs_away and "mlp.experts" in layout.recompute.split(",") and isinstance(block.mlp, MoeSpec):
            _forget_results(module.get_submodule("mlp"), recorder)
        recorder.merged, recorder.rides = layout.fused, layout.regather
        if layout.fused and block.mlp is not None and block.mlp.gated:
            recorder.fused = FUSED
        return _run(stage, module, recorder, layout, model, inputs=_activation(layout, model.dim), block=block)


def _swap_mixers(module: nn.Module, block: BlockSpec, recorder: Recorder, layout: Layout) -> None:
    """Replace attention and Mamba-2 by stand-ins for the device's kernels."""
    window = block.attention.window if isinstance(block.attention, AttentionSpec) else None
    # a user's own may have none, or another one; of whichever attention this is, the device runs it as one kernel
    if block.attention is not None and type(getattr(module.attention, "core", None)) is CausalCore:
        core = FusedCore(core_note(recorder, layout, window)) if layout.attention == "fused" else PlainCore()
        if layout.ulysses > 1:
            core = ByHeads(core, recorder, layout.ulysses)
        module.get_submodule("attention").core = core  # pyright: ignore[reportAttributeAccessIssue]
    if block.mamba is not None:
        mamba = module.get_submodule("mamba")
        mamba.core = FusedMamba(mamba.get_submodule("core"), _note_recurrence(recorder, block.mamba))  # pyright: ignore[reportAttributeAccessIssue]


def _forget_results(moe: Any, recorder: Recorder) -> None:
    """Do not keep the experts' results that came back: the experts' ranks compute the routing weights' gradients instead."""
    once = moe.unpermute

    def unpermute(rows: Tensor, weights: Tensor, order: Order) -> Tensor:
        out = once(rows, weights, order)
        recorder.forget(rows)
        return out

    moe.unpermute = unpermute


def _activation(layout: Layout, dim: int) -> tuple[int, int, int]:
    split = layout.tensor if layout.sequence else 1
    return layout.microbatch, layout.seq_len // layout.context // split, dim


def trace_head(model: ModelSpec, layout: Layout) -> Profile:
    """Trace final norm, output and loss on one rank. With a chunked loss, the forward also computes the gradients."""
    one = model.model_copy(update={"head": model.head.model_copy(update={"tied": False, "ahead": None})})
    with torch.device("meta"), _default(layout.width):
        parts = len(model.part_names)
        stage = _unfilled(one, parts - 1, parts)
        recorder = Recorder(layout.width)
        split(stage.head, recorder, layout)
        swap_kernels(stage.head, layout)
        if layout.tile:
            stage.head.output.table = _Dropped(stage.head.output.weight, layout.tile)
        if layout.loss != "chunked":
            stage.head.output.loss = Copied() if layout.loss == "copied" else LossAtOnce(layout.loss == "whole")  # pyright: ignore[reportAttributeAccessIssue]
        return _run(stage, stage.head, recorder, layout, model, inputs=_activation(layout, model.dim), block=None)


def trace_embedding(model: ModelSpec, layout: Layout) -> Profile:
    """Trace the embedding's look-up on one rank."""
    with torch.device("meta"), _default(layout.width):
        stage = _unfilled(model, 0, 1)
        recorder = Recorder(layout.width)
        embedding = stage.embedding
        positions = embedding.positions
        split(embedding, recorder, layout)
        if layout.regather:  # with Megatron-LM every tensor rank holds the whole table
            embedding.positions, embedding.position_lookup = positions, Lookup()
        if layout.cut:
            embedding.table = _Dropped(embedding.weight, layout.tile)
        return _run(stage, embedding, recorder, layout, model, inputs=None, block=None)


class _Dropped(ResidentTable):
    """A table whose gradient is not counted: `memory_timeline` counts gradients of weights."""

    def give(self, rows: range, gradient: Tensor) -> None:
        """Drop the gradient of a tile."""


class _Unfilled(TorchFunctionMode):
    """Weights are not initialised, because only their shapes count."""

    FILLS = frozenset({Tensor.normal_, Tensor.uniform_, Tensor.fill_, Tensor.zero_})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in self.FILLS else func(*args, **(kwargs or {}))


def _unfilled(model: ModelSpec, first: int, last: int) -> Stage:
    """Build parts `first` to `last - 1` of the model, with weights that are not initialised."""
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


class _AtOnce(list[tuple[Tensor, Callable[[], Tensor]]]):
    """The queue of a backward that defers no weight gradients: each one is computed when it is added."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder, self.weights = recorder, set[int]()

    def append(self, item: tuple[Tensor, Callable[[], Tensor]]) -> None:
        weight, gradient = item
        before, self.recorder.phase = self.recorder.phase, "W"
        made = gradient()
        if id(weight) not in self.weights:  # else it is added to the first
            self.recorder.form(made)
        self.weights.add(id(weight))
        self.recorder.phase = before


def _run(
    stage: Stage, module: nn.Module, recorder: Recorder, layout: Layout, model: ModelSpec,
    *, inputs: tuple[int, int, int] | None, block: BlockSpec | None,
) -> Profile:  # fmt: skip
    """Run forward, input gradients and weight gradients, and return the recorded operations as a profile."""
    tokens = torch.empty(layout.microbatch, layout.seq_len // layout.context, dtype=torch.long)
    x = tokens if inputs is None else torch.empty(*inputs, requires_grad=True)
    batch = stage.prepare(Batch(tokens, targets=tokens))
    recorder.know(module)
    recorder.ignore(tokens)
    recorder.ignore(x)
    for tensor in leaves(batch.rotary):
        recorder.ignore(tensor)
    at_once = layout.defers == "none" and block is not None
    queue = Queue(recomputed=layout.defers != "others", waiting=_AtOnce(recorder) if at_once else [])
    with recorder:
        with torch.autograd.graph.saved_tensors_hooks(recorder.kept, lambda tensor: tensor):
            out = module(x, batch)
        result = out.objective if isinstance(out, Loss) else out
        given = 0 if isinstance(out, Loss) else bytes_of(result)
        saved = recorder.alive - given + (bytes_of(x) if inputs is not None and recorder.keeps(x) else 0)
        spared = recorder.spared(layout) if layout.kept < layout.width else 0.0
        disk = recorder.packed_bytes(x, "disk")
        held = recorder.packed_bytes(x, "host") + disk - spared
        grad, chunked = torch.empty_like(result), layout.loss == "chunked" and isinstance(out, Loss)
        del out
        recorder.phase = "I"
        if not chunked:  # chunks of logits come and go in the forward
            recorder.begin()
        with deferring(queue):
            torch.autograd.backward(result, grad)
        working, beside, formed = recorder.peak - saved, recorder.alive_then - saved, recorder.formed_then
        x.grad = None
        entered = x.untyped_storage()._cdata, 0 if inputs is None else bytes_of(x)
        del result, grad, x
        deferred = recorder.alive - sum(bytes_of(p.grad) for p in module.parameters() if p.grad is not None)
        deferred += entered[1] * recorder.lives(entered[0])
        recorder.phase = "W"
        queue.run_all()
    profile = _profile(module, recorder, layout, saved - spared, working, given, block)
    leaving = {"leaves": float(max(0, held)), "leaves_for_disk": float(disk)}
    return replace(profile, deferred=float(deferred), formed=float(formed), beside=float(max(0, beside)), **leaving)


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
        tensors=len(named),
        multiplied=tuple(_multiplied(module)),
    )


def _multiplied(module: nn.Module) -> Iterator[MultipliedWeight]:
    """Yield the weights that a part's layers multiply, as they are split."""
    for path, layer in module.named_modules():
        if hasattr(layer, "multiply"):
            named = ((name, weight) for name, weight in layer.named_parameters(recurse=False) if weight.dim() > 1)
            for name, weight in named:
                yield MultipliedWeight(path, tuple(weight.shape), SPLITS[name][1] if weight.dim() > 2 else 0)
