"""`megalith coordcheck`: check that activations keep their scale as a model grows, so that a learning rate transfers to larger models."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.status import Status

from megalith.commands.shared.arguments import Json, RunFile, Settings
from megalith.commands.shared.output import print_json, write

if TYPE_CHECKING:
    from megalith.prove.coordcheck import Axis, CoordinateCheck
    from megalith.spec.run import RunSpec

LIMIT = 0.25  # a factor of 1.19 for each doubling


def command(
    run: RunFile,
    settings: Settings = None,
    widths: Annotated[str, typer.Option(help="Widths to compare; 0: none.")] = "64,128,256,512",
    depths: Annotated[str, typer.Option(help="Numbers of blocks to compare; 0: none.")] = "2,4,8,16",
    steps: Annotated[int, typer.Option(min=1, help="Updates of each model.")] = 10,
    seeds: Annotated[int, typer.Option(min=1, help="Number of models of each size; their results are averaged.")] = 1,
    limit: Annotated[float, typer.Option(min=0.0, help="Largest slope at which a quantity counts as flat.")] = LIMIT,
    draw: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw the measured numbers against the sizes into this file.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Train models of several widths and depths for a few steps, and measure whether activations and logits keep their scale.

    Each model is the run's model with another width or number of blocks. Each is trained in the standard parametrization and in a
    parametrization that transfers across sizes (mup for widths, completep for depths; or the run's own). Trains on random tokens, so it
    needs no data. A slope of 0 is flat: a learning rate that is good for a small model is then also good for a large model. Exits with 1
    if the parametrization that the run asks for is not flat.

    Example:  megalith coordcheck run.toml --set optimizer.lr=2e-3 --draw check.svg
    """
    from megalith.prove import coordcheck  # torch
    from megalith.spec.files import load

    spec = load(run, overrides=settings or ()).spec
    axes: list[tuple[Axis, list[int]]] = [("width", _sizes("width", widths)), ("depth", _sizes("depth", depths))]
    wanted: list[tuple[Axis, list[int]]] = [(axis, sizes) for axis, sizes in axes if len(sizes) > 1]
    if not wanted:
        raise typer.BadParameter("nothing to compare. Give at least two sizes: --widths 64,128,256.")
    console = Console(stderr=True)
    found: list[CoordinateCheck] = []
    with console.status("") as status:
        for axis, sizes in wanted:
            for kind in _kinds(spec, axis):
                told = partial(_show_progress, status, f"{kind}, {axis}")
                one = coordcheck.check(
                    spec, axis=axis, sizes=sizes, parametrization=kind, steps=steps, seeds=range(seeds), on_start=told
                )
                found.append(one)
    if draw is not None:
        from megalith.report import coordcheck as pictures  # drawing

        write(pictures.picture(found), draw, overwrite=True)
    own = [one for one in found if one.parametrization == spec.model.parametrization != "standard"]
    ok = all(abs(one.worst.slope) <= limit for one in own)
    if as_json:
        print_json({"ok": ok, "limit": limit, "checked": [one.to_json(limit) for one in found]})
    else:
        _show(found, limit)
    return 0 if ok else 1


def _show_progress(status: Status, what: str, size: int, seed: int) -> None:
    status.update(f"{what} {size}, seed {seed}")


def _sizes(axis: str, text: str) -> list[int]:
    try:
        return sorted({int(word) for word in text.split(",") if int(word) > 0})
    except ValueError:
        raise typer.BadParameter(f"--{axis}s {text!r} is not a list of whole numbers. Write --{axis}s 64,128,256.") from None


def _kinds(spec: "RunSpec", axis: "Axis") -> list[Any]:
    """Return the standard parametrization and one for the axis: the run's own if it scales this axis, otherwise mup or completep."""
    own = spec.model.parametrization
    scaled = own if own == "completep" or (own == "mup" and axis == "width") else {"width": "mup", "depth": "completep"}[axis]
    return ["standard", scaled]


def _show(found: "list[CoordinateCheck]", limit: float) -> None:
    from megalith.report import coordcheck as tables  # drawing

    console = Console()
    for one in found:
        console.print(tables.table(one, limit))
        console.print()
