"""`megalith agent`: run one machine of a multi-node run."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from megalith.commands.shared.arguments import Json, RunFile, RunRequest, Settings
from megalith.commands.train import TrainResult, ended, followed, show

if TYPE_CHECKING:
    from megalith.spec.run import RunSpec


def command(
    run: RunFile,
    settings: Settings = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run folder, the same on all machines. Default: runs/NAME.")] = None,
    machine: Annotated[str | None, typer.Option(help="This machine's name in the run. Default: its host name.")] = None,
    as_json: Json = False,
) -> int:
    """Run one machine of a multi-node run. torchrun or srun starts one agent on each node, and the agent starts the node's ranks.

    fleet.nodes machines train; fleet.spares more stand by with warm processes and replace lost machines. The first agent (rank 0 of the
    engine) directs the run. MEGALITH_MEETING=tcp://HOST:PORT lets a machine join a run in progress.

    Example:  torchrun --nnodes 3 --nproc-per-node 1 -m megalith.cli agent run.toml --set fleet.nodes=2 --set fleet.spares=1
    """
    trained = agent(RunRequest(run, settings or (), run_dir), console=Console(stderr=as_json), machine=machine)
    show(trained, as_json=as_json)
    return trained.code


def agent(request: RunRequest, *, console: Console, machine: str | None = None) -> TrainResult:
    """Run one machine of a multi-node run, named `machine` (default: the host name). The machine either runs ranks or stands by as a
    spare.

    The agent that the launcher (torchrun, srun, ...) started as rank 0 also directs the run, shows its progress on `console`, and starts
    the process that sends alerts and feeds other tools. Raises the errors of `train`, ValueError if neither an option nor an environment
    variable gives the address of the other machines, TimeoutError if too few of them connect.
    """
    from megalith.check import node_ranks
    from megalith.check.sites import launched_alone
    from megalith.commands.shared import first_weights, runs, saved_run
    from megalith.control.owner import hold
    from megalith.fleet import environment
    from megalith.machine.origin import origin
    from megalith.spec import files
    from megalith.train import agents  # needs torch

    place = environment.find(alone=True)
    runs.end_with_torchrun(place)
    checked = runs.check(request, here="error", count=node_ranks, resumes=True)
    spec = checked.resolved.spec
    folder = request.folder(spec)
    runs.refuse([*checked.errors, *launched_alone(spec)], checked.resolved, folder, here=checked.here)
    runs.print_advice(checked)
    name, identity = agents.own_name(machine), runs.identity(spec)

    def host_of(spec: "RunSpec") -> agents.Host:
        job = runs.job(spec, folder.resolve(), runs.TRAIN, {"run_dir": str(folder.resolve())})
        return agents.Host(job, spec.fleet, name, identity, lambda: agents.open_data(spec))

    if not agents.directs(place):
        host = host_of(spec)
        runs.refuse(saved_run.differences(checked.resolved, folder))
        return TrainResult(folder, agents.serve_node(replace(host, job=runs.directed_elsewhere(host.job)), place), "", None)
    assert place is not None  # else it would not direct
    with hold(folder, wide=True) as owner:
        with owner.renewing():  # ended before `direct` forks, and begun again there
            runs.refuse(saved_run.differences(checked.resolved, folder))
            resolved = first_weights.pinned(checked.resolved, folder)
            spec = resolved.spec
            runs.admit(spec, folder)
            saved_run.print_start_over(resolved, folder)
            files.save(resolved, folder, origin(), epoch=owner.epoch)
            host = host_of(spec)
        with followed(folder, spec, console, errors=lambda rank: False, epoch=owner.epoch) as (live_line, tick):
            store = runs.store_of(owner)
            outcome = agents.direct(host, place, owner=owner, checkpoints=store, tick=tick, notify=live_line.print_line)
    return ended(folder, outcome.code, outcome.message(), live_line)
