"""Products of Megalith's trainer in a block with narrow layers: the format of each product, and the roundings of its factors.

If the device multiplies 8-bit codes, a product has the speed of 8 bits, and its factors are rounded by compiled kernels. Every other narrow
product rounds its factors by plain torch operations and multiplies them in the wide format, or in fp32 if scales are not powers of two. No
torch.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from megalith.cost.profile import PHASES, Phase, Product, Profile
from megalith.cost.workload import EXPERTS, Narrow, Workload
from megalith.spec.cluster import Accelerator
from megalith.spec.numbers import BF16, FP32, Granularity, aligned, format_of, formats_of, in_codes, is_narrow, settled, tile_of

if TYPE_CHECKING:
    from megalith.cost.parts import Parts

RATES: Mapping[Granularity, float] = {"tensor": 1.0, "row": 0.75, "tile": 0.68}
"""Relative rate of 8-bit products, by the unit that shares a scale; products with one scale for each tensor have rate 1. The rate for
tiles is fitted to the H200 of docs/performance.md, "Products in 8 bits". The rate for rows follows from torchao's table of Llama 3 8B on
8 H100 (docs/source/workflows/training.md): 25.0 % faster than bf16 with scales of tensors, 10.0 % with scales of rows."""

CODED: Mapping[Granularity, float] = {"tensor": 5.0, "row": 5.0, "tile": 3.0}
"""Bytes moved to turn a number into a code: it is read in bf16 (twice if its scale must be known first) and written."""

SHARED = 6.0
"""Additional bytes moved if other ranks or steps determine a scale: a separate, uncompiled kernel then finds the maximum."""

ROUNDED: Mapping[str, float] = {"up": 85.0, "ocp": 94.0, "fp32": 100.0, "e4m3": 114.0}
"""Bytes that the plain operations of `kernels.quantise.narrowed` move to round a number, by the kind of scale."""

DRAWN, ROTATED = 320.0, 20.0
"""Additional bytes moved for stochastic rounding of a number, and for each step of a Hadamard transform."""

PIECE = 1 << 24
"""On a GPU, number of elements that one operation rounds when tensors are kept in 8 bits (`kernels.packed.SLAB`)."""

HELD = 14
"""Temporary bytes for each number while plain operations round a factor on a GPU: three copies in fp32, and the result."""

CODING, ROUNDING = 2, 30
"""Number of kernels that round to codes, and number of kernels that round by plain operations."""


class FormattedProduct(NamedTuple):
    """A product, and the format in which it is computed."""

    product: Product
    format: str
    """A name from PRECISIONS."""
    share: float
    """Share of the product's kernels that are computed in this format."""
    rate: float = 1.0
    """Rate relative to the device's usual rate in this format."""


class Rounding(NamedTuple):
    """Roundings of the factors of a product."""

    product: Product
    numbers: float
    """Total number of elements that are rounded."""
    bytes: float
    """Bytes moved for each element."""
    kernels: float
    """Total number of kernels that are launched."""
    messages: float
    """Total number of messages that ask other ranks for maxima."""


