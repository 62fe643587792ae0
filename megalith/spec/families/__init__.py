"""Model families: the values of `[model]`, one flat spec for each family, chosen by `family` ("llama" by default).

A family is a frozen Spec. The sizes of a family include `name`, `layers`, `dim`, `vocab`, `context`, `tied` and `init_std`.
`build()` returns the model as parts; `small(layers, unit, heads_unit)` returns a small model of the same family, whose sizes
every split divides. Common code is in `common.py`. To add a family, add a module to this folder and an entry to `Model`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import Discriminator, Tag, TypeAdapter

from megalith.spec.families.bloom import Bloom
from megalith.spec.families.deepseek import DeepSeek
from megalith.spec.families.gemma2 import Gemma2
from megalith.spec.families.gpt import Gpt
from megalith.spec.families.grok import Grok
from megalith.spec.families.llama import Llama
from megalith.spec.families.mistral import Mistral
from megalith.spec.families.mixtral import Mixtral
from megalith.spec.families.nemotron import Nemotron
from megalith.spec.families.nemotron_h import NemotronH
from megalith.spec.families.palm import Palm
from megalith.spec.families.qwen2 import Qwen2
from megalith.spec.families.qwen3 import Qwen3
from megalith.spec.families.qwen3_moe import Qwen3Moe
from megalith.spec.families.switch import Switch

DEFAULT = "llama"


def family_of(values: Any) -> str:
    """Return the family of raw values of `[model]`, or of a spec."""
    family = values.get("family", DEFAULT) if isinstance(values, Mapping) else getattr(values, "family", DEFAULT)
    return str(family)


Model = Annotated[
    Annotated[Llama, Tag("llama")]
    | Annotated[Gpt, Tag("gpt")]
    | Annotated[Bloom, Tag("bloom")]
    | Annotated[Palm, Tag("palm")]
    | Annotated[Gemma2, Tag("gemma2")]
    | Annotated[Qwen2, Tag("qwen2")]
    | Annotated[Qwen3, Tag("qwen3")]
    | Annotated[Qwen3Moe, Tag("qwen3_moe")]
    | Annotated[Mistral, Tag("mistral")]
    | Annotated[Mixtral, Tag("mixtral")]
    | Annotated[Switch, Tag("switch")]
    | Annotated[Grok, Tag("grok")]
    | Annotated[DeepSeek, Tag("deepseek")]
    | Annotated[Nemotron, Tag("nemotron")]
    | Annotated[NemotronH, Tag("nemotron_h")],
    Discriminator(family_of),
]

FAMILIES: dict[str, type] = {tag.tag: spec for spec, tag in map(get_args, get_args(get_args(Model)[0]))}
"""The spec of each family by its name."""

_ADAPTER: TypeAdapter[Model] = TypeAdapter(Model)


def read(values: Mapping[str, Any]) -> Model:
    """The family spec with these plain values, which come from a preset or from a checkpoint's manifest. Raises pydantic's
    ValidationError."""
    return _ADAPTER.validate_python(values)
