"""Gradients after the last backward of a step: sums partial gradients, and computes and clips the global norm.

Each element is counted once: by the first rank that holds it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalith.fleet.observations import NUMERICS
from megalith.parallel.data import Weight, local
from megalith.parallel.groups import Groups


class NotFinite(ArithmeticError):  # noqa: N818  # it says what was found
    """A gradient or the loss is NaN or infinite; the message names the step and the parameters."""


@dataclass(frozen=True)
class SharedParameters:
    """Parameters that other ranks hold too, although their DTensors do not show it."""

    partial: tuple[str, ...]  # whole on every tensor rank, each with only a part of the gradient
    tied: tuple[str, ...]  # on the first and on the last pipeline rank


def shared(weights: Mapping[str, Weight], *, tied: Iterable[str], groups: Groups) -> SharedParameters:
    """Find the parameters. `tied`: names of parameters that both ends of the pipeline hold."""
    partial = tuple(name for name, weight in weights.items() if weight.partial and groups.mesh.tensor > 1)
    return SharedParameters(partial, tuple(name for name in tied if name in weights))


def add_up(parameters: Mapping[str, nn.Parameter], shares: SharedParameters, groups: Groups) -> None:
    """Sum the partial gradients: over the tensor ranks, and over the two ends that hold a tied embedding."""
    _sum_bucket([_grad(parameters[name]) for name in shares.partial], groups.tensor)
    _sum_bucket([_grad(parameters[name]) for name in shares.tied], groups.ends)


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return local(parameter.grad)


def _sum_bucket(grads: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sum all gradients in one all-reduce."""
    if not grads:
        return
    bucket = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(bucket, group=group)
    for grad, total in zip(grads, bucket.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def counted(parameters: Mapping[str, nn.Parameter], shares: SharedParameters, groups: Groups) -> list[str]:
    """The parameters whose share this rank counts in a sum over all ranks."""
    first_end = groups.coordinates["pipeline"] == 0
    return [name for name, p in parameters.items() if (first_end or name not in shares.tied) and _first_holder(p)]


def _first_holder(parameter: nn.Parameter) -> bool:
    """True if this is the first of the ranks that hold the same share."""
    kept = parameter
    assert isinstance(kept, DTensor)
    place = kept.device_mesh.get_coordinate()
    assert place is not None
    return all(at == 0 for at, placement in zip(place, kept.placements, strict=True) if placement.is_replicate())


LARGE = 1 << 16
"""The largest number of squares that a CPU can sum in fp32 with a relative error below 1e-6."""
ROW, ROWS = 4096, 256
"""The elements of a row into which a larger tensor is cut, and the rows that are added up at once."""


class Norms(NamedTuple):
    """Norms of the pieces of one gradient, from which its sum of squares is computed."""

    rest: Tensor
    """The norm of the whole tensor, or of the elements that do not fill a row: fp32."""
    rows: tuple[Tensor, ...] = ()
    """The norms of rows: fp32 [rows], one after another."""


def norms_of(grads: Iterable[Tensor]) -> list[Norms]:
    """Measure each gradient for `total_of`.

    A CPU adds up a whole tensor in a few fp32 accumulators, which grow until small numbers no longer change them: with 33 million numbers,
    a third of a percent is lost. So large tensors are added up row by row, and rows in fp64. A GPU's own sum already works in rows.
    """
    rests, rows = list[Tensor](), list[tuple[Tensor, ...]]()
    for share in map(local, grads):
        if share.device.type == "cpu" and share.numel() > LARGE:
            whole, rest = share.reshape(-1).split([share.numel() // ROW * ROW, share.numel() % ROW])
            cut = whole.view(-1, ROW).split(ROWS)
            rows.append(
                tuple(torch.linalg.vector_norm(some, dim=1, dtype=torch.float32) for some in cut)
            )  # a bf16 piece is copied
            rests.append(rest)
        else:
            rows.append(())
            rests.append(share)
    return [*map(Norms, torch._foreach_norm(rests, dtype=torch.float32), rows)] if rests else []


def total_of(norms: Sequence[Norms]) -> Tensor:
    """Return the sum of the squares of all gradients that were measured: an fp64 scalar, within 1e-6 of the exact one."""
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    rows = [row for each in norms for row in each.rows]
    return torch.cat([torch.stack([each.rest for each in norms]), *rows]).double().square().sum()


def sum_of_squares(grads: Iterable[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements: an fp64 scalar, within 1e-6 of the exact one."""
    return total_of(norms_of(grads))


def scale(grads: Iterable[Tensor], factor: float) -> None:
    """Multiply all gradients by `factor`."""
    if factor != 1.0 and (shares := [local(grad) for grad in grads]):
        torch._foreach_mul_(shares, factor)


def odd_elements(grad: Tensor) -> Tensor:
    """Return how many elements of this rank's share are NaN or infinite, as a scalar on the gradient's device."""
    pieces = local(grad).reshape(-1).split(ROW * ROWS)  # a mask of it all would take a quarter of its memory
    return torch.stack([piece.numel() - piece.isfinite().sum() for piece in pieces]).sum()


def not_finite_elements(
    parameters: Mapping[str, nn.Parameter],
    *,
    world: dist.ProcessGroup,
    forward: Iterable[str] = (),
    freed: Mapping[str, Tensor] | None = None,
) -> dict[str, int]:
    """Return the number of NaN or infinite elements over all ranks, for each gradient that has some. The result is in the order of backward
    if `forward` names the model's parameters in the order of forward, else by name. `freed`: the `odd_elements` of gradients that are no
    longer held. Every rank of `world` calls this together."""
    bad = {name: int(odd_elements(_grad(p))) for name, p in parameters.items() if p.grad is not None}
    bad |= {name: int(count) for name, count in (freed or {}).items()}
    everywhere: list[dict[str, int]] = [{} for _ in range(world.size())]
    dist.all_gather_object(everywhere, {name: count for name, count in bad.items() if count}, group=world)
    total: dict[str, int] = {}
    for found in everywhere:
        for name, count in found.items():
            total[name] = total.get(name, 0) + count
    place = {name: -number for number, name in enumerate(forward)}
    return {name: total[name] for name in sorted(total, key=lambda name: (place.get(name, 1), name))}


def where_not_finite(
    parameters: Mapping[str, nn.Parameter],
    *,
    world: dist.ProcessGroup,
    forward: Iterable[str] = (),
    freed: Mapping[str, Tensor] | None = None,
) -> str:
    """Name the parameters whose gradients hold NaN or infinite elements, with their number. The arguments are those of
    `not_finite_elements`."""
    total = not_finite_elements(parameters, world=world, forward=forward, freed=freed)
    worst = ", ".join(f"{name} ({count} elements)" for name, count in [*total.items()][:5])
    more = f" and {len(total) - 5} more" if len(total) > 5 else ""
    return f"gradients of {worst}{more}" if total else "no single gradient: the sum of their squares overflowed"


def not_finite(step: int, *, reason: str, where: str) -> NotFinite:
    """Return the error for step `step` + 1 if its loss or gradient norm is not finite."""
    return NotFinite(
        f"step {step + 1}: {reason}; NaN or Inf in {where}. No weight was changed. "
        f"{NUMERICS} Any checkpoint of this run is from before this step."
    )
