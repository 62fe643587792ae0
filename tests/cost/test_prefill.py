"""Only forward: the prefill of long prompts."""

import pytest

from megalith.cost.constants import calibration
from megalith.cost.parts import parts
from megalith.cost.prefill import prefill, prefill_memory
from megalith.cost.workload import Workload
from megalith.spec import cluster as clusters
from megalith.spec.plan import Plan
from megalith.spec.presets import presets
from tests.cost.models import DIM, dense, workload


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGALITH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def test_a_million_tokens_of_llama_3_405b_on_128_h100_take_about_77_seconds():
    """Yang et al. 2024 (arXiv:2411.01783, figure 8): tensor 8 in each of 16 nodes, context 16 across them, weights in 8 bits."""
    model = presets()["llama3.1-405b"].build().build()
    plan = Plan(tensor=8, context=16, zero=0)
    found = prefill(Workload(model, plan, clusters.load("h100:128"), 2**20, 1, "fp8"))
    assert found.time.step == pytest.approx(77, rel=0.2)
    assert found.fits


def test_the_keys_and_values_of_all_tokens_are_kept():
    work = workload(dense(), Plan(context=2, zero=0), seq_len=512, global_batch=3)
    held = prefill_memory(work, parts(work), calibration())
    assert held.activations == 4 * 3 * 256 * 2 * DIM * 2  # blocks, sequences, a rank's tokens, keys and values, bytes
    assert held.gradients == held.optimizer == 0


def test_forward_is_a_third_of_the_flops_of_a_step_but_for_the_masked_half_and_the_head():
    work = workload(dense(), Plan(zero=0), global_batch=1)
    weights = sum(block.weights for block in parts(work).blocks)
    products = 2 * 256 * weights
    attention = 4 * 4 * 256 * 256 * DIM / 2
    assert prefill(work).flops == pytest.approx(products + attention, rel=0.01)


def test_one_sequence_makes_all_other_pipeline_ranks_wait():
    one, many = (prefill(workload(dense(), Plan(pipeline=4, zero=0), global_batch=batch)).time for batch in (1, 16))
    assert one.bubble / one.step == pytest.approx(0.75, abs=0.05)
    assert many.bubble == pytest.approx(one.bubble)
    assert many.bubble / many.step < 0.2
