"""`megalith campaign` for a run across sites: faults of whole sites and of the links between them."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from megalith.report.units import counted

if TYPE_CHECKING:
    from megalith.rehearse.site_judge import Evidence, SitesJudgement
    from megalith.spec.files import ResolvedRun
    from megalith.spec.run import RunSpec

REPLAYED = "replayed"  # folder of a campaign
HANG_FLOOR = 600.0
"""Minimum `fleet.hang_floor` of both runs, so that a site that the campaign slows down does not count as hanging."""


def campaign(
    resolved: "ResolvedRun", folder: Path, *, count: int, seed: int, kinds: Sequence[str] = (), minutes: float | None = None
) -> "SitesJudgement":
    """Train a run across sites twice, without faults and with `count` faults of `kinds` (default: all), and judge the second run.

    Both runs, and a replay of the second run, are in `folder`, and replace a campaign in it. `minutes`: time limit for both runs
    together."""
    from megalith.machine.wire import Conditions
    from megalith.rehearse import campaign as runner
    from megalith.rehearse import site_campaign, site_faults, site_judge
    from megalith.spec import files
    from megalith.spec.sites import folder_of
    from megalith.spec.toml import literal

    sites = resolved.spec.sites
    assert sites is not None
    grace = sites.grace or site_faults.GRACE
    faults = site_faults.draw(count, seed=seed, sites=sites.count, grace=grace, kinds=kinds or tuple(site_faults.KINDS))
    between = -(-sites.inner_steps // sites.fragments)
    train = resolved.spec.train.model_copy(update={"steps": between * site_faults.merges_of(faults)})
    fleet = resolved.spec.fleet.model_copy(update={"hang_floor": max(HANG_FLOOR, resolved.spec.fleet.hang_floor)})
    here = {
        "site": None,
        "addresses": (),
        "tls": None,
        "replay": (),
    }  # the campaign joins sites of this machine by its own relays
    spec = resolved.spec.model_copy(update={"train": train, "fleet": fleet, "sites": sites.model_copy(update=here)})
    runner.clear(folder)
    file = folder / "run.toml"
    file.write_text(files.dump(replace(resolved, spec=spec)), encoding="utf-8")
    command = [sys.executable, "-m", "megalith.cli", "train", str(file), "--run-dir"]
    whole = runner.run(command[:-1], folder / runner.WHOLE)

    def command_of(site: int, addresses: Sequence[str]) -> list[str]:
        settings = {"site": site, "addresses": list(addresses)}
        set_ = [word for key, value in settings.items() for word in ("--set", f"sites.{key}={literal(value)}")]
        return [*command, str(folder_of(folder / runner.FAULTED, site)), *set_]

    link = site_campaign.LINK if sites.link is None else Conditions(sites.link.megabits, sites.link.milliseconds)
    faulted = site_campaign.run(command_of, folder / runner.FAULTED, faults, count=sites.count, link=link)
    return site_judge.judge(faulted, _evidence(spec, folder), seconds_without=whole.seconds, minutes=minutes)


def _evidence(spec: "RunSpec", folder: Path) -> "Evidence":
    """Compare the final state of the run with faults with the final state of the run without faults, or, if the merges differ, of a
    replay."""
    from megalith.rehearse import campaign as runner
    from megalith.rehearse.site_judge import Evidence
    from megalith.spec.phases import Phases
    from megalith.spec.sites import at_site, folder_of
    from megalith.train.sites.record import RecordError, merged_samples, recorded  # torch takes seconds to import

    whole, faulted = folder / runner.WHOLE, folder / runner.FAULTED
    total = Phases.of(spec).after(0, spec.train.steps)
    assert spec.sites is not None
    try:
        made = recorded([faulted])
        samples = list(merged_samples(at_site(spec), [made[number] for number in sorted(made)]))
        if made == recorded([whole]):
            ends = [[runner.end_state(folder_of(run, site)) for site in range(spec.sites.count)] for run in (whole, faulted)]
            return Evidence("undisturbed", None not in ends[0] and ends[0] == ends[1], samples, total, len(made))
    except (RecordError, FileNotFoundError) as error:
        return Evidence("replay", None, (), 0, 0, str(error))
    return Evidence("replay", *_replayed(faulted, folder / REPLAYED, samples, total, len(made)))


def _replayed(
    faulted: Path, out: Path, samples: list[int], total: int, merges: int
) -> tuple[bool | None, list[int], int, int, str]:
    """Replay a run, and return all fields of Evidence except the first."""
    command = [sys.executable, "-m", "megalith.cli", "replay", str(faulted), "--out", str(out), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)
        ended = found["tensors"] > 0
    except (ValueError, KeyError):
        ended, found = False, {}
    error = "" if ended else f"the replay ended with status {done.returncode}: {done.stderr.strip()[-500:]}"
    return (found["ok"] if ended else None), samples, total, merges, error


def table_of(found: "SitesJudgement") -> Table:
    """Return a table of the outcome of each kind of fault."""
    caption = (
        "without: faults in which the other sites continued without a site; on again: median seconds from the fault's end until "
        "all sites trained."
    )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, caption=caption)
    table.add_column("fault", max_width=26)
    for heading in ("handled", "without", "on again"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found.rows:
        again = "" if row.again is None else f"{row.again:.1f}"
        table.add_row(row.title, f"{row.handled}/{row.injected}", str(row.without), again)
    return table


def sentences(found: "SitesJudgement") -> Iterator[str]:
    """Yield the results of a campaign across sites as sentences."""
    yield f"{counted(found.merges, 'merge')}; {found.seconds:.0f} s with the faults, {found.seconds_without:.0f} s without"
    if found.same_end is not None:
        same = "the same bits as" if found.same_end else "other bits than"
        if found.law == "undisturbed":
            yield f"the faults changed no merge: {same} the run without faults{', in all sites' * found.same_end}"
        else:
            yield f"the faults changed merges: {same} a replay of the recorded merges"
    yield f"samples: {found.lost} lost, {found.doubled} doubled"
    for problem in found.problems:
        yield f"not met: {problem}"
    yield f"{'passed' if found.passed else 'NOT passed'}: {found.handled} of {found.injected} faults handled"
