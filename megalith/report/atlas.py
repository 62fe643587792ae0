"""The map of the best layouts, as one self-contained HTML page."""

from collections.abc import Callable, Sequence
from html import escape

from megalith.planner.atlas import Atlas, Square
from megalith.planner.plan_result import CONVENTION, assumption, headroom, short
from megalith.planner.search import Candidate
from megalith.report import plans, units
from megalith.report.style import figure, html_page, html_table
from megalith.report.svg import picture, text

GIB = 2**30

OWN = """
svg .cell{rx:8px}
svg .big{fill:var(--ink);font-size:17px;font-weight:650;letter-spacing:-.01em}
svg .layout{fill:var(--ink);fill-opacity:.82;font-size:11px}
svg .none{fill:var(--muted);font-size:11px}
figure{margin-bottom:16px}
"""
"""CSS in addition to the style of all pages."""

STRONGEST = 62
"""Colour strength (per cent) of the cell with the largest value, weak enough that text on the cell is readable in the light and
the dark theme."""

CELL = (142.0, 74.0)


def page(found: Atlas) -> str:
    """Return the page: maps of MFU with the layout, memory and speed, and a table of all figures."""
    train, cluster = found.request.run.train, found.request.cluster
    tokens = train.seq_len * train.global_batch
    title = f"Best layouts on {cluster.accelerator.title}"
    said = (
        f"{train.global_batch:,} sequences of {train.seq_len:,} = {tokens:,} tokens a step, {found.request.format}; "
        f"nodes of {cluster.per_node}. Predicted: {assumption(found.request.software)}."
    )
    peak = units.flops(cluster.accelerator.wide)
    maps = [
        (f"MFU of the best layout ({CONVENTION} of {peak})", _map(found, _mfu, "c0", _layout)),
        (f"Memory of the worst rank{_limit(found)}", _map(found, _memory, "c4", _again)),
        ("Tokens a second of all devices together", _map(found, _rate, "c2", _step)),
    ]
    drawn = "".join(figure(name, picture, wide=True) for name, picture in maps)
    body = f"<header><h1>{escape(title)}</h1><p>{escape(said)}</p></header>{drawn}{_key()}{_table(found)}"
    return html_page(title, f"{body}<footer>Made by megalith plan --atlas. {escape(' '.join(found.request.notes))}</footer>", OWN)


def _limit(found: Atlas) -> str:
    memory = found.request.cluster.accelerator.memory
    return f", of a device's {memory / GIB:.0f} GiB; plans leave {headroom():.0%} free" if memory else ""


CellValue = tuple[float, str]
"""The value that a square's colour shows, and its text in large letters."""


def _mfu(best: Candidate, found: Atlas) -> CellValue:
    share = best.estimate.mfu
    return share, units.percent(share)


def _memory(best: Candidate, found: Atlas) -> CellValue:
    size = best.estimate.memory.total
    return size / (found.request.cluster.accelerator.memory or size), f"{size / GIB:.1f} GiB"


def _rate(best: Candidate, found: Atlas) -> CellValue:
    rate = best.estimate.tokens_per_second * best.estimate.devices
    return rate**0.5, units.count(rate)


def _layout(best: Candidate) -> tuple[str, str]:
    words = short(best.plan).split()
    first = next(i for i, word in enumerate(words) if word[0] == "d" and word[1:].isdigit())
    return " ".join(words[:first]) or "model not split", " ".join(words[first:])


def _again(best: Candidate) -> tuple[str, str]:
    held = best.estimate.memory
    again = {"none": "no recomputation", "full": "all recomputed"}.get(best.plan.recompute, "mlp recomputed")
    return f"{(held.weights + held.gradients + held.optimizer) / GIB:.1f} GiB of state", again


def _step(best: Candidate) -> tuple[str, str]:
    estimate = best.estimate
    return f"{plans.seconds(estimate.time.step)} a step", f"{units.count(estimate.tokens_per_second)} a device"


