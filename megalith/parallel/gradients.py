"""Gradients after the last backward of a step: partial gradients are summed, and the global norm is computed and clipped.

Which elements a rank counts follows from one rule: an element is counted by the first rank that holds it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalith.fleet.signs import NUMERICS
from megalith.parallel.data import Weight, local
from megalith.parallel.groups import Groups


class NotFinite(ArithmeticError):  # noqa: N818  # it says what was found
    """A gradient or the loss is NaN or infinite; the message names the step and the parameters."""


@dataclass(frozen=True)
class Shared:
    """Parameters that other ranks hold too, beyond what their DTensors say."""

    partial: tuple[str, ...]  # whole on every tensor rank, each with only a part of the gradient
    tied: tuple[str, ...]  # on the first and on the last pipeline rank


def shared(weights: Mapping[str, Weight], *, tied: Iterable[str], groups: Groups) -> Shared:
    """Find them. `tied`: names that both ends of the pipeline hold."""
    partial = tuple(name for name, weight in weights.items() if weight.partial and groups.mesh.tensor > 1)
    return Shared(partial, tuple(name for name in tied if name in weights))


def add_up(parameters: Mapping[str, nn.Parameter], shares: Shared, groups: Groups) -> None:
    """Sum the partial gradients: over the tensor ranks, and over the two ends that hold a tied embedding."""
    _sum_bucket([_grad(parameters[name]) for name in shares.partial], groups.tensor)
    _sum_bucket([_grad(parameters[name]) for name in shares.tied], groups.ends)


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return local(parameter.grad)


def _sum_bucket(grads: list[Tensor], group: dist.ProcessGroup) -> None:
    """One all-reduce for all of them."""
    if not grads:
        return
    bucket = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(bucket, group=group)
    for grad, total in zip(grads, bucket.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def counted(parameters: Mapping[str, nn.Parameter], shares: Shared, groups: Groups) -> list[str]:
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
"""Largest count of squares that a CPU sums in fp32 with a relative error below a millionth."""
ROW, ROWS = 4096, 256
"""Numbers in a row of a larger tensor, and rows that are added up at once."""


def sum_of_squares(grads: Iterable[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements: an fp64 scalar, within 1e-6 of the exact one.

    A CPU adds up a whole tensor in a few fp32 accumulators, which grow until they no longer take in the numbers added: of 33 million, a
    third of a percent is lost. So large tensors are added up row by row, and rows in fp64. A GPU adds up in rows anyway.
    """
    small, norms = list[Tensor](), list[Tensor]()
    for share in map(local, grads):
        if share.device.type == "cpu" and share.numel() > LARGE:
            rows, rest = share.reshape(-1).split([share.numel() // ROW * ROW, share.numel() % ROW])
            norms += [
                torch.linalg.vector_norm(some, dim=1, dtype=torch.float32)  # a copy in fp32, if the gradient is in bf16
                for some in rows.view(-1, ROW).split(ROWS)
            ]
            small.append(rest)
        else:
            small.append(share)
    if not small:
        return torch.zeros((), dtype=torch.float64)
    return torch.cat([torch.stack(torch._foreach_norm(small, dtype=torch.float32)), *norms]).double().square().sum()


def scale(grads: Iterable[Tensor], factor: float) -> None:
    """Multiply all gradients by `factor`."""
    if factor != 1.0:
        torch._foreach_mul_([local(grad) for grad in grads], factor)


def not_finite_elements(
    parameters: Mapping[str, nn.Parameter], *, world: dist.ProcessGroup, forward: Iterable[str] = ()
) -> dict[str, int]:
    """Return the number of NaN or infinite elements over all ranks, for each gradient that has some. They come in the order of
    backward if `forward` names the model's parameters in the order of forward, else by name. Every rank of `world` calls this
    together."""
    bad = {name: int((~_grad(p).isfinite()).sum()) for name, p in parameters.items() if p.grad is not None}
    everywhere: list[dict[str, int]] = [{} for _ in range(world.size())]
    dist.all_gather_object(everywhere, {name: count for name, count in bad.items() if count}, group=world)
    total: dict[str, int] = {}
    for found in everywhere:
        for name, count in found.items():
            total[name] = total.get(name, 0) + count
    place = {name: -number for number, name in enumerate(forward)}
    return {name: total[name] for name in sorted(total, key=lambda name: (place.get(name, 1), name))}


def where_not_finite(parameters: Mapping[str, nn.Parameter], *, world: dist.ProcessGroup, forward: Iterable[str] = ()) -> str:
    """Name the parameters whose gradients hold NaN or infinite elements, and how many. Arguments as of `not_finite_elements`."""
    total = not_finite_elements(parameters, world=world, forward=forward)
    worst = ", ".join(f"{name} ({count} elements)" for name, count in [*total.items()][:5])
    more = f" and {len(total) - 5} more" if len(total) > 5 else ""
    return f"gradients of {worst}{more}" if total else "no single gradient: the sum of their squares overflowed"


def not_finite(step: int, *, reason: str, where: str) -> NotFinite:
    """The error for the step after step `step` if its loss or gradient norm is not finite."""
    return NotFinite(
        f"step {step + 1}: {reason}; NaN or Inf in {where}. No weight was changed. "
        f"{NUMERICS} Any checkpoint of this run is from before this step."
    )
