"""The report of a run: one self-contained HTML file, made from the run folder's files."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import accumulate
from math import inf, isfinite, log2
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from megalith import disk, epochs
from megalith.control import ledger
from megalith.events import PrecisionWatched, Problem, Skipped, Step, of_kind
from megalith.report import spikes, timeline, units
from megalith.report.history import History, bits_a_byte, heading, history, origin_of, read_json, tokens_a_byte
from megalith.report.holding import memory_section, who_holds_what
from megalith.report.merges import merge_section
from megalith.report.phases import phase_table
from megalith.report.predicted import predict, term_section
from megalith.report.signs import signs
from megalith.report.style import HALF, WIDE, curves, figure, figures, html_page, html_table
from megalith.report.svg import Point, Series, stacked_columns
from megalith.spec.files import PROVENANCE_FILE, SPEC_FILE

if TYPE_CHECKING:
    from megalith.planner.slowdown import SlowdownReport

FILE = "report.html"

BREAKDOWN: Mapping[str, int] = {
    "forward": 0, "backward": 1, "optimizer": 2, "communication": 3, "data": 4, "checkpoint": 5, "validation": 7, "bubble": 6, "other": 8
}  # fmt: skip
"""Colour of each part of a step's time, in the order in which the parts are stacked."""


def write(run_dir: Path, path: Path | None = None, compared: "SlowdownReport | str" = "") -> Path:
    """Write the run's report to `path` (default: report.html in its folder) and return the path. A run without events gets a report with a
    note. `compared`: as for `render`."""
    path = path or run_dir / FILE
    disk.write_whole(path, render(history(run_dir), folder=run_dir, compared=compared))
    return path


def render(run: History, *, folder: Path, compared: "SlowdownReport | str" = "") -> str:
    """Return the page as text. `folder`: the run folder, whose spec.json, provenance.json and run.toml are shown if they exist.
    `compared`: the comparison of the run's step with its prediction, or the reason why there is none."""
    name = run.spec.get("name") or folder.resolve().name
    sections: list[tuple[str, Callable[[], str]]] = [
        ("", lambda: _cards(run)),
        ("Loss", lambda: _curves(run)),
        ("Phases", lambda: phase_table(run)),
        ("Sites", lambda: merge_section(run)),
        ("Speed", lambda: _speed(run)),
        ("Predicted and measured", lambda: term_section(compared) if run.steps else ""),
        ("Memory", lambda: memory_section(run)),
        ("Who holds what", lambda: who_holds_what(run)),
        ("Pipeline", lambda: _pipeline(run)),
        ("Spikes", lambda: _spikes(run)),
        ("Faults", lambda: _faults(run)),
        ("Samples", lambda: _samples(run)),
        ("Checkpoints", lambda: _checkpoints(run, folder)),
        ("Specification", lambda: _specification(run, folder)),
    ]
    body = _header(run, name, folder) + _problems(run) + _signs(run)
    for title, section in sections:
        if inside := section():
            body += f"<section>{f'<h2>{title}</h2>' if title else ''}{inside}</section>"
    skipped = f" Skipped {units.skipped(run.skipped)}." if run.skipped else ""
    body += f"<footer>Made by megalith from the events of {escape(folder.resolve().name)}.{skipped}</footer>"
    return html_page(heading(name, folder), body)


