"""Changes to a traced part for other software than Megalith: fused kernels, recomputation, and the loss."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalith.cost.cores import PairedExperts, fused_collect, fused_norm, fused_rotate, fused_spread
from megalith.cost.profile import DENSE_MLP, Layout
from megalith.cost.recorder import Recorder
from megalith.kernels.cross_entropy import Loss
from megalith.kernels.grouped import Sizes
from megalith.kernels.kept import Packed
from megalith.kernels.multiply import Activation, Multiply
from megalith.kernels.packed import once, width_of
from megalith.models.batch import Batch
from megalith.models.block import Attention
from megalith.models.latent import LatentAttention
from megalith.models.moe import Moe
from megalith.models.norm import RMSNorm
from megalith.parallel.recompute import FORMED, SEAMS, apply_actions, apply_recompute
from megalith.spec.plan import EXPERTS_ACTIVATION, UP_PROJECTION, Action, Plan


def swap_kernels(part: nn.Module, layout: Layout) -> None:
    """Replace a part's chains of small kernels by the fused kernels of devices and of the software in `layout`."""
    for module in list(part.modules()):
        if isinstance(module, RMSNorm):  # on the meta device torch takes an RMS norm apart into kernels of fp32; devices have one
            module.forward = lambda x, norm=module: fused_norm(x, norm.weight)
        elif isinstance(module, Attention | LatentAttention) and layout.fused and layout.rotary:
            module.rotate = fused_rotate
        elif isinstance(module, Moe) and layout.fused:
            if module.experts.gate is not None:
                module.experts = PairedExperts(module.experts)  # pyright: ignore[reportAttributeAccessIssue]  # called as Experts are
            if layout.permute:
                module.permute, module.unpermute = fused_spread, fused_collect


def recompute(module: nn.Module, recorder: Recorder, layout: Layout) -> None:
    """Apply to parts of a block the actions that decide what they keep for backward."""
    recorder.rest = layout.rest
    if layout.recompute == "full":
        apply_recompute(module, 0, blocks=1, plan=Plan(recompute="full"))
        return
    names = layout.recompute.split(",")
    mlp = getattr(module, "mlp", None)
    if DENSE_MLP in names:
        names[names.index(DENSE_MLP)] = "" if isinstance(mlp, Moe) else "mlp"
    if layout.fused:  # by kernels of its own
        if EXPERTS_ACTIVATION in names and isinstance(mlp, Moe):
            _form_again(mlp.experts, recorder)
        if UP_PROJECTION in names and _has(module, "attention.core"):
            names += ["attention.q_up", "attention.kv_up"]
            _forget_inputs(module.get_submodule("attention.core"), recorder)
        names = [name for name in names if name not in (EXPERTS_ACTIVATION, UP_PROJECTION)]
    again: dict[str, Action] = {name: "recompute" for name in names if name != "none" and name and _has(module, name)}
    apply_actions(module, {**again, **dict(layout.actions)}, KeepsPacked(layout.rounded_tile, recorder))


def _forget_inputs(core: nn.Module, recorder: Recorder) -> None:
    """Do not keep queries, keys and values for attention's backward, which computes them again."""
    once = core.forward

    def forward(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        out = once(q, k, v, batch)
        for tensor in (q, k, v):
            recorder.forget(tensor)
        return out

    core.forward = forward


def _form_again(experts: nn.Module, recorder: Recorder) -> None:
    """Do not keep the product of activation and gate for weight gradients: compute it again from its factors."""
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
    if name in SEAMS or name in FORMED or name == UP_PROJECTION:
        return True
    try:
        return module.get_submodule(name) is not None
    except AttributeError:
        return False


class _Softmax(torch.autograd.Function):
    """The loss of all rows at once; logits become probabilities in place: Megatron-LM's loss in fp32 (`whole`: three passes), or a loss
    in 16 bits with one kernel in forward and one in backward."""

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

    def forward(self, x: Tensor, weight: Tensor, batch: Batch, *, multiply: Multiply, **finishing: float) -> Loss:
        assert batch.targets is not None
        logits = multiply(x.flatten(0, 1), weight)
        loss = _Softmax.apply(logits, batch.targets.flatten(), self.whole)
        return Loss(loss, loss.detach())  # pyright: ignore


class Copied(nn.Module):
    """torch's loss in fp32, which copies the logits at each operation."""

    def forward(self, x: Tensor, weight: Tensor, batch: Batch, *, multiply: Multiply, **finishing: float) -> Loss:
        assert batch.targets is not None
        logits = multiply(x.flatten(0, 1), weight).float()
        loss = F.cross_entropy(logits, batch.targets.flatten(), reduction="sum")
        return Loss(loss, loss.detach())


PACKING, UNPACKING = (108.0, 50), (40.0, 9)
"""Costs of plain operations that convert to 8 bits, and of operations that convert back: (bytes moved for each number, kernels for each
tensor)."""


class KeepsPacked(Packed):
    """Products whose inputs are kept for backward in 8 bits, with a scale in fp32 for each `tile` numbers of a row (0: for each row).
    `recorder`: the recorder of bf16 products, whose inputs are rounded only to be kept. With a recorder, the factors of the activation
    before the product are also rounded."""

    def __init__(self, tile: int, recorder: Recorder | None = None, *, inputs: bool = True, activations: bool = True) -> None:
        super().__init__(tile, inputs=inputs, activations=activations)
        self.recorder = recorder

    def for_layer(self, *, inputs: bool, activations: bool) -> Multiply:
        return KeepsPacked(self.scaling.block[1], self.recorder, inputs=inputs, activations=activations)

    def packed(self, x: Tensor) -> Tensor:
        """Return x [..., columns] in the form in which it is kept."""
        if self.recorder is not None:
            self.recorder.rounded.add(x.untyped_storage()._cdata)
        shape = x.numel() // x.shape[-1], width_of(x.shape[-1], self.scaling)
        return once(x, self.scaling, lambda: self._moving(PACKING, x.new_empty(shape, dtype=torch.uint8)))

    def unpacked(self, kept: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        """Return the numbers [rows, columns] of a kept tensor."""
        return self._moving(UNPACKING, kept.new_empty(len(kept), columns, dtype=dtype))

    def _moving(self, cost: tuple[float, int], made: Tensor) -> Tensor:
        """Record the bytes and kernels of the operations that make the tensor `made`."""
        if self.recorder is not None:
            self.recorder.moved[self.recorder.phase] += cost[0] * made.numel()
            self.recorder.kernels[self.recorder.phase] += cost[1]
        return made

    def activated(self, activation: Activation, gate: Tensor | None, up: Tensor) -> Tensor:
        if self.recorder is None:
            return Multiply.activated(self, activation, gate, up)
        return super().activated(activation, gate, up)
