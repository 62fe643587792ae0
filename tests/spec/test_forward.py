"""The values of a model on which its forward pass depends."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest

from megalith.spec.base import Spec
from megalith.spec.forward import FIELDS, Difference, differences
from megalith.spec.model import ModelSpec
from megalith.spec.presets import presets
from megalith.spec.run import TrainSpec
from megalith.spec.validate import kinds_of


def parts_of(kind: type[Spec]) -> Iterator[type[Spec]]:
    """Return the spec of every part that a model may have."""
    yield kind
    for field in kind.model_fields.values():
        items = [item for item in get_args(field.annotation) if item is not ...] if field.annotation else []
        for nested in {*kinds_of(field.annotation), *(each for item in items for each in kinds_of(item))}:
            yield from parts_of(nested)


def test_it_is_decided_of_every_field_of_a_model_whether_its_forward_depends_on_it():
    kinds = set(parts_of(ModelSpec))
    assert kinds == set(FIELDS)
    for kind in kinds:
        stated = " ".join(FIELDS[kind]).split()
        assert sorted(stated) == sorted(kind.model_fields), kind


def built(preset: str, **values: Any) -> ModelSpec:
    return presets()[preset].build().model_copy(update=values).build()


def found(preset: str, **values: Any) -> list[Difference]:
    return differences(built(preset), built(preset, **values))


@pytest.mark.parametrize("preset", ["llama3.1-8b", "gpt2", "deepseek-v3", "nemotron-h-tiny", "gemma2-2b"])
def test_a_model_does_not_differ_from_itself(preset: str):
    assert found(preset, name="another") == []


@pytest.mark.parametrize(
    ("preset", "key", "value", "path", "change"),
    [
        ("tiny", "rope_theta", 5e5, "attention.rope.theta", "rope_theta"),
        ("llama3.1-8b", "rope_scaling", None, "attention.rope.scaling", "rope_scaling"),
        ("tiny", "layers", 3, "layers", "layers"),
        ("tiny", "layers", 5, "layers", None),
        ("tiny", "norm_eps", 1e-6, "norm.eps", None),
        ("tiny", "tied", True, "head.tied", None),
        ("deepseek-v3", "ahead", 0, "head.ahead", "ahead"),
        ("deepseek-v3", "bias_rate", 0.0, "mlp.router.bias_rate", None),
        ("mixtral-8x7b", "active", 1, "mlp.router.active", None),
    ],
)
def test_what_the_forward_depends_on_is_found_with_the_name_of_its_change(
    preset: str, key: str, value: Any, path: str, change: str | None
):
    first = next(each for each in found(preset, **{key: value}) if each.path == path)
    assert (first.forward, first.change) == (True, change)


@pytest.mark.parametrize(
    ("preset", "key", "value"),
    [("tiny", "init_std", 0.5), ("mixtral-8x7b", "balance_weight", 0.5), ("deepseek-v3", "bias_rate", 0.5)],
)
def test_what_only_training_uses_is_distinguished(preset: str, key: str, value: float):
    assert {each.forward for each in found(preset, **{key: value})} == {False}


def test_a_larger_vocabulary_has_a_name_and_a_smaller_one_has_not():
    vocab = built("tiny").head.vocab
    assert {each.change for each in found("tiny", vocab=vocab + 64)} == {"vocab"}
    assert {each.change for each in found("tiny", vocab=vocab - 64)} == {None}


def test_blocks_that_differ_alike_are_one_difference():
    (difference,) = found("tiny", ffn=96)
    assert (difference.path, difference.blocks) == ("mlp.hidden", (0, 1, 2, 3))


def test_the_guides_and_the_keys_names_of_changes_are_the_same():
    described = TrainSpec.model_fields["init_from_changes"]
    (choices,) = {item for item in get_args(described.annotation) if item is not ...}
    assert described.description is not None
    assert described.description.partition(": ")[2].split(", ") == sorted(get_args(choices))
