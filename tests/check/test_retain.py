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
        ([parts({"mlp": "host"}), "plan.recompute=full"], "a block keeps only its input"),
        ([parts({"mlp": "host"}), "plan.recompute=segments:2"], "a block keeps only its input"),
        ([parts({"attention.core": "host"}), "plan.recompute=selective"], "plan.recompute_parts recomputes it"),
        ([parts({"mlp.activation": "keep", "mlp": "recompute"})], "which contains it, is recomputed"),
        ([parts({"attention.core": "host"}), "plan.recompute=selective", "plan.recompute_parts=['attend']"], "which contains it"),
        ([parts({"mlp": "host", "attention": "disk"})], "names disk and host"),
        ([parts({"mlp": "host"}), "plan.retain.blocks=disk"], "names disk and host"),
        ([parts({"mlp": "host"}), "plan.compile=true"], "compiled code decides"),
        ([parts({"mlp": "compress"}), "train.precision=bf16"], 'use precision.kept = "fp8"'),
        ([parts({"attention.core": "compress"}), "train.precision=fp32"], 'needs train.precision = "bf16"'),
        ([parts({"attention.core": "compress"}), "train.precision=fp16"], 'needs train.precision = "bf16"'),
    ],
)
def test_actions_that_cannot_be_are_named_with_a_way_out(settings: list[str], said: str):
    is_named(settings, KEY, said)


def test_all_problems_of_the_parts_are_found_at_once():
    settings = [parts({"mlq": "keep", "mlp": "compress", "attention.core": "host", "attend": "recompute"}), "plan.compile=true"]
    assert len([problem for problem in errors(*settings) if problem.key == KEY]) == 4


@pytest.mark.parametrize("part", PARTS)
def test_every_part_can_wait_anywhere(part: str):
    for action in ("keep", "host", "disk", *(["compress"] if part in COMPRESSED else [])):
        assert errors(parts({part: action}), "train.precision=bf16") == []


def test_parts_that_run_again_are_known_by_either_key():
    for settings in (
        [parts({"mlp.activation": "recompute"})],
        ["plan.recompute=selective", "plan.recompute_parts=['mlp.activation']"],
    ):
        (problem,) = (
            one for one in found(*settings, "plan.overlap_tensor=2", "plan.tensor=2") if "has no effect with" in one.reason
        )
        assert problem.key == (KEY if KEY in settings[0] else "plan.recompute_parts")


def test_a_share_counts_blocks_whose_parts_leave():
    assert "plan.retain.share" in advice("plan.retain.share=0.5", parts({"mlp": "keep"}))
    assert "plan.retain.share" not in advice("plan.retain.share=0.5", parts({"mlp": "host"}))
