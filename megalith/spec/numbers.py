"""Tables of number formats and precisions, and the table `[precision]` of a run file. No torch.

A new format needs a row of NUMBERS, its dtype in `kernels/numbers.py`, and its kernels. A new precision needs a row of
PRECISIONS.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
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
    """Significant bits, including the implicit one. If a format has one layout for activations and another for gradients, the bits
    of the layout for activations count."""
    rate: str
    """Key of `Accelerator.peak` for matrix products in this format."""
    scale: Literal["none", "tensor", "block"] = "none"
    """Set of numbers that share a scale: the whole tensor, or a block of it."""
    block: int = 0
    """Count of numbers in a block that shares a scale."""
    scale_bits: int = 0
    """Bits of the scale of one block."""

    @property
    def width(self) -> float:
        """Bytes of one number, without its scale."""
        return self.bits // 8 if self.bits % 8 == 0 else self.bits / 8

    @property
    def bytes(self) -> float:
        """Bytes of one number, including its share of a block's scale; a whole tensor's scale is neglected."""
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
    """Parity limits for a plan that only changes the order of sums: each number is compared with that of a run in one process."""

    loss: float = 1e-5
    """Largest |difference| of the loss."""
    norm: float = 1e-5
    """Largest |difference| of the gradient norm, divided by the reference's norm."""
    gradient: float = 1e-4
    """Largest |difference| in a tensor's gradient, divided by the largest |element| of the reference."""
    floor: float = 1e-3
    """Lower limit of the divisor in `gradient`, as a share of the model's largest gradient element."""
    weights: float = 0.05
    """Largest |difference| of a weight, divided by the sum of all steps' learning rates."""
    router: float = 1e-6
    """Largest |difference| of experts' loads and router biases."""
    tie: float = 1e-5
    """A compared run may rank two experts in either order if their scores differ by less than this."""


@dataclass(frozen=True)
class Rounded:
    """Parity limits for precisions below fp32: the plan's run and a run in one process, both in this precision, are compared with
    an fp32 run in one process. The comments in PRECISIONS give the largest values of correct runs: 82 runs in bf16 (14 presets,
    36 plans, seeds 1 to 3) and 141 runs in fp16 (62 presets, 22 plans, seeds 1 and 2)."""

    loss: float
    """Distance of the plan's loss from the fp32 loss, minus the same distance for one process."""
    distance: float
    """Distance of a tensor's gradient from the fp32 gradient, divided by the same distance for one process."""
    least: float
    """Lower limit of one process's distance, as a share of the gradient: the error of a single rounding."""
    scale: float
    """|ratio - 1|, minus four standard errors, where ratio is a tensor's gradient norm divided by its norm in one process."""
    microbatch: float
    """|weight - 1|, minus four standard errors, where weight is the factor of a microbatch's gradient in the gradient of the first
    step."""
    norm: float
    """Relative difference between the gradient norms of the plan and of one process."""
    weights: float
    """Root mean square difference of a tensor's weights from one process, divided by the sum of all steps' learning rates."""
    tie: float
    """A compared run may rank two experts in either order if their scores differ by less than this."""
    maxima: float = 0.15
    """|log2(ratio)|, where ratio is a maximum from which a row's or tensor's scale is computed in the first step, divided by the
    same maximum in one process. The largest value in 12 correct runs is 0.06. If each rank wrongly takes the maximum of its own
    part, the value is at least 0.35."""
    router: float = 1e-6
    """Largest |difference| of experts' loads and router biases, if every token goes to the same experts as in one process."""


