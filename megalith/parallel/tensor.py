"""Tensor and sequence parallelism (Megatron-LM: Shoeybi et al. 2019; Korthikanti et al. 2022) on local tensors.

A split module computes with its rank's shares of the weights. Collectives happen at the module's boundary, as pairs of conjugate functions:
the backward of a gather is a reduce-scatter, and vice versa. The table `LAYOUT` gives, for each class of module, how the tensor axis splits
it. A new model that consists of known modules needs no new row in `LAYOUT`.
"""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.utils.weak import WeakTensorKeyDictionary

from megalith.kernels.cross_entropy import Loss, Terms, TokenLoss, cross_entropy
from megalith.kernels.multiply import Multiply
from megalith.kernels.tiled import Table, look_up, tiled_cross_entropy
from megalith.models.alibi import Alibi
from megalith.models.batch import Batch
from megalith.models.block import Attention
from megalith.models.embedding import Embedding
from megalith.models.head import MtpModule, Output
from megalith.models.latent import LatentAttention
from megalith.models.linear import Linear
from megalith.models.mamba import Mamba, MambaCore
from megalith.models.mlp import Mlp
from megalith.models.moe import Experts, Moe
from megalith.models.norm import LayerNorm, RMSNorm
from megalith.models.own import OwnModule, declaration
from megalith.models.router import Router
from megalith.parallel.conjugate import conjugates
from megalith.parallel.overlap import OverlappedForward, Pieces


