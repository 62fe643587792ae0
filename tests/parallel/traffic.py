"""Records messages between ranks, call by call."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalith.mesh import EXPERTS, STATE, WORK, Mesh

NAMES = {
    "c10d::_allgather_base_": "gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::send": "send",
    "c10d::recv_": "receive",
}
LEAVES: Mapping[str, Callable[[int], Fraction]] = {  # the least share of the largest tensor that each of n ranks sends
    "gather": lambda n: 1 - Fraction(1, n),
    "reduce_scatter": lambda n: 1 - Fraction(1, n),
    "all_reduce": lambda n: 2 - Fraction(2, n),  # a reduce-scatter and a gather
    "send": lambda n: Fraction(1),
    "receive": lambda n: Fraction(0),
}


@dataclass(frozen=True)
class Call:
    """One collective or message among `ranks`. `elements`: size of the largest tensor, for a gather or reduce-scatter the whole one.
    `sent`: bytes that leave this rank."""

    name: str
    elements: int
    dtype: torch.dtype
    ranks: tuple[int, ...]
    sent: Fraction


@dataclass(eq=False)
class Traffic(TorchDispatchMode):
    """Records all calls of this rank."""

    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls.append(_call(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def of(self, name: str, *dtypes: torch.dtype) -> list[Call]:
        """Return the calls of one name with dtypes of weights and gradients (step totals are sent in fp64 and int64)."""
        return [call for call in self.calls if call.name == name and call.dtype in (dtypes or (torch.float32, torch.bfloat16))]


def _call(func: Any, args: Any, kwargs: Any) -> Call:
    given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    largest = max((leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)), key=Tensor.numel)
    ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(given["process_group"])))
    name = NAMES.get(func._schema.name, func._schema.name)
    if name == "all_to_all":
        sent = Fraction(_rows_for_others(given, ranks) * given["input"].element_size())
    else:
        sent = LEAVES[name](len(ranks)) * largest.numel() * largest.element_size() if name in LEAVES else Fraction(0)
    return Call(name, largest.numel(), largest.dtype, ranks, sent)


def _rows_for_others(given: Mapping[str, Any], ranks: tuple[int, ...]) -> int:
    """Return the number of elements of an all-to-all's input that leave this rank."""
    rows = given["input"]
    sizes = given["input_split_sizes"] or [rows.shape[0] // len(ranks)] * len(ranks)
    staying = sizes[ranks.index(dist.get_rank())]
    return rows.numel() - rows[:staying].numel()


def axis_of(ranks: tuple[int, ...], mesh: Mesh, rank: int) -> str:
    """Return the axis along which the ranks of a group differ: an axis of work, otherwise of the dense state, otherwise of the experts.
    If they are only every n-th rank of an axis, add the step: "context by 2"."""
    views = (
        ("", WORK, mesh.coordinates),
        ("state ", STATE, mesh.state_coordinates),
        ("experts ", EXPERTS, mesh.expert_coordinates),
    )
    for view, axes, coordinates in views:
        here = coordinates(rank)
        for chosen in (chosen for n in range(len(axes) + 1) for chosen in combinations(axes, n)):
            rest = [axis for axis in axes if axis not in chosen]
            alike = [r for r in range(mesh.ranks) if all(coordinates(r)[axis] == here[axis] for axis in rest)]
            if sorted(ranks) == alike:
                return view + " x ".join(chosen)
    places = [mesh.coordinates(r) for r in ranks]
    (axis,) = (axis for axis in WORK if len({place[axis] for place in places}) > 1)
    (by,) = {other[axis] - place[axis] for place, other in pairwise(places)}
    return f"{axis} by {by}"


def bytes_by_axis(calls: list[Call], mesh: Mesh, rank: int) -> dict[tuple[str, str], Fraction]:
    """Return (axis, name of the call) -> bytes that this rank sends."""
    found: Counter[tuple[str, str]] = Counter()
    for call in calls:
        found[axis_of(call.ranks, mesh, rank), call.name] += call.sent  # pyright: ignore[reportArgumentType]  # fractions add up too
    return {key: Fraction(value) for key, value in found.items()}
