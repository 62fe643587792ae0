"""The layout table: module class -> how the tensor axis splits it. A new model made of known parts needs no line here."""

from torch import nn

from megalith.models.attention import Attention
from megalith.models.embedding import Embedding
from megalith.models.head import Ahead, Output
from megalith.models.latent import LatentAttention
from megalith.models.mamba import Mamba, MambaCore
from megalith.models.mlp import Mlp
from megalith.models.moe import Experts, Moe
from megalith.models.norm import LayerNorm, RMSNorm
from megalith.models.own import declaration
from megalith.models.router import Router
from megalith.parallel.own import split_own
from megalith.parallel.tensor import (
    Seams,
    Split,
    Style,
    apart,
    boundary,
    column,
    inner,
    overlapped,
    row,
    shared_heads,
    vocabulary_embedding,
    vocabulary_output,
    whole,
)

LAYOUT: dict[type[nn.Module], dict[str, Style]] = {  # "" is the module itself
    Attention: {
        "": boundary,
        "q": column,
        "k": shared_heads,
        "v": shared_heads,
        "out": row,
        "q_norm": inner,
        "k_norm": inner,
    },
    LatentAttention: {
        "": boundary,
        "q": column,
        "q_down": inner,
        "q_norm": inner,
        "q_up": column,
        "kv_down": inner,
        "kv_norm": inner,
        "kv_up": column,
        "out": row,
    },
    Mamba: {"": boundary, "gate": column, "x": column, "b": column, "c": column, "step": column, "out": row},
    MambaCore: {"conv_x": column, "conv_b": column, "conv_c": column, "rates": column, "norm": column},
    Mlp: {"": boundary, "gate": column, "up": column, "down": row},
    Moe: {"shared_gate": whole},
    Router: {"": whole},
    Experts: {"": apart},
    RMSNorm: {"": whole},
    LayerNorm: {"": whole},
    Ahead: {"project": whole},
    Embedding: {"": vocabulary_embedding},
    Output: {"": vocabulary_output},
}


SEAMS: dict[type[nn.Module], Seams] = {  # where the journeys at a module's boundary can hide behind its products
    Attention: Seams(("q", "k", "v"), "out"),
    LatentAttention: Seams(("q", "q_down", "kv_down"), "out"),
    Mamba: Seams(("gate", "x", "b", "c", "step"), "out"),
    Mlp: Seams(("gate", "up"), "down"),
}


def split_part(part: nn.Module, split: Split) -> nn.Module:
    """Split every module of `part` that has a row in LAYOUT; a module that is named in its owner's row is not split by its own
    row. A user's own part is split as it declares.

    Raises TypeError for parameters no row covers: never silently replicated.
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
        raise TypeError(f"no row of parallel.layout.LAYOUT covers the parameters of {names}; add one, or use plan.tensor = 1")
    return part
