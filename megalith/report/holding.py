"""Each rank's place on the mesh, the parts of the model and the bytes that it holds, and the memory used over the run."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from textwrap import wrap

from megalith.events import Holding
from megalith.report import units
from megalith.report.history import History
from megalith.report.style import HALF, curves, figure, figures
from megalith.report.svg import Cell, Series, grid, stacked_rows

MIN_SHARE = 0.01
"""Curves whose largest value is below this share of the largest curve's are only listed, because they would be drawn on the zero
line."""
MAX_COLUMNS = 16
"""Maximum number of columns in the picture; the other columns hold the same parts and are only counted."""


def who_holds_what(run: History) -> str:
    """Draw the grid of ranks: a row for each pipeline rank, a column for each position on the other axes."""
    if not run.holdings:
        return ""
    order = _order({part for holding in run.holdings for part in holding.parts})
    across = [axis for axis in run.holdings[0].coordinates if axis != "pipeline"]
    columns = {h.rank: tuple(h.coordinates[axis] for axis in across) for h in run.holdings}
    places = sorted(set(columns.values()))
    rows = sorted({h.coordinates.get("pipeline", 0) for h in run.holdings})
    at = {(h.coordinates.get("pipeline", 0), columns[h.rank]): h for h in run.holdings}
    shown = places[:MAX_COLUMNS]
    shards = run.plan.dp_shard if run.plan else 1
    share = 1 / (shards * run.plan.tensor) if run.plan else 1.0
    cells = [[_cell(at.get((row, place)), order, shards, share) for place in shown] for row in rows]
    split = [i for i in range(len(across)) if any(place[i] for place in places)]
    names = [", ".join(f"{across[i]} {place[i]}" for i in split) for place in shown]
    svg = grid(cells, [f"pipeline {row}" for row in rows], names)
    more = f" {len(places) - len(shown)} columns that are not shown hold the same parts." if len(places) > len(shown) else ""
    words = "Each strip shows the model from embedding to head. Blue marks the parts that this rank holds, up to the height of its share."
    natural = svg.replace(
        "<svg", f'<svg style="min-width:0;width:{100 + 190 * len(shown)}px"', 1
    )  # a wide mesh scrolls, it does not shrink
    return figure(words + more, natural, wide=True)


def _cell(holding: Holding | None, order: Sequence[str], shards: int, share: float) -> Cell:
    if holding is None:
        return Cell(units.NOTHING, (), (), "no record of this rank")
    held = set(holding.parts)
    lines = [
        *wrap(named(holding.parts), 27),
        f"{units.count(holding.parameters)} parameters",
        f"weights {units.memory(holding.weight_bytes)}",
        f"gradients {units.memory(holding.gradient_bytes)}",
        f"optimizer {units.memory(holding.optimizer_bytes)}",
        *(f"{tier} {units.memory(size)}" for tier, size in (("host", holding.host_bytes), ("disk", holding.disk_bytes)) if size),
    ]
    place = ", ".join(f"{axis} {i}" for axis, i in holding.coordinates.items())
    split = f"1/{round(1 / share)} of each part, {units.counted(shards, 'shard')} per copy"
    title = "\n".join([f"rank {holding.rank}: {place}", *lines, split])
    return Cell(f"rank {holding.rank}", lines, [share * (part in held) for part in order], title)


def _order(parts: Iterable[str]) -> list[str]:

    def key(part: str) -> tuple[int, int, str]:
        found = re.fullmatch(r"blocks\.(\d+)", part)
        return (1, int(found[1]), "") if found else ({"embedding": 0, "head": 2}.get(part, 3), 0, part)

    return sorted(parts, key=key)


def named(parts: Sequence[str]) -> str:
    """List parts of a model briefly, with consecutive blocks as a range, as in `embedding, blocks 0–3, 8, head`."""
    numbers = sorted(int(part.removeprefix("blocks.")) for part in parts if re.fullmatch(r"blocks\.\d+", part))
    ranges: list[str] = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        ranges.append(str(found[0]) if len(found) == 1 else f"{found[0]}–{found[-1]}")
    blocks = [f"block{'s' if len(numbers) > 1 else ''} {', '.join(ranges)}"] if numbers else []
    before = [part for part in parts if part == "embedding"]
    after = [part for part in parts if part != "embedding" and not re.fullmatch(r"blocks\.\d+", part)]
    return ", ".join([*before, *blocks, *after]) or "nothing"


def memory_section(run: History) -> str:
    """Return as HTML the bytes of weights, gradients and optimizer state that each rank holds, and the memory used over time. With more
    than 12 ranks, only one rank of each pipeline rank is shown: the one that holds most bytes."""
    drawn: list[str] = []
    if run.holdings:
        colours = {"weights": 0, "gradients": 1, "optimizer state": 2}
        drawn.append(figure("State a rank holds", stacked_rows(_shares(run.holdings), colours, form=units.memory, width=HALF)))
    names = dict.fromkeys(name for step in run.steps for name in step.memory)
    largest = {name: max(step.memory.get(name, 0) for step in run.steps) for name in names}
    most = max(largest.values(), default=0)
    unit, scale = units.memory_unit(most)
    series = [
        Series(
            name.replace("_", " "),
            [(s.step, s.memory[name] / scale) for s in run.steps if name in s.memory],
            i % 8,
            dashes=name == "peak",
        )
        for i, name in enumerate(names)
        if largest[name] > MIN_SHARE * most
    ]
    if series:
        small = [name.replace("_", " ") for name in names if 0 < largest[name] <= MIN_SHARE * most]
        caption = "Memory over the run" + (
            f"; not drawn (below {MIN_SHARE:.0%} of the largest): {', '.join(small)}" if small else ""
        )
        chart = curves(series, lambda size: f"{size:.4g} {unit}", unit=f" {unit}", from_zero=True)
        drawn.append(figure(caption, chart))
    return figures(*drawn)


def _shares(holdings: Sequence[Holding]) -> dict[str, dict[str, float]]:
    """Return bytes by category in a row for each rank; with more than 12 ranks, in a row for each pipeline rank, with the bytes
    of its worst rank."""
    rows = {h.rank: _bytes(h) for h in holdings}
    if len(rows) <= 12:
        return {f"rank {rank}": row for rank, row in rows.items()}
    groups: dict[int, list[int]] = {}
    for holding in holdings:
        groups.setdefault(holding.coordinates.get("pipeline", 0), []).append(holding.rank)
    worst = {p: max((rows[rank] for rank in ranks), key=lambda row: sum(row.values())) for p, ranks in sorted(groups.items())}
    return {f"pipeline {p}, worst of {len(groups[p])}": row for p, row in worst.items()}


def _bytes(holding: Holding) -> dict[str, float]:
    return {
        "weights": float(holding.weight_bytes),
        "gradients": float(holding.gradient_bytes),
        "optimizer state": float(holding.optimizer_bytes),
    }
