"""Rules about responses to spikes."""

import pytest

from tests.check.runs import advice, errors, found, is_named


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        (['stability.answers=["rewind", "skip"]'], "stability.answers", "Use ['skip', 'rewind']"),
        (['stability.answers=["skip", "skip"]'], "stability.answers", "Use ['skip']"),
        (['stability.answers=["skip"]', "stability.watch=false"], "stability.answers", "Use stability.watch = true"),
        (['stability.answers=["rewind"]', "fleet.recover=false"], "stability.answers", "set checkpoint.every"),
        (['stability.answers=["rewind"]', "plan.state.optimizer=disk"], "stability.answers", "Set checkpoint.every"),
    ],
)
def test_an_illegal_value_is_named_with_its_reason_and_a_way_out(settings: list[str], key: str, said: str) -> None:
    is_named(settings, key, said)


def test_rewinding_to_checkpoints_alone_is_advised_against() -> None:
    settings = ['stability.answers=["rewind"]', "fleet.memory_every=0", "checkpoint.every=5"]
    assert errors(*settings) == []
    assert "stability.answers" in advice(*settings)


def test_a_ladder_with_copies_is_let_be() -> None:
    assert found('stability.answers=["skip", "rewind", "lower", "stop"]') == []
