"""The chosen length of segments is that whose dry run needs the least memory."""

import pytest

from megalith.cost.predicted import workload_of
from megalith.spec.run import RunSpec
from tests.full import sampled
from tests.prove.dry import dry
from tests.specs import brief_run, tiny_run


def _peak(spec: RunSpec, policy: str) -> int:
    """Return the peak bytes of activations, without their gradients, in the first rank's step."""
    plan = spec.plan.model_copy(update={"recompute": policy})
    return max(moment["activations"] for moment in dry(spec.model_copy(update={"plan": plan}), 0).memory_timeline)


RUNS = {
    "one microbatch in flight": tiny_run(
        model={"layers": 12}, plan={"recompute": "segments:auto"}, train={"global_batch": 1, "seq_len": 64}
    ),
    "as many as a pipeline has": brief_run(model={"layers": 12}, plan={"pipeline": 2, "recompute": "segments:auto"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@sampled(1)
def test_the_size_that_is_decided_holds_the_least(name: str) -> None:
    spec = RUNS[name]
    longest = 12 // spec.plan.pipeline
    held = {f"segments:{size}": _peak(spec, f"segments:{size}") for size in range(1, longest + 1)}
    decided = workload_of(spec).plan.recompute
    assert held[decided] <= 1.02 * min(held.values()), held
    assert held[decided] <= _peak(spec, "full")
    assert max(held.values()) > 1.3 * held[decided], "a choice that matters"


def test_other_policies_stay_as_they_are() -> None:
    for policy in ("none", "full", "sqrt", "segments:3"):
        assert workload_of(tiny_run(plan={"recompute": policy})).plan.recompute == policy
