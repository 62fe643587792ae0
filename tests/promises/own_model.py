"""Custom model parts for tests: an attention with a gate, one without a core, a norm, and several parts with one fault each."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor as Values
from torch import nn

from megalith.models.batch import Batch
from megalith.models.block import Attention
from megalith.models.core import CausalCore
from megalith.models.linear import Linear
from megalith.models.rope import tables
from megalith.spec.parts import ModelPart, Tensor

HERE = __name__


class Gated(Attention):
    """Attention with an output gate for each head (Qiu et al. 2025, arXiv:2505.06708)."""

    def __init__(self, dim: int, spec: Any, rope_slot: int = 0) -> None:
        super().__init__(dim, spec, rope_slot)
        self.gate = Linear(dim, spec.heads * spec.head_dim)
        self.outer = Linear(spec.heads * spec.head_dim, dim, bias=True)

    def forward(self, x: Values, batch: Batch) -> Values:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        cos, sin = batch.rotary[self.rope_slot]
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        seen = self.core(q, k, v, batch).flatten(-2)
        return self.out(seen) + self.outer(seen * self.gate(x).sigmoid())


def of_gated(dim: int, spec: Any) -> Iterator[Tensor]:
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield Tensor("q.weight", (queries, dim), cut="outputs", heads=spec.heads)
    yield Tensor("k.weight", (keys, dim), cut="outputs", heads=spec.kv_heads)
    yield Tensor("v.weight", (keys, dim), cut="outputs", heads=spec.kv_heads)
    yield Tensor("out.weight", (dim, queries), cut="inputs", first="residual")
    yield Tensor("gate.weight", (queries, dim), cut="outputs", heads=spec.heads)
    yield Tensor("outer.weight", (dim, queries), cut="inputs", first="residual")
    yield Tensor("outer.bias", (dim,), first="zeros")


GATED = ModelPart("attention", f"{HERE}:Gated", of_gated, core=True)
WHOLE = ModelPart(
    "attention", f"{HERE}:Gated", lambda dim, spec: [each._replace(cut=None) for each in of_gated(dim, spec)], core=True
)


class Power(nn.Module):
    """A norm that divides by the mean of the absolute values."""

    def __init__(self, dim: int, spec: Any) -> None:
        super().__init__()
        self.eps, self.scale = spec.eps, nn.Parameter(torch.empty(dim))

    def forward(self, x: Values) -> Values:
        return x / (x.abs().mean(-1, keepdim=True) + self.eps) * self.scale


POWER = ModelPart("norm", f"{HERE}:Power", lambda dim, spec: [Tensor("scale", (dim,), first="ones")])


class Mean(nn.Module):
    """An attention without a core: each token becomes the mean of itself and all earlier tokens, across documents."""

    def __init__(self, dim: int, spec: Any, rope_slot: int = 0) -> None:
        super().__init__()
        self.value = Linear(dim, dim)

    def forward(self, x: Values, batch: Batch) -> Values:
        past = self.value(x).cumsum(1)
        return past / torch.arange(1, x.shape[1] + 1, device=x.device).unsqueeze(-1)


MEAN = ModelPart("attention", f"{HERE}:Mean", lambda dim, spec: [Tensor("value.weight", (dim, dim))])


class Shifted(Attention):
    """An attention with Megalith's core in which each token also sees the previous one outside of the core."""

    def forward(self, x: Values, batch: Batch) -> Values:
        return super().forward(x + torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1), batch)


SHIFTED = ModelPart("attention", f"{HERE}:Shifted", lambda dim, spec: list(of_gated(dim, spec))[:4])


class Counted(Attention):
    """An attention that derives positions from the length of x."""

    def forward(self, x: Values, batch: Batch) -> Values:
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        return super().forward(x, replace(batch, rotary=(tables(self.rope, self.head_dim, positions),) * len(batch.rotary)))

    def __init__(self, dim: int, spec: Any, rope_slot: int = 0) -> None:
        super().__init__(dim, spec, rope_slot)
        self.rope = spec.rope


COUNTED = SHIFTED._replace(module=f"{HERE}:Counted", core=True)


class Halving(CausalCore):
    def forward(self, q: Values, k: Values, v: Values, batch: Batch) -> Values:
        return 0.5 * super().forward(q, k, v, batch)


class Halved(Attention):
    """An attention with a core of its own."""

    def __init__(self, dim: int, spec: Any, rope_slot: int = 0) -> None:
        super().__init__(dim, spec, rope_slot)
        self.core = Halving()


HALVED = SHIFTED._replace(module=f"{HERE}:Halved", core=True)


class Named(nn.Module):
    """An attention without a core whose matrix is named `core`."""

    def __init__(self, dim: int, spec: Any, rope_slot: int = 0) -> None:
        super().__init__()
        self.core = Linear(dim, dim)

    def forward(self, x: Values, batch: Batch) -> Values:
        return self.core(x).cumsum(1)


NAMED = ModelPart("attention", f"{HERE}:Named", lambda dim, spec: [Tensor("core.weight", (dim, dim))])


class Odd(nn.Module):
    """An MLP of two matrices, with a fault that `Odd.fault` names."""

    fault = ""

    def __init__(self, dim: int, spec: Any) -> None:
        super().__init__()
        self.up, self.down = Linear(dim, spec.hidden), Linear(spec.hidden, dim)
        if self.fault == "buffer":
            self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Values, batch: Batch) -> Values:
        hidden = self.up(x)
        match self.fault:
            case "random":
                hidden = hidden * torch.rand_like(hidden)
            case "mixes":
                hidden = hidden + hidden.roll(1, dims=1)
            case "norm over a cut":
                hidden = hidden / hidden.norm(dim=-1, keepdim=True)
            case "shape":
                return hidden
            case _:
                hidden = hidden.relu()
        return self.down(hidden)


def of_odd(dim: int, spec: Any) -> list[Tensor]:
    return [
        Tensor("up.weight", (spec.hidden, dim), cut="outputs"),
        Tensor("down.weight", (dim, spec.hidden), cut="inputs", first="residual"),
    ]


ODD = ModelPart("mlp", f"{HERE}:Odd", of_odd)
SHORT = ModelPart("mlp", f"{HERE}:Odd", lambda dim, spec: of_odd(dim, spec)[:1])
CROSSED = ModelPart("mlp", f"{HERE}:Odd", lambda dim, spec: [each._replace(cut="outputs") for each in of_odd(dim, spec)])
BROKEN = ModelPart("mlp", f"{HERE}:Odd", lambda dim, spec: spec.width)
AWAY = ModelPart("mlp", "torch.nn:Linear", of_odd)
