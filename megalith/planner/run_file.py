"""Run file with the best plan. Imports torch only to trace parts."""

from typing import Any

from megalith.planner.linked import whole_batch
from megalith.planner.plan_result import PlanResult, short
from megalith.planner.request import DATA, STEPS
from megalith.spec import files
from megalith.spec.files import ResolvedRun
from megalith.spec.plan import Plan
from megalith.spec.toml import dotted
from megalith.spec.validate import leaves


def as_run(result: PlanResult) -> str:
    """Return a run file with the best plan, which `megalith check` accepts and `megalith train` runs once its data exists."""
    request, best = result.request, result.found.best
    assert best is not None
    asked = request.resolved.spec if request.resolved else None
    file = asked.plan if asked else Plan()
    plan, sites = _written(best.plan, file), (result.linked and result.linked.chosen) or request.sites
    if sites is not None and result.site_plans is not None:
        plans = [one.plan or file for one in asked.sites.each] if asked and asked.sites else []
        each = tuple(
            one.model_copy(update={"plan": one.plan and _written(one.plan, own)})
            for one, own in zip(sites.each, plans, strict=True)
        )
        sites = sites.model_copy(update={"each": each})
    spec = (request.whole or whole_batch(request)).model_copy(update={"plan": plan, "sites": sites})
    before = request.resolved.provenance if request.resolved else {}
    old = {dotted(leaf.path): leaf.value for leaf in leaves(request.resolved.spec)} if request.resolved else {}
    origins: dict[str, str] = {}
    for leaf in leaves(spec):
        name = dotted(leaf.path)
        kept = name in before and old.get(name) == leaf.value
        origins[name] = before[name] if kept else "megalith plan"
    text = files.dump(ResolvedRun(spec, origins), brief=True)
    estimate = best.estimate
    head = (
        f"# {request.run.model.name} on {request.run.cluster}, planned by `megalith plan`: {short(plan)}, predicted "
        f"{estimate.time.step:.3g} s a step,\n# {estimate.mfu:.1%} MFU, {estimate.memory.total / 2**30:.1f} GiB on the worst rank.\n"
    )
    if request.resolved is None:
        head += f"# data.path = {DATA!r} is a guess: write your own"
        head += "." if request.tokens else f"; train.steps = {STEPS} is a guess, too."
        head += "\n"
    return head + text.partition("\n")[2]


def _written(plan: Plan, file: Plan) -> Plan:
    """The plan without `recompute_parts` that have no effect, and with the run file's folders and chunks for what is on disk, which no
    search chooses. `file`: the plan in the run file."""
    changed: dict[str, Any] = {} if plan.recompute == "selective" else {"recompute_parts": Plan().recompute_parts}
    if plan.state.optimizer == "disk":
        changed["state"] = plan.state.model_copy(update={"folder": file.state.folder, "chunk": file.state.chunk})
    if "disk" in plan.retain.places:
        changed["retain"] = plan.retain.model_copy(update={"folder": file.retain.folder})
    return plan.model_copy(update=changed)
