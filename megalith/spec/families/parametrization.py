"""How a model's first weights, multipliers and learning rates follow its width and depth, so that a learning rate found on a small model
holds for a large one. No torch.

`mup` is the maximal update parametrization (Yang et al. 2022, "Tensor Programs V", arXiv:2203.03466, table 8); `completep` also
scales the two halves of each block with the depth (Dey et al. 2025, arXiv:2505.01618, table 1, alpha = 1). A model of the base
sizes is the same under `mup`, `completep` and `standard`. Let m be the width divided by the base width, and l the depth divided
by the base depth:

    first weights of hidden matrices    standard deviation x m^-1/2
    logits                              x 1/m
    each half of a block                x 1/l                            (completep)
    scores of attention                 proportional to 1/head_dim, not to 1/sqrt(head_dim), where base_head_dim is given
    learning rate of hidden matrices    x m^-1 for Adam's kind of update, x m^-1/2 for an orthogonal one (`optimizers.Kind.width`)
    weight decay of hidden matrices     x the inverse of the learning rate's factor, so that their product stays the same
    Adam's epsilon                      x 1/m, and x 1/l in blocks       (completep)

Hidden matrices are all matrices, including experts and routers, except embeddings and the output projection.
"""

from functools import cache
from typing import Literal

from pydantic import Field, PositiveInt

from megalith.spec.base import Spec
from megalith.spec.model import BlockSpec, Growth, ModelSpec
from megalith.spec.sizes import Parameter

Parametrization = Literal["standard", "mup", "completep"]


class ParametrizedSpec(Spec):
    """A family of models whose learning rates may have been tuned on a model of other sizes."""

    parametrization: Parametrization = Field(
        default="standard",
        description="rule by which initial weights, multipliers and learning rates depend on the model's sizes",
    )
    base_dim: PositiveInt | None = Field(
        default=None, description="mup, completep: the model width at which the parametrization equals `standard`"
    )
    base_layers: PositiveInt | None = Field(
        default=None, description="completep: the number of blocks at which the parametrization equals `standard`"
    )
    base_head_dim: PositiveInt | None = Field(
        default=None,
        description="mup, completep: the head_dim at which attention scores have the scale of `standard`; none: they have it "
        "at any head_dim",
    )

    def scaling(self, dim: int, layers: int) -> Growth:
        """Return the model's sizes divided by the base sizes. If a base size is missing, which `check` refuses, its ratio is
        1."""
        if self.parametrization == "standard":
            return Growth()
        deep = self.parametrization == "completep" and self.base_layers
        return Growth(
            width=dim / self.base_dim if self.base_dim else 1.0,
            depth=layers / self.base_layers if deep and self.base_layers else 1.0,
            base_layers=self.base_layers if deep else None,
        )


def applied(model: ModelSpec, sizes: ParametrizedSpec) -> ModelSpec:
    """Return the model with the multipliers of its parametrization. A model with the base sizes is returned unchanged."""
    scaling = sizes.scaling(model.dim, len(model.blocks))
    if scaling == Growth():
        return model

    @cache
    def block(one: int) -> BlockSpec:
        return _block(kinds[one], scaling, sizes.base_head_dim)

    kinds = {id(one): one for one in model.blocks}  # equal blocks stay one object
    head = model.head.model_copy(update={"scale": model.head.scale / scaling.width})
    blocks = tuple(block(id(one)) for one in model.blocks)
    return model.model_copy(update={"head": head, "blocks": blocks, "scaling": scaling})


def _block(block: BlockSpec, scaling: Growth, base_head_dim: int | None) -> BlockSpec:
    update: dict[str, object] = {"residual": block.residual / scaling.depth}
    attention = block.attention
    if base_head_dim is not None and attention is not None and attention.kind == "attention":
        usual = attention.scale or attention.head_dim**-0.5
        update["attention"] = attention.model_copy(update={"scale": usual * (base_head_dim / attention.head_dim) ** 0.5})
    return block.model_copy(update=update)


def is_hidden(parameter: Parameter) -> bool:
    """Return True for every matrix but embeddings and the output projection. `parameter` must have its name in the whole
    model."""
    return parameter.role in ("matrix", "experts") and parameter.name != "head.output.weight"
