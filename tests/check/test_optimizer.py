"""Groups of parameters, and matrices that one rank holds whole."""

import pytest

from tests.check.runs import advice, errors, found, is_named


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ('{pattern = "*.attentoin.*"}', "matches none of the model's 39 parameters. A pattern must match a whole name"),
        ('{pattern = "*norm*", lr = 0.1}, {pattern = "*norm*", weight_decay = 0.1}', "later groups also match all 9 parameters"),
        ('{pattern = "blocks.0.*"}, {pattern = "blocks.*"}', "later groups also match all 9 parameters that it matches"),
    ],
)
def test_a_group_of_nothing_is_named(groups: str, said: str) -> None:
    is_named([f"optimizer.groups=[{groups}]"], "optimizer.groups", said)


def test_a_group_of_something_is_let_be() -> None:
    assert found('optimizer.groups=[{pattern="*norm*", weight_decay=0.1}, {pattern="*.mlp.*", kind="lion", lr=0.1}]') == []


def test_a_matrix_that_fits_no_device_is_named_with_its_way_out() -> None:
    """A rank keeps a thousandth of a weight of 200,000 by 100,000."""
    large = ["model.dim=200000", "model.ffn=100000", "model.heads=2000", "model.kv_heads=2000", "model.head_dim=100"]
    plan = ["cluster=h100", "plan.data=2048", "plan.zero=3", "train.global_batch=2048", "optimizer.kind=muon"]
    (problem,) = [each for each in errors(*large, *plan) if each.key == "optimizer.kind"]
    assert "takes" in problem.reason and "[200000, 200000]" in problem.reason
    assert 'kind = "adamw"' in problem.way_out
    assert not [each for each in errors(*large, *plan[:-1]) if each.key == "optimizer.kind"]


def test_a_parametrization_has_a_base_and_rules():
    assert [p.key for p in errors("model.parametrization=mup")] == ["model.base_dim"]
    assert [p.key for p in errors("model.parametrization=completep")] == ["model.base_dim", "model.base_layers"]
    base = ("model.parametrization=completep", "model.base_dim=64", "model.base_layers=2")
    assert errors(*base) == [] and errors(*base, "optimizer.kind=muon") == []
    for kind in ("lamb", "sgd"):
        (problem,) = errors(*base, f"optimizer.kind={kind}")
        assert problem.key == "model.parametrization" and f"no rule for {kind}" in problem.reason
    (problem,) = errors(*base, "optimizer.kind=adafactor", "optimizer.relative_step=true")
    assert "relative_step" in problem.reason
    for preset, what in (("nemotron-h-tiny", "Mamba-2"), ("deepseek-tiny", "latent attention")):
        reasons = [
            p.reason for p in errors(*base, f"model.preset={preset}", "train.seq_len=128") if p.key == "model.parametrization"
        ]
        assert len(reasons) == 1 and what in reasons[0]
    assert "model.base_dim" in advice("model.base_dim=64")
