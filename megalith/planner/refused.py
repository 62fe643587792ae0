"""Plans that `megalith check` refuses for a run. No torch."""

from megalith.check import check
from megalith.spec.phases import DATA as DATA_PHASES
from megalith.spec.phases import RAMP, Phases
from megalith.spec.plan import Plan
from megalith.spec.problem import Problem
from megalith.spec.run import RunSpec
from megalith.spec.sites import own_batch


def refusals(spec: RunSpec, plan: Plan) -> list[Problem]:
    """Return why `megalith check` would not accept a plan for a run; only what concerns the plan counts."""
    found = check(spec.model_copy(update={"plan": plan}), files=False)
    mine = ("plan.", "cluster", "train.global_batch", "train.seq_len", RAMP, DATA_PHASES)
    return [problem for problem in found if problem.severity == "error" and problem.key.startswith(mine)]


def across_sites(spec: RunSpec, *, out: bool, cluster: str | None, batch: int | str | None) -> list[Problem]:
    """Return why options do not suit a run across sites. `out`: the best plan is to be written; `cluster` and `batch`: other devices, and
    another batch, than the run file's."""
    sites = spec.sites
    if sites is None:
        return []
    found, named = list[Problem](), any(one.cluster is not None for one in sites.each)
    if out and (len(Phases.of(spec).all) > 1 or (sites.each and not named)):
        reason = (
            "writes the plan and batch of one site, and this run has phases, or tables of sites (sites.each) without clusters"
        )
        way_out = "Give each of sites.each a cluster, or leave out --out, and write the plan that is printed into the run file."
        found.append(Problem("error", "--out", True, reason, way_out, "command line"))
    for option, value in (("--cluster", cluster), ("--global-batch", batch)):
        if named and value is not None:
            reason = "is for one site, and this run names the cluster of each site and shares its batch out among them"
            found.append(Problem("error", option, value, reason, "Change the run file instead.", "command line"))
    if named and len(Phases.of(spec).all) > 1:
        reason = "name clusters, and the run has phases: shares would be chosen for the batch of one of them"
        found.append(
            Problem("error", "sites.each", len(sites.each), reason, "Leave out the clusters, or the phases and the ramp.")
        )
    if own_batch(spec) == 0:
        reason = f"leaves sites without samples: they share a step's samples out in {sites.parts} parts"
        found.append(Problem("error", "train.global_batch", spec.train.global_batch, reason, f"Use {sites.parts} or more."))
    return found
