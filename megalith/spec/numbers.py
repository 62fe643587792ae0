"""Number formats and precisions of a run, one row each, and a run's choices within a narrow precision. No torch.

A new format needs a row of NUMBERS, its dtype in `kernels/numbers.py`, and its kernels. A new precision is a row of PRECISIONS.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from megalith.spec.base import Spec


@dataclass(frozen=True)
class Number:
    """A number format."""

    name: str
    bits: int
    """Bits of one number, without its scale."""
    significand: int
    """Significant bits, including the implicit one. A format with two layouts has those of activations and weights here."""
    rate: str
    """Key of `Accelerator.peak` for matrix products in this format."""
    scale: Literal["none", "tensor", "block"] = "none"
    """Unit that shares a scale."""
    block: int = 0
    """Numbers in a block that shares a scale."""
    scale_bits: int = 0
    """Bits of a block's scale."""

    @property
    def width(self) -> float:
        """Bytes of one number, without its scale."""
        return self.bits // 8 if self.bits % 8 == 0 else self.bits / 8

    @property
    def bytes(self) -> float:
        """Bytes of one number with its share of the block's scale. A tensor's scale is negligible in size."""
        return self.width + (self.scale_bits / 8 / self.block if self.block else 0)

    @property
    def roundoff(self) -> float:
        """The largest relative error of rounding to this format."""
        return 2.0**-self.significand


NUMBERS: Mapping[str, Number] = {
    number.name: number
    for number in (
        Number("fp32", bits=32, significand=24, rate="fp32"),
        Number("tf32", bits=32, significand=11, rate="tf32"),  # fp32 in memory, rounded by the matrix units
        Number("bf16", bits=16, significand=8, rate="bf16"),
        Number("fp16", bits=16, significand=11, rate="fp16"),
        Number("fp8", bits=8, significand=4, rate="fp8", scale="tensor"),  # E4M3 (Micikevicius et al. 2022, arXiv:2209.05433)
        # Lower halves of master weights (`kernels.halves`): no products are computed in them
        Number("int16", bits=16, significand=16, rate="fp32"),
        Number("int8", bits=8, significand=8, rate="fp32"),
        # OCP Microscaling Formats 1.0, section 5: E4M3 in blocks of 32, with a power of two as scale
        Number("mxfp8", bits=8, significand=4, rate="fp8", scale="block", block=32, scale_bits=8),
        # NVFP4 (NVIDIA 2025, arXiv:2509.25149): E2M1 in blocks of 16, with an E4M3 scale
        Number("nvfp4", bits=4, significand=2, rate="fp4", scale="block", block=16, scale_bits=8),
        # OCP Microscaling Formats 1.0, section 5: E2M1 in blocks of 32, with a power of two as scale
        Number("mxfp4", bits=4, significand=2, rate="fp4", scale="block", block=32, scale_bits=8),
    )
}

FP32, BF16, FP16 = NUMBERS["fp32"], NUMBERS["bf16"], NUMBERS["fp16"]


@dataclass(frozen=True)
class Reordered:
    """Limits of parity if a plan only changes the order of sums: its run is compared with one process, number by number."""

    loss: float = 1e-5
    """|difference|"""
    norm: float = 1e-5
    """|difference| of the gradient norm / reference"""
    gradient: float = 1e-4
    """Largest |difference| / largest |reference| of a tensor"""
    floor: float = 1e-3
    """A tensor's largest gradient counts as at least this share of the model's largest; smaller values are rounding."""
    weights: float = 0.05
    """|difference|, in units of the learning rates summed over the steps"""
    router: float = 1e-6
    """|difference| of loads and biases"""
    tie: float = 1e-5
    """Scores closer than this may be ranked either way."""


@dataclass(frozen=True)
class Rounded:
    """Limits of parity if each number is visibly rounded: a plan's run and one process in the same precision are both
    compared with one process in fp32. Each comment gives the largest value of the correct runs: of 82 runs in bf16 (14
    presets, 36 plans, seeds 1 to 3) and 141 runs in fp16 (62 presets, 22 plans, seeds 1 and 2)."""

    loss: float
    """Distance of the loss from fp32, minus that of one process"""
    distance: float
    """Distance of a tensor's gradient from fp32, divided by that of one process"""
    least: float
    """The distance of one process counts as at least this share of the gradient, a single rounding"""
    scale: float
    """|ratio - 1|, beyond four standard errors, of the norm of a tensor's gradient to the norm in one process"""
    microbatch: float
    """|weight - 1|, for the weight of each microbatch's gradient in the gradient of the first step"""
    norm: float
    """Relative difference of the gradient norm from that of one process"""
    weights: float
    """Root mean square difference of a tensor from that of one process, in units of the learning rates summed over the steps"""
    tie: float
    """Scores closer than this may be ranked either way."""
    maxima: float = 0.15
    """|log2| of the ratio of the maxima behind row and tensor scales to those of one process, in the first step. The largest
    value of 12 correct runs is 0.06; it is at least 0.35 if each rank takes the maximum of its part alone."""
    router: float = 1e-6
    """|difference| of loads and router biases, as long as every token goes to the same experts as in one process"""