@dataclass
class Split:
    """The tensor axis, and how each parameter is placed on it.

    `sequence`: outside split modules, activations are split along the sequence. `placed`: the placement of each parameter on the axis.
    `partial`: the parameters of whose gradient each rank computes only one term.
    """

    group: dist.ProcessGroup
    sequence: bool
    placed: dict[nn.Parameter, Placement] = field(default_factory=dict)
    partial: set[nn.Parameter] = field(default_factory=set)
    shares: MutableMapping[Tensor, nn.Parameter] = field(
        default_factory=WeakTensorKeyDictionary
    )  # by the whole parameters they are of, for as long as another name still has one
    late: dict[nn.Module, list[Linear]] = field(default_factory=dict)  # whose biases are added after a module's partial sums
    pieces: int = 1  # in which activations are sent, while others are multiplied

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    # All communication of a split module goes through the methods below, so that a trace can record it instead.

    def enter(self, x: Tensor) -> Tensor:
        """Return the input [batch, seq, ...] of a split module: x gathered along the sequence or, without `sequence`, x itself.
        Differentiable."""
        return (gather_sequence if self.sequence else copy)(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Sum x [batch, seq, ...] over the ranks; return this rank's share of the sequence or, without `sequence`, the whole sum.
        Differentiable."""
        return (scatter_sequence if self.sequence else add_up)(x, self.group)

    def reduce(self, values: Tensor, operation: str) -> Tensor:
        """Combine `values` of all ranks in place; `operation` is "sum" or "max". Not differentiable."""
        dist.all_reduce(values, op={"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[operation], group=self.group)
        return values


Style = Callable[[nn.Module, Split, nn.Module], None]
"""A function (module, split, owner) that splits `module`, which is a child of `owner` or `owner` itself."""


# --- communication ---


def gather(x: Tensor, group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    """Join the ranks' shares along `dim` (counted from the front) in rank order."""
    size = group.size()
    out = x.new_empty((size * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out.unflatten(0, (size, -1)).movedim(0, dim).flatten(dim, dim + 1)


def _scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = group.size()
    parts = x.unflatten(1, (size, -1)).movedim(1, 0).contiguous().flatten(0, 1)
    out = x.new_empty((parts.shape[0] // size, *parts.shape[1:]))
    dist.reduce_scatter_tensor(out, parts, group=group)
    return out


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


gather_sequence, scatter_sequence = conjugates(gather, _scatter_sum)
"""`gather_sequence` gathers [batch, seq / n, ...] to [batch, seq, ...]. `scatter_sequence` sums [batch, seq, ...] over the ranks and
returns this rank's share [batch, seq / n, ...]."""

copy, add_up = conjugates(lambda x, group: x.view_as(x), _sum)
"""`copy` returns its input, which is the same on all ranks, and its backward sums the gradients over the ranks. `add_up` sums its input
over the ranks, and its backward returns the gradient, which is the same on all ranks."""


# --- weights ---


def share(module: nn.Module, name: str, split: Split, dim: int) -> None:
    """Replace a parameter of `module` itself by this rank's part along `dim`."""
    parameter = module.get_parameter(name)
    if parameter in split.placed:  # tied: the same parameter was split under its other name
        return
    if parameter in split.shares:  # the same, and this name still has the whole one
        module.register_parameter(name, split.shares[parameter])
        return
    part = parameter.detach().chunk(split.size, dim)[split.rank].clone(memory_format=torch.contiguous_format)
    share = nn.Parameter(part, requires_grad=parameter.requires_grad)
    module.register_parameter(name, share)
    split.shares[parameter] = share
    split.placed[share] = Shard(dim)


def column(module: nn.Module, split: Split, owner: nn.Module) -> None:
    """Split the outputs of a linear layer."""
    for name in _own(module):
        share(module, name, split, dim=0)


def row(module: nn.Module, split: Split, owner: nn.Module) -> None:
    """Split the inputs of a linear layer, so that its outputs are partial sums. The boundary of `owner` adds up the partial sums of all
    ranks, and then adds the layer's bias."""
    assert isinstance(module, Linear)
    share(module, "weight", split, dim=1)
    if module.bias is not None:
        replicated(module, split, owner)
        split.late.setdefault(owner, []).append(module)
        module.adds_bias = False


def replicated(module: nn.Module, split: Split, owner: nn.Module) -> None:
    """Keep the whole weight on every rank and apply it outside split modules. With `sequence`, each rank applies the weight only to its
    part of the sequence, so `parallel.gradients` sums the ranks' gradients once a step."""
    for name in _own(module):
        parameter = module.get_parameter(name)
        if parameter not in split.placed:
            _replicate(parameter, split, partial=split.sequence)


def replicated_inside(module: nn.Module, split: Split, owner: nn.Module) -> None:
    """Keep the whole weight on every rank and apply it inside a split module: to the whole sequence, but only for this rank's heads."""
    for name in _own(module):
        _replicate(module.get_parameter(name), split, partial=True)


def shared_heads(module: nn.Module, split: Split, owner: nn.Module) -> None:
    """Split keys or values by heads. If there are fewer key or value heads than ranks, every rank holds all of these heads and computes the
    one that its queries need."""
    assert isinstance(module, Linear) and isinstance(owner, Attention)
    heads, channels = module.out_features // owner.head_dim, owner.head_dim
    if heads % split.size == 0:
        column(module, split, owner)
        return
    replicated_inside(module, split, owner)
    first = split.rank * heads // split.size * channels
    module.rows = slice(first, first + channels)


def own_heads(module: nn.Module, split: Split, owner: nn.Module) -> None:
    """Restrict the attention biases (`Alibi`), which have no parameters, to this rank's heads."""
    assert isinstance(module, Alibi)
    module.count = module.heads // split.size
    module.first = split.rank * module.count


def separate_mesh(module: nn.Module, split: Split, owner: nn.Module) -> None:
    """Do nothing: `parallel.expert` places the module's weights on a mesh of their own."""


def _replicate(parameter: nn.Parameter, split: Split, *, partial: bool) -> None:
    split.placed[parameter] = Replicate()
    if partial:
        split.partial.add(parameter)


def _own(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(recurse=False)]


# --- boundaries ---


def enter(module: nn.Module, split: Split, owner: nn.Module) -> None:
    """Gather the module's input, so that the module gets whole sequences."""
    module.register_forward_pre_hook(lambda _, args: (split.enter(args[0]), *args[1:]))


def leave(module: nn.Module, split: Split, owner: nn.Module) -> None:
    """Sum the module's output over the ranks, and then add the biases of the module's row-split layers."""

    def hook(_: nn.Module, args: tuple, out: Tensor) -> Tensor:
        return _with_late(module, split, split.leave(out))

    module.register_forward_hook(hook)


def _with_late(module: nn.Module, split: Split, out: Tensor) -> Tensor:
    for layer in split.late.get(module, ()):
        out = out + layer.bias
    return out


def boundary(module: nn.Module, split: Split, owner: nn.Module) -> None:
    """Apply `enter` and `leave` to a module that has column-split and row-split layers."""
    enter(module, split, owner)
    leave(module, split, owner)


@dataclass(frozen=True)
class Seams:
    """The names of the layers that read a module's input, and of the layer that computes the module's output."""

    first: tuple[str, ...]
    last: str


def overlapped(module: nn.Module, split: Split, seams: Seams) -> None:
    """Give the module a boundary whose exchanges overlap the module's first and last products. The module's layers must already be
    split."""
    first = [layer for name in seams.first if isinstance(layer := getattr(module, name, None), Linear)]
    last = getattr(module, seams.last)
    pieces = Pieces(split.group, split.sequence, split.pieces)
    module.forward = OverlappedForward(module, pieces, first=first, last=last, after=partial(_with_late, module, split))


# --- vocabulary ---


class VocabularyLookup(nn.Module):
    """Looks up tokens in this rank's part of the embedding table, with zeros for all other tokens. The sum over the ranks is the
    embedding."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, tokens: Tensor, weight: Tensor, table: Table | None = None) -> Tensor:
        here = tokens - self.rank * weight.shape[0]
        if table is not None:
            return look_up(here, weight, table)
        mine = (here >= 0) & (here < weight.shape[0])
        return F.embedding(here * mine, weight) * mine.unsqueeze(-1)


class VocabularyCrossEntropy(nn.Module):
    """Computes the loss from this rank's part of the vocabulary. Ranks exchange only statistics of each row, and no logits, unless the
    user's own loss per token, `of_token`, needs whole rows of logits."""

    of_token: TokenLoss | None = None

    def __init__(self, split: Split) -> None:
        super().__init__()
        self.split = split

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        batch: Batch,
        *,
        multiply: Multiply,
        table: Table | None = None,
        **finishing: float,
    ) -> Loss:
        assert batch.targets is not None
        how: dict[str, Any] = {"multiply": multiply, "offset": self.split.rank * weight.shape[0], "reduce": self.split.reduce}
        how |= {"scale": batch.loss_scale, "z_loss": batch.z_loss, "gradient_scale": batch.gradient_scale, **finishing}
        tokens, targets = x.flatten(0, 1), batch.targets.flatten()
        if table is not None:
            return tiled_cross_entropy(tokens, weight, table, targets, Terms(**how))
        gathered = partial(gather, group=self.split.group, dim=1)
        return cross_entropy(tokens, weight, targets, of_token=self.of_token, gather=gathered, **how)


def vocabulary_embedding(module: nn.Module, split: Split, owner: nn.Module) -> None:
    """Split the embedding tables by their rows."""
    for name in _own(module):  # the tokens' table, and that of learned positions if there is one
        share(module, name, split, dim=0)
    module.lookup = VocabularyLookup(split.rank)
    module.position_lookup = VocabularyLookup(split.rank)
    module.join = split.leave  # pyright: ignore[reportArgumentType]


def vocabulary_output(module: nn.Module, split: Split, owner: nn.Module) -> None:
    """Split the output projection by vocabulary. If the caller needs logits, they are gathered over the ranks."""
    share(module, "weight", split, dim=0)
    module.loss = VocabularyCrossEntropy(split)
    enter(module, split, owner)
    module.register_forward_hook(lambda _, args, out: gather(out, split.group, dim=2) if isinstance(out, Tensor) else out)


# --- a user's own part ---


def split_own(module: nn.Module, declared: OwnModule, split: Split) -> None:
    """Split a user's own part as its row declares it (`spec.parts`): keep this rank's shares of split parameters, inside a boundary that
    adds up the outputs of the ranks. Other parameters are replicated. A norm, or an MLP without split parameters, works on activations
    outside split modules. If an attention has no split parameters, every rank computes all of it, and contributes its output divided by the
    number of ranks."""
    if declared.kind == "norm" or (declared.kind == "mlp" and not declared.cuts):
        for name in declared.tensors:
            _replicate(module.get_parameter(name), split, partial=split.sequence)
        return
    for name, tensor in declared.tensors.items():
        path, _, child = name.rpartition(".")
        owner = module.get_submodule(path)
        if isinstance(owner, Linear) and declared.tensors[f"{path}.weight"].cut == "inputs":
            if child == "weight":  # its bias is added once, after the sum
                row(owner, split, module)
        elif tensor.cut is None:
            _replicate(owner.get_parameter(child), split, partial=True)
        else:
            share(owner, child, split, dim=("outputs", "inputs").index(tensor.cut))
    if not declared.cuts:
        module.register_forward_hook(partial(_portion, split.size))
    boundary(module, split, module)


def _portion(ranks: int, _: nn.Module, args: tuple[object, ...], out: Tensor) -> Tensor:
    return out / ranks


# --- the table ---


LAYOUT: dict[type[nn.Module], dict[str, Style]] = {  # "" is the module itself
    Attention: {
        "": boundary,
        "q": column,
        "k": shared_heads,
        "v": shared_heads,
        "out": row,
        "q_norm": replicated_inside,
        "k_norm": replicated_inside,
        "alibi": own_heads,
    },
    LatentAttention: {
        "": boundary,
        "q": column,
        "q_down": replicated_inside,
        "q_norm": replicated_inside,
        "q_up": column,
        "kv_down": replicated_inside,
        "kv_norm": replicated_inside,
        "kv_up": column,
        "out": row,
    },
    Mamba: {"": boundary, "gate": column, "x": column, "b": column, "c": column, "step": column, "out": row},
    MambaCore: {"conv_x": column, "conv_b": column, "conv_c": column, "rates": column, "norm": column},
    Mlp: {"": boundary, "gate": column, "up": column, "down": row},
    Moe: {"shared_gate": replicated},
    Router: {"": replicated},
    Experts: {"": separate_mesh},
    RMSNorm: {"": replicated},
    LayerNorm: {"": replicated},
    MtpModule: {"project": replicated},
    Embedding: {"": vocabulary_embedding},
    Output: {"": vocabulary_output},
}


SEAMS: dict[type[nn.Module], Seams] = {  # where the transfers at a module's boundary can hide behind its products
    Attention: Seams(("q", "k", "v"), "out"),
    LatentAttention: Seams(("q", "q_down", "kv_down"), "out"),
    Mamba: Seams(("gate", "x", "b", "c", "step"), "out"),
    Mlp: Seams(("gate", "up"), "down"),
}


def split_part(part: nn.Module, split: Split) -> nn.Module:
    """Split every module of `part` that has a row in LAYOUT. A module that the row of its owner names is split by that row, not by its own
    row. A user's own part is split as it declares.

    Raises TypeError for parameters that no row covers, instead of replicating them silently.
    """
    covered: set[nn.Module] = set()
    for module in list(part.modules()):
        if module not in covered and (declared := declaration(module)) is not None:
            split_own(module, declared, split)
            covered |= set(module.modules())
            continue
        hides = split.pieces > 1 and type(module) in SEAMS and module not in covered
        for child, style in LAYOUT.get(type(module), {}).items():
            target = getattr(module, child, None) if child else module
            if isinstance(target, nn.Module) and target not in covered:
                if not (hides and style is boundary):
                    style(target, split, module)
                covered.add(target)
        if hides:
            overlapped(module, split, SEAMS[type(module)])
    bare = {type(m).__name__ for m in part.modules() if m not in covered and list(m.parameters(recurse=False))}
    if bare:
        names = ", ".join(sorted(bare))
        raise TypeError(f"no row of parallel.tensor.LAYOUT covers the parameters of {names}; add a row, or use plan.tensor = 1")
    return part
