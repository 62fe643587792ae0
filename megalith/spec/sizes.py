"""The parameters of a model: their names, their shapes and how they act on tokens, and the layers that stay wide in a narrow
precision, without torch. tests/spec/test_sizes.py compares the parameters with the modules in `models/`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

from megalith.spec.model import (
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    HeadSpec,
    LatentAttentionSpec,
    MambaSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
)
from megalith.spec.numbers import PrecisionSpec
from megalith.spec.parts import Tensor, declared

Role = Literal["matrix", "experts", "table", "filter", "vector"]
"""How a parameter acts on tokens. A `matrix` [outputs, inputs] multiplies every token. `experts` [experts, outputs, inputs] are
one matrix per expert; a token is multiplied by the matrices of its active experts. Rows of a `table` [rows, channels] are looked
up. A `filter` [channels, width] is convolved with the sequence. A `vector` scales or shifts channels or heads. If output and
embedding are tied, their table also multiplies every token."""

ATTENDED = ("*.attention.out",)
"""Layers whose input is also kept by the operation before them, so that an 8-bit copy would cost memory instead of saving it."""

FEW_OUTPUTS = ("*.mamba.step", "*.mlp.shared_gate")
"""Layers with one output, or one output per head. Their products stay in bf16, because a tensor rank's share of the outputs is
less than a tile."""


class Parameter(NamedTuple):
    """One parameter."""

    name: str
    """Name of the parameter in the block, part or model that was asked for."""
    shape: tuple[int, ...]
    role: Role
    heads: int = 1
    """The number of heads among which the rows of a matrix are divided, in order."""
    stacked: tuple[int, ...] = ()
    """If the parameter consists of several stacked matrices: how many rows of each head belong to each matrix; empty: it is one
    matrix."""

    @property
    def numel(self) -> int:
        """The number of elements of the parameter."""
        return prod(self.shape)


class Count(NamedTuple):
    """Numbers of elements of a set of parameters."""

    dense: int
    """Elements outside the experts."""
    experts: int
    """Elements of the experts."""

    @property
    def total(self) -> int:
        """Elements of both."""
        return self.dense + self.experts


Parameters = Iterator[Parameter]


def block_parameters(block: BlockSpec, dim: int) -> tuple[Parameter, ...]:
    """Return the parameters of a block of width `dim`, in the order of its modules."""
    return _kept_block(block, dim)  # pyright: ignore[reportArgumentType]  # frozen specs have hashes, which pyright does not see


@lru_cache(maxsize=1024)  # the planner asks for the same few blocks with every plan
def _kept_block(block: BlockSpec, dim: int) -> tuple[Parameter, ...]:
    return tuple(_block(block, dim))


def part_parameters(model: ModelSpec, part: str) -> tuple[Parameter, ...]:
    """Return the parameters of a part (one of `model.part_names`), in the order of its modules, including tied parameters."""
    if part == "embedding":
        return tuple(_embedding(model.dim, model.embedding))
    if part == "head":
        return tuple(_head(model.dim, model.head, model.embedding))
    return block_parameters(model.blocks[int(part.removeprefix("blocks."))], model.dim)


def model_parameters(model: ModelSpec) -> dict[str, Parameter]:
    """Return every parameter once, by its name in the whole model; tied parameters have one name."""
    tied = tied_names(model)
    named = (each for part in model.part_names for each in _under(part, part_parameters(model, part)))
    return {each.name: each for each in named if each.name not in tied}


def tied_names(model: ModelSpec) -> dict[str, str]:
    """Return a mapping from each further name of a tied parameter to its first name. A tied output and the embeddings of
    multi-token prediction are tied to `embedding.weight`.
    """
    depth = model.head.ahead.depth if model.head.ahead else 0
    ahead = {f"head.ahead.{k}.embedding.weight": "embedding.weight" for k in range(depth)}
    output = {"head.output.weight": "embedding.weight"} if model.head.tied else {}
    return output | ahead


def count(parameters: Iterable[Parameter]) -> Count:
    """Return the numbers of elements of these parameters."""
    sizes = Counter[bool]()
    for each in parameters:
        sizes[each.role == "experts"] += each.numel
    return Count(sizes[False], sizes[True])


def count_block(block: BlockSpec, dim: int) -> Count:
    """Return the number of elements of a block's parameters."""
    return count(block_parameters(block, dim))


