"""Fold a parametrization's multipliers into the weights, for other software, which has no such multipliers. The folded model
computes the same function as the original."""

from collections.abc import Callable, Mapping

from torch import Tensor

from megalith.models.init import RESIDUAL_OUTPUTS
from megalith.spec.families import Model
from megalith.spec.model import AttentionSpec, BlockSpec, ModelSpec, NormSpec

Factor = Callable[[Tensor], Tensor]


def folded(spec: Model, weights: Mapping[str, Tensor]) -> tuple[Model, Mapping[str, Tensor]]:
    """Return a spec in the standard parametrization, and weights with which it computes the same function as `spec` with `weights`.

    Three factors are folded: the logit factor into the final norm, the factor of each half of a block into that half's last
    matrix (or norm), and the factor of attention scores into the queries. In fp32, a factor that is not a power of two rounds
    each weight once.
    """
    if spec.parametrization == "standard":
        return spec, weights
    plain = spec.model_copy(update={"parametrization": "standard", "base_dim": None, "base_layers": None, "base_head_dim": None})
    factors = _factors(spec.build(), plain.build())
    return plain, {name: factors[name](tensor) if name in factors else tensor for name, tensor in weights.items()}


def _factors(model: ModelSpec, plain: ModelSpec) -> dict[str, Factor]:
    found = _of_norm("head.norm", model.head.norm, model.head.scale / plain.head.scale)
    for number, (block, usual) in enumerate(zip(model.blocks, plain.blocks, strict=True)):
        for name, factor in _of_block(block, usual).items():
            found[f"blocks.{number}.{name}"] = factor
    return found


def _of_block(block: BlockSpec, usual: BlockSpec) -> dict[str, Factor]:
    found: dict[str, Factor] = {}
    if block.residual != 1.0 and block.post_norms:
        for half in ("attention", "mlp"):
            found |= _of_norm(f"{half}_post_norm", block.norm, block.residual)
    elif block.residual != 1.0:
        found |= {name: _times(block.residual) for name in (*RESIDUAL_OUTPUTS, "attention.out.bias", "mlp.down.bias")}
    if isinstance(block.attention, AttentionSpec) and isinstance(usual.attention, AttentionSpec) and block.attention.scale:
        scores = block.attention.scale / (usual.attention.scale or usual.attention.head_dim**-0.5)
        into = ("attention.q_norm.weight",) if block.attention.qk_norm else ("attention.q.weight", "attention.q.bias")
        found |= {name: _times(scores) for name in into}
    return found


def _of_norm(name: str, norm: NormSpec, factor: float) -> dict[str, Factor]:
    scaled = (lambda weight: (1 + weight) * factor - 1) if norm.offset else _times(factor)
    return {f"{name}.weight": scaled, f"{name}.bias": _times(factor)}


def _times(factor: float) -> Factor:
    return lambda weight: weight * factor