@dataclass(frozen=True)
class Precision:
    """The number formats of a run's computation. The formats of master weights, sums of gradients and moments are in
    `spec/state.py`."""

    name: str
    compute: Number
    """Format of compute weights, of activations, of the gradients of both, and of messages that contain them."""
    factors: Number
    """Format in which weights and activations enter matrix products in blocks. Other software also keeps activations for weight
    gradients in this format (DeepSeek-V3, arXiv:2412.19437, section 3.3.3; Transformer Engine); in Megalith, `precision.kept`
    decides. Matrix products in the embedding and the head use `compute`."""
    parity: Reordered | Rounded
    """Limits within which the results of a plan must agree with those of one process."""
    products: str = "plain"
    """Name of the recipe for matrix products with weights, which is a row of `parallel.precision.RECIPES`."""
    scaled: bool = False
    """True if the range of `compute` is too small for gradients, so that the loss is multiplied by a scale
    (`train.stability.loss_scale`)."""
    tile: int = 0
    """Number of channels, and number of tokens, in a tile whose 8- or 4-bit numbers share a scale; 0 in other precisions."""
    draws: bool = False
    """True if, by default, gradients are rounded stochastically, and operands of weight gradients are rotated before rounding."""
    emulated: bool = False
    """True if, by default, the trainer rounds values to the format but stores and multiplies them in a wider one, without a gain in
    speed or memory."""

    @property
    def rate(self) -> str:
        """Key of `Accelerator.peak` for the peak FLOP/s of the trainer's matrix products."""
        return (self.compute if self.emulated else self.factors).rate


