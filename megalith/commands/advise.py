"""`megalith advise`: measure which settings suit a run, starting from its checkpoints."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from megalith import epochs
from megalith.commands.shared.arguments import AtStep, Json, RunFolder, one_of
from megalith.commands.shared.output import print_json, write

if TYPE_CHECKING:
    from megalith.planner.batch import Advice, Trial
    from megalith.spec.problem import Problem

Train = Callable[["Trial", Path], int]
"""Function that trains a trial in a run folder and returns its exit status."""


@dataclass(frozen=True)
class AdviceResult:
    """Advice on the batch size, the folder of the trial runs, and the run's own gradient noise scale in sequences (None: not logged)."""

    advice: "Advice"
    folder: Path
    step: int
    noise_scale: float | None


def batch(
    run_dir: RunFolder,
    step: AtStep = None,
    factors: Annotated[
        str, typer.Option(help="Batch sizes to try, as multiples of the run's batch size at the checkpoint.")
    ] = "0.5,1,2,4",
    steps: Annotated[int, typer.Option(min=1, help="Length of a trial branch, in steps with the run's own batch size.")] = 64,
    replicas: Annotated[
        int,
        typer.Option(
            min=1, help="Number of branches for each batch size, each starting later in the data than the previous one."
        ),
    ] = 3,
    scale: Annotated[str, typer.Option(help="Scaling of the learning rate with the batch: root, linear or none.")] = "root",
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Relative loss increase that is tolerated for a larger batch.")
    ] = 0.005,
    out: Annotated[
        Path | None, typer.Option(help="Folder in which the branches get their run folders. Default: RUN_DIR/advise-batch.")
    ] = None,
    draw: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw loss against batch size into this file.")] = None,
    as_json: Json = False,
) -> int:
    """Measure the critical batch size: branches from one checkpoint train on the same samples with different batch sizes.

    Each branch begins with the checkpoint's whole state. If a larger batch ends with a worse loss, the model learns less from each token.
    The compared loss is the held-out loss if the run validates, otherwise the mean training loss over the last half of the samples.
    Finished branches are not trained again.

    Example:  megalith advise batch runs/first --step 2000 --steps 100
    """
    one_of("--scale", scale, "root", "linear", "none")
    try:
        tried = sorted({1.0, *map(float, factors.split(","))})
    except ValueError:
        raise typer.BadParameter(f"--factors {factors!r} is not a list of numbers. Write --factors 0.5,1,2,4.") from None
    if wrong := [factor for factor in tried if not 0 < factor < math.inf]:
        raise typer.BadParameter(
            f"--factors {factors!r} has {wrong[0]:g}. Factors are positive and finite, as in --factors 0.5,1,2,4."
        )
    found = advise(
        run_dir, step=step, factors=tried, steps=steps, replicas=replicas, scale=scale, tolerance=tolerance, out=out,
        train=_trainer(Console(stderr=as_json)),
    )  # fmt: skip
    if draw is not None:
        from megalith.report import advice as pictures  # drawing

        write(pictures.picture(found.advice), draw, overwrite=True)
    if as_json:
        where = {"folder": str(found.folder), "step": found.step, "noise_scale": found.noise_scale}
        print_json({"ok": True} | found.advice.to_json() | where)
    else:
        _show(found)
    return 0


