"""What a run came to, as tables for the terminal."""

from pathlib import Path
from statistics import mean

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megalith.control import ledger
from megalith.events import Problem
from megalith.report import spikes, units
from megalith.report.history import History, history

SHOWN = 5  # incidents in the summary; the report page has them all

STATE = {"finished": "green", "stopped": "yellow", "lost": "yellow", "failed": "red"}
"""How a run ended -> the colour that says so."""


def summary(run_dir: Path) -> RenderableType:
    """The run in one table, and its problems below it; for a folder without events, a sentence that says so."""
    run = history(run_dir)
    if not run.starts and not run.steps and not run.problems:
        return Text(f"{run_dir} has no events: no run has started in it, or it is not a run folder.")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in [*_facts(run), *_faults(run)]:
        table.add_row(name, value)
    problems = _problems(run)
    return Group(table, Text(""), *problems) if problems else table


def _facts(run: History) -> list[tuple[str, RenderableType]]:
    """The rows of the summary that the run has something for."""
    facts: list[tuple[str, RenderableType]] = [("state", Text(run.state, style=STATE.get(run.state, "")))]
    if run.starts:
        start, plan = run.starts[-1], run.plan
        facts.append(("model", f"{run.spec.get('model', {}).get('name', '')} {units.count(start.parameters)} parameters".strip()))
        facts.append(("ranks", f"{start.world} on {start.device}"))
        if plan:
            facts.append(("plan", f"data {plan.data} · tensor {plan.tensor} · pipeline {plan.pipeline} · ZeRO {plan.zero}"))
    if run.steps:
        last = run.steps[-1]
        facts.append(("steps", f"{last.step:,}" + (f" of {run.total_steps:,}" if run.total_steps else "")))
        facts.append(("training loss", f"{mean(s.loss for s in run.steps[-10:]):.4f} (mean of the last {len(run.steps[-10:])})"))
    if run.validations:
        newest = run.validations[-1]
        domains = ", ".join(f"{name} {loss:.4f}" for name, loss in newest.domains.items())
        facts.append(("validation loss", f"{newest.loss:.4f}" + (f" ({domains})" if len(newest.domains) > 1 else "")))
    if run.steps:
        facts.append(("tokens", f"{units.count(run.steps[-1].tokens_seen)}"))
        facts.append(("tokens a second", f"{units.count(run.usual(lambda step: step.tokens_per_second))} (median)"))
        facts.append(("MFU", _mfu(run)))
        facts.append(("time in steps", units.duration(sum(step.seconds for step in run.steps))))
    if run.repeated:
        facts.append(("done again", f"{len(run.repeated)} steps, {units.duration(sum(s.seconds for s in run.repeated))}"))
    if told := spikes.counted(run.events):
        facts.append(("spikes", told))
    if run.checkpoints:
        saved = run.checkpoints[-1]
        facts.append(("newest checkpoint", f"step {saved.step:,}, {units.memory(saved.bytes)}, {saved.path}"))
    if run.skipped:
        facts.append(("skipped", units.skipped(run.skipped)))
    return facts


def _faults(run: History) -> list[tuple[str, str]]:
    """Where the time went, once something has gone wrong; the newest incidents, with whom they blame and what they cost."""
    found = ledger.post_mortems(run.events)
    if not found:
        return []
    account = ledger.goodput(run.events)
    lost = ", ".join(f"{cause} {units.duration(seconds)}" for cause, seconds, _, _ in account.rows() if cause != "useful")
    rows = [("goodput", f"{units.percent(account.share)} ({lost})"), ("incidents", f"{len(found)}; the last {SHOWN}:")]
    for one in found[-SHOWN:]:
        took = "not over" if one.recovery is None else f"{one.detection:.1f} s + {one.recovery:.1f} s"
        rows.append((f"  step {one.step}", f"{one.reason} [{took}]"))
    return rows


def _mfu(run: History) -> str:
    start, share = run.start, run.usual(lambda step: step.mfu)
    if start is None or share is None:
        return f"unknown: {start.peak_source if start else 'no peak is recorded'}"
    return f"{units.percent(share)} of {units.flops(start.peak_flops)} ({start.peak_source}; {start.flops_convention})"


def _problems(run: History) -> list[Text]:
    """The last problems, oldest first, each on a line of its own. Errors that the run has recovered from are left out: an incident's row
    says what they were."""
    lines = list[Text]()
    for problem in [one for one in run.problems if one.severity != "error" or not _is_over(one, run)][-10:]:
        colour = "red" if problem.severity == "error" else "yellow"
        where = f" (rank {problem.rank})" if problem.rank is not None else ""
        first, more, _ = problem.message.partition("\n")
        lines.append(Text.assemble((problem.severity, colour), f" {first}{' …' if more else ''}{where}"))
    return lines


def _is_over(problem: Problem, run: History) -> bool:
    """True if the ranks have started again since a problem, or the run has finished in spite of it."""
    finished = run.finished is not None and run.finished.reason == "finished"
    return finished or (run.start is not None and problem.time < run.start.time)
