"""Recipes for products whose factors are in formats of 8 or 4 bits. By definition of these formats, each 128 numbers of the inner dim
give one partial sum in fp32, and these are added up in fp32 (`kernels.product.defined_product`). NVFP4's scales and fp32 scales are not
powers of two: a CPU computes their products by the definition, and rounds them once; a GPU chooses the order of fp32 sums. If scales are
powers of two, bf16 represents each scaled number exactly, and the product is a bf16 product of rounded factors: the definition up to
the order of fp32 sums. Each factor is rounded along the dim over which its product sums. A product of rounded factors is no faster than
one in bf16: it only computes the numbers that hardware with few bits would compute. `kernels.scaled` multiplies in 8 bits.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from megalith.kernels.draws import key_of, tokens_at_work, uniform
from megalith.kernels.elements import E4M3, ELEMENTS, Element
from megalith.kernels.grouped import Sizes, filled, grouped_products
from megalith.kernels.hadamard import rotated
from megalith.kernels.multiply import Multiply
from megalith.kernels.packed import once, pack, unpack
from megalith.kernels.product import defined_product
from megalith.kernels.quantise import ALL, Scale, Scaling, Share, narrowed
from megalith.kernels.scaled import Factor, multiplies, scaled_product
from megalith.spec.numbers import PrecisionSpec

SLAB = 1 << 18
"""The number of elements that are rounded at once: so few that their fp32 copies stay in a processor's cache, and so many that the
calls themselves take little of the time."""


def in_slabs(x: Tensor, scaling: Scaling, draws: Tensor | None = None, lost: Tensor | None = None) -> Tensor:
    """Return `narrowed(x, scaling)`, computed some rows at a time: x and draws [..., rows, columns]. The result has the dtype of
    x if scales are powers of two, else fp32. `lost` as in `narrowed`."""
    if x.device.type != "cpu":
        return narrowed(x, scaling, draws=draws, lost=lost)
    height, columns = scaling.block[0], x.shape[-1]
    matrices = x.flatten(0, -2)[None] if height == 1 else x[None].flatten(0, -3)
    dtype = x.dtype if scaling.exact else torch.float32
    out = torch.empty_like(matrices, dtype=dtype, memory_format=torch.contiguous_format)
    rows = max(1, SLAB // (max(columns, 1) * height)) * height
    drawn = [None] * len(out) if draws is None else draws.view(matrices.shape)
    for matrix, rounded, random in zip(matrices, out, drawn, strict=True):
        for first in range(0, matrix.shape[0], rows):
            part = slice(first, first + rows)
            rounded[part] = narrowed(matrix[part], scaling, draws=None if random is None else random[part], lost=lost)
    return out.view(x.shape)


TOKENS, INPUTS, OUTPUTS = "tokens", "inputs", "outputs"
"""Names of the dims that a factor of a product can have."""
FACTORS = {(TOKENS, INPUTS): "inputs", (OUTPUTS, INPUTS): "weight", (TOKENS, OUTPUTS): "gradients of outputs"}
"""The tensors of a layer that are factors of products, by their dims."""
HISTORY = "multiply.history"
"""Name, within a layer, of the buffer of maxima that a recipe with delayed scaling has."""


class Blocks(NamedTuple):
    """How many rows and columns of each factor share a scale."""

    along: tuple[int, int]
    """Block of activations and gradients, in products that sum over their columns"""
    down: tuple[int, int]
    """Block of activations and gradients, in products that sum over their rows, which are tokens"""
    weight_along: tuple[int, int]
    weight_down: tuple[int, int]


class Narrow(Multiply, ABC):
    """A product whose factors are rounded to few bits. A subclass decides which numbers of a factor share a scale."""

    tile: ClassVar[int] = 0
    element: ClassVar[Element] = E4M3
    scale: ClassVar[Scale | None] = None
    """None: the run's `precision.scale` chooses the scale."""
    stochastic: ClassVar[bool] = False
    """True if, unless the run chooses, gradients are rounded stochastically, and factors of weight gradients are rotated before."""
    history: Tensor | None
    """fp32 [factors, steps]: the largest numbers of each factor in the last steps, newest first; None: scales follow the current
    numbers."""
    latest: Tensor | None
    """fp32 [factors]: the largest numbers of each factor in this step so far, on this rank"""

    def __init__(self, choices: PrecisionSpec | None = None) -> None:
        super().__init__()
        self.choices = choices = choices or PrecisionSpec()
        size = choices.tile or self.tile
        scale, blocks = self.scale or _SCALES[choices.scale], self.blocks(size)
        gradients = ELEMENTS[choices.gradients] if self.element is E4M3 else self.element
        late = choices.history > 0
        self.along, self.down = (Scaling(self.element, block, scale, late) for block in (blocks.along, blocks.down))
        self.gradient_along, self.gradient_down = replace(self.along, element=gradients), replace(self.down, element=gradients)
        self.weight_along, self.weight_down = (
            Scaling(self.element, block, scale, late) for block in (blocks.weight_along, blocks.weight_down)
        )
        self.codes = choices.multiply == "codes"
        """True if factors are multiplied in 8 bits on devices that can do so."""
        self.draws = choices.rounding == "stochastic"
        self.rotation = size if choices.hadamard else 0
        """Number of tokens that are rotated together before a weight gradient's factors are rounded; 0: no rotation."""
        self.shares: dict[str, Share] = {}
        """For each dim that is split over ranks, the function that takes maxima over these ranks."""
        self.layer = ""
        """The layer's name in the model."""
        self.first_output = 0
        """Index of the layer's first output that this rank computes."""
        self.first_expert = 0
        """Number of the layer's first expert that this rank holds, if the layer has experts"""
        self.partial = False
        """True if this rank's gradient of the outputs is only a partial sum."""
        self.microbatch = ALL
        """The number of tokens over which one maximum is taken, if several microbatches are multiplied at once."""
        self.register_buffer("history", None)
        self.register_buffer("latest", None, persistent=False)

    @classmethod
    def of(cls, choices: PrecisionSpec) -> Self:
        rounding = choices.rounding or ("stochastic" if cls.stochastic else "nearest")
        hadamard = cls.stochastic if choices.hadamard is None else choices.hadamard
        return cls(choices.model_copy(update={"rounding": rounding, "hadamard": hadamard}))

    def remember(self, steps: int, device: torch.device) -> None:
        """Switch to delayed scaling: each scale follows the largest number of its tensor in the last `steps` steps (Micikevicius
        et al. 2022, arXiv:2209.05433, section 4.2; Transformer Engine's `DelayedScaling`)."""
        self.history = torch.zeros(len(FACTORS), steps, device=device)
        self.latest = torch.zeros(len(FACTORS), device=device)

    def take_in(self, largest: Tensor) -> None:
        """After a step, record the largest number of each factor [factors] over all its microbatches and all ranks."""
        assert self.history is not None and self.latest is not None
        self.history.copy_(torch.cat((largest[:, None], self.history[:, :-1]), 1))
        self.latest.zero_()

    def followed(self) -> dict[str, "TrackedMaxima"]:
        """Return the maxima that the next step's scales will follow, by layer and factor. Gradients that are partial sums on a
        rank are left out, and so are factors that no product rounds."""
        assert self.history is not None
        largest = zip(FACTORS.items(), self.history.amax(1).tolist(), strict=True)
        return {
            f"{self.layer}, {name}, of earlier steps": TrackedMaxima(value, value, 1, whole=True)
            for (dims, name), value in largest
            if value and not (self.partial and dims == (TOKENS, OUTPUTS))
        }

    @classmethod
    @abstractmethod
    def blocks(cls, tile: int) -> Blocks:
        """Return the blocks of numbers that share a scale."""

    def fprop(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, sizes: Sizes | None = None) -> Tensor:
        if self.choices.forward == "wide" or self._wide:
            return super().fprop(x, weight, bias, sizes=sizes)
        if self.codes and sizes is None:
            factors = self._factor(x, self.along, TOKENS, INPUTS), self._factor(weight, self.weight_along, OUTPUTS, INPUTS)
            if (out := self._in_codes(*factors)) is not None:
                out = out.view(*x.shape[:-1], -1)
                return out if bias is None else out + bias
        return self._product(self._inputs(x, sizes), weight, bias, sizes).to(x.dtype)

    def keeping(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, sizes: Sizes | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.choices.kept == "wide" or self._wide:
            return super().keeping(x, weight, bias, sizes=sizes)
        rows, scaling = self._inputs(x, sizes), self.kept_as
        kept = once(x, scaling, lambda: pack(rows.reshape(-1, rows.shape[-1]), scaling))
        if self.choices.forward == "wide":  # only the gradient of the weight has rounded inputs
            return super().fprop(x, weight, bias, sizes=sizes), kept
        return self._product(rows, weight, bias, sizes).to(x.dtype), kept

    def restored(self, kept: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
        if kept.dtype != torch.uint8:  # products were wide
            return super().restored(kept, inputs, dtype)
        return unpack(kept, inputs, self.kept_as, dtype)

    @property
    def kept_as(self) -> Scaling:
        """The format in which rounded inputs are kept for backward without a further error: their own format, but with a scale
        for each row of a block, from that row's largest number."""
        return replace(self.along, block=(1, self.along.block[1]), scale="up", saturates=False)

    def _inputs(self, x: Tensor, sizes: Sizes | None) -> Tensor:
        return self._tokens(x, self.along, INPUTS, grouped=sizes is not None)

    def _product(self, rows: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes | None) -> Tensor:
        weight = self._weight(weight, self.weight_along)
        if self.along.exact:
            return super().fprop(rows, weight, bias, sizes=sizes)
        out = _defined(rows, weight.mT, sizes)
        return out if bias is None else out.add_(bias.float())

    def dgrad(self, grad: Tensor, weight: Tensor, *, sizes: Sizes | None = None, out: Tensor | None = None) -> Tensor:
        if self.choices.input_gradient == "wide" or self._wide:
            return super().dgrad(grad, weight, sizes=sizes, out=out)
        if self.codes and sizes is None and not self.draws:
            factors = (
                self._factor(grad, self.gradient_along, TOKENS, OUTPUTS),
                self._factor(weight, self.weight_down, OUTPUTS, INPUTS, down=True),
            )
            if (of_x := self._in_codes(*factors)) is not None:
                return of_x.view(*grad.shape[:-1], -1) if out is None else out.copy_(of_x)
        draws = self._draws(grad, "of inputs", sizes)
        rows = self._tokens(grad, self.gradient_along, OUTPUTS, grouped=sizes is not None, draws=draws)
        weight = self._weight(weight, self.weight_down)
        if self.gradient_along.exact:
            return super().dgrad(rows, weight, sizes=sizes, out=out)
        of_x = _defined(rows, weight, sizes).to(grad.dtype)
        return of_x if out is None else out.copy_(of_x)

    def wgrad(self, grad: Tensor, x: Tensor, *, sizes: Sizes | None = None) -> Tensor:
        """gradᵀ x, the gradient of the weight, as in `Multiply`. By default, weight gradients of experts are computed in high
        precision, because the plan determines which of their tokens share a block."""
        choice = self.choices.weight_gradient if sizes is None else self.choices.expert_weight_gradient
        if choice == "wide" or self._wide:
            return super().wgrad(grad, x, sizes=sizes)
        if sizes is not None:
            return self._wgrad_of_experts(grad, x, sizes)
        if self.codes and not self.draws and not self.rotation:
            factors = (
                self._factor(*each, down=True)
                for each in ((grad, self.gradient_down, TOKENS, OUTPUTS), (x, self.down, TOKENS, INPUTS))
            )
            if (of_weight := self._in_codes(*factors)) is not None:
                return of_weight
        dtype, draws = grad.dtype, self._draws(grad, "of weights")
        if self.rotation:
            grad, x = rotated(grad, self.rotation), rotated(x, self.rotation)
        grad, x = self._tokens(grad, self.gradient_down, OUTPUTS, draws=draws), self._tokens(x, self.down, INPUTS)
        if not self.down.exact:
            return defined_product(grad.T, x).to(dtype)
        return super().wgrad(grad.to(dtype), x.to(dtype))  # what was rotated in fp32 is rounded to numbers of bf16

    def _wgrad_of_experts(self, grad: Tensor, x: Tensor, sizes: Sizes) -> Tensor:
        """gradᵀ x for each expert. Only rows of the same expert share a scale or are rotated together. An expert's last tile may be
        short; before a rotation it is filled up with zeros."""
        dtype = grad.dtype
        if self.rotation:
            sizes, (grad, x) = filled(sizes, self.rotation, grad, x)
            grad, x = rotated(grad, self.rotation), rotated(x, self.rotation)
        grad = self._apart(grad, self.gradient_down, sizes, self._draws(grad, "of weights", sizes))
        x = self._apart(x, self.down, sizes)
        if not self.down.exact:
            out = grad.new_empty(len(sizes), grad.shape[1], x.shape[1], dtype=dtype)
            for matrix, of_results, rows in zip(out, grad.split(sizes.host), x.split(sizes.host), strict=True):
                matrix.copy_(defined_product(of_results.T, rows))
            return out
        return super().wgrad(grad.to(dtype), x.to(dtype), sizes=sizes)

    def _apart(self, x: Tensor, scaling: Scaling, sizes: Sizes, draws: Tensor | None = None) -> Tensor:
        """Round the rows of each expert on their own."""
        lost, rounds = self._lost(x), narrowed if _spans(scaling) else in_slabs
        each = draws.split(sizes.host) if draws is not None else [None] * len(sizes.host)
        parts = zip(x.split(sizes.host), each, strict=True)
        return torch.cat([rounds(rows, scaling, draws=drawn, lost=lost) for rows, drawn in parts])

    def _factor(self, x: Tensor, scaling: Scaling, rows: str, columns: str, *, down: bool = False) -> Factor:
        share = self._share(scaling, rows, columns, whole=scaling.whole) if _spans(scaling) else None
        return Factor(x.reshape(-1, x.shape[-1]), scaling, share, down)

    def _in_codes(self, a: Factor, b: Factor) -> Tensor | None:
        """Return the product of two factors in the dtype of the first. Return None if the device has no product for such factors,
        or if losses by rounding must be counted."""
        apart = self.microbatch != ALL and any(ALL in each.scaling.block for each in (a, b))
        if _counts is not None or apart or not multiplies(a, b):
            return None
        return scaled_product(a, b, a.numbers.dtype)

    @property
    def part(self) -> str:
        """The part of the model to which the layer belongs, such as `blocks.3`."""
        return ".".join(self.layer.split(".", 2)[:2])

    @property
    def _wide(self) -> bool:
        work = tokens_at_work()
        if work is None:
            return False
        # A compiler that sees no name here compiles blocks once, not each.
        return work.wide or bool(work.raised and self.part in work.raised)

    @property
    def dispatched_as(self) -> Scaling | None:
        if self.choices.dispatch == "wide" or self._wide:
            return None
        return replace(self.along, block=(1, self.along.block[1]))  # tokens of experts share no scale

    @property
    def gradients_dispatched_as(self) -> Scaling | None:
        if self.choices.combine_gradients == "wide" or self._wide:
            return None
        return replace(self.gradient_along, block=(1, self.gradient_along.block[1]))  # as tokens: none share a scale

    @property
    def gathered_as(self) -> Scaling | None:
        return None if self.choices.gather == "wide" or self._wide else self.weight_along

    def _draws(self, grad: Tensor, product: str, sizes: Sizes | None = None) -> Tensor | None:
        """Return a random draw for each element of the gradient of outputs [..., outputs], or None if gradients are rounded to
        nearest.

        Raises RuntimeError if `kernels.draws.working_on` has not set the tokens.
        """
        if not self.draws:
            return None
        work = tokens_at_work()
        numbers = work and (work.numbers if sizes is None else sizes.tokens)
        if numbers is None:
            raise RuntimeError(
                f"{self.layer or 'a layer'} rounds gradients stochastically, but the current tokens are not set: "
                "run forward and backward inside kernels.draws.working_on"
            )
        outputs = range(self.first_output, self.first_output + grad.shape[-1])
        if sizes is None:
            return uniform(key_of(f"{self.layer}, {product}"), numbers, outputs).view(grad.shape)
        # each matrix of each expert has draws of its own, or the errors of a token's gradients would add up
        experts = range(self.first_expert, self.first_expert + len(sizes))
        keys = [key_of(f"{self.layer}.{sizes.weight}.{expert}, {product}") for expert in experts]
        return uniform(sizes.spread(keys, numbers), numbers, outputs)

    def _tokens(
        self, x: Tensor, scaling: Scaling, channels: str, *, grouped: bool = False, draws: Tensor | None = None
    ) -> Tensor:
        """Round activations or gradients x [..., channels]. Tokens of experts (`grouped`) do not share a scale with each other."""
        if grouped and scaling.block[0] == ALL:
            scaling = replace(scaling, block=(1, scaling.block[1]))
        if not _spans(scaling):
            return in_slabs(x, scaling, draws, self._lost(x))
        rows = x.reshape(-1, x.shape[-1])
        if grouped and scaling.scale == "e4m3":
            rows = rows.unsqueeze(1)  # each token is a matrix with a scale of its own
        elif scaling.block[0] != 1 or scaling.scale == "e4m3":
            rows = rows if self.microbatch == ALL else rows.unflatten(0, (-1, self.microbatch))
        share = self._share(scaling, TOKENS, channels, whole=scaling.whole and not grouped)
        draws = None if draws is None else draws.view(rows.shape)
        return narrowed(rows, scaling, share=share, draws=draws, lost=self._lost(x)).view(x.shape)

    def _weight(self, weight: Tensor, scaling: Scaling) -> Tensor:
        if not _spans(scaling):
            return in_slabs(weight, scaling, lost=self._lost(weight))
        share = self._share(scaling, OUTPUTS, INPUTS, whole=scaling.whole)
        return narrowed(weight, scaling, share=share, lost=self._lost(weight))

    def _lost(self, x: Tensor) -> Tensor | None:
        """Return the counts of rounding losses for the layer's part, on the device of x; None if losses are not being counted."""
        if _counts is None:
            return None
        if self.part not in _counts:
            _counts[self.part] = torch.zeros(3, dtype=torch.int64, device=x.device)
        return _counts[self.part]

    def _share(self, scaling: Scaling, rows: str, columns: str, *, whole: bool) -> Share | None:
        """Return the function that takes maxima over the ranks that hold a part of a block, or of a matrix with a scale. `whole`:
        each maximum is that of a whole tensor."""
        cut = zip((rows, columns), scaling.block, strict=True)
        dims = [dim for dim, size in cut if (size == ALL or scaling.scale == "e4m3") and dim in self.shares]
        if not dims and _seen is None and self.history is None:
            return None

        def share(amax: Tensor) -> Tensor:
            for dim in dims:
                amax = self.shares[dim](amax)
            part = self.partial and (rows, columns) == (TOKENS, OUTPUTS)
            if not part:  # the largest number of a part of a sum follows from the plan, and the history must not
                amax = self._delayed(amax, [*FACTORS].index((rows, columns)))
            if _seen is not None and amax.numel() and not part:
                name = f"{self.layer}, {rows} x {columns}, {scaling.block}"
                _seen[name] = TrackedMaxima.of(amax, whole=whole).joined(_seen.get(name))
            return amax

        return share

    def _delayed(self, amax: Tensor, factor: int) -> Tensor:
        """Record the maxima of a factor; if there is a maximum of earlier steps, return it instead of the current one. An
        infinity is returned unchanged, because its scale must be NaN."""
        if self.history is None or self.latest is None or not amax.numel():
            return amax
        self.latest[factor] = torch.maximum(self.latest[factor], amax.max())
        before = self.history[factor].amax()
        return torch.where((before > 0) & amax.isfinite(), before, amax)


class TrackedMaxima(NamedTuple):
    """A summary of the maxima that the scales of one factor followed, over several products and ranks."""

    least: float
    total: float
    blocks: int
    whole: bool
    """True if each maximum is that of a whole tensor."""

    @classmethod
    def of(cls, amax: Tensor, *, whole: bool) -> Self:
        return cls(float(amax.min()), float(amax.double().sum()), amax.numel(), whole)

    def joined(self, other: "TrackedMaxima | None") -> "TrackedMaxima":
        """Return the summary of both summaries' maxima."""
        if other is None:
            return self
        return TrackedMaxima(min(self.least, other.least), self.total + other.total, self.blocks + other.blocks, self.whole)

    @property
    def value(self) -> float:
        """The smallest maximum of tensors, or the mean maximum of rows. A rank that mistakes its part for the whole tensor lowers
        this value."""
        return self.least if self.whole else self.total / self.blocks


_seen: dict[str, TrackedMaxima] | None = None


@contextmanager
def maxima() -> Iterator[dict[str, TrackedMaxima]]:
    """Inside this context, record the maxima that scales follow, by layer and factor. Gradients that are partial sums on a rank
    are left out."""
    global _seen
    before, _seen = _seen, {}
    try:
        yield _seen
    finally:
        _seen = before


_counts: dict[str, Tensor] | None = None


@contextmanager
def losses() -> Iterator[dict[str, Tensor]]:
    """Inside this context, count the numbers that products round, those that saturate, and those that become 0: int64 [3] for
    each part of the model."""
    global _counts
    before, _counts = _counts, {}
    try:
        yield _counts
    finally:
        _counts = before


def _defined(a: Tensor, b: Tensor, sizes: Sizes | None) -> Tensor:
    return defined_product(a, b) if sizes is None else grouped_products(a, b, sizes, defined=True)


def _spans(scaling: Scaling) -> bool:
    """True if one scale may depend on numbers of several ranks."""
    return ALL in scaling.block or scaling.scale == "e4m3"


_SCALES: dict[str, Scale] = {"up": "up", "ocp": "down", "fp32": "fp32"}
