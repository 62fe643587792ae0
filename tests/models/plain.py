"""Small whole models for tests."""

from typing import Any

import torch
from torch import Tensor

from megalith.models.batch import Batch
from megalith.models.init import initialise
from megalith.models.stage import Stage
from megalith.spec.families import Model
from megalith.spec.families.llama import Llama
from tests.specs import TINY


def llama(**sizes: Any) -> Llama:
    """Return the tests' tiny Llama with other `sizes`."""
    return Llama.model_validate(TINY | sizes)


def stage(spec: Model, first: int = 0, last: int | None = None, *, seed: int = 0) -> Stage:
    """Return initialised parts of the model."""
    made = Stage(spec.build(), first, last)
    for name, part in made.parts():
        initialise(part, name=name, spec=made.spec, seed=seed)
    return made


def lively(spec: Model, *, seed: int = 0, spread: float = 0.15) -> Stage:
    """Return a whole model whose weights are so large that logits differ clearly."""
    made = stage(spec, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters_by_name().values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread + (parameter.dim() == 1))
    return made


def tokens_of(spec: Model, batch: int = 2, seq: int = 24, *, seed: int = 0) -> Tensor:
    """Return random tokens [batch, seq]."""
    return torch.randint(spec.vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))


def logits(model: Stage, tokens: Tensor, **more: Any) -> Tensor:
    """Return logits [batch, seq, vocab]."""
    out = model(tokens, Batch(tokens, **more))
    assert isinstance(out, Tensor)
    return out
