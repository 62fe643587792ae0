"""First weights: a pure function of (seed, parameter name), so that every plan starts from the same model."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalith.models.mamba import CausalConv, GatedNorm, Rates
from megalith.models.moe import Experts
from megalith.models.norm import LayerNorm, RMSNorm
from megalith.models.own import declaration
from megalith.models.router import Router
from megalith.spec.model import ModelSpec
from megalith.spec.parts import First
from megalith.spec.sizes import tied_names

RESIDUAL_OUTPUTS = ("attention.out.weight", "mamba.out.weight", "mlp.down.weight", "mlp.experts.down", "mlp.shared.down.weight")


def seed_of(seed: int, name: str) -> int:
    """Return the 63-bit seed of one random stream of a run: that of a parameter, sample or step with this `name`."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class HeldExperts:
    """The experts of one layer that a rank holds: consecutive experts, beginning with number `first`. Each matrix is cut into `parts` equal
    parts along `dim`, and the rank holds part number `part`."""

    first: int
    dim: int = 0
    part: int = 0
    parts: int = 1


@torch.no_grad()
def initialise(
    part: nn.Module, *, name: str, spec: ModelSpec, seed: int, held: Mapping[nn.Parameter, HeldExperts] | None = None
) -> None:
    """Set the first values of a part that is not split yet: a factor of 1 in norms, 0 in biases and buffers, N(0, init_std²) in matrices.
    Matrices that write to the residual stream use init_std / sqrt(2 · layers), so that its variance does not grow with depth (GPT-2,
    Radford et al. 2019, §2.3). `spec.families.parametrization` may scale these standard deviations. The other parameters of Mamba-2 start
    as in its authors' code (RATES). A user's own part declares its own first values. Each expert is drawn separately, so a rank draws only
    the experts in `held`."""
    tied, declared = tied_names(spec), dict[str, First]()
    for path, module in part.named_modules():
        if (own := declaration(module)) is not None:
            declared |= {f"{path}.{each}": tensor.first for each, tensor in own.tensors.items()}
        for child, parameter in module.named_parameters(recurse=False):
            full_name = ".".join(filter(None, (name, path, child)))
            full_name = tied.get(full_name, full_name)
            if (first := declared.get(f"{path}.{child}")) is not None:
                _fill(parameter, full_name, first, spec=spec, seed=seed)
            elif child == "bias":
                parameter.zero_()
            elif isinstance(module, Rates):
                parameter.copy_(RATES[child](_uniform(parameter, full_name, seed=seed)))
            elif isinstance(module, CausalConv):
                parameter.copy_((2 * _uniform(parameter, full_name, seed=seed) - 1) / math.sqrt(parameter.shape[1]))
            elif isinstance(module, RMSNorm | LayerNorm | GatedNorm):
                parameter.fill_(0.0 if isinstance(module, RMSNorm | LayerNorm) and module.offset else 1.0)
            elif isinstance(module, Experts):
                here = (held or {}).get(parameter, HeldExperts(0))
                for number, matrix in enumerate(parameter, here.first):
                    _draw_part(matrix, here, f"{full_name}.{number}", spread=_spread(full_name, spec), seed=seed)
            else:
                _draw(parameter, full_name, spread=_spread(full_name, spec), seed=seed)
        if isinstance(module, Router):
            for buffer in module.buffers(recurse=False):
                buffer.zero_()


def _fill(parameter: Tensor, name: str, first: First, *, spec: ModelSpec, seed: int) -> None:
    if first in ("ones", "zeros"):
        parameter.fill_(float(first == "ones"))
    else:
        _draw(parameter, name, spread=_hidden(spec, residual=first == "residual"), seed=seed)


def _step(drawn: Tensor) -> Tensor:
    """Return the inverse softplus of step sizes between 0.001 and 0.1 whose logarithms are evenly distributed."""
    sizes = torch.exp(math.log(0.001) + drawn * math.log(100))
    return sizes + torch.log(-torch.expm1(-sizes))


RATES: dict[str, Callable[[Tensor], Tensor]] = {
    "decay": lambda drawn: torch.log(1 + 15 * drawn),
    "step": _step,
    "skip": torch.ones_like,
}
"""Functions that turn random numbers from [0, 1) into the first values of `Rates`, as in mamba_ssm/modules/mamba2.py: decay rates lie
between 1 and 16, and `skip` is 1, so that the whole input also bypasses the state."""


def _uniform(like: Tensor, name: str, *, seed: int) -> Tensor:
    return torch.empty_like(like).uniform_(generator=torch.Generator(like.device).manual_seed(seed_of(seed, name)))


def _draw(weight: Tensor, name: str, *, spread: float, seed: int) -> None:
    weight.normal_(0.0, spread, generator=torch.Generator(weight.device).manual_seed(seed_of(seed, name)))


def _draw_part(matrix: Tensor, held: HeldExperts, name: str, *, spread: float, seed: int) -> None:
    sizes = list(matrix.shape)
    sizes[held.dim] *= held.parts
    whole = matrix if held.parts == 1 else matrix.new_empty(sizes)
    _draw(whole, name, spread=spread, seed=seed)
    if whole is not matrix:
        matrix.copy_(whole.chunk(held.parts, held.dim)[held.part])


def _spread(name: str, spec: ModelSpec) -> float:
    if name == "embedding.weight":
        return spec.embedding.init_std or spec.init_std
    if name == "head.output.weight" or name.startswith("embedding."):
        return spec.init_std
    return _hidden(spec, residual=name.endswith(RESIDUAL_OUTPUTS))


def _hidden(spec: ModelSpec, *, residual: bool) -> float:
    """Standard deviation of a matrix inside a block. `residual`: the matrix writes to the residual stream."""
    std = spec.init_std / math.sqrt(spec.scaling.width) if spec.scaling.width != 1.0 else spec.init_std
    layers = spec.scaling.base_layers or len(spec.blocks)  # else a factor on each block's output makes up for depth
    return std / math.sqrt(2 * max(1, layers)) if residual else std
