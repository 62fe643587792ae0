"""`megalith check`: report everything in a run that is wrong or unwise."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from megalith.commands.shared.arguments import Json, RunFile, RunRequest, Settings
from megalith.commands.shared.output import BAD_SPECIFICATION, print_json, print_problems, problem_rows

if TYPE_CHECKING:
    from megalith.commands.shared.runs import CheckResult
    from megalith.planner.formats import Gains
    from megalith.planner.price import Price
    from megalith.spec.problem import Problem
    from megalith.spec.run import RunSpec


def command(
    run: RunFile,
    settings: Settings = None,
    ranks: Annotated[int | None, typer.Option(help="Number of ranks that will be started, to compare with the plan.")] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Run folder. If this folder holds checkpoints, check the run as one that resumes from them. Default: runs/NAME."
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print every value of the run and where it came from.")] = False,
    price: Annotated[
        bool,
        typer.Option(
            "--price",
            help="For each layout rule that the plan breaks, also predict the time that this costs on the run's cluster.",
        ),
    ] = False,
    fp8: Annotated[
        bool,
        typer.Option(
            "--fp8", help="Also predict how much time 8-bit matrix products save or cost in each layer on the run's cluster."
        ),
    ] = False,
    here: Annotated[
        bool, typer.Option("--here", help="Report resources that this machine lacks as errors, as `train` does.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Report every error and unwise setting of a run, before anything starts.

    Needs no GPU and no torch. Resources that this machine lacks (GPUs, memory, processors) are only advice, because the run may be for
    other machines. Exit status 2 if there are errors.

    Example:  megalith check run.toml --set plan.tensor=4 --ranks 8
    """
    from megalith.commands.shared import runs  # specifications take 0.2 s to import

    request = RunRequest(run, settings or (), run_dir)
    checked = runs.check_as_resumed(request, world=ranks, here="error" if here else "advice")
    wrong = bool(checked.errors)
    priced = _prices(request) if price and not wrong else ()
    problems, gained = (checked.problems, None) if wrong else _in_8_bits(checked, asked=fp8)
    if as_json:
        prices = {"prices": [one.to_json() for one in priced]} if price else {}
        spec = checked.resolved.spec
        updated = {} if wrong else {"updated": _treated_rows(spec), "clipping": _clipping(spec), "phases": _phase_rows(spec)}
        prices |= {"gains": gained and gained.to_json()} if fp8 else {}
        print_json({"ok": not wrong, "problems": problem_rows(problems)} | prices | updated | checked.as_json())
        return BAD_SPECIFICATION if wrong else 0
    if show:
        from megalith.spec.files import dump

        print(dump(checked.resolved))
    print_problems(problems, as_json=False)
    if wrong:
        return BAD_SPECIFICATION
    if price:
        _show_prices(priced)
    if fp8:
        _show_gains(gained, checked.resolved.spec)
    _show_treated(checked.resolved.spec)
    if clipping := _clipping(checked.resolved.spec):
        print(f"clipping: {clipping}")
    _show_run(checked.resolved.spec)
    _show_phases(checked.resolved.spec)
    return 0


def _prices(request: RunRequest) -> "tuple[Price, ...]":
    """For each layout rule that a run's plan breaks, predict the time that this costs on the run's cluster. Raises SpecErrors if steps on
    the cluster cannot be predicted."""
    from megalith.planner import price  # the planner takes long to import
    from megalith.planner.request import PlanRequest, resolve
    from megalith.spec.cluster import CALIBRATE
    from megalith.spec.problem import Problem, SpecErrors

    plan_request = resolve(PlanRequest(path=request.file, overrides=tuple(request.overrides)))
    plan = plan_request.run.plan
    used = plan_request.cluster.resized(plan.ranks)  # a plan may leave devices of a cluster idle
    if used is None:
        reason = f"was measured with another number of ranks than the plan's {plan.ranks:,}, so the measured rates do not apply"
        way_out = f"{CALIBRATE} --ranks {plan.ranks}."
        raise SpecErrors([Problem("error", "cluster", plan_request.run.cluster, reason, way_out)])
    return price.prices(replace(plan_request, cluster=used), plan)


def _show_prices(priced: "Sequence[Price]") -> None:
    from megalith.report import plans  # drawing

    Console(highlight=False).print(plans.prices(priced) if priced else "The plan breaks no layout rule that costs time.")


