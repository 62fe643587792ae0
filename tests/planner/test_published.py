from dataclasses import replace

import pytest

from megalith.cost.estimate import estimate
from megalith.cost.workload import Workload
from megalith.planner.candidates import offloaded
from megalith.planner.published.express import express, measured_seconds
from megalith.planner.published.rows import read
from megalith.planner.published.software import SOFTWARE
from megalith.spec import cluster as clusters
from megalith.spec.plan import Plan
from megalith.spec.presets import presets

ROWS = read()
SCORED = [row for row in ROWS if row.scored or row.ran_out]
SAID = [express(row) for row in SCORED]


def test_more_than_85_percent_of_the_transformer_rows_can_be_said():
    transformers = [item for item in SAID if item.transformer]
    assert sum(bool(item.choices) for item in transformers) >= 0.85 * len(transformers)


def test_every_row_has_workloads_or_a_reason():
    assert all(bool(item.choices) != bool(item.reason) for item in SAID)


def test_every_workload_uses_all_its_devices():
    for item in SAID:
        for load in item.choices:
            assert load.plan.ranks == load.cluster.count, item.row.name
            assert load.microbatches * load.plan.microbatch * load.plan.data == load.global_batch, item.row.name


def test_every_said_row_measured_time_or_memory():
    for item in SAID:
        if item.choices and item.row.scored:
            assert measured_seconds(item.row, item.choices[0]) or item.row.memory, item.row.name


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"model_spec": '{"layers": 4, "hybrid": {"mamba": 3}}'}, "as a JSON object"),
        ({"model_spec": '{"layers": 4'}, "cannot be read"),
        ({"model_spec": '{"layers": 4, "hidden": 8}'}, "vocabulary"),
        ({"model_spec": "[1, 2]"}, "cannot be read"),
        ({"hardware": "Abacus"}, "catalogue has no Abacus"),
        ({"options": "yes"}, "cannot be read"),
    ],
)
def test_a_row_of_another_file_that_cannot_be_said_gives_a_reason(columns: dict[str, str], said: str):
    row = next(row for row in ROWS if row.name == "torchtitan-a100-0004")
    found = express(type(row)(row.columns | columns))
    assert not found.choices
    assert said in found.reason


def test_rows_have_their_sources_and_groups_their_software():
    assert all(row.text("source") and row.group for row in ROWS)
    ours = {row.group for row in ROWS if row.group.startswith(("torchtitan", "megalith"))}
    assert ours == {"torchtitan", "torchtitan-a100", "torchtitan-h200", "megalith"} and ours <= set(SOFTWARE)


def test_what_is_published_to_have_run_out_of_memory_does_not_fit():
    """The same model with more recomputation was run; its predicted memory fits, and is within a tenth of the measured one."""
    checked = 0
    for item in SAID:
        if item.row.ran_out or (item.choices and not item.transformer and item.row.memory):
            found = estimate(item.choices[0])
            assert found.fits != item.row.ran_out, item.row.name
            if not item.row.ran_out:
                assert found.memory.allocated == pytest.approx(item.row.memory, rel=0.1)
            checked += 1
    assert checked == 4


def test_internevo_s_memory_rows_are_7b_with_the_temporary_tensors_of_its_update():
    """Their notes name InternLM-20B, which the source measured on more devices than these."""
    (row,) = [row for row in ROWS if row.name == "internevo-0056"]
    (choice,) = express(row).choices
    assert (len(choice.model.blocks), choice.model.dim, choice.software_profile.update_bytes) == (32, 4096, 12)


def test_megatron_bridge_s_gb_are_decimal():
    """The figures themselves show it: recomputing the activations of 23 expert layers saved 4.194 of the printed "GB", and their size
    is known: 6 of 128 experts a token, 8,192 tokens, width 1,856, 16 bits."""
    rows = {row.name: row for row in ROWS}
    spared = rows["mbridge-skills-0007"].memory - rows["mbridge-skills-0008"].memory
    assert spared == pytest.approx(23 * 8192 * 6 * 1856 * 2, rel=0.01)


@pytest.mark.parametrize("group", ["mosaic", "nemo2407", "mbridge"])
def test_a_source_s_tflops_by_its_own_convention_are_its_seconds(group):
    """Some rows print both figures. They show that the conventions are understood, so rows that print TFLOP/s alone are
    read correctly too."""
    gaps = []
    for item in SAID:
        row = item.row
        plain = item.choices and row.options.get("task") != "LoRA" and "variant" not in row.options
        if row.group == group and plain and row.number("step_time_s") and row.number("tflops_per_gpu"):
            without = {"step_time_s": "", "tokens_per_s_per_gpu": ""}
            seconds = measured_seconds(type(row)(row.columns | without), item.choices[0])
            gaps.append(abs(seconds / row.number("step_time_s") - 1))
    assert sorted(gaps)[len(gaps) // 2] < 0.04


def test_what_offloading_the_optimizer_costs_is_near_what_was_published():
    """Megatron-Bridge's card of Qwen3-30B has the same run with none to all of its moments in host memory. The batch is not printed,
    so the test compares the extra time of a step, which does not depend on the batch."""
    rows = {row.name: row.number("step_time_s") for row in ROWS}
    plan = Plan(data=4, tensor=2, pipeline=2, expert=4)
    load = Workload(presets()["qwen3-30b-a3b"].build().build(), plan, clusters.load("h100:16"), 4096, 64)
    none, *moved = (estimate(replace(load, plan=offloaded(plan, share))) for share in (0.0, 0.25, 0.5, 0.75, 1.0))
    for number, one in enumerate(moved, 23):
        measured = rows[f"mbridge-skills-{number:04}"] - rows["mbridge-skills-0022"]
        assert one.time.step - none.time.step == pytest.approx(measured, rel=0.3)
