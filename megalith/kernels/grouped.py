"""Products of consecutive groups of rows with one matrix per group, which a mixture's experts compute without padding or dropping
(MegaBlocks, Gale et al. 2022, arXiv:2211.15841)."""

from collections.abc import Sequence
from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from megalith.kernels.product import defined_product, product

ALIGNMENT = 16  # bytes that the strides of torch's grouped product are multiples of


class Sizes:
    """The number of rows of each group, in order, on the host or only on the device. If the numbers are only on the device, code
    that reads `host` waits for the device."""

    def __init__(self, counts: Tensor | Sequence[int]) -> None:
        self._counts = counts if isinstance(counts, Tensor) else tuple(counts)
        self._read: list[tuple[int, ...]] = []  # the numbers on the host, once they are there, for all copies
        self.tokens: Tensor | None = None
        """int64 [rows]: the number of the token in each row; products that round stochastically need it."""
        self.weight = ""
        """The name of the weight that holds the groups' matrices, which such products need too"""

    @property
    def host(self) -> tuple[int, ...]:
        if not self._read:
            self._read.append(tuple(self._counts.tolist()) if isinstance(self._counts, Tensor) else self._counts)
        return self._read[0]

    def of(self, weight: str) -> "Sizes":
        """Return these sizes for products with the weight of this name."""
        found = copy(self)
        found.weight = weight
        return found

    def spread(self, numbers: Sequence[int], rows: Tensor) -> Tensor:
        """Return, for each of the rows, the number of its group, int64."""
        counts = self._counts if isinstance(self._counts, Tensor) else torch.tensor(self._counts, device=rows.device)
        return torch.tensor(numbers, device=rows.device).repeat_interleave(counts, output_size=len(rows))

    def __len__(self) -> int:
        return len(self._counts)

    def ends(self, device: torch.device) -> Tensor:
        """Return the end of each group, as the number of the row after its last row, int32."""
        counts = self._counts if isinstance(self._counts, Tensor) else torch.tensor(self._counts, device=device)
        return counts.cumsum(0).to(torch.int32)


def filled(sizes: Sizes, unit: int, *tensors: Tensor) -> tuple[Sizes, list[Tensor]]:
    """Return tensors [rows, ...] in which each group's rows are filled up with zeros to a multiple of `unit`, and their sizes. The
    new rows have numbers that no token has, and that differ from step to step like those of tokens."""
    missing = [-rows % unit for rows in sizes.host]
    wider = Sizes([rows + more for rows, more in zip(sizes.host, missing, strict=True)]).of(sizes.weight)

    def fill(x: Tensor) -> Tensor:
        parts = zip(x.split(sizes.host), missing, strict=True)
        return torch.cat([piece for part, more in parts for piece in (part, x.new_zeros(more, *x.shape[1:]))])

    if sizes.tokens is not None:
        parts = zip(sizes.tokens.split(sizes.host), missing, strict=True)
        new = ((part, ~(part[-1:] + torch.arange(more, device=part.device))) for part, more in parts)
        wider.tokens = torch.cat([piece for pair in new for piece in pair])
    return wider, [fill(x) for x in tensors]


def grouped_plain(x: Tensor, weight: Tensor, sizes: Sizes) -> Tensor:
    """The plain definition: x [rows, in], weight [groups, out, in] -> [rows, out]. The rows of group g are multiplied by
    weight[g]ᵀ."""
    parts = [F.linear(rows, matrix) for rows, matrix in zip(x.split(sizes.host), weight, strict=True)]
    return torch.cat(parts)


def grouped_products(x: Tensor, matrices: Tensor, sizes: Sizes, *, defined: bool = False) -> Tensor:
    """Multiply each group's rows by its matrix: x [rows, a], matrices [groups, a, b] -> [rows, b]. One launch is enough if
    torch's grouped product can be used.

    `sizes` must add up to the rows of x, because torch's product leaves rows after the last group uninitialised. `defined`: each product is
    a `defined_product`, of fp32 factors.
    """
    if _torch_can(x, matrices):
        return F.grouped_mm(x, matrices, offs=sizes.ends(x.device))
    out = x.new_empty(x.shape[0], matrices.shape[2])
    first = 0
    for rows, matrix in zip(sizes.host, matrices, strict=True):
        part = slice(first, first + rows)
        if rows and defined:
            out[part] = defined_product(x[part], matrix)
        elif rows:  # a product of no rows is a call all the same
            product(x[part], matrix, out=out[part])
        first += rows
    assert first == x.shape[0], (first, x.shape)
    return out


def grouped_outer_products(one: Tensor, other: Tensor, sizes: Sizes) -> Tensor:
    """Return one[g]ᵀ other[g] for the rows of each group g: one [rows, a], other [rows, b] -> [groups, a, b]. The result is zero
    for a group without rows."""
    if _torch_can(one, other):
        return F.grouped_mm(one.T, other, offs=sizes.ends(one.device))
    out = one.new_empty(len(sizes.host), one.shape[1], other.shape[1])
    first = 0
    for rows, here in zip(sizes.host, out, strict=True):
        if rows:
            product(one[first : first + rows].T, other[first : first + rows], out=here)
        else:
            here.zero_()
        first += rows
    return out


def _torch_can(one: Tensor, other: Tensor) -> bool:
    """True if torch's grouped product is used: on the meta device, and on a GPU for aligned bf16, where it takes one launch. On a
    CPU torch's grouped product is a loop that is slower than ours."""
    if one.device.type == "meta":
        return True
    sizes = (*one.shape[1:], *other.shape[1:])
    return one.is_cuda and one.dtype == torch.bfloat16 and all(n * one.element_size() % ALIGNMENT == 0 for n in sizes)