@dataclass(frozen=True)
class Ways:
    """The way in which Megalith's trainer computes the products of a block."""

    wide: str
    """The format of wide products: a name from PRECISIONS."""
    narrow: Narrow
    shares: Mapping[tuple[int, int], float]
    """Sizes of a weight on a rank, the smaller size first -> share of narrow layers among all layers with weights of these sizes."""
    experts: bool
    """True if experts multiply in the narrow format."""
    codes: bool
    """True if the device multiplies 8-bit codes."""
    shared: bool
    """True if scales depend on numbers of other ranks."""

    @classmethod
    def of(cls, workload: Workload, profile: Profile, layers: tuple[str, ...]) -> "Ways | None":
        """Return how the products of a block whose `layers` are narrow are computed; None if it has no narrow layers."""
        narrow, plan = workload.narrow, workload.plan
        if narrow is None or not layers:
            return None
        return cls.on(workload.cluster.accelerator, narrow, workload.format, ranks=plan.tensor * plan.context).within(
            profile, layers
        )

    @classmethod
    def on(cls, device: Accelerator, narrow: Narrow, wide: str, *, ranks: int) -> "Ways":
        """Return how products are computed on a device; `within` adds the layers. `ranks`: how many ranks hold a part of each tensor."""
        asked, whole = narrow.choices.multiply == "codes", "nvfp4" in formats_of(narrow.choices, narrow.precision)
        codes = asked and in_codes(narrow.choices, narrow.precision, device.compute_capability)
        return cls(wide, narrow, {}, False, codes, ranks > 1 and (whole or not narrow.tile))

    def within(self, profile: Profile, layers: tuple[str, ...]) -> "Ways":
        """Return these `Ways` for a block whose `layers` are narrow."""
        dense = [(_sizes(weight.shape), weight.layer in layers) for weight in profile.multiplied if not weight.expert]
        counts, mine = Counter(sizes for sizes, _ in dense), Counter(sizes for sizes, narrow in dense if narrow)
        return replace(self, shares={sizes: mine[sizes] / count for sizes, count in counts.items()}, experts=EXPERTS in layers)

    def alone(self, rows: int, columns: int) -> "Ways":
        """Return these `Ways` for a single narrow layer with a weight of these sizes."""
        return replace(self, shares={_sizes((rows, columns)): 1.0}, experts=True)

    def computed(self, products: Iterable[Product]) -> Iterator[FormattedProduct]:
        """Yield each product with its format. A product that some layers compute narrow and others wide is yielded twice."""
        for product in products:
            share = self._share(product)
            if share < 1:
                yield FormattedProduct(product, self.wide, 1 - share)
            if share and self.multiplies_codes(product):
                yield FormattedProduct(product, self.narrow.precision, share, RATES[self.narrow.choices.granularity])
            elif share:
                yield FormattedProduct(product, self.wide if self._exact(product) else FP32.name, share)

    def roundings(self, products: Iterable[Product]) -> Iterator[Rounding]:
        """Yield the roundings of both factors of each narrow product, and of the inputs that a wide forward keeps in 8 bits."""
        for product in products:
            kept = product.phase == "F" and self.narrow.choices.forward == "wide" and self.narrow.choices.kept != "wide"
            if share := self._narrow(product) if kept else self._share(product):
                codes = self.multiplies_codes(product) and not kept
                factors = ((product.rows, product.phase != "F"), (product.columns, False))
                for rows, gradients in factors[:1] if kept else factors:
                    times = share * product.times
                    numbers = rows * product.inner * product.count * times
                    moved = self._coded if codes else self._rounded[product.phase, product.expert, gradients]
                    calls = product.count if product.expert and product.phase == "W" else 1  # each expert's rows on their own
                    kernels = times * calls * (CODING if codes else ROUNDING)
                    yield Rounding(product, numbers, moved, kernels, times * self.shared)

    def held(self, profile: Profile) -> float:
        """Return the largest temporary bytes for the rounding of a factor on a GPU."""
        each = (
            max(product.rows, product.columns) * product.inner * product.count * (1 if self.multiplies_codes(product) else HELD)
            for product in profile.products
            if self._share(product)
        )
        return float(max(each, default=0))

    def _share(self, product: Product) -> float:
        """Return the share of a product's kernels whose factors are narrow."""
        return self._narrow(product) if self._formats[product.phase, product.expert] else 0.0

    def _narrow(self, product: Product) -> float:
        """Return the share of a product's kernels that belong to narrow layers."""
        if not product.weight:
            return 0.0
        if product.expert:
            return float(self.experts)
        # Ranks that share a head of keys multiply a part of a whole weight, which is not found here: it counts as wide.
        # Forward's products have the sizes [inner, columns] or, where they run again in backward, the same in the other order
        sizes = (product.rows if product.phase == "W" else product.inner), product.columns
        return self.shares.get(_sizes(sizes), 0.0)

    @cached_property
    def _formats(self) -> dict[tuple[Phase, bool], str]:
        """The precision in whose format the products of narrow layers are computed (empty: wide), by phase, for dense layers (False) and
        experts (True)."""
        weights = {False: "weight_gradient", True: "expert_weight_gradient"}
        both, how = {"F": "forward", "I": "input_gradient"}, (self.narrow.choices, self.narrow.precision)
        return {(phase, experts): format_of(both.get(phase, weights[experts]), *how) for phase in PHASES for experts in weights}

    def multiplies_codes(self, product: Product) -> bool:
        """Return True if the device multiplies the codes of this narrow product."""
        sizes = product.rows, product.columns, product.inner
        return self.codes and not product.expert and aligned(*sizes, tile=self.narrow.tile, square=product.phase != "W")

    def _exact(self, product: Product) -> bool:
        """Return True if bf16 represents every rounded number of a narrow product."""
        return self.narrow.choices.scale != "fp32" and self._formats[product.phase, product.expert] != "nvfp4"

    @cached_property
    def _coded(self) -> float:
        apart = self.shared or self.narrow.choices.history > 0
        return CODED[self.narrow.choices.granularity] + (SHARED if apart else 0.0)

    @cached_property
    def _rounded(self) -> dict[tuple[Phase, bool, bool], float]:
        """The bytes that plain operations move to round a number, by the product's phase and by two flags: whether the product is one of
        experts, and whether the number is a gradient, which may be rounded stochastically. Factors of weight gradients may be rotated
        first."""
        found = dict[tuple[Phase, bool, bool], float]()
        for (phase, experts), format in self._formats.items():
            precision = format or self.narrow.precision  # a wide forward rounds what it keeps
            choices = settled(self.narrow.choices, precision)
            kind = "e4m3" if precision == "nvfp4" else choices.scale
            rotated = ROTATED * tile_of(choices, precision).bit_length() if choices.hadamard and phase == "W" else 0.0
            drawn = DRAWN if choices.rounding == "stochastic" else 0.0
            found |= {(phase, experts, gradients): ROUNDED[kind] + gradients * drawn + rotated for gradients in (False, True)}
        return found