def _map(
    found: Atlas, value_of: Callable[[Candidate, Atlas], CellValue], colour: str, lines: Callable[[Candidate], tuple[str, str]]
) -> str:
    squares = {(square.model, square.nodes): square for square in found.squares}
    most = max((value_of(one.choice, found)[0] for one in found.squares if one.choice is not None), default=1.0) or 1.0
    wide, tall = CELL
    left, top = 132.0, 40.0
    body = ""
    for c, nodes in enumerate(found.nodes):
        x = left + (c + 0.5) * wide
        body += text(x, 16, f"{nodes:,} node{'s' * (nodes > 1)}", anchor="middle", style="strong")
        body += text(x, 31, f"{squares[found.models[0], nodes].devices:,} devices", anchor="middle")
    for r, model in enumerate(found.models):
        y = top + r * tall
        body += text(left - 12, y + tall / 2 + 2, model, anchor="end", style="strong")
        for c, nodes in enumerate(found.nodes):
            square = squares[model, nodes]
            place = left + c * wide + 3, y + 3, wide - 6, tall - 6
            if square.choice is None:
                body += _empty(square, *place)
            else:
                body += _cell(square, square.choice, value_of(square.choice, found), most, colour, lines(square.choice), *place)
    return picture(left + len(found.nodes) * wide + 4, top + len(found.models) * tall + 6, body, "heat map")


def _cell(
    square: Square,
    best: Candidate,
    said: CellValue,
    most: float,
    colour: str,
    lines: Sequence[str],
    x: float,
    y: float,
    wide: float,
    tall: float,
) -> str:
    share = 6 + (STRONGEST - 6) * said[0] / most
    fill = f"fill:color-mix(in srgb,var(--{colour}) {share:.0f}%,var(--panel))"
    body = f'<rect class="cell" x="{x:g}" y="{y:g}" width="{wide:g}" height="{tall:g}" rx="8" style="{fill}"/>'
    body += text(x + 12, y + 25, said[1], style="big")
    body += text(x + 12, y + 43, lines[0], style="layout") + text(x + 12, y + 57, lines[1], style="layout")
    return f'<g class="bar"><title>{escape(_whole(square, best))}</title>{body}</g>'


def _empty(square: Square, x: float, y: float, wide: float, tall: float) -> str:
    body = f'<rect class="soft" x="{x:g}" y="{y:g}" width="{wide:g}" height="{tall:g}" rx="8"/>'
    return (
        body
        + text(x + 12, y + 30, "does not fit" if "GiB" in square.why else "no valid plan", style="none")
        + text(x + 12, y + 45, square.why, style="none")
    )


def _whole(square: Square, best: Candidate) -> str:
    estimate, time = best.estimate, best.estimate.time
    return "\n".join(
        (
            f"{square.model} on {square.devices:,} devices: {short(best.plan)}",
            f"MFU {units.percent(estimate.mfu)}, {plans.seconds(time.step)} a step",
            f"{estimate.memory.total / GIB:.1f} GiB, recompute {best.plan.recompute}",
            f"bubble {time.bubble / time.step:.1%}, exposed communication {time.exposed / time.step:.1%}",
        )
    )


def _key() -> str:
    words = (
        "t tensor, c context, p pipeline x chunks, e expert, d data, z ZeRO stage, r copies, m microbatch: values not shown are 1"
    )
    return f'<p class="none">{words}.</p>'


def _table(found: Atlas) -> str:
    head = ("model", "nodes", "devices", "layout", "recompute", "MFU", "tokens/s a device", "step", "memory", "bubble")
    rows = list[Sequence[str]]()
    for square in found.squares:
        start = (square.model, f"{square.nodes:,}", f"{square.devices:,}")
        if square.choice is None:
            cells: Sequence[str] = (*start, square.why, *[""] * 6)
        else:
            plan, estimate = square.choice.plan, square.choice.estimate
            cells = (
                *start, short(plan), plan.recompute, units.percent(estimate.mfu), units.count(estimate.tokens_per_second),
                plans.seconds(estimate.time.step), units.memory(estimate.memory.total),
                units.percent(estimate.time.bubble / estimate.time.step),
            )  # fmt: skip
        rows.append(cells)
    return f"<details><summary>All {len(found.squares)} squares as a table</summary>{html_table(head, rows)}</details>"
