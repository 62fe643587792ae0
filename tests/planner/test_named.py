"""Published training runs: their layouts can be expressed, `check` accepts them, and they are predicted to take about as
long as published."""

from dataclasses import replace
from pathlib import Path

import pytest

from megalith.check import check
from megalith.cost.software import SOFTWARE
from megalith.planner.named import HEAD, NAMED, NamedRun, PredictedRun, ours, replay, row
from megalith.spec.presets import presets
from megalith.spec.run import RunSpec

WITHIN = {
    "TFLOP/s": 0.10,
    "GPU-hours a trillion tokens": 0.12,
    "s": 0.20,
    "hardware TFLOP/s": 0.15,
    "tokens/s": 0.15,
    "% MFU": 0.15,
}
"""The allowed error of each. The first three are promised; the others used older software and devices than the planner
assumes."""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGALITH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.parametrize("named", NAMED, ids=lambda named: named.name)
def test_a_published_training_is_predicted_as_published(named: NamedRun):
    """Time within the allowed error and its 80 % interval; memory within 15 % and its interval; all choices of a run that took place
    cannot be too large."""
    found = replay(named)
    assert found.estimate.fits
    assert found.interval[0] < found.figure < found.interval[1]
    if named.published is None:
        assert found.error is None
    else:
        assert found.error is not None and abs(found.error) <= WITHIN[named.unit]
        assert found.interval[0] <= named.published <= found.interval[1]
    if named.published_gib is not None:
        assert found.gib == pytest.approx(named.published_gib, rel=0.15)
        assert found.gib_interval[0] <= named.published_gib <= found.gib_interval[1]


@pytest.mark.parametrize("named", [one for one in NAMED if not one.forward_only], ids=lambda named: named.name)
def test_check_accepts_a_published_layout(named: NamedRun):
    known = presets()[named.preset].values
    run = {
        "name": "published", "cluster": named.cluster, "model": known | named.sizes, "data": {"path": "data"},
        "train": {"steps": 10_000, "seq_len": named.seq_len, "global_batch": named.global_batch, "precision": "bf16"},
    }  # fmt: skip
    for plan in named.plans:
        found = check(RunSpec.model_validate(run | {"plan": plan}), files=False)
        assert not [one for one in found if one.severity == "error"]


def test_the_layouts_are_those_of_the_fields_large_trainings():
    """Tensor, pipeline, data and expert ranks, and the ZeRO stage, from the papers."""
    said = {(one.preset, one.seq_len): one.plans[0] for one in NAMED if not one.forward_only}  # GPT-3 has one on both machines
    sizes = {key: (plan.tensor, plan.pipeline, plan.data, plan.expert, plan.zero) for key, plan in said.items()}
    assert sizes == {
        ("llama3.1-405b", 8192): (8, 16, 128, 1, 2),
        ("llama3.1-405b", 131_072): (8, 16, 8, 1, 2),
        ("deepseek-v3", 4096): (1, 16, 128, 64, 1),
        ("deepseek-v2", 4096): (1, 16, 32, 8, 1),
        ("gpt3-175b", 2048): (8, 16, 8, 1, 1),
        ("bloom-176b", 2048): (4, 12, 8, 1, 1),
        ("nemotron4-340b", 4096): (8, 12, 64, 1, 1),
        ("llama1-65b", 2048): (8, 8, 16, 1, 1),
        ("llama2-70b", 4096): (8, 4, 64, 1, 1),
        ("deepseek-llm-67b", 4096): (1, 8, 64, 1, 1),
        ("palm-540b", 2048): (12, 1, 512, 1, 3),
        ("gemma2-27b", 8192): (8, 1, 768, 1, 3),
    }


def _named(name: str) -> PredictedRun:
    (named,) = (one for one in NAMED if one.name.startswith(name))
    return replay(named)


def _cells(found: PredictedRun) -> list[str]:
    return [cell.strip() for cell in row(found).strip("|").split("|")]


def test_a_row_says_what_was_published_and_what_is_predicted_for_it_and_for_us():
    bloom = _named("BLOOM")
    cells = _cells(bloom)
    assert len(cells) == len(HEAD)
    assert cells[1] == "Megatron-DeepSpeed, `megatron-deepspeed`" and cells[2].startswith(
        "156 hardware TFLOP/s (arXiv:2211.05100"
    )
    assert cells[4] == f"{bloom.error:+.1%}" and f"published {bloom.named.published_gib:.0f}" in cells[5]
    own = ours(bloom)
    assert own is not None and own.time.step != bloom.estimate.time.step
    assert cells[6].startswith(f"{own.time.step / bloom.estimate.time.step:.2f} times as long")


def test_a_run_without_a_published_speed_has_no_error_and_a_tpu_no_run_of_ours():
    cells = _cells(_named("Gemma 2"))
    assert cells[2].startswith("none (") and cells[4] == "–" and cells[6] == "–"


def test_a_row_says_what_does_not_fit():
    found = _named("Gemma 2")
    large = replace(found, estimate=replace(found.estimate, fits=False))
    assert "does not fit" in row(large) and "does not fit" not in row(found)


def test_each_run_has_software_that_can_be_planned_for_by_name():
    assert {one.software for one in NAMED} <= {*SOFTWARE}
    page = (Path(__file__).parents[2] / "docs/planner.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page or f" {name}" in page for name in SOFTWARE)
