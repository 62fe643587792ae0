"""`megalith parity`: train under a run's plan, or under random plans, and compare the result with training in one process."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megalith import epochs
from megalith.commands.shared.arguments import Json, RunRequest, Settings
from megalith.commands.shared.output import print_json, progress
from megalith.report.units import counted


def command(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN.toml]", help="The run whose plan is tested.", show_default=False)
    ] = None,
    settings: Settings = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps to compare. Default: 3.", show_default=False)] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the ranks' logs. Default: runs/NAME-parity.")] = None,
    random: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Instead of a run: test N combinations drawn at random.", show_default=False),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of --random; the same seed draws the same combinations. Default: 0.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> int:
    """Show that a plan does not change the result: train a small model of the run's shape under the plan and in one process,
    and compare.

    Compares losses, gradients, gradient norm and weights over several steps, in the run's precision. In bf16, it compares two errors
    relative to one process in fp32: the plan's, and that of one process in bf16. Needs no data. Exit status 1 if a difference exceeds its
    limit.

    With --random, draws combinations of models, data, context, tensor, pipeline and expert parallelism, recomputation and sites, on up to 8
    ranks.

    Under torchrun or srun this process becomes one of the ranks, and the first rank prints the result.

    Example:  megalith parity run.toml --set plan.tensor=2

    Any combination:  megalith parity --random 20 --seed 7
    """
    from megalith.fleet import environment

    place = environment.find()
    if random is not None:
        unused = {"RUN.toml": run, "--set": settings, "--steps": steps, "--run-dir": run_dir}
        if wrong := [name for name, value in unused.items() if value is not None]:
            raise typer.BadParameter(f"--random draws its own runs and does not use {' or '.join(wrong)}. Leave them out.")
        found = _draws_with_a_bar(random, seed or 0)
    elif run is None:
        raise typer.BadParameter(
            "Name a run, as in `megalith parity run.toml`, or draw runs at random: `megalith parity --random 20`."
        )
    elif seed is not None:
        raise typer.BadParameter("--seed chooses the draws of --random N. For a run file, use --set train.seed=1.")
    else:
        found = parity(RunRequest(run, settings or (), run_dir), steps=steps or 3)
    if place is None or place.rank == 0:
        if as_json:
            print_json({"ok": found["equal"]} | found)
        else:
            _show(found) if random is None else _show_draws(found)
    return 0 if found["equal"] else 1


def parity(request: RunRequest, *, steps: int = 3) -> dict[str, Any]:
    """Train a small model under the run's plan and in one process, and compare: `{"equal", "precision", "rows": [...], "model",
    "steps"}`.

    Ranks are started as by `train`, in the folder of the request (default: runs/NAME-parity). The run's data is not needed. Raises
    SpecErrors for a plan with problems, RuntimeError with the first cause when a rank fails.
    """
    from megalith.commands.shared import runs
    from megalith.fleet import environment
    from megalith.spec.problem import SpecErrors

    place = environment.find()
    checked = runs.check(request, world=place.world if place else None, look=False)
    if checked.errors:
        raise SpecErrors(checked.errors)
    resolved = checked.resolved
    folder = request.run_dir or Path("runs") / f"{resolved.spec.name}-parity"
    arguments = {"run_dir": str(folder.resolve()), "steps": steps}
    file, entry = "parity.json", "megalith.prove.parity:main"
    with runs.own(folder, place) as owner:
        if place is not None:
            if status := runs.join(resolved, folder, place, entry, arguments, owner=owner):
                raise RuntimeError(f"this rank ended with status {status}: the errors of all ranks show the cause")
        else:
            assert owner is not None
            (folder / epochs.name(file, owner.epoch)).unlink(missing_ok=True)
            outcome = runs.start(resolved, owner, entry, arguments)
            if outcome.code:
                raise RuntimeError(outcome.message())
        return json.loads(epochs.newest(folder, file).read_text(encoding="utf-8"))


def of_draws(
    count: int,
    *,
    seed: int = 0,
    starting: Callable[[str, int], None] = lambda name, ranks: None,
    ended: Callable[[str], None] = lambda outcome: None,
) -> dict[str, Any]:
    """Test `count` combinations of parallelisms, drawn so that every pair of choices occurs early: `{"equal", "asked", "seed", "outcomes",
    "cases": [...]}`.

    `starting` is called with the name and number of ranks of each combination before it runs, `ended` with its outcome. "equal" is True if
    `count` combinations are equal; ties (two experts with nearly equal scores) do not count.
    """
    from megalith.prove import prove

    cases: list[dict[str, Any]] = []
    outcomes = {"equal": 0, "tie": 0, "NOT equal": 0, "failed": 0}
    for proof in prove.prove_drawn(count, seed, starting=lambda one: starting(one.name, one.ranks)):
        outcomes[proof.outcome] += 1
        rows = [asdict(row) | {"equal": row.equal} for row in proof.rows]
        known = {"name": proof.draw.name, "choices": dict(proof.draw.choices), "ranks": proof.draw.ranks}
        cases.append({**known, "outcome": proof.outcome, "tokens_tied": proof.tokens_tied, "rows": rows, "error": proof.error})
        ended(proof.outcome)
    return {"equal": outcomes["equal"] == count, "asked": count, "seed": seed, "outcomes": outcomes, "cases": cases}


def _draws_with_a_bar(count: int, seed: int) -> dict[str, Any]:
    """Test random combinations, with a progress bar on stderr; without a terminal, with a line for each combination."""
    done = {"equal": 0, "tie": 0, "NOT equal": 0, "failed": 0}
    with progress() as bar:
        task = bar.add_task("starting", total=count, counts="")
        bar.refresh()

        def ended(outcome: str) -> None:
            done[outcome] += 1
            counts = ", ".join(f"{number} {word}" for word, number in done.items() if number or word == "equal")
            bar.update(task, advance=outcome != "tie", counts=counts, refresh=True)
            if bar.disable:
                print(outcome, file=sys.stderr)

        def starting(name: str, ranks: int) -> None:
            name = f"{name} on {counted(ranks, 'rank')}"
            bar.update(task, description=escape(name), refresh=True)
            if bar.disable:
                print(f"{sum(done.values()) + 1}/{count}  {name}: ", end="", file=sys.stderr, flush=True)

        return of_draws(count, seed=seed, starting=starting, ended=ended)


def _show(found: dict[str, Any]) -> None:
    table = Table("quantity", "worst gap", "limit", "where", "")
    for row in found["rows"]:
        verdict = "[green]equal[/]" if row["equal"] else "[bold red]NOT equal[/]"
        table.add_row(row["quantity"], f"{row['gap']:.2g}", f"{row['limit']:g}", row["where"], verdict)
    Console(highlight=False).print(table)
    precision = found["precision"]
    print(
        f"equal in {precision}: the plan changes nothing"
        if found["equal"]
        else f"NOT equal in {precision}: the plan changes the result"
    )


def _show_draws(found: dict[str, Any]) -> None:
    wrong = [case for case in found["cases"] if case["outcome"] != "equal"]
    if wrong:
        Console(highlight=False).print(_table_of_gaps(wrong))
    outcomes, count, seed = found["outcomes"], found["asked"], found["seed"]
    equal, ties = outcomes["equal"], outcomes["tie"]
    if ties:
        print(f"{counted(ties, 'combination')} not counted, because two experts had nearly equal scores for some tokens")
    if found["equal"]:
        ranks = counted(max(case["ranks"] for case in found["cases"]), "rank")
        print(f"equal: {counted(equal, 'combination')} (seed {seed}, up to {ranks}) give the same result as one process")
    elif outcomes["NOT equal"] or outcomes["failed"]:
        print(f"NOT equal: {equal} of {count} combinations (seed {seed}) give the same result as one process")
    else:
        print(
            f"equality is not shown: only {equal} combinations could be compared, but {count} were requested. Use a smaller --random."
        )


def _table_of_gaps(cases: Sequence[dict[str, Any]]) -> Table:
    """Return a table of the cases that are not equal, with the reasons."""
    table = Table("combination", "ranks", "", "why", show_lines=True)
    for case in cases:
        gaps = [f"{r['quantity']}: {r['gap']:.2g}, limit {r['limit']:g} ({r['where']})" for r in case["rows"] if not r["equal"]]
        if case["outcome"] == "tie":
            gaps = [f"{case['tokens_tied']} tokens had two experts with nearly equal scores"]
        why = case["error"].strip().splitlines()[-6:] or gaps
        colour = "yellow" if case["outcome"] == "tie" else "bold red"
        table.add_row(escape(case["name"]), str(case["ranks"]), f"[{colour}]{case['outcome']}[/]", escape("\n".join(why)))
    return table
