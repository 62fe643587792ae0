"""Families in which a user's own modules can replace attention, MLP and norm."""

from collections.abc import Iterable, Iterator

from pydantic import Field

from megalith.spec.families.parametrization import ParametrizedSpec
from megalith.spec.model import AttentionSpec, BlockSpec, MlpSpec, NormSpec
from megalith.spec.parts import OwnPart


class OwnPartsSpec(ParametrizedSpec):
    """A family whose blocks all have attention and a dense MLP, which the user's own modules can replace."""

    attention: OwnPart | None = Field(default=None, description="your own attention module for every block, as `module:object`")
    mlp: OwnPart | None = Field(default=None, description="your own MLP module for every block, as `module:object`")
    norm: OwnPart | None = Field(
        default=None, description="your own norm module for every block and for the final norm, as `module:object`"
    )


def replaced(blocks: Iterable[BlockSpec], sizes: OwnPartsSpec) -> Iterator[BlockSpec]:
    """Yield the blocks with the user's own parts that `sizes` names. Blocks that are the same object stay the same object."""
    known: dict[int, tuple[BlockSpec, BlockSpec]] = {}
    for block in blocks:
        if id(block) not in known:
            known[id(block)] = block, _replaced(block, sizes)
        yield known[id(block)][1]


def own_norm(norm: NormSpec, sizes: OwnPartsSpec) -> NormSpec:
    """Return the norm with the user's own module that `sizes` names, if any."""
    return norm.model_copy(update={"own": sizes.norm})


def _replaced(block: BlockSpec, sizes: OwnPartsSpec) -> BlockSpec:
    assert isinstance(block.attention, AttentionSpec) and isinstance(block.mlp, MlpSpec), block
    parts = {"attention": block.attention.model_copy(update={"own": sizes.attention}), "norm": own_norm(block.norm, sizes)}
    return block.model_copy(update=parts | {"mlp": block.mlp.model_copy(update={"own": sizes.mlp})})