@dataclass(frozen=True)
class Precision:
    """The number formats of a run's computation. The formats of master weights, sums of gradients and moments are in
    `spec/state.py`."""

    name: str
    compute: Number
    """Format of compute weights, activations and their gradients, and of messages that carry them."""
    factors: Number
    """Format of weights and activations as inputs of matrix products in blocks, and of the activations kept for weight gradients
    (DeepSeek-V3, arXiv:2412.19437, section 3.3.3; Transformer Engine). Embedding and head multiply in `compute`."""
    parity: Reordered | Rounded
    """Limits within which a plan trains like one process."""
    products: str = "plain"
    """Name of the recipe of products with weights, a row of `parallel.precision.RECIPES`."""
    scaled: bool = False
    """True if `compute` has too small a range for gradients, which are then multiplied by a loss scale (`train.stability.loss_scale`)."""
    tile: int = 0
    """Number of channels, and of tokens, that share a scale in a narrow format."""
    draws: bool = False
    """True if, by default, gradients are rounded stochastically, and operands of weight gradients are rotated before rounding."""
    emulated: bool = False
    """True if the trainer rounds to the format's numbers but has the speed and memory of `compute`."""

    @property
    def rate(self) -> str:
        """Key of `Accelerator.peak` for the trainer's matrix products."""
        return (self.compute if self.emulated else self.factors).rate


IN_8_BITS = Rounded(  # comments: the largest of 56 correct runs: 4 presets, 8 plans, seeds 1 to 4; `scale`: of 41
    loss=1e-3,  # 2e-4
    distance=4.0,  # 1.3
    least=2.0**-9,
    scale=0.01,  # 0.0045
    microbatch=0.008,  # 0.0013
    norm=0.01,  # 0.0012
    weights=0.25,  # 0.13
    tie=2.0**-8,
)
# 52 correct drawn runs on up to 4 ranks; the largest of the gaps that have no limit of their own: distance 1.4, norm 0.0035
IN_4_BITS = replace(
    IN_8_BITS,
    weights=0.5,  # 0.28
    maxima=0.4,  # 0.30; of 18 runs in which each rank takes its part for the whole the smallest is 0.50
)

PRECISIONS: Mapping[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("fp32", compute=FP32, factors=FP32, parity=Reordered()),
        Precision(
            "bf16",
            compute=BF16,
            factors=BF16,
            parity=Rounded(
                loss=1e-3,  # 1e-4
                distance=4.0,  # 2.8, in a model whose ReLUs switch; 1.6 in the others
                least=2.0**-9,
                scale=0.005,  # 0.0 in 18 runs
                microbatch=0.008,  # 0.004
                norm=0.01,  # 0.004
                weights=0.25,  # 0.11
                tie=2.0**-8,  # 1e-3
            ),
        ),
        Precision(
            "fp16",
            compute=FP16,
            factors=FP16,
            scaled=True,
            parity=Rounded(
                loss=1e-4,  # 2e-5
                distance=64.0,  # 33, in a model whose ReLUs switch; 1.3 in the others
                least=2.0**-12,
                scale=0.012,  # 0.0 in 18 runs, none of a model with ReLUs, which may switch
                microbatch=0.002,  # 3e-4
                norm=0.002,  # 3e-4
                weights=0.25,  # 0.12, as in bf16: one of 288 elements whose gradient is nearly 0 changes its sign; 0.016 where none does
                tie=2.0**-11,
            ),
        ),
        Precision("fp8", compute=BF16, factors=NUMBERS["fp8"], parity=IN_8_BITS, products="blockwise", tile=128, emulated=True),
        Precision(
            "mxfp8", compute=BF16, factors=NUMBERS["mxfp8"], parity=IN_8_BITS, products="microscaled", tile=32, emulated=True
        ),
        Precision(
            "nvfp4",
            compute=BF16,
            factors=NUMBERS["nvfp4"],
            parity=IN_4_BITS,
            products="nvfp4",
            tile=16,
            draws=True,
            emulated=True,
        ),
        Precision(
            "mxfp4",
            compute=BF16,
            factors=NUMBERS["mxfp4"],
            parity=IN_4_BITS,
            products="microscaled4",
            tile=32,
            draws=True,
            emulated=True,
        ),
    )
}

