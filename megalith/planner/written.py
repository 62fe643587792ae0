"""The best plan in a run file. No torch unless a part must be traced."""

from megalith.planner.answer import PlanResult, short
from megalith.planner.linked import whole_batch
from megalith.planner.request import DATA, STEPS
from megalith.spec import files
from megalith.spec.files import ResolvedRun
from megalith.spec.plan import Plan
from megalith.spec.toml import dotted
from megalith.spec.validate import leaves


def as_run(answered: PlanResult) -> str:
    """The best plan in a run file that `megalith check` accepts once its data is there, and `megalith train` runs."""
    asked, best = answered.asked, answered.found.best
    assert best is not None
    plan, sites = _written(best.plan), (answered.linked and answered.linked.chosen) or asked.sites
    if sites is not None and answered.apart is not None:
        each = tuple(one.model_copy(update={"plan": one.plan and _written(one.plan)}) for one in sites.each)
        sites = sites.model_copy(update={"each": each})
    spec = (asked.whole or whole_batch(asked)).model_copy(update={"plan": plan, "sites": sites})
    before = asked.resolved.provenance if asked.resolved else {}
    old = {dotted(leaf.path): leaf.value for leaf in leaves(asked.resolved.spec)} if asked.resolved else {}
    origins: dict[str, str] = {}
    for leaf in leaves(spec):
        name = dotted(leaf.path)
        kept = name in before and old.get(name) == leaf.value
        origins[name] = before[name] if kept else "megalith plan"
    text = files.dump(ResolvedRun(spec, origins), brief=True)
    estimate = best.estimate
    head = (
        f"# {asked.run.model.name} on {asked.run.cluster}, as `megalith plan` lays it out: {short(plan)}, predicted "
        f"{estimate.time.step:.3g} s a step,\n# {estimate.mfu:.1%} MFU, {estimate.memory.total / 2**30:.1f} GiB on the worst rank.\n"
    )
    if asked.resolved is None:
        head += f"# data.path = {DATA!r} is a guess: put your own"
        head += "." if asked.tokens else f"; so is train.steps = {STEPS}."
        head += "\n"
    return head + text.partition("\n")[2]


def _written(plan: Plan) -> Plan:
    """The plan without parts to be recomputed that have no effect."""
    return plan if plan.recompute == "selective" else plan.model_copy(update={"recompute_parts": Plan().recompute_parts})