def count_active(block: BlockSpec, dim: int) -> int:
    """Return the number of a block's elements that one token uses: all except those of inactive experts."""
    dense, experts = count_block(block, dim)
    return dense + (experts // block.mlp.experts * block.mlp.router.active if isinstance(block.mlp, MoeSpec) else 0)


def count_blocks(model: ModelSpec) -> Count:
    """Return the number of elements of all blocks' parameters."""
    times = Counter(map(id, model.blocks))  # blocks of a kind are one object, and the hash of a block costs more than a look-up
    counts = [(count_block(block, model.dim), times[key]) for key, block in {id(block): block for block in model.blocks}.items()]
    return Count(sum(each.dense * n for each, n in counts), sum(each.experts * n for each, n in counts))


def count_model(model: ModelSpec) -> Count:
    """Return the number of elements of the whole model's parameters. A tied parameter counts once."""
    tied = tied_names(model)
    ends = [each for part in ("embedding", "head") for each in _under(part, part_parameters(model, part))]
    outside, inside = count(each for each in ends if each.name not in tied), count_blocks(model)
    return Count(outside.dense + inside.dense, outside.experts + inside.experts)


def multiplied(block: BlockSpec, dim: int) -> Parameters:
    """Yield the parameters of a block that `kernels.product` multiplies: experts, and all matrices except the router's."""
    for each in block_parameters(block, dim):
        if each.role in ("matrix", "experts") and each.name != "mlp.router.weight":
            yield each


def layer_of(parameter: Parameter) -> str:
    """Return the name of the layer of a parameter."""
    return parameter.name.rpartition(".")[0]


def is_packed(layer: str, *, blocks: int, choices: PrecisionSpec) -> bool:
    """Return True if the bf16 layer of this name keeps its input in 8 bits, in a run where `packs` is True."""
    return not stays_wide(layer, blocks=blocks, choices=choices) and not any(fnmatchcase(layer, each) for each in ATTENDED)


def stays_wide(layer: str, *, blocks: int, choices: PrecisionSpec) -> bool:
    """Return True if the layer (such as `blocks.3.mlp.up`) always multiplies in bf16, in a model of `blocks` blocks."""
    part, _, rest = layer.partition(".")
    if part != "blocks":
        return True
    number = int(rest.partition(".")[0])
    outside = number < choices.wide_first or number >= blocks - choices.wide_last
    return outside or any(fnmatchcase(layer, pattern) for pattern in (*FEW_OUTPUTS, *choices.wide))


def own_tensors(block: BlockSpec, dim: int) -> dict[str, tuple[Tensor, ...]]:
    """Return the parameters that a block's user-defined attention and MLP declare, under the keys "attention" and "mlp"."""
    halves = {"attention": block.attention, "mlp": block.mlp}
    named = {half: spec for half, spec in halves.items() if isinstance(spec, AttentionSpec | MlpSpec) and spec.own}
    return {half: declared(spec.own or "", dim, spec) for half, spec in named.items()}


def _under(path: str, parameters: Iterable[Parameter]) -> Parameters:
    return (each._replace(name=f"{path}.{each.name}") for each in parameters)


def _embedding(dim: int, spec: EmbeddingSpec) -> Parameters:
    yield Parameter("weight", (spec.vocab, dim), "table")
    if spec.positions:
        yield Parameter("positions", (spec.positions, dim), "table")
    if spec.norm:
        yield from _under("norm", _norm(dim, spec.norm))


def _head(dim: int, spec: HeadSpec, embedding: EmbeddingSpec) -> Parameters:
    yield from _under("norm", _norm(dim, spec.norm))
    yield Parameter("output.weight", (spec.vocab, dim), "matrix")
    for depth in range(spec.ahead.depth) if spec.ahead else ():
        yield from _under(f"ahead.{depth}", _ahead(dim, spec.ahead.block, embedding) if spec.ahead else ())


def _ahead(dim: int, block: BlockSpec, embedding: EmbeddingSpec) -> Parameters:
    yield Parameter("embedding.weight", (embedding.vocab, dim), "table")
    yield from _under("norm_embedding", _norm(dim, block.norm))
    yield from _under("norm_hidden", _norm(dim, block.norm))
    yield from _linear("project", 2 * dim, dim)
    yield from _under("block", _block(block, dim))
    yield from _under("norm", _norm(dim, block.norm))


def _block(spec: BlockSpec, dim: int) -> Parameters:
    if spec.attention:
        yield from _under("attention_norm", _norm(dim, spec.norm))
        attention = spec.attention
        inside = _attention(attention, dim) if isinstance(attention, AttentionSpec) else _latent_attention(attention, dim)
        yield from _under("attention", inside)
    if spec.post_norms:
        yield from _under("attention_post_norm", _norm(dim, spec.norm))
    if spec.mamba:
        yield from _under("mamba_norm", _norm(dim, spec.norm))
        yield from _under("mamba", _mamba(spec.mamba, dim))
    if spec.mlp:
        if not spec.parallel:
            yield from _under("mlp_norm", _norm(dim, spec.norm))
        yield from _under("mlp", _mlp(spec.mlp, dim) if isinstance(spec.mlp, MlpSpec) else _moe(spec.mlp, dim))
    if spec.post_norms:
        yield from _under("mlp_post_norm", _norm(dim, spec.norm))


def _linear(
    name: str, inputs: int, outputs: int, bias: bool = False, *, heads: int = 1, stacked: tuple[int, ...] = ()
) -> Parameters:
    yield Parameter(f"{name}.weight", (outputs, inputs), "matrix", heads, stacked)
    if bias:
        yield Parameter(f"{name}.bias", (outputs,), "vector")


def _own(name: str, dim: int, spec: AttentionSpec | MlpSpec | NormSpec) -> Parameters:
    return (Parameter(each.name, each.shape, each.role, each.heads) for each in declared(name, dim, spec))


def _norm(dim: int, spec: NormSpec) -> Parameters:
    if spec.own:
        yield from _own(spec.own, dim, spec)
        return
    yield Parameter("weight", (dim,), "vector")
    if spec.kind == "layer" and spec.bias:
        yield Parameter("bias", (dim,), "vector")


def _attention(spec: AttentionSpec, dim: int) -> Parameters:
    if spec.own:
        yield from _own(spec.own, dim, spec)
        return
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield from _linear("q", dim, queries, bool(spec.bias), heads=spec.heads)
    yield from _linear("k", dim, keys, bool(spec.bias), heads=spec.kv_heads)
    yield from _linear("v", dim, keys, bool(spec.bias), heads=spec.kv_heads)
    if spec.qk_norm:
        yield Parameter("q_norm.weight", (spec.head_dim,), "vector")
        yield Parameter("k_norm.weight", (spec.head_dim,), "vector")
    yield from _linear("out", queries, dim, spec.bias is True)


def _latent_attention(spec: LatentAttentionSpec, dim: int) -> Parameters:
    queries = spec.heads * (spec.nope_dim + spec.rope_dim)
    if spec.q_rank is None:
        yield from _linear("q", dim, queries, heads=spec.heads)
    else:
        yield from _linear("q_down", dim, spec.q_rank)
        yield Parameter("q_norm.weight", (spec.q_rank,), "vector")
        yield from _linear("q_up", spec.q_rank, queries, heads=spec.heads)
    yield from _linear("kv_down", dim, spec.kv_rank + spec.rope_dim, stacked=(spec.kv_rank, spec.rope_dim))
    yield Parameter("kv_norm.weight", (spec.kv_rank,), "vector")
    keys_and_values = spec.nope_dim, spec.v_dim
    yield from _linear("kv_up", spec.kv_rank, spec.heads * sum(keys_and_values), heads=spec.heads, stacked=keys_and_values)
    yield from _linear("out", spec.heads * spec.v_dim, dim)


def _mamba(spec: MambaSpec, dim: int) -> Parameters:
    inner, shared = spec.heads * spec.head_dim, spec.groups * spec.state
    for name, outputs in (("gate", inner), ("x", inner), ("b", shared), ("c", shared), ("step", spec.heads)):
        yield from _linear(name, dim, outputs)
    for name, channels in (("conv_x", inner), ("conv_b", shared), ("conv_c", shared)):
        yield Parameter(f"core.{name}.weight", (channels, spec.conv), "filter")
        yield Parameter(f"core.{name}.bias", (channels,), "vector")
    for name in ("decay", "step", "skip"):
        yield Parameter(f"core.rates.{name}", (spec.heads,), "vector")
    yield Parameter("core.norm.weight", (inner,), "vector")
    yield from _linear("out", inner, dim)


def _mlp(spec: MlpSpec, dim: int) -> Parameters:
    if spec.own:
        yield from _own(spec.own, dim, spec)
        return
    if spec.gated:
        yield from _linear("gate", dim, spec.hidden, spec.bias)
    yield from _linear("up", dim, spec.hidden, spec.bias)
    yield from _linear("down", spec.hidden, dim, spec.bias)


def _moe(spec: MoeSpec, dim: int) -> Parameters:
    yield Parameter("router.weight", (spec.experts, dim), "matrix")
    for name in ("gate", "up") if spec.gated else ("up",):
        yield Parameter(f"experts.{name}", (spec.experts, spec.hidden, dim), "experts")
    yield Parameter("experts.down", (spec.experts, dim, spec.hidden), "experts")
    if spec.shared:
        yield from _under("shared", _mlp(MlpSpec(hidden=spec.shared, gated=spec.gated), dim))
        if spec.shared_gate:
            yield from _linear("shared_gate", dim, 1)


def active_parameters(model: ModelSpec) -> int:
    """Return the number of elements that one token uses in the prediction of the next token, without multi-token prediction."""
    alone = model.model_copy(update={"head": model.head.model_copy(update={"ahead": None})})
    ends = count_model(alone).total - count_blocks(alone).total
    return ends + sum(count_active(block, model.dim) for block in model.blocks)
