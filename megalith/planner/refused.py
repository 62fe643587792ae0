"""Plans that `megalith check` refuses for a run. No torch."""

from megalith.check import check
from megalith.spec.phases import DATA as DATA_PHASES
from megalith.spec.phases import RAMP
from megalith.spec.plan import Plan
from megalith.spec.problem import Problem
from megalith.spec.run import RunSpec


def refusals(spec: RunSpec, plan: Plan) -> list[Problem]:
    """Return why `megalith check` would not accept a plan for a run; only what concerns the plan counts."""
    found = check(spec.model_copy(update={"plan": plan}), files=False)
    mine = ("plan.", "cluster", "train.global_batch", "train.seq_len", RAMP, DATA_PHASES)
    return [problem for problem in found if problem.severity == "error" and problem.key.startswith(mine)]
