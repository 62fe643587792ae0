"""The description of a model family for writing its models in the format of transformers, and for reading them."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch

from megalith.checkpoint.foreign.weights import Piece
from megalith.spec.base import Spec
from megalith.spec.problem import Problem
from megalith.spec.validate import examine

Json = dict[str, Any]

KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "rope_scaling": ((dict, NoneType), "an object or null"),
    "rope_parameters": ((dict, NoneType), "an object or null"),
    "layer_types": ((list, NoneType), "a list or null"),
    "router_aux_loss_coef": ((int, float), "a number"),
    "num_experts_per_tok": ((int,), "a whole number"),
}
"""Settings with which `read` functions compute: the types allowed for their values, and a name for these types. The values of all
other settings are checked as fields of the spec."""

SIZES = {"vocab": "vocab_size", "dim": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
"""Map from fields of Megalith's spec to transformers' settings, common to all families since Llama."""


def habits(*, context: int, norm_eps: float, tied: bool) -> dict[str, tuple[str, Any]]:
    """Return a map from fields of Megalith's spec to transformers' settings, which are the same in most families since Llama;
    each setting comes with the default that transformers has for one family."""
    return {
        "context": ("max_position_embeddings", context),
        "norm_eps": ("rms_norm_eps", norm_eps),
        "tied": ("tie_word_embeddings", tied),
        "init_std": ("initializer_range", 0.02),
    }


class ForeignModelError(ValueError):
    """The folder's model cannot be read, or Megalith cannot represent all of it; the text lists every reason."""


@dataclass(frozen=True)
class Read:
    """Fields of Megalith's spec that were read from a configuration, and the problems: settings that Megalith cannot represent."""

    fields: Json
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Foreign:
    """Conversion of one model family between transformers' format and Megalith's. Tables map fields of Megalith's spec to
    transformers' settings; two functions, `write` and `read`, convert settings that do not map one to one."""

    spec: type[Spec]
    architecture: str
    model_type: str
    pieces: Callable[[Any], list[Piece]]
    """Returns the pieces of a model of this family: its tensors in both formats, and their conversion."""
    needed: Mapping[str, str]
    """Map from fields of Megalith's spec to transformers' settings, for settings that every configuration has."""
    optional: Mapping[str, tuple[str, Any]]
    """Map from fields of Megalith's spec to transformers' settings, each with transformers' own default."""
    fixed: Mapping[str, tuple[Any, ...]]
    """Map from transformers' settings to the values that match Megalith's modules; the first value is the one to write, and None
    means that the setting is absent."""
    write: Callable[[Any], Json] = lambda spec: {}
    """Returns further transformers settings for a spec; these override the tables above."""
    read: Callable[[Json], Read] = lambda config: Read({})
    """Returns further fields of Megalith's spec; these override the tables above."""
    further: Mapping[str, str] = field(default_factory=dict)
    """Map from a field that `read` fills to the transformers setting from which its value comes, if the names differ."""
    refuse: Callable[[Any], list[str]] = lambda spec: []
    """Returns the reasons why a spec cannot be written in transformers' format."""
    prefix: str = "model."
    """Prefix of all of transformers' tensor names except the output's; tensor names in old files lack this prefix."""
    without_missing: Callable[[Any, Collection[str]], Any] = lambda spec, names: spec
    """Returns the spec without those optional parts of the model that have no tensor in `names`."""
    computed: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Name endings of tensors in old files that can be computed from the configuration, and are not read."""
    exact: tuple[str, ...] = ()
    """Name endings of tensors that transformers keeps in fp32, whatever the dtype of the others."""

    def written_as(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype to write for the tensor with transformers' name `name`, if most tensors have `dtype`."""
        return torch.float32 if name.endswith(self.exact) else dtype

    def configuration(self, spec: Any) -> Json:
        """Return the settings that describe all of `spec`."""
        written = {theirs: getattr(spec, ours) for ours, theirs in self.needed.items()}
        written |= {theirs: getattr(spec, ours) for ours, (theirs, _) in self.optional.items()}
        written |= {theirs: values[0] for theirs, values in self.fixed.items() if values[0] is not None}
        return {"architectures": [self.architecture], "model_type": self.model_type} | written | self.write(spec)

    def understood(self, config: Json, *, name: str) -> Any:
        """Return the spec that a configuration describes. Raises ForeignModelError with every setting that Megalith cannot
        represent."""
        fixed = {"architectures": ([self.architecture], None), "quantization_config": (None,)} | dict(self.fixed)
        problems = [
            f"{setting} = {config.get(setting)!r}; only {' or '.join(map(repr, values))} can be represented"
            for setting, values in fixed.items()
            if config.get(setting) not in values
        ]
        problems += [f"{theirs} is not given" for theirs in self.needed.values() if theirs not in config]
        unusable = [
            f"{setting} = {json.dumps(config[setting])}: {kind} is needed"
            for setting, (types, kind) in KINDS.items()
            if not isinstance(config.get(setting, types[0]()), types)
        ]
        more = Read({}) if unusable else self.read(config)
        problems += unusable + more.problems
        fields = {ours: config[theirs] for ours, theirs in self.needed.items() if theirs in config}
        fields |= {ours: config.get(theirs, default) for ours, (theirs, default) in self.optional.items()}
        found = examine(
            {"family": self.family, "name": name or self.family} | fields | more.fields, self.spec, source=lambda key: ""
        )
        if problems:
            given = [self._told(problem) for problem in found.problems if problem.key in fields]  # others may follow from these
            raise ForeignModelError("cannot be represented here:\n  " + "\n  ".join([*problems, *given]))
        if found.problems:
            raise ForeignModelError(
                "holds invalid values; correct these settings in this file:\n  " + "\n  ".join(map(self._told, found.problems))
            )
        return found.spec

    def _told(self, problem: Problem) -> str:
        """Return the text of a spec's problem, with the names of the transformers settings from which the values came."""
        theirs = dict(self.needed) | {ours: setting for ours, (setting, _) in self.optional.items()} | dict(self.further)
        ours = problem.key.split(".")[-1]  # "factor" of rope_scaling.factor: the table is in either of two settings
        reason = re.sub(r"\b(\w+)(?= = )", lambda word: theirs.get(word[1], word[1]), problem.reason)
        return f"{theirs.get(ours, ours)} = {json.dumps(problem.value)}: {reason}" if ours else reason

    @property
    def family(self) -> str:
        """Return Megalith's name of this model family."""
        return self.spec.model_fields["family"].default