def _when(run: History) -> str:
    if not run.starts:
        return ""
    first, last = run.starts[0].time, max(event.time for event in run.events)
    began = datetime.fromtimestamp(first, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"<p>{escape(f'started {began} · {units.duration(last - first)} to the newest event')}</p>"


def _header(run: History, name: str, folder: Path) -> str:
    bad = "bad" if run.state == "failed" else "good" if run.state == "finished" else ""
    title = f'<h1>{escape(heading(name, folder))}</h1><span class="state {bad}">{escape(run.state)}</span>'
    return f"<header>{title}<p>{_said(run)}</p>{_when(run)}{_where(folder)}</header>"


def _where(folder: Path) -> str:
    found = origin_of(folder)
    words = " · ".join(f"{name} {found[name]}" for name in ("host", "folder", "commit") if name in found)
    command = f"<p><code>{escape(found['command'])}</code></p>" if "command" in found else ""
    return f"<p>{escape(words)}</p>{command}"


def _said(run: History) -> str:
    start, plan = run.start, run.plan
    if start is None:
        return "The log in this folder records no start of a run, so there is little to show yet."
    words = [f"{units.count(start.parameters)} parameters", f"{units.counted(start.world, 'rank')} on {start.device}"]
    if plan:
        words.append(f"data {plan.data}, tensor {plan.tensor}, pipeline {plan.pipeline}, ZeRO {plan.zero}")
        words += [f"schedule {plan.schedule}"] if plan.pipeline > 1 else []
        words += [f"recompute {plan.recompute}"] if plan.recompute != "none" else []
        words += ["compiled"] if plan.compile else []
    words += [f"branch of {run.branch}"] if run.branch else []
    words += [f"{k} {v}" for k, v in start.versions.items()]
    return escape(" · ".join(words))


def _cards(run: History) -> str:
    if not run.steps:
        return '<p class="none">No step is recorded yet.</p>'
    last = run.steps[-1]
    cards = [_card("Step", f"{last.step:,}", f"of {run.total_steps:,}" if run.total_steps else "")]
    cards.append(
        _card(
            "Training loss",
            f"{_recent_loss(run):.4f}",
            f"perplexity {units.perplexity(_recent_loss(run))}, mean of {len(run.steps[-10:])} steps",
        )
    )
    if run.validations:
        best, newest, rates = min(run.validations, key=lambda v: v.loss), run.validations[-1], tokens_a_byte(run.spec)
        bits = f"{bits_a_byte(newest.loss, rates['']):.4f} bits a byte, " if "" in rates else ""
        words = f"perplexity {units.perplexity(newest.loss)}, {bits}best {best.loss:.4f} at step {best.step:,}"
        cards.append(_card("Validation loss", f"{run.validations[-1].loss:.4f}", words))
    rate = run.usual(lambda step: step.tokens_per_second)
    cards.append(_card("Tokens", units.count(last.tokens_seen), f"{units.count(last.tokens)} a step"))
    cards.append(_card("Tokens a second", units.count(rate), "median, after warm-up"))
    cards.append(_card("Time in steps", units.duration(sum(s.seconds for s in run.steps)), _lost(run)))
    card, footnote = _mfu(run)
    return f'<div class="cards">{"".join([*cards, card])}</div><p class="note">{escape(footnote)}</p>'


def _card(name: str, value: str, note: str) -> str:
    return f'<div class="card"><b>{escape(name)}</b><strong>{escape(value)}</strong><small>{escape(note)}</small></div>'


def _recent_loss(run: History) -> float:
    return mean(step.loss for step in run.steps[-10:])


def _mfu(run: History) -> tuple[str, str]:
    start, share = run.start, run.usual(lambda step: step.mfu)
    if start is None or share is None:
        return _card("MFU", units.NOTHING, "no peak known"), f"No peak known: {start.peak_source if start else 'unknown device'}."
    peak = f"the peak of {units.counted(start.world, 'rank')}: {units.flops(start.peak_flops)} ({start.peak_source})"
    work = f"{units.flops(start.flops_per_token)[:-2]} a token ({start.flops_convention})"
    return _card("MFU", units.percent(share), "median, after warm-up"), f"MFU is relative to {peak}. The model computes {work}."


def _lost(run: History) -> str:
    words = [f"{units.duration(run.usual(lambda step: step.seconds))} a step"]
    if len(run.starts) > 1:
        words.append(f"started {len(run.starts)} times")
    if run.repeated:
        words.append(f"{len(run.repeated)} steps repeated ({units.duration(sum(s.seconds for s in run.repeated))})")
    return ", ".join(words)


def _signs(run: History) -> str:
    found = "".join(f'<li class="warning"><b>sign</b><span>{escape(sign)}</span></li>' for sign in signs(run))
    return f'<ul class="problems">{found}</ul>' if found else ""


def _problems(run: History) -> str:
    if not run.problems:
        return ""
    counted: dict[tuple[str, str], list[Problem]] = {}
    for problem in reversed(run.problems):
        counted.setdefault((problem.severity, problem.message), []).append(problem)
    rows = ""
    for (severity, message), found in list(counted.items())[:30]:
        ranks = sorted({p.rank for p in found if p.rank is not None})
        where = f" <small>rank {', '.join(map(str, ranks))}</small>" if ranks else ""
        times = f" <small>{len(found)} times</small>" if len(found) > 1 else ""
        rows += f'<li class="{escape(severity)}"><b>{escape(severity)}</b><span>{escape(message)}{where}{times}</span></li>'
    more = f"<li><span>and {len(counted) - 30} more in the log</span></li>" if len(counted) > 30 else ""
    return f'<ul class="problems">{rows}{more}</ul>'


def _points(steps: Sequence[Step], number: Callable[[Step], float | None]) -> list[Point]:
    return [(step.step, y) for step in steps if (y := number(step)) is not None]


def smoothed(points: Sequence[Point], *, reach: int) -> list[Point]:
    """The mean of each point and its neighbours, up to `reach` on either side; points that are not finite are left out."""
    kept = [(x, y) for x, y in points if isfinite(y)]
    sums = list(accumulate((y for _, y in kept), initial=0.0))
    found: list[Point] = []
    for i, (x, _) in enumerate(kept):
        around = min(reach, i, len(kept) - 1 - i)  # the same on both sides, so that the ends of the curve do not lag
        found.append((x, (sums[i + around + 1] - sums[i - around]) / (2 * around + 1)))
    return found


def _curve(name: str, points: Sequence[Point], colour: int) -> list[Series]:
    if len(points) < 60:
        return [Series(name, points, colour)]
    return [Series(name, points, colour, faint=True), Series(name, smoothed(points, reach=max(len(points) // 60, 3)), colour)]


def _curves(run: History) -> str:
    if not run.steps:
        return ""
    digits: Callable[[float], str] = lambda y: f"{y:.3g}" if abs(y) < 1000 else units.count(y)  # noqa: E731
    loss = _curve("training loss", _points(run.steps, lambda step: step.loss), 0)
    if run.validations:
        loss.append(Series("validation loss", [(v.step, v.loss) for v in run.validations], 1, dots=True))
    drawn = [figure("Loss (nats a token)", curves(loss, digits, log=True))]
    drawn += _held_out(run, digits)
    norm = _curve("gradient norm", _points(run.steps, lambda step: step.grad_norm), 2)
    rate = [Series("learning rate", _points(run.steps, lambda step: step.lr), 7)]
    if balance := [(s.step, s.experts["max_load"]) for s in run.steps if s.experts]:
        chart = curves(_curve("largest load over the mean", balance, 4), digits, from_zero=True)
        drawn.append(figure("Load of the busiest expert over the mean load, in the least balanced layer", chart))
    if scales := [(x, log2(y)) for x, y in _points(run.steps, lambda step: step.scale)]:
        chart = curves([Series("loss scale", scales, 5)], lambda y: f"2^{y:g}", unit="2^")
        over = sum(each.scale_before is not None for each in of_kind(run.events, Skipped))
        drawn.append(figure(f"Loss scale of fp16; {over:,} {'step' if over == 1 else 'steps'} overflowed", chart))
    if noise := [(s.step, s.noise["tokens"]) for s in run.steps if "tokens" in s.noise]:
        chart = curves(_curve("noise scale", noise, 3), units.count, from_zero=True)
        drawn.append(figure("Gradient noise scale (tokens), smoothed", chart))
    if run.watched:
        drawn += _rounding(run.watched, digits)
    drawn.append(figure("Gradient norm, before clipping", curves(norm, digits, log=True, from_zero=True)))
    drawn.append(figure("Learning rate", curves(rate, lambda y: f"{y:.2g}" if y else "0", from_zero=True)))
    return figures(*drawn)


def _held_out(run: History, digits: Callable[[float], str]) -> list[str]:
    rates = tokens_a_byte(run.spec)
    losses = {"": [(v.step, v.loss) for v in run.validations]}
    domains = sorted({name for v in run.validations for name in v.domains})
    if len(domains) > 1:
        losses |= {name: [(v.step, v.domains[name]) for v in run.validations if name in v.domains] for name in domains[:16]}
    each = [Series(name, points, i % 8, dots=True) for i, (name, points) in enumerate(losses.items()) if name]
    bits = [
        Series(name or "all held-out text", [(x, bits_a_byte(y, rates[name])) for x, y in points], i % 8, dots=True)
        for i, (name, points) in enumerate(losses.items())
        if points and name in rates
    ]
    drawn = [figure("Validation loss by domain (nats a token)", curves(each, digits, log=True))] if each else []
    return drawn + ([figure("Validation loss (bits a byte)", curves(bits, digits, log=True))] if bits else [])


def _rounding(watched: Sequence[PrecisionWatched], digits: Callable[[float], str]) -> list[str]:
    last = watched[-1].errors
    largest = sorted(last, key=lambda part: -(inf if (error := last[part]) is None else error))[:8]
    errors = {part: [(one.step, error) for one in watched if (error := one.errors.get(part)) is not None] for part in largest}
    series = [Series(part, points, i, dots=True) for i, (part, points) in enumerate(errors.items()) if points]
    if watched[-1].limit:
        series.append(Series("precision.auto", [(one.step, one.limit) for one in watched], 8))
    most = {"cut off": "saturated", "became 0": "zeroed"}
    shares = {name: [(one.step, max(getattr(one, key).values(), default=0.0)) for one in watched] for name, key in most.items()}
    lost = [Series(name, points, 1 + i, dots=True) for i, (name, points) in enumerate(shares.items())]
    raised = sum(bool(one.raised) for one in watched)
    blocks = units.counted(raised, "block")
    words = f"Relative error of gradients compared with wide products (not in 8 or 4 bits); {blocks} made wide"
    inputs = "Share of the products' inputs that saturated or were rounded to 0, in the worst part"
    chart = curves(series, digits, log=True, from_zero=True)
    return [figure(words, chart), figure(inputs, curves(lost, units.percent, unit=" %", from_zero=True))]


def _speed(run: History) -> str:
    if not run.steps:
        return ""
    rate = _curve("tokens a second", _points(run.steps, lambda step: step.tokens_per_second), 0)
    drawn = [figure("Throughput (tokens a second)", curves(rate, units.count, from_zero=True))]
    mfu = _points(run.steps, lambda step: step.mfu)
    if mfu:
        drawn.append(figure("MFU", curves(_curve("MFU", mfu, 7), units.percent, unit=" %", from_zero=True)))
    columns = _buckets([(s.step, s.breakdown) for s in run.steps if s.breakdown], most=60)
    if columns:
        wide = len(drawn) % 2 == 0
        chart = stacked_columns(columns, _colours(columns), x_label="step", y_format=_seconds, width=WIDE if wide else HALF)
        drawn.append(figure("Time of a step by part", chart, wide=wide))
    return figures(*drawn)


def _seconds(value: float) -> str:
    return "0" if value == 0 else units.duration(value)


def _colours(columns: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, int]:
    there = {name for _, values in columns for name, value in values.items() if value > 0}
    return {name: colour for name, colour in BREAKDOWN.items() if name in there} | {
        name: i % 8 for i, name in enumerate(sorted(there - set(BREAKDOWN)))
    }


def _buckets(values: Sequence[tuple[int, Mapping[str, float]]], *, most: int) -> list[tuple[float, dict[str, float]]]:
    """Average the values over at most `most` ranges with equal numbers of steps (the final range may have fewer); x is a range's mean
    step."""
    size = -(-len(values) // most)
    found: list[tuple[float, dict[str, float]]] = []
    for i in range(0, len(values), max(size, 1)):
        some = values[i : i + size]
        names = dict.fromkeys(name for _, parts_of in some for name in parts_of)
        found.append((mean(x for x, _ in some), {name: mean(p.get(name, 0.0) for _, p in some) for name in names}))
    return found


def _pipeline(run: History) -> str:
    """Draw the predicted pipeline schedule and, if a step's spans were recorded, the measured one; empty for a run without a
    pipeline."""
    plan, spans = run.plan, run.spans[-1] if run.spans else None
    if plan is None or not run.microbatches or plan.pipeline == 1:
        return ""
    predicted, basis, microbatches = predict(run)
    groups = {f"predicted from {basis}": timeline.predicted(predicted)}
    sizes = [(plan.pipeline, "rank"), (plan.stages, "stage"), (run.microbatches, "microbatch")]
    notes = [f"{plan.schedule}, {', '.join(units.counted(*each) for each in sizes)} a step."]
    if microbatches < run.microbatches:
        notes.append(f"The prediction is drawn for {microbatches} microbatches, to keep it readable.")
    if spans:
        bars = timeline.measured(spans.spans, plan.pipeline)
        groups[f"measured in step {spans.step}"] = bars
        seen = timeline.work_end(bars)
        if microbatches == run.microbatches and seen:
            gap = predicted.end / seen - 1
            notes.append(f"Predicted {units.duration(predicted.end)}, measured {units.duration(seen)}: gap {gap * 100:+.1f} %.")
    notes.append("Numbers are microbatches; paler bars are later chunks of the same rank.")
    return figures(figure(" ".join(notes), timeline.draw(groups, plan.pipeline, width=WIDE), wide=True))


def _spikes(run: History) -> str:
    rows = spikes.rows(run.events)
    return f"<p>{spikes.counted(run.events)}</p>{html_table(spikes.COLUMNS, rows)}" if rows else ""


def _faults(run: History) -> str:
    found = ledger.post_mortems(run.events)
    if not found:
        return ""
    account = ledger.goodput(run.events)
    rows = [(cause, units.duration(seconds), units.percent(share), words) for cause, seconds, share, words in account.rows()]
    where = html_table(("went to", "time", "share", ""), rows)
    incidents = "".join(
        f"<details><summary>{escape(f'incident {one.incident}, step {one.step}: {one.reason}')}</summary>"
        f"<pre>{escape(one.text())}</pre></details>"
        for one in found
    )
    return f"<p>Goodput {units.percent(account.share)}; {units.counted(len(found), 'incident')}.</p>{where}{incidents}"


def _samples(run: History) -> str:
    found = ""
    for sample in reversed(run.samples[-5:]):
        words = f"<b>{escape(sample.prompt)}</b>{escape(sample.text)}"
        found += f"<blockquote><small>step {sample.step:,}</small><p>{words}</p></blockquote>"
    return found


def _checkpoints(run: History, folder: Path) -> str:
    there = [one for one in run.checkpoints if (folder / one.path).is_dir()]
    if not run.checkpoints:
        return ""
    rows = [
        (f"{c.step:,}", units.memory(c.bytes), units.duration(c.seconds), units.duration(c.wait_seconds), c.path)
        for c in there[-20:]
    ]
    words = f"{units.counted(len(run.checkpoints), 'checkpoint')} saved, {len(there):,} still in the folder."
    return f"<p>{words}</p>{html_table(('step', 'size', 'written in', 'training waited', 'path'), rows) if rows else ''}"


def _specification(run: History, folder: Path) -> str:
    described, origins, file = (epochs.newest(folder, name) for name in (SPEC_FILE, PROVENANCE_FILE, "run.toml"))
    spec, provenance = read_json(described) or run.spec, read_json(origins)
    found = ""
    if spec:
        rows = [(key, value, str(provenance.get(key, ""))) for key, value in flat(spec)]
        chosen = [row for row in rows if row[2] not in ("", "default")]
        if chosen:
            found += f"<p>Set for this run:</p>{html_table(('key', 'value', 'from'), chosen)}"
        found += f"<details><summary>All {len(rows)} values</summary>{html_table(('key', 'value', 'from'), rows)}</details>"
    if file.is_file():
        words = file.read_text(encoding="utf-8", errors="replace")
        found += f"<details><summary>run.toml</summary><pre>{escape(words)}</pre></details>"
    return found


def flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return the leaves of nested dictionaries as pairs: the dotted key, and the value as JSON text."""
    found: list[tuple[str, str]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found += flat(value, f"{prefix}{key}.")
        else:
            found.append((prefix + key, json.dumps(value, ensure_ascii=False)))
    return found
