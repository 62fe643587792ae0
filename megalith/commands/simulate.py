"""`megalith simulate`: simulate a long run on a large cluster with faults."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from megalith.commands.shared.arguments import Json, one_of
from megalith.commands.shared.output import print_json, progress, write
from megalith.report.units import counted

if TYPE_CHECKING:
    from megalith.rehearse.prepare import PreparedSimulation, SimulationRequest
    from megalith.rehearse.replay import ReplayedCampaign
    from megalith.rehearse.scenario import Scenario
    from megalith.rehearse.simulate import SimulationResult, SweepPoint
    from megalith.spec.run import RunSpec

ScenarioRun = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN.toml]",
        help="Take [fleet], checkpoint interval, state size, step time and cluster from this run.",
        show_default=False,
    ),
]
ScenarioSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set a value of the simulation (see below), or of RUN.toml. May be repeated."
    ),
]
Cluster = Annotated[
    str | None, typer.Option(help="NAME:DEVICES, such as h100:16384, or a cluster file (.toml).", show_default=False)
]
Campaign = Annotated[
    Path | None,
    typer.Option(
        help="Replay the faults of the campaign in this folder instead of drawing faults at random.", show_default=False
    ),
]
Latencies = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Take recovery times from the log of this campaign or run, instead of the assumed times of --profile.",
    ),
]
Days = Annotated[float | None, typer.Option(help="Length of the run. Default: 30.", show_default=False)]
Seeds = Annotated[int, typer.Option(min=1, help="Number of simulations, each with different faults.")]
Spares = Annotated[
    int | None, typer.Option(help="Spare nodes of each site. Default: one spare node for every 128 nodes.", show_default=False)
]
CheckpointEvery = Annotated[
    float | None,
    typer.Option(
        metavar="MINUTES", help="Time between checkpoints in the shared store. Default: the run's, or 30.", show_default=False
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(help="Assumed recovery times: cold, warm or memory (slowest to fastest). Default: warm.", show_default=False),
]
Sites = Annotated[
    int | None,
    typer.Option(
        help="Divide the nodes among this many sites, which merge their weights. Default: the run's.", show_default=False
    ),
]
SweepOver = Annotated[str | None, typer.Option(help="Simulate a range of intervals (between checkpoints) or spares.")]
Out = Annotated[Path | None, typer.Option(help="Draw the result into this file (.svg).")]


def command(
    run: ScenarioRun = None,
    settings: ScenarioSettings = None,
    cluster: Cluster = None,
    campaign: Campaign = None,
    latencies: Latencies = None,
    days: Days = None,
    seeds: Seeds = 20,
    spares: Spares = None,
    checkpoint_every: CheckpointEvery = None,
    profile: Profile = None,
    sites: Sites = None,
    sweep: SweepOver = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Simulate a long run on a large cluster with typical faults, and show the use of its time.

    Needs no GPU; needs torch only to predict the step of a new RUN.toml (and not with --set step_seconds=12).

    Keys of --set: step_seconds, state_bytes and storage (bytes/s of the store, for the time that checkpoints take), planned (stops per
    day), merge_every, merge_seconds, grace, return_seconds, patience, decides, staleness (sites), interruptions (per device-hour),
    fleet.KEY as in a run file, reliability.KEY as in a cluster file (repairs, idle nodes, racks, switches, lemon nodes), latencies.KEY. All
    of them: docs/reliability.md.

    Example:  megalith simulate --cluster h100:16384 --days 54 --profile memory --checkpoint-every 5

    Best checkpoint interval, beside Young's and Daly's formulas:  megalith simulate --cluster h100:16384 --profile cold --sweep intervals

    Best number of spares:  megalith simulate --cluster h100:16384 --days 54 --sweep spares --out spares.svg

    One of your runs:  megalith simulate run.toml --cluster h100:1024 --set storage=2e11 --set fleet.verify_every=100

    Racks, switches and lemon nodes:  megalith simulate --cluster clusters/h100-16k-outages.toml --set reliability.rack_outages=0.5

    Four sites:  megalith simulate --cluster h100:16384 --sites 4 --set merge_every=60 --set grace=10 --profile memory

    With measured latencies:  megalith simulate --cluster h100:16384 --latencies runs/NAME-campaign

    Predict a campaign's goodput from its faults and its measured latencies:  megalith simulate --campaign runs/NAME-campaign
    """
    given = {
        "days": days, "fleet.spares": spares, "checkpoint_every": checkpoint_every, "profile": profile, "sites": sites,
    }  # fmt: skip
    options = {key: value for key, value in given.items() if value is not None}
    if campaign is not None:
        said = {"RUN.toml": run, "--cluster": cluster, "--set": settings, "--sweep": sweep, "--out": out}
        _only_campaign([*(name for name, value in said.items() if value is not None), *map(_option, options)])
        _replay(campaign, latencies, as_json=as_json)
        return
    if run is None and cluster is None:
        raise typer.BadParameter("Give --cluster, a RUN.toml that names a cluster, or --campaign to replay a campaign.")
    if sweep is not None:
        one_of("--sweep", sweep, "intervals", "spares")
    if out is not None and out.suffix != ".svg":
        raise typer.BadParameter(f"--out {out} does not name a picture. Use a name that ends in .svg.")
    from megalith.rehearse.prepare import SimulationRequest  # numpy and specifications take 0.3 s to import

    prepared = prepare(SimulationRequest(cluster, run, latencies, options, tuple(settings or ())))
    _play(prepared, sweep, seeds=seeds, out=out, as_json=as_json)


