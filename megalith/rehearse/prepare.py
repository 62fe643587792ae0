"""Input of a simulation, from the command line, a run file and a campaign's log. All mistakes in this input are reported
together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from megalith import epochs, events
from megalith.check.own import load_admitted
from megalith.cost.across import LinkChoice
from megalith.events import Incident
from megalith.rehearse import latencies
from megalith.rehearse.between import BETWEEN_SITES, between_sites, site_count, sites_linked
from megalith.rehearse.campaign import FAULTED
from megalith.rehearse.latencies import PROFILES, Latencies
from megalith.rehearse.scenario import DAY, Scenario, scenario
from megalith.spec import cluster as clusters
from megalith.spec import files
from megalith.spec.cluster import ClusterSpec
from megalith.spec.faults import tables
from megalith.spec.files import Layer, ResolvedRun
from megalith.spec.fleet import FleetSpec
from megalith.spec.plan import Plan
from megalith.spec.problem import Problem, SpecErrors, near
from megalith.spec.run import RunSpec
from megalith.spec.simulation import SimulationSpec
from megalith.spec.validate import validate

STEP_SECONDS, CHECKPOINT_MINUTES = 10.0, 30.0
"""Values that are assumed if neither an option nor a run file gives them: seconds of a step, and minutes between checkpoints."""

MAX_EVENTS, MAX_NODES = 100_000, 1_000_000
"""The most events (faults, outages or planned stops) and nodes of one simulated run. A simulation with more events or nodes would take too
long, or too much memory."""

WITHOUT_EFFECT: dict[str, str] = {
    "recover": "the simulated policy always recovers after a fault",
    "nodes": "Use --cluster, which sets how many nodes train.",
    "disk": "Use latencies.restore.disk and latencies.stall.disk.",
    "digest": "The tables of faults have no fault that alters the state between two steps.",
    "verify": "Use latencies.verify for the cost of verification.",
    "hang_factor": "Use latencies.hang.",
    "hang_floor": "Use latencies.hang.",
    "node_timeout": "Use latencies.node_lost.",
    "straggler_factor": "Use reliability.slow_factor.",
    "check": "Use latencies.check.",
    "burn_in": "Use latencies.check.",
    "ledger": "Use reliability.lemon_share and lemon_factor.",
}
"""Keys of [fleet] that the simulation ignores, each with the reason or with the key to use instead. Run files may contain keys that the
simulation ignores; `--set` refuses them."""


@dataclass(frozen=True)
class SimulationRequest:
    """The options of the command line; None if an option was not given. `options`: keys of `SimulationSpec`, as dotted names."""

    cluster: str | None = None
    run: Path | None = None
    log: Path | None = None
    options: Mapping[str, Any] | None = None
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class PreparedSimulation:
    """A scenario and its assumptions. `linked`: the prediction for the link between sites, and the choice of a method for it; None without
    a link."""

    scenario: Scenario
    notes: tuple[str, ...] = ()
    linked: LinkChoice | None = None


def prepare(
    wanted: SimulationRequest,
    *,
    state_bytes: Callable[[RunSpec], float | None] = lambda run: None,
    step_seconds: Callable[[Path, Sequence[str], str], float | None] = lambda run, overrides, cluster: None,
) -> PreparedSimulation:
    """Turn the options into a scenario. `state_bytes` and `step_seconds` return, if known, the bytes of a run's whole state and the seconds
    of its step on a cluster.

    Raises SpecErrors with everything that is wrong.
    """
    problems: list[Problem] = []
    own, others = _sorted(wanted, problems)
    resolved = _run(wanted, others, problems)
    spec = _spec(own, problems)
    name, cluster = _cluster(wanted, resolved, problems, sites=site_count(spec, resolved.spec if resolved else None))
    base = _measured(wanted, spec, problems)
    problems += _contradictions(spec, resolved, cluster)
    if problems:
        raise SpecErrors(problems)
    assert cluster and base
    if resolved is not None:
        assert wanted.run is not None
        found = {
            "state_bytes": spec.state_bytes or state_bytes(resolved.spec),
            "step_seconds": spec.step_seconds or step_seconds(wanted.run, [*others, *_of_a_site(spec, resolved, cluster)], name),
        }
        spec = spec.model_copy(update=found)
    return _prepared(spec, resolved, _with_own(cluster, spec), base)


# What was said


def _sorted(wanted: SimulationRequest, problems: list[Problem]) -> tuple[list[Layer], list[str]]:
    """Split the settings into those of the simulation and those of the run file. Keys of [fleet] belong to the run file if there
    is one."""
    own: list[Layer] = []
    others: list[str] = []
    for key, value in (wanted.options or {}).items():
        if wanted.run and key.startswith("fleet."):
            others.append(f"{key}={value}")
        else:
            own.append(Layer(_nested(key, value), "command line"))
    for text in wanted.overrides:
        try:
            layer = files.read_setting(text)
        except SpecErrors as errors:
            problems += errors.problems
            continue
        table = next(iter(layer.values))
        if table == "fleet" and isinstance(layer.values[table], dict):
            problems += _ineffective(layer.values[table])
        of_run = (
            table == "fleet"
            or table not in SimulationSpec.model_fields
            or (isinstance(layer.values[table], dict) and table == "sites")
        )
        others.append(text) if wanted.run and of_run and table in RunSpec.model_fields else own.append(layer)
    return own, others


def _nested(key: str, value: Any) -> dict[str, Any]:
    table, dot, rest = key.partition(".")
    return {table: _nested(rest, value) if dot else value}


def _ineffective(fleet: Mapping[str, Any]) -> Iterator[Problem]:
    for key in fleet.keys() & WITHOUT_EFFECT.keys():
        way_out = WITHOUT_EFFECT[key]
        if not way_out.endswith("."):
            way_out = f"Leave this key out: {way_out}."
        yield _problem(f"fleet.{key}", fleet[key], "this key changes nothing in a simulation", way_out)


def _spec(layers: Sequence[Layer], problems: list[Problem]) -> SimulationSpec:
    tree: dict[str, Any] = {}
    for layer in layers:
        files.lay(tree, layer.values, source=layer.source, sources={})
    try:
        return validate(tree, SimulationSpec, source=lambda key: "command line")
    except SpecErrors as errors:
        problems += errors.problems
        wrong = {problem.key.partition(".")[0] for problem in errors.problems}
        return validate({key: value for key, value in tree.items() if key not in wrong}, SimulationSpec, source=lambda key: "")


def _run(wanted: SimulationRequest, overrides: Sequence[str], problems: list[Problem]) -> ResolvedRun | None:
    return None if wanted.run is None else load_admitted(wanted.run, overrides, problems)


def _cluster(
    wanted: SimulationRequest, run: ResolvedRun | None, problems: list[Problem], *, sites: int
) -> tuple[str, ClusterSpec | None]:
    """Return the name of the cluster that trains a step, and the cluster of all sites. A run file names the cluster of one site."""
    name, each = wanted.cluster, 1
    if name is None and run is not None and run.spec.cluster != "local":
        name = run.spec.cluster if clusters.counted(run.spec.cluster) else f"{run.spec.cluster}:{run.spec.plan.ranks}"
        each = sites if run.spec.sites is not None else 1
        problems += _different(run.spec)
    if name is None:
        if run is not None or wanted.run is None:
            problems.append(
                _problem("--cluster", None, "is missing", "Name the cluster to simulate, such as --cluster h100:16384.")
            )
        return "", None
    try:
        found = clusters.load(name)
        return name, found.resized(each * found.count) or found
    except SpecErrors as errors:
        problems += errors.problems
        return name, None


def _different(run: RunSpec) -> Iterator[Problem]:
    """Yield a problem if a run file names different clusters for its sites."""
    named = {one.cluster or run.cluster for one in run.sites.each} if run.sites is not None else set[str]()
    if len(named) > 1:
        reason = f"names {len(named)} clusters ({', '.join(sorted(named))}), but all simulated sites have the same devices"
        yield _problem("sites.each", len(run.sites.each) if run.sites else 0, reason, "Name one cluster for all with --cluster.")


def _measured(wanted: SimulationRequest, spec: SimulationSpec, problems: list[Problem]) -> Latencies | None:
    base = PROFILES[spec.profile]
    if wanted.log is None:
        return base
    folder = wanted.log / FAULTED if (wanted.log / FAULTED).is_dir() else wanted.log
    try:
        records = list(events.read(folder))
    except (OSError, ValueError) as error:
        problems.append(_problem("--latencies", str(wanted.log), f"cannot be read: {error}", "Give another campaign's folder."))
        return None
    if not events.of_kind(records, Incident):
        reason = f"the run's log has no incident ({epochs.newest(folder, events.FILE)})"
        way_out = "Give the folder that `megalith campaign` named, or the folder of a run that had faults."
        problems.append(_problem("--latencies", str(wanted.log), reason, way_out))
        return None
    found = latencies.calibrated(records, base, typical=fmean)  # totals are to come right
    return replace(found, source=f"{found.source} in {folder}; durations without a measurement: {base.source}")


def _contradictions(spec: SimulationSpec, run: ResolvedRun | None, cluster: ClusterSpec | None) -> Iterator[Problem]:
    sites = site_count(spec, run.spec if run else None)
    if cluster is not None and sites > cluster.nodes:
        reason = f"each site needs a node, but the cluster has only {cluster.nodes}"
        yield _problem("sites", sites, reason, f"Use 1 to {cluster.nodes}.")
    if sites > 1 and run is not None and run.spec.sites is not None and run.spec.sites.exchanges_gradients:
        reason = "with this method each fault stops all sites, but the simulator has only sites that merge with a quorum"
        yield _problem("sites.method", run.spec.sites.method, reason, "Use --sites 1 with all nodes.")
    for key in BETWEEN_SITES if sites == 1 else ():
        if key in spec.model_fields_set:
            reason = "this key describes merges between sites, but there is only one site"
            yield _problem(key, getattr(spec, key), reason, "Use --sites 2 or more, or leave this key out.")
    own = run.spec.sites.decides if run is not None and run.spec.sites is not None else None
    decides = own if spec.decides is None else spec.decides
    if decides is not None and decides >= sites > 1:
        yield _problem("decides", decides, f"is not one of the sites 0 to {sites - 1}", "Name one with --set decides=NUMBER.")
    if spec.storage is not None and spec.state_bytes is None and run is None:
        way_out = "Add --set state_bytes=BYTES, such as 6.5e12 for 405e9 parameters with 16 bytes each, or give a RUN.toml."
        yield _problem(
            "storage", spec.storage, "this is a rate, and without the bytes of the state the time of a save is unknown", way_out
        )
    known = spec.reliability if "faults" in spec.reliability.model_fields_set else cluster.reliability if cluster else None
    if known is not None and known.faults not in tables():
        nearest = near(known.faults, tables())
        way_out = f"{f'Did you mean {nearest!r}? ' if nearest else ''}Known: {', '.join(tables())}."
        yield _problem("reliability.faults", known.faults, "no table of faults has this name", way_out)
    if cluster is not None:
        yield from _too_large(_with_own(cluster, spec), spec, run.spec.fleet.spares if run else spec.fleet.spares)


def _too_large(cluster: ClusterSpec, spec: SimulationSpec, spares: int) -> Iterator[Problem]:
    if cluster.nodes > MAX_NODES:
        way_out = f"Use at most {MAX_NODES * cluster.per_node:,} devices."
        yield _problem("--cluster", cluster.count, f"{cluster.nodes:,} nodes are too many to simulate", way_out)
    if spares > MAX_NODES:
        yield _problem("fleet.spares", spares, "too many to simulate", f"Use at most {MAX_NODES:,}.")
    own, years = cluster.reliability, spec.days / 365.25
    rates = {
        "interruptions": (cluster.interruptions, 24 * spec.days * cluster.count, "faults"),
        "reliability.rack_outages": (own.rack_outages, years * -(-cluster.nodes // own.rack_nodes), "outages"),
        "reliability.switch_outages": (
            own.switch_outages,
            years * -(-cluster.nodes // (own.rack_nodes * own.switch_racks)),
            "outages",
        ),
        "planned": (spec.planned, spec.days, "stops"),
    }
    for key, (rate, times, what) in rates.items():
        if rate * times > MAX_EVENTS:
            seconds = spec.days * DAY / (rate * times)
            reason = (
                f"gives {rate * times:.3g} {what} in {spec.days:g} days, one every {seconds:.2g} seconds: too many to simulate"
            )
            way_out = f"Use at most {MAX_EVENTS / times:.2g}, or fewer days."
            said = key != "interruptions" or spec.interruptions is not None
            yield Problem("error", key, rate, reason, way_out, "command line" if said else "cluster")


# What it comes to


def _with_own(cluster: ClusterSpec, spec: SimulationSpec) -> ClusterSpec:
    said = {key: getattr(spec.reliability, key) for key in spec.reliability.model_fields_set}
    rate = {} if spec.interruptions is None else {"interruptions": spec.interruptions}
    return cluster.model_copy(update={"reliability": cluster.reliability.model_copy(update=said), **rate})


def _of_a_site(spec: SimulationSpec, run: ResolvedRun, cluster: ClusterSpec) -> list[str]:
    """Return the setting that leaves the planner one site's devices of the cluster."""
    sites = site_count(spec, run.spec)
    return [f"cluster.count={cluster.nodes // sites * cluster.per_node}"] if sites > 1 else []


