"""Tries a user's own model parts in a small model: their results must agree with their declarations."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith import own
from megalith.models.batch import Batch
from megalith.models.own import OwnModule, declaration
from megalith.models.stage import Stage
from megalith.parallel.tensor import Split, split_own
from megalith.spec.families.own import OwnPartsSpec
from megalith.spec.parts import PARTS

ROWS, TOKENS, RANKS = 2, 8, 2
HALF = TOKENS // 2

Call = Callable[[nn.Module, Tensor, Batch], Tensor]


def try_parts(sizes: OwnPartsSpec, *, masked: bool) -> None:
    """Build a small model of this family, and run each of the user's own parts on the CPU: the forward of each part as a whole; for an
    attention or a part with cuts, also forward and backward, both whole and split as for two tensor-parallel ranks.

    Raises own.OwnPartError if a part draws random numbers, changes the shape, uses tokens that it must not see, or gives other results with
    its declared cuts. `masked`: documents of a sequence must not see each other."""
    small: Any = sizes  # every family has `small` and `build`
    spec = small.small(layers=1, unit=RANKS, heads_unit=RANKS).build()
    try:
        with torch.device("meta"):
            stage = Stage(spec, 1, 2)
        stage.to_empty(device="cpu")
    except own.OwnPartError as error:
        raise own.OwnPartError(f"{error} (in the small model with dim = {spec.dim} in which own parts are tried)") from error
    block: Any = stage.blocks["0"]
    generator = torch.Generator().manual_seed(0)
    for module in (block.attention, block.mlp, block.attention_norm):
        if module is not None and (declared := declaration(module)) is not None:
            with torch.no_grad():
                for name, tensor in declared.tensors.items():
                    module.get_parameter(name).normal_(tensor.first == "ones", 0.3, generator=generator)
            x = torch.randn(ROWS, TOKENS, spec.dim, generator=generator)
            try:
                _try(module, declared, x, stage, masked=masked)
            except own.OwnPartError:
                raise
            except Exception as error:  # the user's own code runs
                raise own.OwnPartError(
                    f"{declared.name} fails on x of shape {list(x.shape)}: {type(error).__name__}: {error}"
                ) from error


def _try(module: nn.Module, declared: OwnModule, x: Tensor, stage: Stage, *, masked: bool) -> None:
    name, kind = declared.name, declared.kind
    call: Call = (lambda part, x, batch: part(x)) if kind == "norm" else (lambda part, x, batch: part(x, batch))
    positions = torch.arange(TOKENS).repeat(ROWS, 1)
    batch = stage.prepare(Batch(positions, positions=positions))
    with torch.no_grad():
        out = call(module, x, batch)
        if out.shape != x.shape:
            raise own.OwnPartError(
                f"{name} returns shape {list(out.shape)} for x of shape {list(x.shape)}, but must return the same shape"
            )
        if not torch.equal(out, call(module, x, batch)):
            raise own.OwnPartError(
                f"{name} gives another result when called again with the same x. Keep no state and draw no random numbers"
            )
        if kind == "attention":
            _try_sight(module, declared, x, out, batch, stage, masked=masked)
        elif not _same(out, _in_halves(module, x, positions, stage, call)):
            raise own.OwnPartError(f"{name} lets tokens see each other, but an own {kind} must process each token separately")
    if (declared.cuts or kind == "attention") and all(tensor.units % RANKS == 0 for tensor in declared.tensors.values()):
        _try_cuts(module, declared, x, batch, call)


def _try_sight(
    module: nn.Module, declared: OwnModule, x: Tensor, out: Tensor, batch: Batch, stage: Stage, *, masked: bool
) -> None:
    changed = torch.cat((x[:, :-1], x[:, -1:] + 1), dim=1)
    if not _same(out[:, :-1], module(changed, batch)[:, :-1]):
        raise own.OwnPartError(
            f"{declared.name} lets tokens see later tokens, but a token may see only itself and earlier tokens"
        )
    if masked:
        positions = torch.arange(HALF).repeat(ROWS, 2)
        two = stage.prepare(replace(batch, positions=positions, segments=((HALF, HALF),) * ROWS))
        changed = torch.cat((x[:, :HALF] + 1, x[:, HALF:]), dim=1)
        if not _same(module(x, two)[:, HALF:], module(changed, two)[:, HALF:]):
            raise own.OwnPartError(
                f"{declared.name} lets documents see each other, but data.document_mask is true. Mask by batch.segments, as self.core does"
            )
    if PARTS[declared.name].core:
        core, module.core = module.core, _Alone()
        try:
            call: Call = lambda part, x, batch: part(x, batch)  # noqa: E731
            assert batch.positions is not None
            if not _same(module(x, batch), _in_halves(module, x, batch.positions, stage, call)):
                raise own.OwnPartError(
                    f"{declared.name} declares core = True, but a token's result changes if the tokens before it are cut off, even with a "
                    "core in which each token sees only itself. Either the part counts positions itself, or it lets tokens see each other "
                    "outside self.core. Take positions from batch.positions or batch.rotary, or declare core = False"
                )
        finally:
            module.core = core


def _try_cuts(module: nn.Module, declared: OwnModule, x: Tensor, batch: Batch, call: Call) -> None:
    weight = torch.linspace(-1, 1, x.numel()).view_as(x)
    whole_x, cut_x = (x.clone().requires_grad_() for _ in range(2))
    out = call(module, whole_x, batch)
    (out * weight).sum().backward()
    copies = [deepcopy(module) for _ in range(RANKS)]
    biases = list[list[Tensor]]()
    for rank, copy in enumerate(copies):
        split = _Trial(dist.ProcessGroup(rank, RANKS), sequence=True)
        split_own(copy, declared, split)
        biases.append([layer.bias for layer in split.late.pop(copy, [])])
    total = sum((call(copy, cut_x, batch) for copy in copies), torch.zeros_like(x)) + sum(biases[0])
    if not _same(out, total):
        raise own.OwnPartError(
            f"the declared cuts of {declared.name} do not add up to the whole: with two tensor ranks, the relative error is "
            f"{_gap(out, total):.2g}. Correct `cut`. The part must take all sizes from x and its parameters. After a cut along "
            "the inputs, the part must add anything else, such as a bias, on one rank only"
        )
    (total * weight).sum().backward()
    for name, tensor in declared.tensors.items():
        gradients = [copy.get_parameter(name).grad for copy in copies]
        found = [
            torch.zeros_like(copy.get_parameter(name)) if g is None else g for copy, g in zip(copies, gradients, strict=True)
        ]
        joined = torch.stack(found).sum(0) if tensor.cut is None else torch.cat(found, ("outputs", "inputs").index(tensor.cut))
        mine = module.get_parameter(name).grad
        if mine is not None and not _same(mine, joined):
            raise own.OwnPartError(
                f"with the declared cuts, the gradient of {name} in {declared.name} has a relative error of {_gap(mine, joined):.2g}"
            )
    for copy in (module, *copies):
        copy.zero_grad()
    assert whole_x.grad is not None and cut_x.grad is not None
    if not _same(whole_x.grad, cut_x.grad):
        raise own.OwnPartError(
            f"with the declared cuts, the gradient of x in {declared.name} has a relative error of {_gap(whole_x.grad, cut_x.grad):.2g}"
        )


class _Trial(Split):
    def enter(self, x: Tensor) -> Tensor:
        return x

    def leave(self, x: Tensor) -> Tensor:
        return x


class _Alone(nn.Module):
    """An attention core in which each token sees only itself. The core's output also depends on queries and keys, which contain the
    positions."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        keys, values = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        return values + q.sum(-1, keepdim=True) + keys.sum(-1, keepdim=True)


def _in_halves(module: nn.Module, x: Tensor, positions: Tensor, stage: Stage, call: Call) -> Tensor:
    halves = zip(x.split(HALF, 1), positions.split(HALF, 1), strict=True)
    return torch.cat([call(module, part, stage.prepare(Batch(at, positions=at))) for part, at in halves], dim=1)


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max() / one.detach().abs().max().clamp(min=1e-12))


def _same(one: Tensor, other: Tensor) -> bool:
    return _gap(one, other) < 1e-4