def advise(
    run_dir: Path,
    *,
    step: int | None,
    factors: list[float],
    steps: int,
    replicas: int,
    scale: Any,
    tolerance: float,
    out: Path | None,
    train: Train,
) -> AdviceResult:
    """Train all branches that are not finished, and judge their losses. Before any branch starts, raises FileNotFoundError or
    DamagedCheckpointError if the run has no complete checkpoint (of `step`), and SpecErrors if a branch has problems. Raises
    RuntimeError if a branch fails."""
    from megalith.check import check
    from megalith.check.own import admit
    from megalith.checkpoint.folder import find_complete, name, of_run
    from megalith.planner.batch import judge, trials
    from megalith.spec import files
    from megalith.spec.phases import Phases
    from megalith.spec.problem import Problem, SpecErrors

    spec = files.read(epochs.newest(run_dir, files.FILE), saved=True).whole().spec
    if unfit := admit(spec, {})[0]:
        raise SpecErrors(unfit)
    path, manifest = find_complete(run_dir if step is None else of_run(run_dir) / name(step))
    position = manifest.meta["position"]
    folder = (out or run_dir / "advise-batch") / path.name
    where: dict[str, Any] = {"checkpoint": str(path.resolve()), "updates": position["updates"], "samples": position["samples"]}
    try:
        wanted = list(trials(spec, **where, steps=steps, factors=factors, replicas=replicas, scaling=scale))
    except ValueError as fault:
        reason, _, way_out = str(fault).partition(". ")
        raise SpecErrors([Problem("error", "--factors", factors, reason, way_out, "command line")]) from fault
    wrong = [problem for trial in wanted for problem in check(trial.spec) if problem.severity == "error"]
    if wrong := [*dict.fromkeys(wrong), *(problem for trial in wanted for problem in _others(trial, folder / trial.name))]:
        raise SpecErrors(wrong)
    losses: dict[float, list[float]] = {factor: [] for factor in factors}
    for trial in wanted:
        losses[trial.factor].append(_loss(trial, folder / trial.name, train))
    phase = Phases.of(spec).at(position["samples"])
    advice = judge(losses, batch=phase.global_batch, seq_len=phase.seq_len, tolerance=tolerance)
    return AdviceResult(advice, folder, manifest.step, _noise_scale(run_dir, manifest.step))


def _others(trial: "Trial", folder: Path) -> "list[Problem]":
    """Return the problem if `folder` holds a branch with other settings than the trial, whose loss is no answer; otherwise no problem."""
    from megalith.check import check_resume
    from megalith.spec import files
    from megalith.spec.problem import Problem

    file = epochs.newest(folder, files.FILE)
    if not file.is_file():
        return []
    spec, saved = trial.spec, files.read(file, saved=True).resolved.spec
    differ = [problem.key for problem in check_resume(saved, spec)]
    differ += ["train.steps"] * (saved.train.steps != spec.train.steps) + ["validation"] * (saved.validation != spec.validation)
    if not differ:
        return []
    reason = f"holds a branch with other settings ({', '.join(differ)}), for example from another --steps or --scale"
    way_out = "Choose another folder with --out, or repeat the options of the first call."
    return [Problem("error", "--out", str(folder), reason, way_out, "command line")]


def _loss(trial: "Trial", folder: Path, train: Train) -> float:
    """Return the final loss of a trial; train the trial first if it is not finished."""
    from megalith.report.history import history

    if history(folder).state != "finished" and train(trial, folder):
        raise RuntimeError(f"{folder} did not finish: megalith report {folder} shows why")
    found = history(folder)
    if found.validations:
        return found.validations[-1].loss
    late = found.steps[len(found.steps) // 2 :]
    return sum(one.loss * one.tokens for one in late) / sum(one.tokens for one in late)


def _noise_scale(run_dir: Path, step: int) -> float | None:
    from megalith.report.history import history

    known = [one.noise["scale"] for one in history(run_dir).steps if one.step <= step and "scale" in one.noise]
    return known[-1] if known else None


def _trainer(console: Console) -> Train:
    """Return the function that trains a trial on this machine, as `megalith train` does."""

    def run(trial: "Trial", folder: Path) -> int:
        from megalith.commands.shared.arguments import RunRequest
        from megalith.commands.train import train
        from megalith.spec import files
        from megalith.spec.files import ResolvedRun
        from megalith.spec.toml import dotted
        from megalith.spec.validate import leaves

        origins = {dotted(leaf.path): "megalith advise batch" for leaf in leaves(trial.spec)}
        file = folder.with_suffix(".toml")
        write(files.dump(ResolvedRun(trial.spec, origins)), file, overwrite=True)
        console.print(f"{trial.name}: {trial.factor:g} times the batch")
        return train(RunRequest(file, (), folder), console=console).code

    return run


def _show(found: AdviceResult) -> None:
    from megalith.report import advice as tables  # drawing

    console = Console(highlight=False)
    console.print(tables.table(found.advice))
    console.print(found.advice.words)
    if found.noise_scale is not None:
        console.print(f"The newest gradient noise scale up to step {found.step:,} was {found.noise_scale:,.3g} sequences.")
    console.print(f"branches: {found.folder}", soft_wrap=True, markup=False)
