"""Published training runs: their layouts can be expressed, `check` accepts them, and they are predicted to take about as
long as published."""

import pytest

from megalith.check import check
from megalith.planner.named import NAMED, NamedRun, replay, table
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
def test_a_published_training_takes_about_as_long_as_published(named: NamedRun):
    assert abs(replay(named).error) <= WITHIN[named.unit]


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
    said = {(one.preset, one.seq_len): one.plans[0] for one in NAMED if not one.forward_only}
    sizes = {key: (plan.tensor, plan.pipeline, plan.data, plan.expert, plan.zero) for key, plan in said.items()}
    assert sizes == {
        ("llama3.1-405b", 8192): (8, 16, 128, 1, 2),
        ("llama3.1-405b", 131_072): (8, 16, 8, 1, 2),
        ("deepseek-v3", 4096): (1, 16, 128, 64, 1),
        ("gpt3-175b", 2048): (8, 16, 8, 1, 1),
        ("bloom-176b", 2048): (4, 12, 8, 1, 1),
        ("nemotron4-340b", 4096): (8, 12, 64, 1, 1),
        ("llama1-65b", 2048): (8, 8, 16, 1, 1),
        ("llama2-70b", 4096): (8, 4, 64, 1, 1),
        ("deepseek-llm-67b", 4096): (1, 8, 64, 1, 1),
        ("palm-540b", 2048): (12, 1, 512, 1, 3),
    }


def test_the_table_says_what_does_not_fit():
    lines = table().splitlines()
    assert len(lines) == 2 + len(NAMED)
    for line, named in zip(lines[2:], NAMED, strict=True):
        assert ("does not fit" in line) is not replay(named).estimate.fits
