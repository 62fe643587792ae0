"""`megalith campaign`: a run with injected faults, compared with the same run without faults."""

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megalith.commands.shared.arguments import Json, RunFile, RunRequest, Settings, one_of
from megalith.commands.shared.output import print_json
from megalith.report.units import counted

if TYPE_CHECKING:
    from megalith.rehearse.campaign import CampaignRun
    from megalith.rehearse.hangs import Hangs
    from megalith.rehearse.judge import Aims, Judgement
    from megalith.rehearse.site_judge import SitesJudgement
    from megalith.spec.files import ResolvedRun
    from megalith.spec.run import RunSpec


@dataclass(frozen=True)
class Faultload:
    """The faults of a campaign: the number of faults drawn from Llama 3's mix, the seed for the draw, and the number of additional kills
    of the supervisor and of nodes' agents. With agent kills each node has its own agent, as on many machines. `kinds`: inject only these
    kinds of faults; empty: all kinds that the run can survive."""

    count: int = 24
    seed: int = 0
    supervisor_kills: int = 0
    agent_kills: int = 0
    kinds: tuple[str, ...] = ()


def command(
    run: RunFile,
    count: Annotated[
        int, typer.Option("--faults", min=1, help="Number of faults. The mix of faults follows the table in the Llama 3 paper.")
    ] = 24,
    seed: Annotated[int, typer.Option(help="Seed of the list of faults; the same seed gives the same list.")] = 0,
    settings: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the runs with and without faults; replaces a campaign in it. Default: runs/NAME-campaign."),
    ] = None,
    supervisor_kills: Annotated[int, typer.Option(min=0, help="Also kill the supervisor this many times.")] = 0,
    agent_kills: Annotated[
        int,
        typer.Option(min=0, help="Give each node its own agent, as on many machines, and kill this many agents."),
    ] = 0,
    median: Annotated[
        float | None, typer.Option(min=0.0, metavar="SECONDS", help="Fail if the median recovery takes more seconds than this.")
    ] = None,
    most: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="SECONDS", help="Fail if the 99th percentile of recoveries takes more seconds than this."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.0, help="Fail if both runs together take more minutes than this.")
    ] = None,
    silence: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="TIMES", help="Fail if a hang's silence lasts longer than this multiple of its limit."),
    ] = None,
    kinds: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="KIND", help="Inject only this kind of fault. May be repeated.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> int:
    """Inject faults into a run, and show that its final state is the same as without faults.

    Trains twice, with about three steps for each fault: once without faults, and once with killed and stopped processes, bit flips,
    broken connections, lost nodes and lost checkpoints. Passes if no person was needed, the end state is equal bit for bit, no sample was
    lost or repeated, hangs were detected within limits that follow from the run's pace, and the right rank was blamed; otherwise the exit
    status is 1. Times also depend on the machine, so they are judged only with --median, --most, --minutes or --silence.

    In a run with [sites], whole sites are killed, cut off or slowed down, or their links lose packets or connections. If faults changed
    which sites took part in merges, the run must end with the same bits as a replay of its recorded merges.

    Example:  megalith campaign run.toml --faults 24 --seed 1 --set fleet.nodes=2 --set fleet.spares=1
    """
    from megalith.commands.sites import campaign as across_sites
    from megalith.rehearse import site_faults  # specifications take 0.2 s to import
    from megalith.rehearse.judge import Aims

    resolved = checked(RunRequest(run, settings or ()))
    if resolved.spec.sites is not None:
        if supervisor_kills or agent_kills or (median, most, silence) != (None, None, None):
            raise typer.BadParameter(
                "with [sites], faults hit whole sites: leave out --supervisor-kills, --agent-kills, --median, --most and --silence"
            )
        admit(kinds or (), site_faults.KINDS, {})
        hurt = across_sites.campaign(
            resolved, _folder(resolved.spec, out), count=count, seed=seed, kinds=kinds or (), minutes=minutes
        )
        _show(hurt, across_sites.table_of(hurt), across_sites.sentences(hurt), as_json=as_json)
        return 0 if hurt.passed else 1
    faultload = Faultload(count, seed, supervisor_kills, agent_kills, tuple(kinds or ()))
    found = campaign(resolved, faultload, out=out, aims=Aims(median, most, minutes, silence))
    _show(found, _table_of_faults(found), sentences(found), as_json=as_json)
    return 0 if found.passed else 1


def _show(found: "Judgement | SitesJudgement", table: Table, lines: Iterator[str], *, as_json: bool) -> None:
    """Print a judgement."""
    if as_json:
        print_json(found.as_json())
        return
    Console(highlight=False).print(table)
    for line in lines:
        print(line)


