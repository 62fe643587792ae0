"""The fields of a model spec on which the forward pass depends, and the differences of two models in these fields. Weights only
work in the forward pass that they were trained with. A run that starts from a checkpoint's weights (`train.init_from`) must
therefore have the checkpoint's values of the fields on which the forward pass depends, except where `train.init_from_changes`
names a difference.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megalith.spec.base import Spec
from megalith.spec.model import (
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    Growth,
    HeadSpec,
    LatentAttentionSpec,
    LinearScaling,
    MambaSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    MtpSpec,
    NormSpec,
    RopeScaling,
    RopeSpec,
    RouterSpec,
    YarnScaling,
)

Change = Literal["ahead", "context", "layers", "rope_scaling", "rope_theta", "tokenizer", "vocab"]
"""Name of a permitted difference between a checkpoint's model and that of a run which starts from the checkpoint."""


class Fields(NamedTuple):
    """The fields of one part of a model, divided by their effect into three lists."""

    forward: str
    """Fields that the forward pass depends on."""
    training: str = ""
    """Fields that affect training but not the forward pass."""
    nothing: str = ""
    """Fields without an effect on any computed number."""


FIELDS: Mapping[type[Spec], Fields] = {
    RopeScaling: Fields("kind factor low_freq_factor high_freq_factor original_context"),
    YarnScaling: Fields("kind factor original_context beta_fast beta_slow mscale mscale_all_dim"),
    LinearScaling: Fields("kind factor"),
    RopeSpec: Fields("theta scaling"),
    AttentionSpec: Fields("kind heads kv_heads head_dim rope rope_dim bias qk_norm window softcap scale alibi own"),
    LatentAttentionSpec: Fields("kind heads q_rank kv_rank nope_dim rope_dim v_dim norm_eps rope"),
    MambaSpec: Fields("heads head_dim state groups conv norm_eps", nothing="chunk"),
    MlpSpec: Fields("kind hidden activation gated bias own"),
    RouterSpec: Fields(
        "active scores normalise scale groups active_groups group_score capacity balanced",
        training="bias_rate balance_weight balance_set z_weight",
    ),
    MoeSpec: Fields("kind experts hidden shared shared_gate activation gated router"),
    NormSpec: Fields("kind eps offset bias own"),
    BlockSpec: Fields("attention mamba mlp norm parallel post_norms residual"),
    EmbeddingSpec: Fields("vocab positions scale norm", training="init_std"),
    MtpSpec: Fields("depth block", training="weight"),
    HeadSpec: Fields("vocab tied norm scale softcap ahead"),
    ModelSpec: Fields("dim context embedding blocks head", training="init_std scaling", nothing="name"),
    Growth: Fields("", training="width depth base_layers"),
}
"""Every field of every part of a model. tests/spec/test_forward.py fails if a field is missing in this table."""

ROWS: Mapping[Change, tuple[str, ...]] = {
    "context": ("embedding.positions",),
    "vocab": ("embedding.weight", "head.output.weight"),
}
"""Parameters that may have other numbers of rows after a permitted change. The run loads those rows that the checkpoint has."""

SWITCHES = {(RouterSpec, "bias_rate")}
"""Training fields whose value 0 removes a part of the forward pass: without a bias_rate, a router has no bias."""


@dataclass(frozen=True)
class Difference:
    """A field in which two models differ."""

    path: str
    """Path of the field, such as `attention.rope.theta`, without a block's number."""
    before: Any
    """The first model's value."""
    after: Any
    """The second model's value."""
    forward: bool
    """True if the forward pass depends on the field; False if only training does."""
    blocks: tuple[int, ...] = ()
    """Numbers of the blocks that differ in the field; empty if the field is not in a block."""

    @property
    def change(self) -> Change | None:
        """The name by which `train.init_from_changes` permits this difference; None if it is never permitted."""
        numbers = isinstance(self.before, int) and isinstance(self.after, int)
        if self.path in ("context", "embedding.positions"):
            return "context" if numbers else None
        if self.path.endswith("rope.theta"):
            return "rope_theta"
        if "rope.scaling" in self.path:
            return "rope_scaling"
        if self.path == "layers":
            return "layers" if self.after < self.before else None
        if self.path in ("embedding.vocab", "head.vocab"):
            return "vocab" if self.after > self.before else None
        if self.path in ("head.ahead", "head.ahead.depth"):
            fewer = self.after is None or (numbers and self.after < self.before)
            return "ahead" if fewer else None
        return None


def other_rows(changes: Collection[Change]) -> frozenset[str]:
    """Return the names of the parameters whose number of rows may differ under these permitted changes."""
    return frozenset(name for change in changes for name in ROWS.get(change, ()))


def differences(before: ModelSpec, after: ModelSpec) -> list[Difference]:
    """Return every field in which two models differ, except for fields without an effect. Block i is compared with block i; if
    the models have different numbers of blocks, that is one difference called `layers`."""
    found = [each for each in _between(before, after, "") if each.path != "blocks"]
    if len(before.blocks) != len(after.blocks):
        found.append(Difference("layers", len(before.blocks), len(after.blocks), forward=True))
    kinds: dict[tuple[int, int], list[Difference]] = {}  # a model has few distinct blocks
    alike: dict[str, tuple[Difference, list[int]]] = {}
    for number, (one, other) in enumerate(zip(before.blocks, after.blocks, strict=False)):
        key = id(one), id(other)
        if key not in kinds:
            kinds[key] = list(_between(one, other, ""))
        for each in kinds[key]:
            alike.setdefault(repr(each), (each, []))[1].append(number)
    found += [Difference(each.path, each.before, each.after, each.forward, tuple(numbers)) for each, numbers in alike.values()]
    return found


def _between(before: Spec, after: Spec, path: str) -> Iterator[Difference]:
    """Yield the differences of two parts of the same class. A subpart that only one of the two parts has is one difference."""
    kind = type(before)
    fields = FIELDS[kind]
    for name in kind.model_fields:
        one, other = getattr(before, name), getattr(after, name)
        if one == other or name in fields.nothing.split():
            continue
        here = f"{path}{name}"
        if isinstance(one, Spec) and type(one) is type(other):
            yield from _between(one, other, f"{here}.")
            continue
        switched = (kind, name) in SWITCHES and (one == 0) != (other == 0)
        yield Difference(here, one, other, forward=switched or name in fields.forward.split())
