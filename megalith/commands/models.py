"""`megalith models`: list the model presets."""

from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megalith.commands.shared.arguments import Json
from megalith.commands.shared.output import print_json

STATE_BYTES = 16
"""Bytes of state for each parameter in training with AdamW, summed over all ranks: fp32 weights, gradients and two moments."""


@dataclass(frozen=True)
class ModelRow:
    """A model preset. `active`: number of parameters that process each token. `state_bytes`: bytes of training state over all ranks,
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
        typer.Argument(
            metavar="[WORD...]",
            help="Show only models whose names contain all these words, such as llama 8b.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """List the model presets: sizes, memory of their training state, and sources.

    Choose one with [model] preset = "NAME" in a run file, or with --model NAME for `megalith plan` and `megalith init`.

    Example:  megalith models llama 8b
    """
    rows = models(" ".join(words or ()))
    if as_json:
        print_json({"ok": bool(rows), "models": [asdict(row) for row in rows]})
        return 0 if rows else 1
    if not rows:
        print(f"no model name contains all of {' '.join(words or ())!r}; `megalith models` lists all models")
        return 1
    console = Console(highlight=False)
    console.print(_table(rows, console.width))
    print("state: fp32 weights, gradients and AdamW's moments over all ranks, 16 bytes a parameter, without activations")
    return 0


def models(words: str = "") -> list[ModelRow]:
    """Return the model presets; with `words`, only presets whose names contain all words."""
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
    """Return a table of models. Sources are truncated, so that each model takes one line of `width` columns."""
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