def _sizes(shape: tuple[int, ...]) -> tuple[int, int]:
    one, other = shape
    return (one, other) if one < other else (other, one)


def rounding_bytes(workload: Workload, traced: "Parts") -> float:
    """Return the largest temporary bytes for the rounding of a factor; 0 on a CPU, which rounds few numbers at a time."""
    device = workload.cluster.accelerator
    if workload.narrow is None or device.is_processor:
        return 0.0
    if not is_narrow(workload.narrow.precision):  # numbers that are rounded to be kept
        return HELD * PIECE
    return _largest(traced, workload.narrow, Ways.on(device, workload.narrow, workload.format, ranks=1).codes)


@lru_cache(1 << 12)
def _largest(traced: "Parts", narrow: Narrow, codes: bool) -> float:
    alike = {(id(profile), layers): (profile, layers) for profile, layers in zip(traced.blocks, traced.narrow, strict=True)}
    return max((_held(*block, narrow, codes) for block in alike.values()), default=0.0)


_known: dict[tuple[int, tuple[str, ...], int, bool], tuple[Profile, Narrow, float]] = {}
"""Results of `_held` by the ids of profile and settings, stored with these so that ids stay unique: hashing whole profiles takes long."""


def _held(profile: Profile, layers: tuple[str, ...], narrow: Narrow, codes: bool) -> float:
    known = id(profile), layers, id(narrow), codes
    if known not in _known:
        bare = Ways(BF16.name, narrow, {}, False, codes, False)
        _known[known] = profile, narrow, bare.within(profile, layers).held(profile)
    return _known[known][2]