def rope_settings(config: Json) -> Json:
    """Return the rotary settings in the form of transformers 5: always with "rope_type" and "rope_theta". transformers 4 has only
    `rope_scaling`; if `rope_scaling` is set, `rope_parameters` is ignored.
    """
    found: Json = config.get("rope_scaling") or config.get("rope_parameters") or {}
    beside = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    original = "original_max_position_embeddings"
    wins = {original: config[original]} if original in config else {}
    kind = found.get("rope_type", found.get("type", "default"))
    return {"rope_theta": 10_000.0} | beside | found | wins | {"rope_type": kind}


LLAMA3 = {  # our field -> their setting
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
}
YARN = {
    "factor": "factor",
    "original_context": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
STRETCHES: dict[str, Mapping[str, str]] = {"llama3": LLAMA3, "yarn": YARN, "linear": {"factor": "factor"}}
"""Map from the kind of context extension to a map from Megalith's fields to transformers' settings. Only YaRN's `beta_fast` and
`beta_slow` may be missing; the defaults of these two are then those of transformers."""


def scaled_rope(config: Json) -> Read:
    """Read the rotary base and the context extension, for a family that supports every kind in `STRETCHES`."""
    rope = rope_settings(config)
    kind, problems = rope["rope_type"], uneven_rotation(rope)
    if kind == "default":
        return Read({"rope_theta": rope["rope_theta"], "rope_scaling": None}, problems)
    if kind not in STRETCHES:
        known = ", ".join(map(repr, ("default", *STRETCHES)))
        return Read({}, [*problems, f"rope_type = {kind!r}; only {known} can be represented"])
    given = {ours: rope[theirs] for ours, theirs in STRETCHES[kind].items() if rope.get(theirs) is not None}
    needed = [ours for ours in STRETCHES[kind] if not ours.startswith("beta")]
    problems += [f"rope_type {kind} without {STRETCHES[kind][ours]}" for ours in needed if ours not in given]
    usual: Json = {"attention_factor": (None,), "mscale": (None,), "mscale_all_dim": (None,), "truncate": (None, True)}
    for key, values in usual.items() if kind == "yarn" else ():
        if rope.get(key) not in values:
            problems.append(f"rope {key} = {rope[key]!r}; Megalith supports only the default")
    return Read({"rope_theta": rope["rope_theta"], "rope_scaling": {"kind": kind} | given}, problems)


def write_scaled_rope(spec: Any) -> Json:
    """Write the rotary base and the context extension of a spec."""
    scaling = spec.rope_scaling
    stretch = scaling and {"rope_type": scaling.kind} | {
        theirs: getattr(scaling, ours) for ours, theirs in STRETCHES[scaling.kind].items()
    }
    return write_rope(spec.rope_theta, stretch)


def no_further_yarn(spec: Any) -> list[str]:
    """Return the problem of YaRN settings whose attention temperature differs from transformers'."""
    scaling = spec.rope_scaling
    if scaling is None or scaling.kind != "yarn" or (scaling.mscale, scaling.mscale_all_dim) == (1.0, 0.0):
        return []
    return [
        f"mscale = {scaling.mscale:g} and mscale_all_dim = {scaling.mscale_all_dim:g}: transformers supports only 1 and 0 in this family"
    ]


def plain_rope(config: Json) -> Read:
    """Read the rotary base, for a family that has no context extension in Megalith."""
    rope = rope_settings(config)
    plain = rope["rope_type"] == "default"
    problems = [] if plain else [f"rope_type = {rope['rope_type']!r}; only 'default' can be represented"]
    return Read({"rope_theta": rope["rope_theta"]}, problems + uneven_rotation(rope))


def uneven_rotation(rope: Json) -> list[str]:
    """Return the problems of rotary settings that rotate only some channels of a head, or that differ between layers."""
    part, nested = rope.get("partial_rotary_factor"), [key for key, value in rope.items() if isinstance(value, dict)]
    problems = (
        [] if part in (None, 1.0) else [f"partial_rotary_factor = {part!r}; Megalith rotates only whole heads in this family"]
    )
    if nested:
        problems.append(f"separate rotary settings for {' and '.join(nested)}; Megalith rotates all layers alike in this family")
    return problems


def write_rope(theta: float, stretch: Json | None = None) -> Json:
    """Return rotary settings in the forms of both transformers 4 and transformers 5."""
    parameters = {"rope_theta": theta} | (stretch or {"rope_type": "default"})
    return {"rope_theta": theta, "rope_scaling": stretch, "rope_parameters": parameters}


def heads_divide(spec: Any) -> list[str]:
    """Return the problem if the number of heads does not divide dim, as transformers requires for some families."""
    if spec.dim % spec.heads == 0:
        return []
    return [f"transformers needs heads to divide dim, but {spec.heads} does not divide {spec.dim}"]
