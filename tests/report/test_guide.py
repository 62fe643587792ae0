"""The guide's pictures equal the code's current output, and their content is correct."""

import re
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree

import pytest

from megalith.check import check
from megalith.commands.shared import runs
from megalith.commands.shared.arguments import RunRequest
from megalith.report import guide
from megalith.report.svg import standalone
from megalith.schedule import SCHEDULES
from tests.specs import tiny_run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/guide/pictures"
PAGE = FOLDER.parent / "parallelism.md"


@pytest.mark.parametrize("name", guide.pictures())
def test_a_picture_of_the_guide_is_the_one_drawn_today(name: str) -> None:
    drawn = standalone(guide.pictures()[name]())
    assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == drawn, "make guide-pictures draws it again"
    assert ElementTree.fromstring(drawn).tag.endswith("svg")


def test_every_picture_is_shown_and_every_schedule_drawn() -> None:
    page = "".join(each.read_text(encoding="utf-8") for each in (PAGE, PAGE.with_name("precision.md")))
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(guide.pictures())
    assert all(f"](pictures/{name}.svg)" in page for name in guide.pictures())


def test_pictures_are_written_anywhere(tmp_path: Path) -> None:
    files = guide.write(tmp_path / "new")
    assert sorted(tmp_path.rglob("*.svg")) == sorted(files)


def test_the_state_shrinks_with_each_zero_stage_to_an_even_share() -> None:
    """Rajbhandari et al. 2019, with gradients of 4 bytes, give 18, then 12 / n + 6, 16 / n + 2, 16 / n bytes."""
    kept = [sum(guide.state_bytes(stage, 8).values()) for stage in range(4)]
    assert kept == [18, 12 / 8 + 6, 16 / 8 + 2, 16 / 8]


def test_context_ranks_score_equally_much() -> None:
    assert guide.context().count("scores 8 squares") == 4


def test_an_outlier_in_4_bits_takes_the_numbers_that_share_its_scale() -> None:
    """In 8 bits it takes none, unless a whole tensor shares a scale."""
    row, found = guide.rounded_rows()
    alone = [0.0] * 128
    alone[guide.AT] = guide.OUTLIER
    assert found["nvfp4"][32:48] == alone[32:48] and found["mxfp4"][32:64] == alone[32:64]
    error, zeros = zip(*(guide.lost(row, numbers) for numbers in found.values()), strict=True)
    assert dict(zip(found, zeros, strict=True)) == {**dict.fromkeys(found, 0), "fp8, tensor": 14, "nvfp4": 23, "mxfp4": 43}
    by_format = dict(zip(found, error, strict=True))
    assert by_format["fp16"] < by_format["bf16"] < by_format["fp8, tile"] < by_format["fp8, tensor"] < by_format["nvfp4"]
    assert 2**-9 / 3**0.5 < by_format["bf16"] < 2**-8 / 3**0.5 and 2**-5 / 3**0.5 < by_format["mxfp8"] < 2**-4 / 3**0.5


REFUSED = re.findall(r"^\| `(recipes/[^`]+)` \| `([^`]+)` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("recipe", "settings", "reason"), REFUSED)
def test_what_the_guide_says_is_refused_is_refused_for_that_reason(recipe: str, settings: str, reason: str) -> None:
    checked = runs.check(RunRequest(ROOT / recipe, settings.split()))
    assert [problem for problem in checked.errors if problem.reason.endswith(reason)], checked.errors


def _kind(reason: str) -> str:
    """Return a reason without its numbers and names."""
    reason = re.sub(r"\((?:blocks\.\d+|embedding|train)[^)]*\)", "(part)", reason)
    reason = re.sub(r"does not divide (?:heads|ffn|vocab|shared|context|seq_len) =", "does not divide size =", reason)
    return re.sub(r"\d+", "N", re.sub(r"'[\w-]+'", "'name'", reason).replace("one stage", "1 stages"))


@pytest.mark.slow
def test_no_plan_is_refused_for_a_reason_that_the_guide_does_not_list() -> None:
    """Plans are drawn from small numbers, most of which are incompatible."""
    random, listed = Random(0), {_kind(reason) for _, _, reason in REFUSED}
    axes = ("data", "replicate", "tensor", "context", "ulysses", "expert", "expert_tensor", "pipeline", "microbatch")
    for _ in range(400):
        plan: dict[str, Any] = {axis: random.choice((1, 1, 2, 3, 4)) for axis in axes}
        plan |= {"schedule": random.choice(list(SCHEDULES)), "chunks": random.choice((1, 2)), "zero": random.randrange(4)}
        plan |= {"recompute": random.choice(("none", "every:5")), "layers": random.choice((None, None, (1,) * 4, (1,) * 8))}
        model = {"preset": random.choice(("tiny", "mixtral-8x7b", "deepseek-tiny"))}
        spec = tiny_run(
            plan=plan, model=model, train={"global_batch": random.choice((8, 16)), "seq_len": random.choice((32, 48))}
        )
        for problem in check(spec, files=False):
            if problem.severity == "error":
                assert any(_kind(problem.reason).endswith(one) for one in listed), problem
