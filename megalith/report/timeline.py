"""Predicted and measured timelines: drawn on the same axis, or as a trace for Perfetto."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from statistics import mean
from types import MappingProxyType
from typing import Any, NamedTuple

from megalith.events import Span
from megalith.report.svg import picture, text, ticks, width_of
from megalith.report.units import duration, percent
from megalith.schedule.action import COMPUTATIONS, Action, Overlap, RowEntry, parse, parts
from megalith.schedule.simulate import Timeline

FILLS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "F": ("forward", "#1f6fb5", "#ffffff"),
        "B": ("backward", "#cf5a22", "#ffffff"),
        "I": ("input gradient", "#e3a83b", "#2b1d00"),
        "W": ("weight gradient", "#5ab8a5", "#04241e"),
        "GATHER": ("gather weights", "#8d6cc0", "#ffffff"),
        "REDUCE": ("reduce gradients", "#8792a2", "#ffffff"),
        "OFFLOAD": ("activations leave the device", "#b07a8c", "#ffffff"),
        "FETCH": ("activations are fetched", "#7a9a4c", "#ffffff"),
        "MESSAGE": ("send and receive", "#5f6b7a", "#ffffff"),
        "WAIT": ("wait for messages", "#d3d9e0", "#1c2430"),
        "OTHER": ("other", "#a9a18c", "#1c1a14"),
    }
)
"""Name, fill and text colour of each kind of bar, the same in the light and the dark theme."""


class Bar(NamedTuple):
    """An activity of a rank, from `start` to `end` in seconds. `kind` is a key of FILLS, `word` the text on the bar.

    `shade` is the number of the rank's chunk, or 1 for the other direction of a bidirectional schedule. `frame` is the length in
    seconds of a frame from `start` around this bar and the next one, drawn if the two are overlapped; 0: no frame.
    """

    rank: int
    name: str
    kind: str
    word: str
    start: float
    end: float
    shade: int = 0
    frame: float = 0.0


def predicted(timeline: Timeline) -> list[Bar]:
    """Return the bars of a simulated timeline."""
    return [bar for span in timeline.spans for bar in _bars(span.rank, span.action, span.start, span.end, timeline.ranks)]


def measured(spans: Iterable[Span], ranks: int) -> list[Bar]:
    """Return the bars of a Spans event, whose entries are `[rank, action, start, end]`; entries that are not actions keep their
    names."""
    bars: list[Bar] = []
    for rank, name, start, end in spans:
        try:
            entry = parse(name)
        except ValueError:
            bars.append(Bar(rank, name, name if name in FILLS else "OTHER", name, start, end))
        else:
            bars += _bars(rank, entry, start, end, ranks)
    return bars


def _bars(rank: int, entry: RowEntry, start: float, end: float, ranks: int) -> list[Bar]:
    if isinstance(entry, Overlap):  # one above the other would be too flat to read: each takes its half of the time
        middle = (start + end) / 2
        (first,) = _bars(rank, entry.first, start, middle, ranks)
        return [first._replace(frame=end - start), *_bars(rank, entry.second, middle, end, ranks)]
    kind = entry.kind if entry.kind in FILLS else "MESSAGE"
    word = "" if entry.microbatch is None else str(entry.microbatch)
    shade = entry.stage // ranks or int(entry.kind in COMPUTATIONS and entry.stage != rank)  # a stage of the other direction
    return [Bar(rank, str(entry), kind, word, start, end, shade)]


def mean_seconds(steps: Iterable[Iterable[Span]]) -> dict[tuple[str, int], float]:
    """Return the mean seconds of each (kind, stage) over the measured spans `[rank, action, start, end]` of some steps. The spans
    of an action that was interrupted in a step are added up."""
    found: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for spans in steps:
        whole: defaultdict[tuple[int, str], float] = defaultdict(float)
        for rank, name, start, end in spans:
            if re.fullmatch(r"\d+[FBIW]\d+", name):
                whole[rank, name] += end - start
        for (_, name), seconds in whole.items():
            action = parse(name)
            assert isinstance(action, Action), name
            found[action.kind, action.stage].append(seconds)
    return {key: mean(values) for key, values in found.items()}


def work_end(bars: Sequence[Bar]) -> float:
    """Return the time at which the last computation ends."""
    return max((bar.end for bar in bars if bar.kind in COMPUTATIONS), default=0.0)


def bubble(bars: Sequence[Bar], ranks: int) -> float:
    """Return the idle time of all ranks divided by their useful time, between the start of the first computation and the end of
    the last."""
    work = [bar for bar in bars if bar.kind in COMPUTATIONS]
    useful = sum(bar.end - bar.start for bar in work)
    begin = min((bar.start for bar in work), default=0.0)
    return ((work_end(work) - begin) * ranks - useful) / useful if useful else 0.0


def draw(groups: Mapping[str, Sequence[Bar]], ranks: int, *, width: float = 1180) -> str:
    """Draw groups of bars (such as predicted and measured) one below the other on one time axis. Each rank has a row, and bars
    are labelled with their microbatch."""
    bars = [bar for group in groups.values() for bar in group]
    if not bars:
        return picture(width, 60, text(width / 2, 34, "nothing to draw yet", anchor="middle"), "no timeline")
    end = max(bar.end for bar in bars) or 1.0
    left, right, y = 64.0, width - 30, 30.0
    body = _legend({bar.kind: None for bar in bars}, left)
    for name, group in groups.items():
        last = max((bar.end for bar in group), default=0.0)
        said = f"{name}: {duration(work_end(group))}, bubble {percent(bubble(group, ranks))} of the useful time"
        body += text(left, y + 16, said, style="strong")
        y += 26
        for rank in range(ranks):
            body += text(left - 10, y + 17, f"rank {rank}", anchor="end")
            body += f'<rect x="{left}" y="{y}" width="{(right - left) * last / end:.2f}" height="26" rx="3" class="soft"/>'
            mine = [bar for bar in group if bar.rank == rank]
            body += "".join(_rectangle(bar, left, y, (right - left) / end) for bar in mine)
            body += "".join(_frame(bar, left, y, (right - left) / end) for bar in mine if bar.frame)
            y += 31
        y += 8
    return picture(width, y + 24, body + _seconds(end, left, right, y), "pipeline timeline")


def _rectangle(bar: Bar, left: float, y: float, scale: float) -> str:
    _, fill, ink = FILLS[bar.kind]
    x, wide = left + bar.start * scale, max((bar.end - bar.start) * scale, 0.6)
    beside = bar.kind in ("GATHER", "REDUCE", "OFFLOAD", "FETCH", "MESSAGE")
    top, tall = (y + 21, 5) if beside else (y, 26)
    opacity = (1.0, 0.78, 0.6, 0.46)[min(bar.shade, 3)]
    title = escape(f"{bar.name}\n{duration(bar.end - bar.start)}, from {duration(bar.start)} to {duration(bar.end)}")
    gap = 0.8 if wide > 4 else 0.0
    body = (
        f'<rect x="{x:.2f}" y="{y if not beside else top}" width="{wide - gap:.2f}" height="{tall}" rx="{2 if wide > 6 else 0}" '
    )
    body += f'fill="{fill}" fill-opacity="{opacity}"/>'
    if not beside and width_of(bar.word) + 3 < wide:
        colour = ink if opacity > 0.7 else "var(--ink)"
        body += f'<text x="{x + wide / 2:.2f}" y="{y + 17}" text-anchor="middle" style="fill:{colour}">{escape(bar.word)}</text>'
    return f'<g class="bar"><title>{title}</title>{body}</g>'


def _frame(bar: Bar, left: float, y: float, scale: float) -> str:
    wide = max(bar.frame * scale - 0.8, 0.6)
    place = f'x="{left + bar.start * scale + 0.4:.2f}" y="{y + 0.6}" width="{wide:.2f}" height="24.8" rx="2"'
    return f'<rect {place} style="fill:none;stroke:var(--ink);stroke-width:1.2"/>'


def _legend(kinds: Iterable[str], left: float) -> str:
    body, x = "", left
    for kind in (kind for kind in FILLS if kind in set(kinds)):
        name, fill, _ = FILLS[kind]
        body += f'<rect x="{x:.1f}" y="6" width="11" height="11" rx="3" fill="{fill}"/>' + text(x + 16, 16, name)
        x += width_of(name) + 34
    return body


def _seconds(end: float, left: float, right: float, y: float) -> str:
    body = f'<line x1="{left}" x2="{right}" y1="{y}" y2="{y}" class="axis"/>'
    for tick in ticks(0, end, most=9):
        x = left + tick / end * (right - left)
        body += f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 4}" class="axis"/>'
        body += text(x, y + 17, duration(tick) if tick else "0", anchor="middle")
    return body


def chrome_trace(groups: Mapping[str, Timeline | Sequence[Bar]]) -> dict[str, Any]:
    """Return timelines in Chrome's trace format for Perfetto and chrome://tracing, with a process for each group, a thread for each rank,
    and times in microseconds. Messages of a simulated timeline overlap computations, so they have a separate process."""
    found: list[dict[str, Any]] = []
    for name, group in groups.items():
        bars = predicted(group) if isinstance(group, Timeline) else list(group)
        found += _process(found, name, [(bar.rank, bar.name, FILLS[bar.kind][0], bar.start, bar.end) for bar in bars])
        if isinstance(group, Timeline) and group.transfers:
            sent = [
                (span.rank, str(action), "message", span.start, span.end)
                for span in group.transfers
                for action in parts(span.action)
            ]
            found += _process(found, f"{name}: messages under way", sent)
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def _process(
    before: Sequence[Mapping[str, Any]], name: str, rows: Sequence[tuple[int, str, str, float, float]]
) -> list[dict[str, Any]]:
    pid = len({event["pid"] for event in before})
    found: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}]
    for rank in sorted({row[0] for row in rows}):
        found.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": rank, "args": {"name": f"rank {rank}"}})
    return found + [_trace_event(*row, pid=pid) for row in rows]


def _trace_event(rank: int, name: str, category: str, start: float, end: float, *, pid: int) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": rank, "ts": start * 1e6, "dur": (end - start) * 1e6}