def admit(wanted: Collection[str], known: Collection[str], left_out: Mapping[str, str]) -> None:
    """Raise a usage error for an unknown kind of fault, or for a kind that this run cannot have; `left_out` maps such kinds to the
    reasons."""
    for kind in wanted:
        if kind in left_out:
            raise typer.BadParameter(f"--kind {kind} is not possible in this run: {left_out[kind]}.")
        one_of("--kind", kind, *known)


def checked(request: RunRequest) -> "ResolvedRun":
    """Return the run if it has no errors, else raise SpecErrors."""
    from megalith.commands.shared import runs
    from megalith.spec.problem import SpecErrors

    found = runs.check(request)
    if found.errors:
        raise SpecErrors(found.errors)
    return found.resolved


def _folder(spec: "RunSpec", out: Path | None) -> Path:
    return (out or Path("runs") / f"{spec.name}-campaign").resolve()


def campaign(
    resolved: "ResolvedRun",
    faultload: Faultload,
    *,
    out: Path | None = None,
    aims: "Aims | None" = None,
) -> "Judgement":
    """Train a run twice, first without faults and then with the faults of `faultload`, and compare the two.

    Both run folders are in `out` (default: runs/NAME-campaign), and replace a campaign in it. `aims`: time limits that must also be met.
    Raises FileExistsError if `out` has other files.
    """
    from megalith.fleet import injection
    from megalith.machine import networks
    from megalith.rehearse import campaign as runner
    from megalith.rehearse import faults, judge
    from megalith.spec.faults import tables

    spec = resolved.spec
    folder = _folder(spec, out)
    own_disk = spec.checkpoint.every > 0 and runner.may_mount()
    own_data = runner.may_copy(Path(spec.data.path))
    left_out, kinds = runner.possible(
        spec.fleet, own_disk=own_disk, own_data=own_data, no_network=networks.missing(), agents=faultload.agent_kills > 0,
        elsewhere=runner.ruled_out(spec),
    )  # fmt: skip
    if faultload.kinds:
        admit(faultload.kinds, kinds, left_out)
        kinds = [kind for kind in kinds if kind in faultload.kinds]
    kills = Counter(supervisor=faultload.supervisor_kills, agent=faultload.agent_kills)
    amounts = +(Counter(faults.counts(faultload.count, tables()["llama3"], kinds)) + kills)
    injections = faults.draw(
        amounts, seed=faultload.seed, first=3, every=3, ranks=spec.ranks, slots=spec.fleet.nodes,
        only_at=runner.only_at(spec.fleet, checkpoint_every=spec.checkpoint.every),
        not_before=runner.not_before(checkpoint_every=spec.checkpoint.every),
    )  # fmt: skip
    steps = max(one.step for one in injections) + faults.AFTERMATH
    listed = folder / runner.LISTED
    runner.clear(folder)  # only now: a refused command leaves an earlier campaign as it is
    injection.save(listed, injections)
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"steps": steps})})
    faultless, hurt = folder / runner.WHOLE, folder / runner.FAULTED
    whole = runner.run(_training(resolved, spec, faultless), faultless)
    if "shard" in amounts:
        spec = spec.model_copy(update={"data": runner.data_of(spec.data, folder / "data")})
    faulted = _hurt(resolved, spec, hurt, listed=listed, kinds=amounts, like=faultless)
    states = runner.end_state(whole.folder), runner.end_state(faulted.folder)
    aimed = runner.aimed(spec.fleet, checkpoint_every=spec.checkpoint.every, kinds=amounts)
    return judge.judge(
        whole, faulted, injections=listed, states=states, left_out=left_out, aimed=aimed, fleet=spec.fleet,
        timeout=spec.launch.timeout, aims=aims or judge.Aims(),
    )  # fmt: skip


def _hurt(
    resolved: "ResolvedRun", spec: "RunSpec", folder: Path, *, listed: Path, kinds: Collection[str], like: Path
) -> "CampaignRun":
    """Train the second run of a campaign, with faults of `kinds` from the file `listed`. `like`: the first run. If agents are killed,
    each node has its own agent."""
    from megalith.commands.shared import runs
    from megalith.fleet import local
    from megalith.fleet.rank_info import node_folder
    from megalith.fleet.tiers import roots
    from megalith.machine import networks
    from megalith.rehearse import campaign as runner
    from megalith.rehearse.supervised_agents import SupervisedAgents

    names = local.node_names(spec.fleet)
    disk = runner.disk_of(folder, like=like, small="full" in kinds)
    run = partial(runner.run, folder=folder, injections=listed)
    if "agent" in kinds:  # on one machine: no node has processors of its own to burn in
        spec = spec.model_copy(update={"fleet": spec.fleet.model_copy(update={"burn_in": 0.0})})
        with disk:
            return run(_training(resolved, spec, folder, verb="agent"), agents=SupervisedAgents(names, runner.REPAIR_SECONDS))
    memory = roots.memory_root(folder, runs.identity(spec))
    nodes = [node_folder(memory, name) for name in names]
    with disk, networks.joined(names) if "interface" in kinds else nullcontext() as network:
        return run(_training(resolved, spec, folder), nodes=nodes, network=network)


