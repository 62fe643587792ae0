"""The layout table: module class -> how the tensor axis splits it. A new model made of known parts needs no line here."""

from torch import nn

from megalith.models.attention import Attention
from megalith.models.embedding import Embedding
from megalith.models.head import Output
from megalith.models.mlp import SwiGLU
from megalith.models.norm import RMSNorm
from megalith.parallel.tensor import Split, Style, boundary, column, row, vocabulary_embedding, vocabulary_output, whole

LAYOUT: dict[type[nn.Module], dict[str, Style]] = {  # "" is the module itself
    Attention: {"": boundary, "q": column, "k": column, "v": column, "out": row},
    SwiGLU: {"": boundary, "gate": column, "up": column, "down": row},
    RMSNorm: {"": whole},
    Embedding: {"": vocabulary_embedding},
    Output: {"": vocabulary_output},
}


def split_part(part: nn.Module, split: Split) -> nn.Module:
    """Split every module of `part` that has a row in LAYOUT. Raises TypeError for parameters no row covers: never silently replicated."""
    covered: set[nn.Module] = set()
    for module in list(part.modules()):
        for child, style in LAYOUT.get(type(module), {}).items():
            target = module.get_submodule(child)
            style(target, split)
            covered.add(target)
    bare = {type(m).__name__ for m in part.modules() if m not in covered and list(m.parameters(recurse=False))}
    if bare:
        names = ", ".join(sorted(bare))
        raise TypeError(f"no row of parallel.layout.LAYOUT covers the parameters of {names}; add one, or use plan.tensor = 1")
    return part
