"""Charts as inline SVG: lines, stacked bars, grids. Charts scale with the page and follow its light or dark colours.

Values show on hover. Colours are CSS classes (`c0` .. `c10`, in STYLE). The first eight colours are after Okabe and Ito's set,
which people with colour blindness can tell apart."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from math import ceil, floor, isfinite, log10

from megalith.report.units import count

Point = tuple[float, float]

STYLE = """
:root{--bg:#ffffff;--panel:#ffffff;--soft:#f3f5f8;--ink:#1c2430;--muted:#5f6b7a;--line:#e2e6ec;--grid:#eceff3;
--c0:#0b6fb8;--c1:#d1551a;--c2:#00876a;--c3:#b2559b;--c4:#c28a00;--c5:#3a9fd6;--c6:#8792a2;--c7:#6558c9;
--c8:#7d4e24;--c9:#a3142e;--c10:#8f9a1c;color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--bg:#0f1319;--panel:#171c24;--soft:#1f2630;--ink:#e8ecf2;--muted:#9aa6b6;--line:#2a323d;
--grid:#242c36;--c0:#4fa8e8;--c1:#f58a52;--c2:#3cc6a0;--c3:#dc8fc8;--c4:#e8b53c;--c5:#8accf2;--c6:#8d99a9;--c7:#a39af0;--c8:#c59a6d;--c9:#ff8095;
--c10:#c6d24e}}
svg{display:block;width:100%;height:auto;font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
svg text{fill:var(--muted);font-size:11px}
svg .strong{fill:var(--ink);font-weight:600}
svg .grid{stroke:var(--grid);stroke-width:1}
svg .axis{stroke:var(--line);stroke-width:1}
svg .level{stroke:var(--muted);stroke-width:1;stroke-dasharray:5 4}
svg .mark{stroke:var(--ink);stroke-width:1;stroke-dasharray:2 3}
svg .title{fill:var(--ink);font-weight:600;font-size:13px}
svg .area{stroke:none;opacity:.25}
svg .curve{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
svg .faint{opacity:.32;stroke-width:1.1}
svg .strip{fill:transparent}
svg .strip:hover{fill:var(--muted);fill-opacity:.13}
svg .box{fill:var(--soft);stroke:var(--line)}
svg .soft{fill:var(--soft)}
svg .bar:hover{opacity:.8}
""" + "".join(f"svg .c{i}{{stroke:var(--c{i})}}svg .f{i}{{fill:var(--c{i})}}\n" for i in range(11))
"""CSS of the classes that pictures use. A page includes this CSS once; `standalone` adds it to a single picture."""


@dataclass(frozen=True)
class Series:
    """A named curve. `colour`: the number of its colour class; `dots`: draw a dot at each point; `faint`: raw values behind a
    smoothed curve, which the legend leaves out; `dashes`: a dashed line, so that an equal curve below it is visible."""

    name: str
    points: Sequence[Point]
    colour: int
    dots: bool = False
    faint: bool = False
    dashes: bool = False


@dataclass(frozen=True)
class Area:
    """A named area between two curves with the same x values."""

    name: str
    low: Sequence[Point]
    high: Sequence[Point]
    colour: int


@dataclass(frozen=True)
class _Frame:
    """The plotting area and the scales of a chart, in units of the picture."""

    left: float
    top: float
    right: float
    bottom: float
    x: Point
    y: Point

    def px(self, value: float) -> float:
        return self.left + (value - self.x[0]) / (self.x[1] - self.x[0]) * (self.right - self.left)

    def py(self, value: float) -> float:
        return self.bottom - (value - self.y[0]) / (self.y[1] - self.y[0]) * (self.bottom - self.top)


@dataclass(frozen=True)
class Zoom:
    """Attributes of a picture for curves.js, which zooms into its curves. `unit`: unit of the y axis. `log`: the script may make
    the y axis logarithmic."""

    unit: str = ""
    log: bool = False

    def of(self, frame: _Frame, from_zero: bool) -> str:
        numbers = " ".join(f"{one:.10g}" for one in (frame.left, frame.top, frame.right, frame.bottom, *frame.x, *frame.y))
        flags = (' data-zero=""' if from_zero else "") + (' data-log=""' if self.log else "")
        return f' data-frame="{numbers}" data-unit="{escape(self.unit)}"{flags}'


def picture(width: float, height: float, body: str, label: str, more: str = "") -> str:
    """An SVG element of the given size in units; it scales to the width of its container. `more`: further attributes."""
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}"{more}>{body}</svg>'


def standalone(svg: str) -> str:
    """Return a picture as the content of a stand-alone SVG file."""
    head = '<svg xmlns="http://www.w3.org/2000/svg"'
    return svg.replace("<svg", head, 1).replace(">", f"><style>{escape(STYLE, quote=False)}</style>", 1) + "\n"


def text(x: float, y: float, words: str, *, anchor: str = "start", style: str = "") -> str:
    """Text at a position; `anchor` is start, middle or end."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{f" class={style!r}" if style else ""}>{escape(words)}</text>'


def width_of(words: str, size: float = 11) -> float:
    """Return the approximate width of words, so that labels do not overlap."""
    return len(words) * size * 0.58


MIN_SPAN = 1e-300  # numbers that are closer are one: a step between them would have no digits


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most `most` round numbers in [low, high]."""
    if not high - low > MIN_SPAN:
        return [low]
    raw = (high - low) / max(most - 1, 1)
    power = 10.0 ** floor(log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = ceil(low / step - 1e-9)
    return [i * step for i in range(first, floor(high / step + 1e-9) + 1)]


def thin(points: Sequence[Point], most: int = 500) -> list[Point]:
    """Thin out many points: in each range of consecutive points, keep only the lowest and the highest, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    size = ceil(2 * len(points) / most)
    kept: list[Point] = []
    for i in range(0, len(points), size):
        stretch = points[i : i + size]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def legend(entries: Sequence[tuple[str, int]], *, left: float, right: float, top: float) -> tuple[str, float]:
    """Return the legend, in as many lines as it needs, and its height."""
    body, x, y = "", left, top
    for name, colour in entries:
        wide = width_of(name) + 30
        if x + wide > right and x > left:
            x, y = left, y + 17
        body += f'<rect x="{x:.1f}" y="{y - 8:.1f}" width="11" height="11" rx="3" class="f{colour}"/>' + text(x + 16, y + 2, name)
        x += wide
    return body, (y - top + 22 if entries else 0)


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str = "",
    y_format: Callable[[float], str] = count,
    from_zero: bool = False,
    areas: Sequence[Area] = (),
    level: float | None = None,
    marks: Sequence[tuple[float, str]] = (),
    names: Sequence[tuple[str, int]] = (),
    zoom: Zoom | None = None,
    width: float = 620,
    height: float = 270,
) -> str:
    """Draw curves over one x axis. Points that are not finite are left out; if no point remains, the picture says so.

    `level`: a value of y at which a horizontal line is drawn, inside the picture. `marks`: values of x at which vertical lines
    are drawn, each with a name. `names`: further entries of the legend, with their colours. `zoom`: data with which a page's
    script can zoom into the curves.
    """
    shown = [replace(s, points=_finite(s.points)) for s in series]
    shown = [s for s in shown if s.points]
    if not shown:
        return picture(width, 60, text(width / 2, 34, "no values yet", anchor="middle"), "no values")
    entries = [*((s.name, s.colour) for s in shown if not s.faint), *((area.name, area.colour) for area in areas), *names]
    listed, tall = legend(entries if len(entries) > 1 else [], left=8, right=width, top=14)  # one curve: the caption names it
    points = [p for curve in [*(s.points for s in shown), *(a.low for a in areas), *(a.high for a in areas)] for p in curve]
    if level is not None:
        points.append((points[0][0], level))
    frame = _frame(points, from_zero, y_format, tall + (24 if y_label else 10), width, height)
    body = f'<g class="legend">{listed}</g><g class="axes">{_axes(frame, x_label, y_format)}</g>'
    body += text(8, frame.top - 6, y_label) if y_label else ""
    body += "".join(_area(frame, area) for area in areas) + _level(frame, level) + _marks(frame, marks)
    for s in shown:
        place = [f"{frame.px(x):.2f},{frame.py(y):.2f}" for x, y in thin(s.points, 1000 if zoom else 500)]
        how = " faint" * s.faint + " dashes" * s.dashes
        body += f'<polyline class="curve c{s.colour}{how}" points="{" ".join(place)}"/>'
        if s.dots or len(place) == 1:
            radius = 2.6 if len(place) <= 60 else 1.4
            dots = (f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="{radius}"/>' for p in place)
            body += f'<g class="dots f{s.colour}">{"".join(dots)}</g>'
    body += _strips(frame, [s for s in shown if not s.faint], x_label, y_format)
    return picture(
        width, height, body, ", ".join(s.name for s in shown if not s.faint), zoom.of(frame, from_zero) if zoom else ""
    )


def _area(frame: _Frame, area: Area) -> str:
    place = [f"{frame.px(x):.1f},{frame.py(y):.1f}" for x, y in (*area.low, *reversed(area.high))]
    return f'<polygon class="area f{area.colour}" points="{" ".join(place)}"/>'


def _level(frame: _Frame, level: float | None) -> str:
    if level is None:
        return ""
    y = frame.py(level)
    return f'<line class="level" x1="{frame.left:.1f}" x2="{frame.right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _marks(frame: _Frame, marks: Sequence[tuple[float, str]]) -> str:
    """Draw a vertical line at each marked value of x. Names are at different heights, so that the names of neighbouring lines do
    not overlap."""
    body = ""
    for i, (at, name) in enumerate(sorted(marks)):
        x, y = frame.px(at), frame.bottom - 8 - 13 * (len(marks) - 1 - i)
        right = x + 8 + width_of(name) > frame.right
        body += f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.top:.1f}" y2="{frame.bottom:.1f}"/>'
        body += text(x - 4 if right else x + 4, y, name, anchor="end" if right else "start", style="strong")
    return body


def _finite(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if isfinite(x) and isfinite(y)]


def _frame(
    points: Sequence[Point], from_zero: bool, y_format: Callable[[float], str], top: float, width: float, height: float
) -> _Frame:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = (0.0 if from_zero else min(ys)), max(ys)
    if high == low:
        low, high = (0.0, high or 1.0) if from_zero else (low - (abs(low) or 1) * 0.05, high + (abs(high) or 1) * 0.05)
    space = (high - low) * 0.06
    y = (low if from_zero else low - space, high + space)
    x = (min(xs), max(xs)) if max(xs) > min(xs) else (min(xs) - 0.5, max(xs) + 0.5)
    left = 16 + max(width_of(y_format(tick)) for tick in ticks(*y, most=5))
    return _Frame(left, top, width - 14, height - 36, x, y)


def _axes(frame: _Frame, x_label: str, y_format: Callable[[float], str]) -> str:
    body = ""
    for tick in ticks(*frame.y, most=5):
        y = frame.py(tick)
        body += f'<line x1="{frame.left:.1f}" x2="{frame.right:.1f}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        body += text(frame.left - 8, y + 4, y_format(tick), anchor="end")
    body += f'<line x1="{frame.left:.1f}" x2="{frame.right:.1f}" y1="{frame.bottom}" y2="{frame.bottom}" class="axis"/>'
    for tick in ticks(*frame.x, most=8):
        body += text(frame.px(tick), frame.bottom + 16, count(tick), anchor="middle")
    return body + text((frame.left + frame.right) / 2, frame.bottom + 32, x_label, anchor="middle")


def _strips(frame: _Frame, series: Sequence[Series], x_label: str, y_format: Callable[[float], str]) -> str:
    """Draw invisible columns over the curves. Each column shows the curves' values at its x when the mouse is over it."""
    places = sorted({x for s in series for x, _ in s.points})
    places = places[:: ceil(len(places) / 120)]
    edges = [frame.left, *((frame.px(a) + frame.px(b)) / 2 for a, b in pairwise(places)), frame.right]
    body = ""
    for x, left, right in zip(places, edges, edges[1:], strict=False):
        near = [(s.name, _nearest(s.points, x)) for s in series]
        gap = (frame.x[1] - frame.x[0]) * (right - left) / (frame.right - frame.left)
        lines = [f"{name} {y_format(p[1])}" for name, p in near if abs(p[0] - x) <= gap]
        words = escape("\n".join([f"{x_label} {x:g}", *lines]))
        area = f'x="{left:.1f}" y="{frame.top:.1f}" width="{right - left:.1f}" height="{frame.bottom - frame.top:.1f}"'
        body += f'<rect class="strip" {area}><title>{words}</title></rect>'
    return body


def _nearest(points: Sequence[Point], x: float) -> Point:
    i = bisect_left(points, (x, float("-inf")))
    return min(points[max(i - 1, 0) : i + 1], key=lambda p: abs(p[0] - x))


def stacked_columns(
    columns: Sequence[tuple[float, Mapping[str, float]]],
    colours: Mapping[str, int],
    *,
    x_label: str,
    y_format: Callable[[float], str] = count,
    width: float = 620,
    height: float = 270,
) -> str:
    """Draw a stacked column at each x, with its parts in the order of `colours`."""
    if not columns:
        return picture(width, 60, text(width / 2, 34, "no values yet", anchor="middle"), "no values")
    names, tall = legend(list(colours.items()), left=8, right=width, top=14)
    xs = [x for x, _ in columns]
    step = (xs[-1] - xs[0]) / max(len(xs) - 1, 1) or 1.0
    totals = [(x, sum(values.values())) for x, values in columns]
    frame = _frame([*totals, (xs[0] - step / 2, 0.0), (xs[-1] + step / 2, 0.0)], True, y_format, tall + 10, width, height)
    body = names + _axes(frame, x_label, y_format)
    wide = (frame.right - frame.left) / len(columns)
    for x, values in columns:
        base = 0.0
        lines = [f"{name} {y_format(values[name])}" for name in colours if values.get(name)]
        bars = ""
        for name, colour in colours.items():
            y, tip = frame.py(base), frame.py(base + values.get(name, 0.0))
            place = f'x="{frame.px(x) - wide * 0.43:.1f}" y="{tip:.1f}" width="{wide * 0.86:.1f}" height="{y - tip:.1f}"'
            bars += f'<rect {place} class="f{colour}"/>' if y - tip > 0.05 else ""
            base += values.get(name, 0.0)
        title = escape("\n".join([f"{x_label} {x:g}", *lines, f"together {y_format(base)}"]))
        body += f'<g class="bar"><title>{title}</title>{bars}</g>'
    return picture(width, height, body, f"{', '.join(colours)} by {x_label}")


def stacked_rows(
    rows: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, int],
    *,
    form: Callable[[float], str] = count,
    x_label: str = "",
    width: float = 620,
) -> str:
    """Draw a bar for each name, made of named parts in the order of `colours`, with its total at the end. `x_label`: the
    quantity."""
    names, tall = legend(list(colours.items()), left=8, right=width, top=14)
    most = max((sum(values.values()) for values in rows.values()), default=0) or 1.0
    left = 18 + max((width_of(name) for name in rows), default=0)
    right = width - 16 - max((width_of(form(sum(values.values()))) for values in rows.values()), default=0)
    body, y = names, tall + 12
    for row, values in rows.items():
        x, title = left, ""
        body += text(left - 10, y + 14, row, anchor="end")
        parts = ""
        for name, colour in colours.items():
            wide = values.get(name, 0.0) / most * (right - left)
            parts += f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="19" class="f{colour}"/>' if wide > 0.05 else ""
            title += f"\n{name} {form(values.get(name, 0.0))}"
            x += wide
        body += f'<g class="bar"><title>{escape(row + title)}</title>{parts}</g>'
        body += text(x + 7, y + 14, form(sum(values.values())), style="strong")
        y += 26
    if x_label:
        body += text((left + right) / 2, y + 12, x_label, anchor="middle")
        y += 18
    return picture(width, y + 4, body, f"{', '.join(colours)} of {len(rows)}")


def titled(title: str, parts: Sequence[str]) -> str:
    """Stack pictures below a title."""
    boxes = [[float(number) for number in part.partition('viewBox="')[2].partition('"')[0].split()] for part in parts]
    body, top = text(8, 20, title, style="title"), 30.0
    for part, box in zip(parts, boxes, strict=True):
        # groups, not pictures in a picture: STYLE gives every svg element the width of what it stands in
        body += f'<g transform="translate(0,{top:g})">{part[part.index(">") + 1 : part.rindex("</svg>")]}</g>'
        top += box[3]
    return picture(max(box[2] for box in boxes), top, body, title)


@dataclass(frozen=True)
class Cell:
    """One rank in the grid: a head, lines of text, and its share (0..1) of each of the model's parts."""

    head: str
    lines: Sequence[str]
    held: Sequence[float]
    title: str


def grid(
    cells: Sequence[Sequence[Cell]], row_names: Sequence[str], column_names: Sequence[str], *, cell_width: float = 190
) -> str:
    """Draw cells in rows and columns. A strip in each cell shows the model's parts in order; each part is filled up to the share
    that the cell's rank holds."""
    lines = max((len(cell.lines) for row in cells for cell in row), default=0)
    left, top, tall = 22 + max(map(width_of, row_names), default=0), 30, 56 + 15 * lines
    body = "".join(
        text(left + (i + 0.5) * cell_width, 18, name, anchor="middle", style="strong") for i, name in enumerate(column_names)
    )
    for r, row in enumerate(cells):
        y = top + r * (tall + 8)
        body += text(left - 10, y + tall / 2 + 4, row_names[r], anchor="end", style="strong")
        for c, cell in enumerate(row):
            body += _cell(cell, left + c * cell_width + 4, y, cell_width - 8, tall)
    width, height = left + len(column_names) * cell_width + 4, top + len(cells) * (tall + 8)
    return picture(width, height, body, "which rank holds which parts of the model")


def _cell(cell: Cell, x: float, y: float, width: float, height: float) -> str:
    body = f'<rect class="box" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="7"/>'
    body += text(x + 11, y + 19, cell.head, style="strong")
    for i, line in enumerate(cell.lines):
        body += text(x + 11, y + 36 + 15 * i, line)
    step = (width - 22) / max(len(cell.held), 1)
    bottom, tall = y + height - 9, 14.0
    for i, share in enumerate(cell.held):
        place = f'x="{x + 11 + i * step:.1f}" width="{max(step - min(2.0, step * 0.2), 0.5):.1f}"'
        body += f'<rect {place} y="{bottom - tall:.1f}" height="{tall:.1f}" style="fill:var(--line)"/>'
        if share > 0:
            filled = max(tall * share, 2.0)
            body += f'<rect {place} y="{bottom - filled:.1f}" height="{filled:.1f}" class="f0"/>'
    return f"<g class='bar'><title>{escape(cell.title)}</title>{body}</g>"