def _option(key: str) -> str:
    return f"--{key.removeprefix('fleet.').replace('_', '-')}"


def _only_campaign(others: Sequence[str]) -> None:
    """Raise a usage error if options that --campaign does not use are given."""
    if others:
        raise typer.BadParameter(f"--campaign replays a campaign unchanged. Leave out {', '.join(others)}, or --campaign.")


def _play(prepared: "PreparedSimulation", over: str | None, *, seeds: int, out: Path | None, as_json: bool) -> None:
    """Simulate a scenario, or a sweep of its "intervals" or "spares" (`over`); draw the result into `out`, and print it."""
    from megalith.rehearse import simulate

    plan = prepared.scenario
    with _bar(seeds * (len(sweep_values(plan, over)) if over else 1)) as tick:
        found = sweep(plan, over, seeds=seeds, tick=tick) if over else simulate.simulate(plan, seeds=seeds, tick=tick)
    if out is not None:
        write(_picture(found), out, overwrite=True)
    if as_json:
        link = None if prepared.linked is None else prepared.linked.to_json()
        more = {"notes": prepared.notes, "link": link} | ({"picture": str(out)} if out else {})
        print_json({"ok": True} | found.as_json() | more)
        return
    for note in prepared.notes:
        print(note)
    if prepared.linked is not None:
        from megalith.report import plans  # the planner takes long to import

        print(plans.across(prepared.linked))
    _show_swept(found, seeds) if isinstance(found, SweepResult) else _show_simulated(found)
    if out is not None:
        print(f"drawn: {out}")


@contextmanager
def _bar(total: int) -> Iterator[Callable[[], None]]:
    """Yield a function that advances a progress bar over `total` simulated runs by one."""
    with progress() as bar:
        task = bar.add_task("simulating", total=total, counts="lives")
        yield lambda: bar.update(task, advance=1, refresh=True)


def prepare(wanted: "SimulationRequest") -> "PreparedSimulation":
    """Return the requested scenario. Raises SpecErrors with all problems of the settings."""
    from megalith.rehearse import prepare as words

    return words.prepare(wanted, state_bytes=_state_bytes, step_seconds=_step_seconds)


def _state_bytes(run: "RunSpec") -> float | None:
    """Return the bytes of a checkpoint, or None if the model's sizes are invalid."""
    from megalith.check import Case
    from megalith.spec.sizes import count_model
    from megalith.spec.state import MASTER, bytes_each
    from megalith.spec.treatment import slots_of

    model = Case(run, None, files=False).model
    each = bytes_each([MASTER, *slots_of(run.optimizer)])  # as checkpoints hold them
    return None if model is None else each * count_model(model).total


def _step_seconds(run: Path, overrides: Sequence[str], cluster: str) -> float | None:
    """Return the predicted seconds of a step; None if the cluster cannot be predicted, or the plan leaves some devices idle."""
    from megalith.planner import find, request  # the planner takes long to import
    from megalith.spec.problem import SpecErrors

    try:
        found = request.resolve(request.PlanRequest(path=run, cluster=cluster, overrides=tuple(overrides)))
    except SpecErrors:
        return None
    if found.own is None:
        return None
    return find.scorer_of(found).estimate(find.workload_of(found, found.own)).time.step