IN_8_BITS = Rounded(  # comments: the largest value in 56 correct runs (4 presets, 8 plans, seeds 1 to 4); for `scale`, in 41
    loss=1e-3,  # 2e-4
    distance=4.0,  # 1.3
    least=2.0**-9,
    scale=0.01,  # 0.0045
    microbatch=0.008,  # 0.0013
    norm=0.01,  # 0.0012
    weights=0.25,  # 0.13
    tie=2.0**-8,
)
# Comments: the largest value in 67 correct runs on up to 4 ranks. For limits taken from IN_8_BITS: distance 1.4
IN_4_BITS = replace(
    IN_8_BITS,
    norm=0.05,  # 0.025 after the first update: small differences of weights are rounded to other numbers
    weights=0.5,  # 0.28
    maxima=0.4,  # 0.30; at least 0.50 in 18 runs in which each rank wrongly uses the maximum of its own part
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
                distance=4.0,  # 2.8 in a model with ReLUs whose inputs change sign; 1.6 in other models
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
                distance=64.0,  # 33 in a model with ReLUs whose inputs change sign; 1.3 in other models
                least=2.0**-12,
                scale=0.012,  # 0.0 in 18 runs of models without ReLUs
                microbatch=0.002,  # 3e-4
                norm=0.002,  # 3e-4
                weights=0.25,  # 0.12 if the gradient of one of 288 elements is nearly 0 and changes its sign, as in bf16; else 0.016
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
"""Bytes of the fp32 scale of one tile or row that is sent or kept in 8 bits."""
TRAINED = tuple(PRECISIONS)
"""Precisions in which the trainer can train."""
FAST = tuple(name for name in TRAINED if not PRECISIONS[name].emulated)
"""Precisions that the trainer does not emulate, so that a run gains their speed and memory."""

Granularity = Literal["tile", "row", "tensor"]
ADA, HOPPER = 8.9, 9.0
"""Compute capabilities of NVIDIA GPUs: the lowest one that multiplies 8-bit numbers, and the only one that supports one scale per
128-wide tile."""


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
    numbers along the inner dim share a scale; 0: all. `square`: True if, in the second factor, each square of `tile` rows and
    `tile` columns shares a scale."""
    unit = max(ALIGNED, tile)
    return rows % ALIGNED == columns % (unit if square else ALIGNED) == inner % unit == 0 < rows * inner


if TYPE_CHECKING:
    Rate = Trained = Factors = str
else:
    Rate = Literal[tuple(dict.fromkeys(number.rate for number in NUMBERS.values()))]
    Trained = Literal[TRAINED]
    Factors = Literal["narrow", "wide", *(name for name in TRAINED if PRECISIONS[name].tile)]

PRODUCTS = ("forward", "input_gradient", "weight_gradient", "expert_weight_gradient")
"""The keys of `[precision]` that choose the format of a layer's products."""


class PrecisionSpec(Spec):
    """Settings of the 8- and 4-bit precisions. "narrow" is the format of `train.precision`, and "wide" is bf16. Embedding, head, router
    and norms always use the wide format. By default, weight gradients of experts also use it: otherwise the plan would decide which
    tokens share a tile."""

    forward: Factors = Field(
        default="narrow",
        description="format of the inputs of matrix products in the forward pass. `narrow`: that of train.precision; `wide`: bf16; "
        "fp8, mxfp8, nvfp4 or mxfp4: that precision's",
    )
    input_gradient: Factors = Field(
        default="narrow", description="format of the inputs of matrix products that compute gradients of activations"
    )
    weight_gradient: Factors = Field(
        default="narrow",
        description="format of the inputs of matrix products that compute gradients of weights, except experts'",
    )
    expert_weight_gradient: Factors = Field(
        default="wide",
        description="format of the inputs of matrix products that compute gradients of experts' weights. In any format but `wide`, "
        "tokens of an expert share scales, and the plan decides which, so another plan gives other bits",
    )
    gradients: Literal["e4m3", "e5m2"] = Field(default="e4m3", description="8-bit format of gradients that enter matrix products")
    granularity: Granularity = Field(
        default="tile",
        description="group of numbers with one fp8 scale. `tile`: tile x tile numbers of a weight, tile numbers of another tensor. "
        "`row`: a row along the inner dimension of a matrix product. `tensor`: the whole tensor of a microbatch",
    )
    scale: Literal["up", "ocp", "fp32"] = Field(
        default="up",
        description="8-bit scales. `up`: the smallest power of two at which no number saturates. `ocp`: OCP's power of two, which is "
        'rounded down. `fp32`: any fp32 number (needs train.precision = "fp8")',
    )
    history: NonNegativeInt = Field(
        default=0,
        description="number of past steps whose maxima give a tensor's scale (delayed scaling); 0: the tensor itself gives the scale",
    )
    rounding: Literal["nearest", "stochastic"] | None = Field(
        default=None,
        description="rounding of gradients that enter matrix products; default: stochastic in nvfp4 and mxfp4",
    )
    hadamard: bool | None = Field(
        default=None,
        description="apply a random Hadamard transform, over the tokens of a tile, to the inputs of weight-gradient products; "
        "default: true in nvfp4, mxfp4",
    )
    tile: PositiveInt | None = Field(
        default=None,
        description="number of channels, or of tokens, that share a scale; default: 128 in fp8, 16 in nvfp4, 32 in mxfp8 and mxfp4",
    )
    wide_first: NonNegativeInt = Field(default=1, description="number of blocks at the beginning of the model that stay in bf16")
    wide_last: NonNegativeInt = Field(default=1, description="number of blocks at the end of the model that stay in bf16")
    wide_decay: bool = Field(
        default=False,
        description="compute every layer in bf16 during the decay phase of the schedules wsd and 1-sqrt",
    )
    wide: tuple[str, ...] = Field(
        default=(), description="names of layers that stay in bf16; * matches any characters, as in `*.attention.*`"
    )
    multiply: Literal["wide", "codes"] = Field(
        default="wide",
        description="how dense matrix products in fp8 are computed. `wide`: numbers are rounded to fp8 and multiplied in "
        "bf16 or fp32, on any device; `codes`: 8-bit codes are multiplied, on GPUs that support it",
    )
    dispatch: Literal["wide", "fp8"] = Field(
        default="wide",
        description="in fp8: format in which tokens are sent to fp8 experts; the experts' results and the gradients of tokens "
        "are sent in bf16",
    )
    combine_gradients: Literal["wide", "fp8"] = Field(
        default="wide",
        description="in fp8: format in which gradients of experts' results are sent back to fp8 experts",
    )
    kept: Literal["wide", "fp8"] = Field(
        default="wide",
        description="format in which inputs are kept for backward. In 8-bit precisions, fp8 keeps the inputs of 8-bit matrix "
        "products as forward rounded them. In bf16, fp8 keeps the inputs of matrix products and of activation "
        "functions inside blocks, so that weight gradients are computed from rounded inputs",
    )
    gather: Literal["wide", "fp8"] = Field(
        default="wide",
        description="in fp8: format in which ZeRO gathers the weights of fp8 layers in which no tile spans two shards",
    )
    watch_every: NonNegativeInt = Field(
        default=0,
        description="steps between comparisons of a microbatch's gradients with its gradients from bf16 products; 0: no comparisons",
    )
    auto: NonNegativeFloat = Field(
        default=0.0,
        description="if a comparison finds a block whose gradient has a larger relative error than this, the worst block "
        "computes in bf16 from then on; 0: comparisons change no block",
    )


RECIPE = {"tile": "blockwise", "row": "rowwise", "tensor": "tensorwise"}
"""Granularity -> recipe for matrix products in fp8 (a row of `parallel.precision.RECIPES`). In other precisions the recipe
does not depend on the granularity."""


def is_narrow(precision: str) -> bool:
    """Return True if matrix products in this precision have 8- or 4-bit inputs."""
    return PRECISIONS[precision].tile > 0


def format_of(product: str, choices: PrecisionSpec, precision: str) -> str:
    """Return the narrow precision in whose format the factors of a product, one of PRODUCTS, are rounded; empty: they stay wide."""
    asked: str = getattr(choices, product)
    return {"wide": "", "narrow": precision}.get(asked, asked) if is_narrow(precision) else ""


def formats_of(choices: PrecisionSpec, precision: str, products: Iterable[str] = PRODUCTS) -> tuple[str, ...]:
    """Return the narrow precisions in whose formats the factors of these products are rounded."""
    found = dict.fromkeys(format_of(product, choices, precision) for product in products)
    return tuple(each for each in found if each)


def packs(choices: PrecisionSpec, precision: str) -> bool:
    """Return True if matrix products in bf16 keep their inputs for backward in 8 bits."""
    return choices.kept != "wide" and precision == BF16.name


def packed_tile(choices: PrecisionSpec, precision: str) -> int:
    """Return how many numbers of a row share a scale in the 8-bit inputs that bf16 products keep; 0 if they keep bf16 inputs."""
    return kept_tile(choices) if packs(choices, precision) else 0


def kept_tile(choices: PrecisionSpec) -> int:
    """Return how many numbers share a scale in tensors that a block keeps for backward in 8 bits."""
    return choices.tile or PRECISIONS["fp8"].tile


def recipe_of(choices: PrecisionSpec, precision: str) -> str:
    """Return the name of the recipe for matrix products in this precision."""
    own = "packed" if packs(choices, precision) else PRECISIONS[precision].products
    return RECIPE[choices.granularity] if own in RECIPE.values() else own


def in_codes(choices: PrecisionSpec, precision: str, capability: float | None) -> bool:
    """Return True if a GPU of this compute capability can compute this run's dense matrix products from 8-bit codes."""
    own = PRECISIONS[precision]
    usual = (
        own.products == "blockwise"
        and choices.tile in (None, own.tile)
        and choices.rounding != "stochastic"
        and not choices.hadamard
    )
    return usual and multiplies_codes(choices.granularity, capability)


def tile_of(choices: PrecisionSpec, precision: str) -> int:
    """Return the number of channels, and of tokens, that share a scale; 0 if the run scales rows or tensors, or has no scales."""
    tile = PRECISIONS[precision].tile
    return 0 if choices.granularity != "tile" else tile and (choices.tile or tile)


def whole_tiles(length: int, shards: int, tile: int) -> bool:
    """Return True if no tile spans two shards of a dim of this length. The last shards may be shorter than the others, or
    empty."""
    share = -(-length // shards)
    return share % tile == 0 or share >= length


def settled(choices: PrecisionSpec, precision: str) -> PrecisionSpec:
    """Return `choices` with the precision's defaults for `rounding` and `hadamard` if the run leaves them out."""
    draws = PRECISIONS[precision].draws
    rounding = choices.rounding or ("stochastic" if draws else "nearest")
    return choices.model_copy(update={"rounding": rounding, "hadamard": draws if choices.hadamard is None else choices.hadamard})
