"""Tensor and sequence parallelism (Megatron-LM: Shoeybi et al. 2019; Korthikanti et al. 2022) on local tensors.

A split module computes on its shares of the weights; collectives stand at its boundary, as pairs of conjugate functions:
what is gathered in forward is summed and scattered in backward, and the other way round.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from megalith.kernels.cross_entropy import Loss, cross_entropy
from megalith.models.batch import Batch


@dataclass(frozen=True)
class Split:
    """The tensor axis as a module's splitter sees it. `sequence`: activations between split modules are split along the sequence."""

    mesh: DeviceMesh
    sequence: bool

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()


Style = Callable[[nn.Module, Split], None]


# --- communication ---


def _gather(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Shares of `dim` (counted from the front) joined in rank order."""
    size = group.size()
    out = x.new_empty((size * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out.unflatten(0, (size, -1)).movedim(0, dim).flatten(dim, dim + 1)


def _scatter_sum(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """This rank's share of `dim` of the sum over the ranks."""
    size = group.size()
    parts = x.unflatten(dim, (size, -1)).movedim(dim, 0).contiguous().flatten(0, 1)
    out = x.new_empty((parts.shape[0] // size, *parts.shape[1:]))
    dist.reduce_scatter_tensor(out, parts, group=group)
    return out


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


class GatherSequence(torch.autograd.Function):
    """[batch, seq / n, ...] -> [batch, seq, ...]; backward sums the ranks' gradients and keeps this rank's share."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x, group, dim=1)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _scatter_sum(grad, ctx.group, dim=1), None


class ScatterSequence(torch.autograd.Function):
    """Partial sums [batch, seq, ...] -> this rank's share [batch, seq / n, ...] of the total; backward gathers."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter_sum(x, group, dim=1)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gather(grad, ctx.group, dim=1), None


class Copy(torch.autograd.Function):
    """The same on all ranks; backward sums their gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _sum(grad, ctx.group), None


class Sum(torch.autograd.Function):
    """Partial sums -> the total on all ranks; backward passes the gradient on."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


# --- weights ---


class _LocalWeights:
    """Mixed into a module whose parameters are DTensors: its own forward reads this rank's share as a plain tensor."""

    in_forward = False  # everyone else (FSDP, the optimizer, checkpoints) sees the DTensor

    def __getattr__(self, name: str):
        value = super().__getattr__(name)  # pyright: ignore[reportAttributeAccessIssue]
        return value.to_local() if self.in_forward and isinstance(value, DTensor) else value

    def forward(self, *args):
        self.in_forward = True
        try:
            return super().forward(*args)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            self.in_forward = False


_LOCAL: dict[type, type] = {}


def _split_weights(module: nn.Module, split: Split, placement: Placement) -> None:
    """Replace each parameter of `module` itself by this rank's share, as a DTensor that knows its global shape."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if isinstance(parameter, DTensor):  # tied: the same parameter was split under its other name
            continue
        full = parameter.detach()
        share = full.chunk(split.size, placement.dim)[split.rank].clone() if isinstance(placement, Shard) else full
        value = DTensor.from_local(share, split.mesh, [placement], run_check=False)
        module.register_parameter(name, nn.Parameter(value, requires_grad=parameter.requires_grad))
    kind = type(module)
    if not issubclass(kind, _LocalWeights):
        module.__class__ = _LOCAL.setdefault(kind, type(kind.__name__, (_LocalWeights, kind), {"__module__": kind.__module__}))


def column(module: nn.Module, split: Split) -> None:
    """Split the outputs of a linear layer."""
    _split_weights(module, split, Shard(0))


def row(module: nn.Module, split: Split) -> None:
    """Split the inputs of a linear layer; its outputs are partial sums, which the boundary around it adds up."""
    _split_weights(module, split, Shard(1))


def whole(module: nn.Module, split: Split) -> None:
    """Every rank holds the weight and applies it to its part of the sequence. The ranks' gradients are then partial:
    `parallel.gradients` adds them up once a step."""
    _split_weights(module, split, Replicate())


# --- boundaries ---


def enter(module: nn.Module, split: Split) -> None:
    """The module sees the whole sequence."""
    function = GatherSequence if split.sequence else Copy
    module.register_forward_pre_hook(lambda _, args: (function.apply(args[0], split.group), *args[1:]))


def leave(module: nn.Module, split: Split) -> None:
    """The module's partial sums are added up."""
    function = ScatterSequence if split.sequence else Sum
    module.register_forward_hook(lambda _, args, out: function.apply(out, split.group))


def boundary(module: nn.Module, split: Split) -> None:
    """Both sides of a module made of column and row splits."""
    enter(module, split)
    leave(module, split)


# --- vocabulary ---


class VocabularyLookup(nn.Module):
    """Rows of the part of the table this rank holds, zero for other tokens: the sum over the ranks is the embedding."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, tokens: Tensor, weight: Tensor) -> Tensor:
        here = tokens - self.rank * weight.shape[0]
        mine = (here >= 0) & (here < weight.shape[0])
        return F.embedding(here * mine, weight) * mine.unsqueeze(-1)


class VocabularyCrossEntropy(nn.Module):
    """The loss from this rank's part of the vocabulary; only row statistics are exchanged, never logits."""

    def __init__(self, split: Split) -> None:
        super().__init__()
        self.split = split

    def forward(self, x: Tensor, weight: Tensor, batch: Batch) -> Loss:
        assert batch.targets is not None
        return cross_entropy(
            x.flatten(0, 1),
            weight,
            batch.targets.flatten(),
            scale=batch.loss_scale,
            z_loss=batch.z_loss,
            offset=self.split.rank * weight.shape[0],
            reduce=self._reduce,
        )

    def _reduce(self, values: Tensor, operation: str) -> Tensor:
        dist.all_reduce(values, op={"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[operation], group=self.split.group)
        return values


def vocabulary_embedding(module: nn.Module, split: Split) -> None:
    """Split the embedding table by tokens."""
    _split_weights(module, split, Shard(0))
    module.lookup = VocabularyLookup(split.rank)
    leave(module, split)


def vocabulary_output(module: nn.Module, split: Split) -> None:
    """Split the output projection by tokens; logits, where they are asked for, are gathered whole."""
    _split_weights(module, split, Shard(0))
    module.loss = VocabularyCrossEntropy(split)
    enter(module, split)
    module.register_forward_hook(lambda _, args, out: _gather(out, split.group, dim=2) if isinstance(out, Tensor) else out)