@dataclass(frozen=True)
class SweepResult:
    """Simulations of one scenario over a range of "intervals" (seconds between checkpoints) or "spares" (nodes).

    `known`: values with a name, such as the interval by Young's formula. `tried` includes these values.
    """

    plan: "Scenario"
    what: str
    tried: "list[SweepPoint]"
    known: Mapping[str, float] = field(default_factory=dict)

    @property
    def best(self) -> "SweepPoint":
        """The interval with the best goodput, or the number of spares with the best goodput over all devices, spares included."""
        return max(self.tried, key=lambda one: one.goodput if self.what == "intervals" else one.per_device)

    @property
    def scale(self) -> tuple[int, str]:
        """The unit in which values are shown, and its name."""
        return (60, "minutes between checkpoints") if self.what == "intervals" else (1, "spare nodes")

    def names(self, one: "SweepPoint") -> list[str]:
        """Return the names of a value: "best", and the authors of formulas that give it."""
        return ["best"] * (one is self.best) + [name for name, value in self.known.items() if value == one.value]

    def as_json(self) -> dict[str, Any]:
        """Return the results as JSON. Known intervals are in seconds, or null if there are no faults or checkpoints take no time."""
        found = {"sweep": self.what, "tried": [asdict(one) for one in self.tried], "best": asdict(self.best)}
        if self.what == "intervals":
            found |= {name.lower(): self.known.get(name) for name in ("Young", "Daly")}
        return found


def known_intervals(plan: "Scenario") -> dict[str, float]:
    """Return the best seconds between checkpoints by Young's and Daly's formulas; empty if there are no faults or checkpoints take no
    time."""
    from megalith.rehearse import closed_form

    stall = plan.latencies.stall["store"]
    if not stall or plan.mtbf == float("inf"):
        return {}
    return {"Young": closed_form.young(plan.mtbf, stall), "Daly": closed_form.daly(plan.mtbf, stall)}