def _prepared(spec: SimulationSpec, run: ResolvedRun | None, cluster: ClusterSpec, base: Latencies) -> PreparedSimulation:
    step = spec.step_seconds or STEP_SECONDS
    fleet, notes = _fleet(spec, run, cluster)
    every, how = _interval(spec, run, step)
    notes += [how] if how else []
    if run is not None:
        notes.append(
            f"a step takes {step:.3g} s{'' if spec.step_seconds else ', assumed: --set step_seconds=SECONDS changes it'}"
            + (f"; a state of {spec.state_bytes / 1e12:.3g} TB" if spec.state_bytes else "")
        )
    if fleet.verify_every and not spec.latencies.verify:
        notes.append("fleet.verify_every: assumed to cost nothing; --set latencies.verify=SHARE of the time changes it")
    sites = site_count(spec, run.spec if run else None)
    if left := cluster.nodes % sites:
        notes.append(f"{left} of {cluster.nodes} nodes are unused, because all {sites} sites have the same size")
    linked = sites_linked(spec, run.spec if run else None, step) if sites > 1 else None
    if linked is not None and linked.chosen is not None:
        notes.append("simulated with the method chosen for this link; `megalith plan RUN.toml --out FILE` writes it")
    if linked is not None:
        notes.append("one site alone is assumed to take as many times as long for the whole batch as for its part of it")
    between = between_sites(spec, run.spec if run else None, step, linked) if sites > 1 else {}
    rated = latencies.at_rates(base, cluster, state_bytes=spec.state_bytes, storage=spec.storage)
    plan = scenario(
        cluster, days=spec.days, latencies=_with_said(rated, spec), fleet=fleet, store_every=every, step_seconds=step,
        sites=sites, **between,
    )  # fmt: skip
    return PreparedSimulation(replace(plan, planned=spec.planned), tuple(notes), linked)


