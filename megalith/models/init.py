"""First weights: a pure function of (seed, parameter name), so that every plan starts from the same model."""

import hashlib
import math

import torch
from torch import nn

from megalith.models.norm import RMSNorm
from megalith.models.stage import TIED
from megalith.spec.model import ModelSpec

RESIDUAL_OUTPUTS = ("attention.out.weight", "mlp.down.weight")


def seed_of(seed: int, name: str) -> int:
    """A 63-bit seed for one named thing of a run."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


@torch.no_grad()
def initialise(part: nn.Module, *, name: str, spec: ModelSpec, seed: int) -> None:
    """Fill a plain, unsplit part: norms with 1, matrices with N(0, init_std²), those that write to the residual stream with
    init_std / sqrt(2 · layers), so that its variance does not grow with depth (GPT-2, Radford et al. 2019, §2.3)."""
    scaled = spec.init_std / math.sqrt(2 * max(1, len(spec.blocks)))
    for path, module in part.named_modules():
        for child, parameter in module.named_parameters(recurse=False):
            full_name = ".".join(filter(None, (name, path, child)))
            if spec.head.tied:
                full_name = TIED.get(full_name, full_name)
            if isinstance(module, RMSNorm):
                parameter.fill_(1.0)
                continue
            generator = torch.Generator(parameter.device).manual_seed(seed_of(seed, full_name))
            std = scaled if full_name.endswith(RESIDUAL_OUTPUTS) else spec.init_std
            parameter.normal_(0.0, std, generator=generator)
