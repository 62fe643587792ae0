"""Problems of requests for a plan: plans that `megalith check` refuses, and unpublished figures of a cluster. No torch."""

from typing import Any, NamedTuple

from megalith.check import check
from megalith.check.case import next_multiple
from megalith.check.remedies import combinations, rounding
from megalith.spec.cluster import OWN, ClusterSpec
from megalith.spec.phases import DATA as DATA_PHASES
from megalith.spec.phases import RAMP, Phases
from megalith.spec.plan import Plan
from megalith.spec.problem import Problem
from megalith.spec.run import RunSpec
from megalith.spec.sites import own_batch


def problem(key: str, value: Any, reason: str, way_out: str) -> Problem:
    """Return an error of the command line."""
    return Problem("error", key, value, reason, way_out, "command line")


def plan_problems(spec: RunSpec, plan: Plan) -> list[Problem]:
    """Return the errors for which `megalith check` would refuse a plan for a run; only errors that concern the plan count."""
    found = check(spec.model_copy(update={"plan": plan}), files=False)
    mine = ("plan.", "cluster", "train.global_batch", "train.seq_len", RAMP, DATA_PHASES)
    return [problem for problem in found if problem.severity == "error" and problem.key.startswith(mine)]


def across_sites(spec: RunSpec, *, out: bool, cluster: str | None, batch: int | str | None) -> list[Problem]:
    """Return the problems of command-line options in a run across sites. `out`: --out was given; `cluster` and `batch`:
    values of --cluster and --global-batch."""
    sites = spec.sites
    if sites is None:
        return []
    found, named, phased = list[Problem](), any(one.cluster is not None for one in sites.each), len(Phases.of(spec).all) > 1
    printed = "leave out --out, and write the printed plan into the run file."
    if out and phased:
        reason = "--out writes one batch for a run across sites, but this run has phases or a batch ramp"
        found.append(Problem("error", "--out", True, reason, f"{printed[0].upper()}{printed[1:]}", "command line"))
    elif out and sites.plans and not named:
        reason = "--out writes the plan of one site, but this run has tables of sites (sites.each) without clusters"
        found.append(Problem("error", "--out", True, reason, f"Give each of sites.each a cluster; or {printed}", "command line"))
    for option, value in (("--cluster", cluster), ("--global-batch", batch)):
        if named and value is not None:
            reason = f"{option} is for one site, but this run names a cluster for each site and divides its batch among them"
            found.append(Problem("error", option, value, reason, "Change the run file instead.", "command line"))
    if named and phased:
        reason = "sites.each names clusters, but the run has phases: the sites' shares would suit the batch of only one phase"
        found.append(
            Problem("error", "sites.each", len(sites.each), reason, "Leave out the clusters, or the phases and the batch ramp.")
        )
    if batch is None:  # else the option is one site's batch
        found += _undivided(spec, sites.parts, chosen=named)
    return found


def _undivided(spec: RunSpec, parts: int, *, chosen: bool) -> list[Problem]:
    """Return the problem of the first batch of a run that does not divide into the parts that sites read. `chosen`: the planner chooses
    other parts."""
    if own_batch(spec) == 0:
        reason = f"this batch leaves sites without samples: the sites divide a step's samples into {parts} parts"
        return [Problem("error", "train.global_batch", spec.train.global_batch, reason, f"Use {parts} or more.")]
    phase = next((one for one in Phases.of(spec).all if one.global_batch % parts), None)
    if chosen or phase is None:
        return []
    key, size = phase.set_by.get("global_batch", "train.global_batch"), phase.global_batch
    reason = f"is not a multiple of {parts}, the number of parts into which the sites divide a step's samples"
    near_ones = " or ".join(str(n) for n in (size // parts * parts, next_multiple(size, parts)) if n)
    return [Problem("error", key, size, reason, f"Use {near_ones}.")]


def unpublished(name: str, cluster: ClusterSpec) -> list[Problem]:
    """Return a problem if nobody published figures of a cluster that a prediction needs."""
    device = cluster.accelerator
    needed: dict[str, Any] = {"peak.bf16": device.peak.get(device.half), "memory_bandwidth": device.memory_bandwidth}
    if cluster.count > 1 and device.scale_up_domain > 1:
        needed["scale_up"] = device.scale_up
    if cluster.nodes > 1:
        needed["scale_out"] = cluster.scale_out
    missing = ", ".join(what for what, value in needed.items() if value is None)
    unknown = needed.get("scale_out", 0) is None
    own = "If you know scale_out, give it in bytes/s out of a device, such as --set cluster.scale_out=25e9. " if unknown else ""
    way_out = f"{own}Measure this machine with `megalith doctor --calibrate machine.toml`, and use --cluster machine.toml. {OWN}"
    return [problem("--cluster", name, f"nobody published {missing} of {device.name}", way_out)] if missing else []


class Remedy(NamedTuple):
    """A way to ask for a layout that needs less memory."""

    words: str
    keys: tuple[str, ...]
    """Beginnings of the keys of those changes of `check.remedies` that a search makes if this is asked for."""
    values: dict[str, Any]
    """Values of the run."""


REMEDIES = {
    "small": Remedy(
        "--small-state (moments, and gradients and master weights where that helps, are rounded, so results change)",
        ("optimizer.", "train.gradients"), {"optimizer.moments": "fp8"},
    ),
    "kept": Remedy(
        'precision.kept = "fp8" with plan.compile = false in a run file (tensors kept for backward are rounded, so results change)',
        ("precision.kept",), {"precision.kept": "fp8", "plan.compile": False},  # compiled code decides itself what is kept
    ),
    "offload": Remedy("--offload", ("plan.state.", "plan.retain."), {}),
}  # fmt: skip
"""Name of an argument of `ResolvedRequest.changed` -> the remedy."""


def remedies_for(run: RunSpec) -> list[tuple[str, ...]]:
    """Return combinations of names from REMEDIES, in the order in which `check.remedies` prefers what they ask for. A search makes all
    other changes without being asked, except `compress`, which saves less than the recomputation that a search tries."""
    found = dict[tuple[str, ...], None]()
    for values in combinations(run.model_copy(update={"plan": Plan()})):
        if "plan.retain.parts" in values:
            continue
        keys = [*rounding(values), *(key for key in values if key.startswith(REMEDIES["offload"].keys))]
        found[tuple(name for name, one in REMEDIES.items() if any(key.startswith(one.keys) for key in keys))] = None
    return [names for names in found if names]