def _fleet(spec: SimulationSpec, run: ResolvedRun | None, cluster: ClusterSpec) -> tuple[FleetSpec, list[str]]:
    """Return the policy's settings, and notes on them. The default number of spares is one for every 128 nodes of a site, and at
    least one."""
    fleet = run.spec.fleet if run else spec.fleet
    said = run.provenance["fleet.spares"] != "default" if run else "spares" in spec.fleet.model_fields_set
    update: dict[str, Any] = (
        {} if said else {"spares": max(1, cluster.nodes // site_count(spec, run.spec if run else None) // 128)}
    )
    notes: list[str] = []
    if fleet.no_spare == "shrink" and fleet.fallback is None:
        update["fallback"] = Plan()  # which one does not matter here: work goes on in proportion to the nodes that are left
        notes.append(
            "fleet.no_spare = shrink: the run is assumed to train on any number of nodes, in proportion; a real run needs a fleet.fallback"
        )
    return fleet.model_copy(update=update), notes


def _interval(spec: SimulationSpec, run: ResolvedRun | None, step: float) -> tuple[float, str]:
    """Return the seconds of work between checkpoints, and their source."""
    if spec.checkpoint_every is not None:
        return 60.0 * spec.checkpoint_every, ""
    if run is None:
        return 60.0 * CHECKPOINT_MINUTES, ""
    steps = run.spec.checkpoint.every
    if not steps:
        return spec.days * DAY, "checkpoint.every = 0: the run saves only at its end"
    return steps * step, f"checkpoint.every = {steps}: a checkpoint every {steps * step / 60:.3g} minutes"


def _with_said(found: Latencies, spec: SimulationSpec) -> Latencies:
    said = spec.latencies.model_dump(exclude_none=True)
    if not any(value != {} for value in said.values()):
        return found
    for table in ("restore", "stall"):
        said[table] = {**getattr(found, table), **said[table]}
    named = ", ".join(sorted(spec.latencies.model_fields_set))
    return replace(found, **said, source=f"{found.source}; as set: {named}")


def _problem(key: str, value: Any, reason: str, way_out: str) -> Problem:
    return Problem("error", key, value, reason, way_out, "command line")