SCALE_BYTES = 4
"""Bytes of the scale, in fp32, of a tile or row that is sent or kept in 8 bits."""
TRAINED = tuple(PRECISIONS)
"""Precisions that the trainer computes in."""
FAST = tuple(name for name in TRAINED if not PRECISIONS[name].emulated)
"""Precisions that the trainer does not emulate; a run has their speed and memory."""

Granularity = Literal["tile", "row", "tensor"]
ADA, HOPPER = 8.9, 9.0
"""NVIDIA's compute capabilities: the first one that multiplies 8-bit numbers, and the one that supports scales of 128-wide
tiles."""


def multiplies_codes(granularity: Granularity, capability: float | None) -> bool:
    """Return True if a GPU of this compute capability (None: no GPU) multiplies 8-bit numbers that share scales at this
    granularity."""
    if capability is None:
        return False
    return {"tensor": capability >= ADA, "row": capability >= HOPPER, "tile": capability == HOPPER}[granularity]


ALIGNED = 16
"""Number of elements that torch's 8-bit product reads at once."""


def aligned(rows: int, columns: int, inner: int, *, tile: int = 0, square: bool = False) -> bool:
    """Return True if torch can multiply 8-bit factors of these sizes, [rows, inner] and [columns, inner]. `tile`: how many
    numbers along the inner dim share a scale; 0: all. `square`: as many rows of the second factor share the scale, too."""
    unit = max(ALIGNED, tile)
    return rows % ALIGNED == columns % (unit if square else ALIGNED) == inner % unit == 0 < rows * inner


if TYPE_CHECKING:
    Rate = str
    Trained = str
else:
    Rate = Literal[tuple(dict.fromkeys(number.rate for number in NUMBERS.values()))]
    Trained = Literal[TRAINED]


# --- choices within a narrow precision ---

ATTENDED = ("*.attention.out",)
"""Layers whose input the operation before them keeps anyway: an 8-bit copy would take further memory."""

FEW_OUTPUTS = ("*.mamba.step", "*.mlp.shared_gate")
"""Layers with a single output, or one for each head. They stay wide, because a tensor rank's share of the outputs is not a
whole tile."""


class PrecisionSpec(Spec):
    """Choices within a narrow precision. Embedding, head, router and norms stay wide in any case. So do the weight gradients of
    experts, because the tokens that share a tile would depend on the plan."""

    input_gradient: Literal["narrow", "wide"] = Field(
        default="narrow", description="format of the products that give the gradients of activations"
    )
    weight_gradient: Literal["narrow", "wide"] = Field(
        default="narrow", description="format of the products that give the gradients of weights, except for experts"
    )
    gradients: Literal["e4m3", "e5m2"] = Field(default="e4m3", description="8-bit format of gradients in products")
    granularity: Granularity = Field(
        default="tile",
        description="set of numbers that share one scale in fp8. `tile`: a tile. `row`: a row along a product's inner dimension. "
        "`tensor`: a microbatch's whole tensor",
    )
    scale: Literal["up", "ocp", "fp32"] = Field(
        default="up",
        description="8-bit scales. `up`: the smallest power of two at which nothing saturates. `ocp`: OCP's, rounded down. "
        "`fp32`: any fp32 number, in fp8 only",
    )
    history: NonNegativeInt = Field(
        default=0,
        description="number of past steps whose maxima give a tensor's scale (delayed scaling); 0: scale by the current numbers",
    )
    rounding: Literal["nearest", "stochastic"] | None = Field(
        default=None, description="rounding of gradients in products; default: stochastic in nvfp4 and mxfp4"
    )
    hadamard: bool | None = Field(
        default=None,
        description="random Hadamard transform, over the tokens of a tile, of the operands of weight gradients; default: true in nvfp4 "
        "and mxfp4",
    )
    tile: PositiveInt | None = Field(
        default=None,
        description="how many channels, and how many tokens, share a scale; default: 128 in fp8, 16 in nvfp4, 32 in the others",
    )
    wide_first: NonNegativeInt = Field(default=1, description="first blocks that stay wide")
    wide_last: NonNegativeInt = Field(default=1, description="last blocks that stay wide")
    wide_decay: bool = Field(
        default=False, description="compute every layer in the wide format once the learning rate of wsd or 1-sqrt decays"
    )
    wide: tuple[str, ...] = Field(
        default=(), description="layers that stay wide, by name, with * for any characters: `*.attention.*`"
    )
    multiply: Literal["wide", "codes"] = Field(
        default="wide",
        description="how dense products in fp8 are computed. `wide`: from rounded numbers, in bf16, on any device. `codes`: "
        "from 8-bit codes, "
        "on GPUs that support it",
    )
    dispatch: Literal["wide", "fp8"] = Field(
        default="wide",
        description="in fp8: format in which tokens are sent to narrow experts; the experts' results and the gradients "
        "of tokens are sent wide",
    )
    combine_gradients: Literal["wide", "fp8"] = Field(
        default="wide", description="in fp8: format in which the gradients of experts' results are sent back to narrow experts"
    )
    kept: Literal["wide", "fp8"] = Field(
        default="wide",
        description="format in which inputs are kept for backward. In 8-bit precisions it applies to inputs of narrow "
        "products, as forward rounded them. In bf16 it applies to inputs of products and activations in blocks, and "
        "rounds them for weight gradients",
    )
    gather: Literal["wide", "fp8"] = Field(
        default="wide",
        description="in fp8: format in which ZeRO gathers the weights of narrow layers, if no tile lies across two shards",
    )
    watch_every: NonNegativeInt = Field(
        default=0, description="steps between comparisons of a microbatch's gradients with gradients from wide products; 0: never"
    )
    auto: NonNegativeFloat = Field(
        default=0.0,
        description="relative error of a block's gradient above which a comparison makes the worst block wide; 0: "
        "comparisons change no block",
    )


