"""`megalith models`: models by name."""

from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megalith.commands.shared.arguments import Json
from megalith.commands.shared.output import print_json

STATE_BYTES = 16
"""Bytes a parameter that training with AdamW keeps over all ranks: fp32 weights, gradients and two moments."""


@dataclass(frozen=True)
class ModelRow:
    """A model that has a name. `active`: parameters that a token meets. `state_bytes`: bytes of training state over all ranks,
    without activations."""

    name: str
    family: str
    parameters: int
    active: int
    layers: int
    dim: int
    context: int
    state_bytes: int
    source: str


def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORD...]", help="Show only models with all these words, such as llama 8b.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> int:
    """List the model presets: sizes, memory of their training state, and sources.

    A run file names one with [model] preset = "NAME"; `megalith plan` and `megalith init` with --model NAME.

    Example:  megalith models llama 8b
    """
    rows = models(" ".join(words or ()))
    if as_json:
        print_json({"ok": bool(rows), "models": [asdict(row) for row in rows]})
        return 0 if rows else 1
    if not rows:
        print(f"no model has {' '.join(words or ())!r} in its name; `megalith models` lists all")
        return 1
    console = Console(highlight=False)
    console.print(_table(rows, console.width))
    print("state: fp32 weights, gradients and AdamW's moments over all ranks, 16 bytes a parameter; plus activations")
    return 0


def models(words: str = "") -> list[ModelRow]:
    """Return the models that have a name; with `words`, those whose names have all of them."""
    from megalith.spec.presets import meant, presets  # specifications take 0.2 s to import
    from megalith.spec.sizes import active_parameters, count_model

    chosen = meant(words) if words.strip() else list(presets())
    rows = list[ModelRow]()
    for name in chosen:
        preset = presets()[name]
        family, built = preset.build(), preset.build().build()
        total = count_model(built).total
        rows.append(
            ModelRow(
                name, family.family, total, active_parameters(built), len(built.blocks), built.dim, family.context, STATE_BYTES * total,
                preset.source,
            )
        )  # fmt: skip
    return rows


def _table(rows: list[ModelRow], width: int) -> Table:
    """Return a table of models; the source is cut so that a model takes one line of `width` columns."""
    from megalith.report import units  # drawing

    heads = ("name", "parameters", "a token", "context", "state")
    cells = [
        (
            row.name,
            units.count(row.parameters),
            units.count(row.active) if row.active != row.parameters else "",
            f"{row.context:,}",
            units.memory(row.state_bytes),
        )
        for row in rows
    ]
    used = sum(max(map(len, column)) + 2 for column in zip(heads, *cells, strict=True))
    left = max(12, width - used)
    table = Table(*heads, "source", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[1:5]:
        column.justify = "right"
    for row, texts in zip(rows, cells, strict=True):
        source = row.source if len(row.source) <= left else row.source[: left - 1] + "…"
        table.add_row(*map(escape, texts), escape(source))
    return table