def sweep_values(plan: "Scenario", what: str) -> list[float]:
    """Return the "intervals" or "spares" that a sweep tries, including the scenario's own value and the values of the formulas."""
    if what == "intervals":
        rounded = {60.0 * minutes for minutes in (1, 2, 5, 10, 20, 30, 60, 120)}
        return sorted({plan.store_every, *known_intervals(plan).values(), *rounded})
    powers = (2**i for i in range(20))
    return sorted({0, plan.fleet.spares, *(count for count in powers if count <= max(4, plan.nodes // 32))})


def sweep(plan: "Scenario", what: str, *, seeds: int = 20, tick: Callable[[], None] = lambda: None) -> SweepResult:
    """Simulate a scenario with each of `sweep_values`. `tick` is called after each run."""
    from megalith.rehearse import simulate

    values = sweep_values(plan, what)
    if what == "intervals":
        return SweepResult(plan, what, simulate.try_intervals(plan, values, seeds=seeds, tick=tick), known_intervals(plan))
    return SweepResult(plan, what, simulate.try_spares(plan, [int(value) for value in values], seeds=seeds, tick=tick))


def _picture(found: "SimulationResult | SweepResult") -> str:
    from megalith.report import goodput  # drawing

    if not isinstance(found, SweepResult):
        return goodput.simulation(found)
    unit, label = found.scale
    marks = [
        (one.value / unit, f"{', '.join(names)}: {one.value / unit:.3g}") for one in found.tried if (names := found.names(one))
    ]
    title = f"{found.plan.name}, {found.plan.days:g} days: goodput by {label}"
    return goodput.sweep([replace(one, value=one.value / unit) for one in found.tried], title=title, x_label=label, marks=marks)


def _setting(plan: "Scenario", seeds: int, *, besides: str = "") -> str:
    """Describe the scenario in one line, without `besides`, the setting that a sweep varies."""
    sites = f"{plan.sites} sites, each of " if plan.sites > 1 else ""
    spares = "" if besides == "spares" else f" and {counted(plan.fleet.spares, 'spare')}"
    store = "" if besides == "intervals" else f", a checkpoint every {plan.store_every / 60:.3g} minutes"
    tiers = [tier for tier in plan.fleet.tiers if tier != "store"]
    tiers = tiers if plan.sites == 1 else []
    places = {"buddy": "a buddy's memory"}
    copies = f"copies in {' and '.join(places.get(tier, tier) for tier in tiers)}" if tiers else "no copies but checkpoints"
    return f"{plan.name}: {plan.days:g} days, {sites}{counted(plan.nodes, 'node')}{spares}{store}, {copies}, {counted(seeds, 'seed')}"


def _show_simulated(found: "SimulationResult") -> None:
    """Print a simulation."""
    plan, (low, high) = found.scenario, found.band
    print(_setting(plan, len(found.lives)))
    table = Table("what time went to", "share", "hours")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = found.rows()
    for what, seconds, share in rows:
        table.add_row(what, f"{share:.2%}", f"{seconds / 3600:,.1f}")
    Console(highlight=False).print(table)
    print(
        f"goodput {found.goodput:.1%} (seeds: {low:.1%} to {high:.1%}); {found.per_device:.1%} of the time of all devices, "
        "spares included"
    )
    print(f"means of the seeds: {_sum('fault', found.means(lambda life: life.fates))}")
    print(_sum("restart", found.means(lambda life: life.restarts)))
    stops, ended = found.mean(lambda life: life.stops), found.mean(lambda life: life.ended)
    print(
        f"{stops:,.1f} stops until a person acted; {ended:,.1f} times the run ended for lack of nodes (status 71) and the "
        "command was restarted"
    )
    if plan.sites > 1:
        merges, left, anew = (
            found.mean(count) for count in (lambda life: life.merges, lambda life: life.left, lambda life: life.anew)
        )
        print(
            f"{merges:,.1f} merges; sites left {left:,.1f} times; all sites restarted {anew:,.1f} times, because no site "
            "or no quorum was at a merge"
        )
    print(f"latencies: {plan.latencies.source}")
    missing = sum(share for what, _, share in rows if what == "waiting for nodes")
    if missing > 0.02:
        print(
            f"{missing:.0%} of the time went to waiting for nodes: {counted(plan.fleet.spares, 'spare')} "
            f"{'is' if plan.fleet.spares == 1 else 'are'} too few. --sweep spares tries more."
        )


def _sum(what: str, parts: Mapping[str, float]) -> str:
    """Return a count and its parts as text. The parts are rounded, so their sum may differ from the count by a tenth or so."""
    listed = [f"{number:,.1f} {name}" for name, number in parts.items()]
    return f"{sum(parts.values()):,.1f} {what}s" + (f" = {' + '.join(listed)}" if listed else "")


def _show_swept(found: SweepResult, seeds: int) -> None:
    plan, (unit, heading) = found.plan, found.scale
    print(_setting(plan, seeds, besides=found.what))
    table = Table(heading, "goodput", "seeds", "of all devices, spares included", "")
    for one in found.tried:
        low, high = one.band
        value = f"{one.value / unit:.3g}"
        names = ", ".join(found.names(one))
        table.add_row(value, f"{one.goodput:.1%}", f"{low:.1%} to {high:.1%}", f"{one.per_device:.1%}", names)
    Console(highlight=False).print(table)
    print(f"latencies: {plan.latencies.source}")
    if found.what == "intervals":
        _show_formulas(found)


def _show_formulas(found: SweepResult) -> None:
    plan, (unit, _) = found.plan, found.scale
    if not found.known:
        print("Young's and Daly's formulas give no interval: there are no faults, or checkpoints take no time.")
        return
    formulas = ", ".join(f"{name} {value / unit:.3g}" for name, value in found.known.items())
    print(
        f"minutes between checkpoints: the best simulated value is {found.best.value / unit:.3g}, {formulas}, with a fault "
        f"every {plan.mtbf / 3600:.3g} hours and {plan.latencies.stall['store']:.3g} s of pause for each checkpoint"
    )
    if plan.fleet.tiers != ("store",):
        print(
            "Young's and Daly's formulas assume that after every fault the run goes back to a checkpoint. After a fault, this "
            "run first uses copies in memory or on disks, so it needs checkpoints less often; --set fleet.memory_every=0 --set "
            "fleet.disk_every=0 leaves out the copies."
        )


def _replay(folder: Path, like: Path | None, *, as_json: bool) -> None:
    """Replay a campaign's list of faults, with the latencies of its own log or of the campaign in `like`, and print the campaign and the
    replay."""
    from megalith.rehearse import replay

    found = replay.replay(folder, like=like)
    print_json({"ok": True} | found.as_json()) if as_json else _show_replayed(found)


def _show_replayed(found: "ReplayedCampaign") -> None:
    table = Table("what time went to", "recorded", "predicted")
    for what, *seconds in found.rows():
        table.add_row(what, *(f"{value:.1f} s" for value in seconds))
    Console(highlight=False).print(table)
    print(f"latencies: {found.figures.latencies.source}")
    print(f"goodput {found.recorded.share:.1%} recorded, {found.goodput:.1%} predicted: {found.gap:+.1%}")