RECIPE = {"tile": "blockwise", "row": "rowwise", "tensor": "tensorwise"}
"""Granularity -> recipe for products (a row of `parallel.precision.RECIPES`), in precisions whose own recipe is `blockwise`."""


def is_narrow(precision: str) -> bool:
    """Return True if products have narrow factors in this precision."""
    return PRECISIONS[precision].tile > 0


def packs(choices: PrecisionSpec, precision: str) -> bool:
    """Return True if wide products keep their inputs for backward in 8 bits."""
    return choices.kept != "wide" and precision == BF16.name


def packed_tile(choices: PrecisionSpec, precision: str) -> int:
    """Return how many numbers of a row share a scale where wide products keep their inputs in 8 bits; 0 if they do not."""
    return kept_tile(choices) if packs(choices, precision) else 0


def kept_tile(choices: PrecisionSpec) -> int:
    """Return how many numbers share a scale where a part of a block is kept for backward in 8 bits."""
    return choices.tile or PRECISIONS["fp8"].tile


def recipe_of(choices: PrecisionSpec, precision: str) -> str:
    """Return the name of the recipe for products."""
    own = "packed" if packs(choices, precision) else PRECISIONS[precision].products
    return RECIPE[choices.granularity] if own in RECIPE.values() else own


def in_codes(choices: PrecisionSpec, precision: str, capability: float | None) -> bool:
    """Return True if a GPU of this compute capability can multiply the factors of dense products in 8 bits."""
    own = PRECISIONS[precision]
    usual = (
        own.products == "blockwise"
        and choices.tile in (None, own.tile)
        and choices.rounding != "stochastic"
        and not choices.hadamard
    )
    return usual and multiplies_codes(choices.granularity, capability)


def tile_of(choices: PrecisionSpec, precision: str) -> int:
    """Return how many channels and how many tokens share a scale; 0 if the number is not fixed, or nothing shares a scale."""
    tile = PRECISIONS[precision].tile
    return 0 if choices.granularity != "tile" else tile and (choices.tile or tile)


def whole_tiles(length: int, shards: int, tile: int) -> bool:
    """Return True if no tile lies across two shards of a dim of this length. Shards have equal length; the last ones may be
    shorter or empty."""
    share = -(-length // shards)
    return share % tile == 0 or share >= length


def settled(choices: PrecisionSpec, precision: str) -> PrecisionSpec:
    """Return the choices; those that a run leaves open are set to the precision's defaults."""
    draws = PRECISIONS[precision].draws
    rounding = choices.rounding or ("stochastic" if draws else "nearest")
    return choices.model_copy(update={"rounding": rounding, "hadamard": draws if choices.hadamard is None else choices.hadamard})


def is_packed(layer: str, *, blocks: int, choices: PrecisionSpec) -> bool:
    """Return True if the wide layer of this name keeps its input in 8 bits, in a run with such wide layers."""
    return not stays_wide(layer, blocks=blocks, choices=choices) and not any(fnmatchcase(layer, each) for each in ATTENDED)


def stays_wide(layer: str, *, blocks: int, choices: PrecisionSpec) -> bool:
    """Return True if the layer of this name (`blocks.3.mlp.up`) multiplies in the wide format, in a model of `blocks` blocks."""
    part, _, rest = layer.partition(".")
    if part != "blocks":
        return True
    number = int(rest.partition(".")[0])
    outside = number < choices.wide_first or number >= blocks - choices.wide_last
    return outside or any(fnmatchcase(layer, pattern) for pattern in (*FEW_OUTPUTS, *choices.wide))