def _training(resolved: "ResolvedRun", spec: "RunSpec", run_dir: Path, verb: str = "train") -> list[str]:
    """Write a run file for `spec` beside the run folder, and return the command that trains it."""
    from megalith.spec import files

    file = run_dir.with_name(f"{run_dir.name}.toml")
    file.write_text(files.dump(replace(resolved, spec=spec)), encoding="utf-8")
    return [sys.executable, "-m", "megalith.cli", verb, str(file)]


def _table_of_faults(found: "Judgement") -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
        caption="Seconds. found: median from fault to detection; on again, most: median and longest from detection until training resumed.",
    )
    table.add_column("fault", max_width=22)
    table.add_column("handled", no_wrap=True)
    table.add_column("seen as", max_width=12)
    table.add_column("blamed", no_wrap=True)
    for heading in ("found", "on again", "most"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found.rows:
        right, of = row.blamed
        times = (row.detection, row.recovery, row.slowest)
        table.add_row(
            row.title, f"{row.handled}/{row.injected}", row.seen_as, f"{right}/{of}" if of else "nobody",
            *("" if value is None else f"{value:.2f}" for value in times),
        )  # fmt: skip
    return table


def sentences(found: "Judgement") -> Iterator[str]:
    """Yield the results of a campaign as sentences."""
    if found.recovery_median is not None and found.recovery_p99 is not None:
        yield f"recovery after detection: median {found.recovery_median:.2f} s, 99th percentile {found.recovery_p99:.2f} s"
    yield from _hangs(found.hangs)
    yield (
        f"{counted(found.steps, 'step')} in {counted(found.generations, 'start')} of the ranks, {found.lost_steps} steps "
        f"repeated; {found.seconds:.0f} s, {found.seconds_without:.0f} s without faults"
    )
    if found.supervisor_restarts:
        each = ", ".join(f"{seconds:.1f} s" for seconds in found.supervisor_restarts)
        yield f"seconds from the kill of a supervisor to the first step after it (not counted as recoveries): {each}"
    yield from _false_alarms(found)
    for kind, why in found.aimed.items():
        yield f"chosen steps: {kind} is injected only {why}" if not why.startswith("all steps") else f"{kind}: {why}"
    for kind, why in found.left_out.items():
        yield f"left out: {kind} ({why})"
    for one in found.asked:
        value = "nothing to measure" if one.found is None else f"{one.found:.2f}{one.unit}"
        yield f"limit: {one.title} {one.most:g}{one.unit}; found: {value}"
    for problem in found.problems:
        yield f"not met: {problem}"
    if found.hidden:
        yield (
            f"{counted(found.hidden, 'fault')} came before the run had recovered from another fault: the run recovered from "
            "both, and the blame for them is not judged"
        )
    verdict = "passed" if found.passed else "NOT passed"
    right, of = found.blamed
    others = f" (for {found.among} of the faults, other nodes were blamed too)" if found.among else ""
    aims = "" if found.asked else "; no time limit was set"
    yield f"{verdict}: {found.handled} of {found.injected} faults handled, {right} of {of} blamed correctly{others}{aims}"


def _hangs(hangs: "Hangs") -> Iterator[str]:
    """Yield sentences about hangs: the longest silence relative to its detection limit, and the limits."""
    if hangs.most is None:
        return
    limits = "" if hangs.limits is None else f" (limits {hangs.limits[0]:.2f} to {hangs.limits[1]:.2f} s)"
    late = f"; {hangs.late} of the hangs found late, because the ranks or their supervisor got no CPU time" if hangs.late else ""
    yield f"hangs: {hangs.found}, the longest silence was {hangs.most:.2f} times its detection limit{limits}{late}"
    if hangs.elsewhere:
        yield (
            f"hangs: {hangs.elsewhere} of the {hangs.found} hangs came outside of a step, where other detection limits apply: "
            f"{hangs.elsewhere_limit:.2f} s at most"
        )


def _false_alarms(found: "Judgement") -> Iterator[str]:
    for one in found.false_alarms:
        who = (
            f"rank {one.rank} on {one.node}" if one.rank is not None else f"node {one.node}" if one.node is not None else "nobody"
        )
        cost = "not recovered from" if one.seconds is None else f"{one.seconds:.2f} s, {counted(one.lost_steps, 'step')} repeated"
        yield f"false alarm: {one.cause} at step {one.step}, {who} ({one.reason}): {cost}"
    if not found.false_alarms:
        yield "no false alarm"
    elif found.same_end:
        yield (
            f"{counted(len(found.false_alarms), 'false alarm')}, none of which changed the result: the end state is "
            f"the same as without faults"
        )