def _in_8_bits(checked: "CheckResult", *, asked: bool) -> "tuple[Sequence[Problem], Gains | None]":
    """Return the problems, and advice about layers that 8-bit products make slower. If `asked`, also return the time that 8-bit products
    save in each layer: None if the devices have no 8-bit products, or if their speed is not published."""
    from megalith.spec import cluster as clusters

    spec = checked.resolved.spec
    if spec.cluster == "local" or not (asked or spec.precision.multiply == "codes"):
        return checked.problems, None
    from megalith.planner import formats, problems  # the planner takes long to import

    used = clusters.load(spec.cluster)
    if problems.unpublished(spec.cluster, used):
        return checked.problems, None
    return (*checked.problems, *formats.advice_on(spec, used)), formats.gains(spec, used) if asked else None


def _show_gains(found: "Gains | None", spec: "RunSpec") -> None:
    if found is None:
        print(
            f'cluster = "{spec.cluster}": gains of 8-bit products are predicted only for named devices with published figures on which '
            "the trainer multiplies 8-bit numbers; on other devices fp8 would only be emulated"
        )
        return
    from megalith.report import plans  # drawing

    Console(highlight=False).print(plans.gains(found))
    print(plans.recipe_advice(found))


def _treated_rows(spec: "RunSpec") -> list[dict[str, object]]:
    """Return the update rule of each group of parameters, as JSON objects."""
    from megalith.spec.treatment import summary

    return [
        {
            "pattern": row.pattern,
            **row.treatment._asdict(),
            "moments": row.treatment.moments.number,
            "parameters": [each.name for each in row.parameters],
        }
        for row in summary(spec.model.build(), spec.optimizer)
    ]


def _show_treated(spec: "RunSpec") -> None:
    """Print the update rule of each group of parameters, unless one rule updates all."""
    from megalith.spec.optimizers import OPTIMIZERS
    from megalith.spec.treatment import summary

    few = spec.optimizer.moments != "fp32" or spec.optimizer.master != "fp32"
    if few or spec.optimizer.groups or OPTIMIZERS[spec.optimizer.kind].rest:
        from megalith.report import parameter_rules  # drawing

        Console(highlight=False).print(parameter_rules.table(summary(spec.model.build(), spec.optimizer)))
    if few or spec.train.gradients != "fp32":
        from megalith.spec.numbers import PRECISIONS
        from megalith.spec.treatment import kept_of

        compute = PRECISIONS[spec.train.precision].compute.name
        print(
            "optimizer state for each element of a large matrix: "
            f"{kept_of(spec.optimizer, compute, gradients=spec.train.gradients, released=spec.plan.state.release)}"
        )


def _clipping(spec: "RunSpec") -> str:
    """Describe how a run clips exactly if it updates off the device, or before the norm is known; otherwise empty."""
    from megalith.spec.treatment import exact_clipping

    return exact_clipping(spec) if spec.optimizer.clip or spec.plan.state.release else ""


def _show_run(spec: "RunSpec") -> None:
    plan = spec.plan
    ranks = f"{plan.ranks} rank{'s' * (plan.ranks > 1)}"
    if spec.sites is not None:
        sizes = [one.ranks for one in spec.sites.plans]
        ranks = f"{' + '.join(map(str, sizes))} ranks" if len(set(sizes)) > 1 else ranks
        ranks = f"{spec.sites.count} site{'s' * (spec.sites.count > 1)} of {ranks}"
    print(
        f"{spec.name}: no errors found: {ranks} (data {plan.data} x tensor {plan.tensor} x pipeline {plan.pipeline}), "
        f"{spec.microbatches} microbatches a step, {spec.train.global_batch * spec.train.seq_len:,} tokens a step, "
        f"{spec.train.steps:,} steps"
    )


def _phase_rows(spec: "RunSpec") -> list[dict[str, object]]:
    """Return the phases that a run enters, as JSON objects; `steps` is the number of steps in a phase."""
    from megalith.spec.phases import Phases

    names = ("first", "step", "tokens", "seq_len", "global_batch", "weights")
    spans = Phases.of(spec).spans(spec.train.steps)
    return [{"steps": steps, **{name: getattr(phase, name) for name in names}} for phase, steps in spans]


def _show_phases(spec: "RunSpec") -> None:
    """Print the phases of a run, if it has several, and the samples and tokens that it reads in all."""
    from megalith.spec.phases import Phases

    phases = Phases.of(spec)
    if len(phases.all) == 1:
        return
    for phase, steps in phases.spans(spec.train.steps):
        print(f"from sample {phase.first:,}, step {phase.step + 1:,}: {phase.words}, for {steps:,} steps")
    samples = phases.after(0, spec.train.steps)
    print(f"in all {samples:,} samples, {phases.tokens(samples):,} tokens")
    for late in phases.all[len(list(phases.spans(spec.train.steps))) :]:
        print(f"the run ends before this phase begins: sample {late.first:,}, step {late.step + 1:,}")
