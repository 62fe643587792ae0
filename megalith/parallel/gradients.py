"""Gradients after the last backward of a step: sums partial gradients, and computes and clips the global norm.

In the norm, each element is counted once, by the first rank that holds the element.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalith.exchange import ObjectCollectives
from megalith.fleet.observations import NUMERICS
from megalith.parallel.data import Weight, local
from megalith.parallel.groups import Groups


class NotFinite(ArithmeticError):  # noqa: N818  # it says what was found
    """The loss or a gradient is NaN or infinite; the error's message names the step and the parameters."""


@dataclass(frozen=True)
class SharedParameters:
    """Parameters that several ranks hold although the parameters' DTensors do not show this."""

    partial: tuple[str, ...]  # whole on every tensor rank, each with only a part of the gradient
    tied: tuple[str, ...]  # on the first and on the last pipeline rank


def shared(weights: Mapping[str, Weight], *, tied: Iterable[str], groups: Groups) -> SharedParameters:
    """Find the shared parameters among `weights`. `tied`: names of the parameters that both ends of the pipeline hold."""
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
    if not grads:
        return
    bucket = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(bucket, group=group)
    for grad, total in zip(grads, bucket.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def counted(parameters: Mapping[str, nn.Parameter], shares: SharedParameters, groups: Groups) -> list[str]:
    """Return the parameters that this rank counts in a sum over all ranks, so that each share is counted once."""
    first_end = groups.coordinates["pipeline"] == 0
    return [name for name, p in parameters.items() if (first_end or name not in shares.tied) and _first_holder(p)]


def _first_holder(parameter: nn.Parameter) -> bool:
    kept = parameter
    assert isinstance(kept, DTensor)
    place = kept.device_mesh.get_coordinate()
    assert place is not None
    return all(at == 0 for at, placement in zip(place, kept.placements, strict=True) if placement.is_replicate())


LARGE = 1 << 16
"""The largest number of squares that a CPU can sum in fp32 with a relative error below 1e-6."""
ROW, ROWS = 4096, 256
"""Tensors of more than LARGE elements are cut into rows of ROW elements, and ROWS rows are summed at once."""


class Norms(NamedTuple):
    """Norms of the pieces of one gradient, from which its sum of squares is computed."""

    rest: Tensor
    """The norm of the whole tensor, or, if the tensor is cut into rows, of the elements that do not fill a row; fp32."""
    rows: tuple[Tensor, ...] = ()
    """Tensors fp32 [rows] with the norms of consecutive rows."""


def norms_of(grads: Iterable[Tensor]) -> list[Norms]:
    """Measure each gradient for `total_of`.

    A CPU sums a whole tensor in a few fp32 accumulators, which grow until small numbers no longer change them: for 33 million elements, the
    sum is 0.3 % too small. Therefore large tensors on a CPU are summed row by row, and the row sums are added in fp64. A GPU sums in rows
    by itself.
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


def norms_of_piece(piece: Tensor, before: Norms | None) -> Norms:
    """Measure the next flat piece of a large gradient, each of whose pieces but the last one has a multiple of `ROW` elements. `before`:
    the norms of the pieces before it. On a CPU, the last result is the same as that of `norms_of` for the whole gradient."""
    whole, rest = piece.split([piece.numel() // ROW * ROW, piece.numel() % ROW])
    rows = tuple(torch.linalg.vector_norm(some, dim=1, dtype=torch.float32) for some in whole.view(-1, ROW).split(ROWS))
    return Norms(torch._foreach_norm([rest], dtype=torch.float32)[0], (*(before.rows if before is not None else ()), *rows))


def total_of(norms: Sequence[Norms]) -> Tensor:
    """Return the sum of squares of all gradients, from their `norms`: an fp64 scalar, with a relative error below 1e-6."""
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    rows = [row for each in norms for row in each.rows]
    return torch.cat([torch.stack([each.rest for each in norms]), *rows]).double().square().sum()


def sum_of_squares(grads: Iterable[Tensor]) -> Tensor:
    """Return the sum of squares of all elements: an fp64 scalar, with a relative error below 1e-6."""
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
    """Return, for each gradient with NaN or infinite elements, their number over all ranks. If `forward` names the model's parameters in
    the order of forward, the result is in the order of backward; otherwise it is sorted by name. `freed`: the `odd_elements` of gradients
    that were freed. Every rank of `world` calls this together."""
    bad = {name: int(odd_elements(_grad(p))) for name, p in parameters.items() if p.grad is not None}
    bad |= {name: int(count) for name, count in (freed or {}).items()}
    everywhere = ObjectCollectives(world).all_gather({name: count for name, count in bad.items() if count}, dict[str, int])
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
    """Return a text that names the parameters whose gradients hold NaN or infinite elements, and the number of these elements. The
    arguments are those of `not_finite_elements`."""
    total = not_finite_elements(parameters, world=world, forward=forward, freed=freed)
    worst = ", ".join(f"{name} ({count} elements)" for name, count in [*total.items()][:5])
    more = f" and {len(total) - 5} more" if len(total) > 5 else ""
    return f"gradients of {worst}{more}" if total else "no single gradient (the sum of the gradients' squares overflowed)"


def not_finite(step: int, *, reason: str, where: str) -> NotFinite:
    """Return the error for step `step` + 1, whose loss or gradient norm is not finite."""
    return NotFinite(
        f"step {step + 1}: {reason}; NaN or Inf in {where}. No weight was changed. "
        f"{NUMERICS} All checkpoints of this run were saved before this step."
    )
