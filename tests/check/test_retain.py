"""Actions for what parts of blocks keep."""

import pytest

from megalith.spec.plan import COMPRESSED, PARTS
from tests.check.runs import advice, errors, found, is_named

KEY = "plan.retain.parts"


def parts(named: dict[str, str]) -> str:
    return "plan.retain.parts={" + ", ".join(f'"{part}" = "{action}"' for part, action in named.items()) + "}"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([parts({"mlp": "keep", "attention.cor": "host"})], 'Did you mean "attention.core"?'),
        ([parts({"mlp": "host"}), "plan.recompute=full"], "blocks keep only inputs"),
        ([parts({"mlp": "host"}), "plan.recompute=segments:2"], "blocks keep only inputs"),
        ([parts({"attention.core": "host"}), "plan.recompute=selective"], "plan.recompute_parts recomputes it"),
        ([parts({"mlp.activation": "keep", "mlp": "recompute"})], "which contains it, is recomputed"),
        ([parts({"attention.core": "host"}), "plan.recompute=selective", "plan.recompute_parts=['attend']"], "which contains it"),
        (
            [parts({"mlp": "compress"}), "train.precision=bf16", "plan.compile=true"],
            "attention_norm, mamba_norm, mlp_norm are possible",
        ),
        ([parts({"mamba.core": "compress"}), "train.precision=bf16"], "sums over the whole sequence"),
        ([parts({"mlp": "compress"}), "train.precision=fp8"], 'use precision.kept = "fp8"'),
        ([parts({"mlp": "compress"}), "train.precision=nvfp4"], 'Leave "mlp" out.'),
        ([parts({"mlp": "compress"}), "train.precision=bf16", "plan.tensor=2", "plan.overlap_tensor=2"], "sent in pieces"),
        ([parts({"attention.core": "compress"}), "train.precision=fp32"], "promises more precision than bf16"),
        ([parts({"attention.core": "compress"}), "train.precision=fp16"], "promises more precision than bf16"),
    ],
)
def test_actions_that_cannot_be_are_named_with_a_way_out(settings: list[str], said: str):
    is_named(settings, KEY, said)


def test_all_problems_of_the_parts_are_found_at_once():
    settings = [
        parts({"mlq": "keep", "mlp": "compress", "mamba.core": "compress", "attention.core": "host", "attend": "recompute"}),
        "plan.compile=true",
    ]
    assert len([problem for problem in errors(*settings) if problem.key == KEY]) == 4


@pytest.mark.parametrize("part", PARTS)
def test_every_part_can_wait_anywhere(part: str):
    for action in ("keep", "host", "disk", *(["compress"] if part in COMPRESSED else [])):
        assert errors(parts({part: action}), "train.precision=bf16") == []


@pytest.mark.parametrize("part", ["mlp", "mlp.activation", "attend"])
def test_a_tile_lies_inside_a_rank(part: str):
    """The input of a product, or an activation, is cut by tensor ranks; a norm's input is not."""
    settings = (parts({part: "compress"}), "train.precision=bf16", "plan.tensor=2", "precision.tile=32")
    named = [problem for problem in errors(*settings) if problem.key == "plan.tensor"]
    assert ["that blocks.0.mlp.down keeps in 8 bits" in problem.reason for problem in named] == [True] * (part != "attend")
    assert errors(*settings[:-1], "precision.tile=8") == []


def test_parts_of_compiled_blocks_have_actions():
    named = parts({"attention.core": "keep", "mlp": "host", "mlp_norm": "compress", "mlp.activation": "disk"})
    assert errors(named, "plan.compile=true", "train.precision=bf16") == []


def test_parts_may_wait_in_several_places():
    assert errors(parts({"mlp": "host", "attention": "disk"}), "plan.retain.share=0.5") == []
    assert errors(parts({"mlp": "host"}), "plan.retain.blocks=disk") == []


def test_parts_that_run_again_are_known_by_either_key():
    for settings in (
        [parts({"mlp.activation": "recompute"})],
        ["plan.recompute=selective", "plan.recompute_parts=['mlp.activation']"],
    ):
        (problem,) = (
            one for one in found(*settings, "plan.overlap_tensor=2", "plan.tensor=2") if "has no effect with" in one.reason
        )
        assert problem.key == (KEY if KEY in settings[0] else "plan.recompute_parts")


def test_the_activation_of_experts_runs_again_where_others_cannot():
    """`megalith dryrun` shows that it saves memory: products of experts are neither compiled nor sent in pieces."""
    experts = ["model.preset=deepseek-tiny", "plan.recompute=selective", "plan.recompute_parts=['mlp.experts.activation']"]
    for other in (["plan.tensor=2", "plan.overlap_tensor=2"], ["plan.compile=true"]):
        assert not [one for one in found(*experts, *other) if "has no effect with" in one.reason]


def test_a_share_counts_blocks_whose_parts_leave():
    assert "plan.retain.share" in advice("plan.retain.share=0.5", parts({"mlp": "keep"}))
    assert "plan.retain.share" not in advice("plan.retain.share=0.5", parts({"mlp": "host"}))
