"""Tables that summarize a run for the terminal."""

from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megalith.events import Problem, Skipped, of_kind
from megalith.report import spikes, units
from megalith.report.history import History, history
from megalith.report.phases import noise_words
from megalith.report.summary import Summary, summarize

SHOWN = 5  # incidents in the summary; the report page has them all

STATE = {"finished": "green", "stopped": "yellow", "lost": "yellow", "failed": "red"}
"""Colour of each state in which a run can end."""


def summary(run_dir: Path) -> RenderableType:
    """Return a table of the run, with its problems below it; for a folder without events, a sentence."""
    run = history(run_dir)
    if not run.starts and not run.steps and not run.problems:
        return Text(f"{run_dir} has no events: no run has started in it, or it is not a run folder.")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    found = summarize(run)
    for name, value in [*_facts(run, found), *_faults(found)]:
        table.add_row(name, value)
    problems = _problems(run)
    return Group(table, Text(""), *problems) if problems else table


def _facts(run: History, found: Summary) -> list[tuple[str, RenderableType]]:
    facts: list[tuple[str, RenderableType]] = [("state", Text(found.state, style=STATE.get(found.state, "")))]
    if run.starts:
        plan = run.plan
        facts.append(("model", f"{found.model or ''} {units.count(found.parameters)} parameters".strip()))
        facts.append(("ranks", f"{found.ranks} on {found.device}"))
        if plan:
            facts.append(("plan", f"data {plan.data} · tensor {plan.tensor} · pipeline {plan.pipeline} · ZeRO {plan.zero}"))
        if came := run.branch:
            facts.append(("branch of", came))
    if run.steps:
        facts.append(("steps", f"{found.step:,}" + (f" of {found.steps:,}" if found.steps else "")))
        facts.append(("training loss", f"{found.loss:.4f} (mean of the last {found.loss_steps})"))
    if (merges := found.merges) is not None:
        sent, waited = units.memory(merges.bytes_sent), units.duration(merges.waited)
        first = f"the first site sent {sent} and waited {waited} ({units.percent(merges.used)} of the time was not spent waiting)"
        facts.append(("merges", f"{merges.count:,} over {merges.sites} sites: {first}"))
    if run.phases:
        facts.append(("phase", run.phases[-1].words.partition(" ")[2]))
    if found.validation_loss is not None:
        domains = ", ".join(f"{name} {loss:.4f}" for name, loss in found.validation_domains.items())
        said = f"{found.validation_loss:.4f}" + (f" ({domains})" if len(found.validation_domains) > 1 else "")
        facts.append(("validation loss", f"{said} at step {found.validation_step:,}"))
    named = {"training": found.loss, "validation": found.validation_loss}
    if known := [f"{units.perplexity(loss)} in {name}" for name, loss in named.items() if loss is not None]:
        facts.append(("perplexity", ", ".join(known)))
    if found.bits_per_byte is not None:
        facts.append(("bits a byte", f"{found.bits_per_byte:.4f} in validation"))
    if run.steps:
        facts.append(("tokens", f"{units.count(found.tokens)}"))
        facts.append(("tokens a second", f"{units.count(found.tokens_per_second)} (median)"))
        facts.append(("MFU", _mfu(run, found)))
        facts.append(("noise scale", noise_words(run)))
        facts.append(("time in steps", units.duration(found.seconds_in_steps)))
    if run.steps and run.steps[-1].scale is not None:
        over = sum(each.scale_before is not None for each in of_kind(run.events, Skipped))
        facts.append(("loss scale", f"{run.steps[-1].scale:,.0f}, and {over:,} {'step' if over == 1 else 'steps'} overflowed"))
    if found.repeated_steps:
        facts.append(("repeated", f"{found.repeated_steps} steps, {units.duration(found.repeated_seconds)}"))
    if told := spikes.counted(run.events):
        facts.append(("spikes", told))
    if found.checkpoint is not None:
        facts.append(
            ("newest checkpoint", f"step {found.checkpoint_step:,}, {units.memory(found.checkpoint_bytes)}, {found.checkpoint}")
        )
    if found.skipped_lines:
        facts.append(("skipped", units.skipped(found.skipped_lines)))
    return facts


def _faults(found: Summary) -> list[tuple[str, str]]:
    if not found.incidents:
        return []
    lost = ", ".join(f"{cause} {units.duration(seconds)}" for cause, seconds in found.lost_seconds.items())
    rows = [("goodput", f"{units.percent(found.goodput)} ({lost})"), ("incidents", f"{len(found.incidents)}; the newest:")]
    for one in found.incidents[-SHOWN:]:
        recovery = one.recovery_seconds
        took = "not over" if recovery is None else f"{one.detection_seconds:.1f} s + {recovery:.1f} s"
        rows.append((f"  step {one.step}", f"{one.reason} [{took}]"))
    return rows


def _mfu(run: History, found: Summary) -> str:
    start = run.start
    if start is None or found.mfu is None:
        return f"unknown: {start.peak_source if start else 'no peak is recorded'}"
    return f"{units.percent(found.mfu)} of {units.flops(start.peak_flops)} ({start.peak_source}; {start.flops_convention})"


def _problems(run: History) -> list[Text]:
    """Return the newest problems, oldest first, each as one line. Errors before the newest start of the ranks, and all errors
    of a finished run, are left out: the rows of incidents show them if a supervisor recovered the run."""
    lines = list[Text]()
    for problem in [one for one in run.problems if one.severity != "error" or not _is_over(one, run)][-10:]:
        colour = "red" if problem.severity == "error" else "yellow"
        where = f" (rank {problem.rank})" if problem.rank is not None else ""
        first, more, _ = problem.message.partition("\n")
        lines.append(Text.assemble((problem.severity, colour), f" {first}{' …' if more else ''}{where}"))
    return lines


def _is_over(problem: Problem, run: History) -> bool:
    finished = run.finished is not None and run.finished.reason == "finished"
    return finished or (run.start is not None and problem.time < run.start.time)
