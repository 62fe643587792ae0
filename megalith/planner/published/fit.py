"""`python -m megalith.planner.published.fit`: fit the calibration on published rows of every source group, and
again without each group. At most 40 measured rows of a group are used, evenly spaced, and only rows of transformers.

The script writes calibration.toml, which predictions use; left_out.toml, the figures that differ in the fit without a group, so that each
group is predicted by a fit that never saw it; and doubt.toml, the errors of these predictions. The fit starts from the physical values of
starts.toml and is deterministic: the same rows and code give the same figures.
"""

import argparse
import os
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from megalith import cost
from megalith.cost import doubt
from megalith.cost.calibrate import Observation, as_toml, fit, measured
from megalith.cost.constants import Calibration, calibration, parse
from megalith.cost.parts import parts
from megalith.planner.published.express import express, measured_seconds
from megalith.planner.published.residuals import residuals
from megalith.planner.published.rows import Row, read

COMMAND = "python -m megalith.planner.published.fit"

SWEEPS = 6
"""Number of passes over all figures when the bundled figures are fitted."""

LEFT_OUT = "left_out.toml"


def observations(rows: Sequence[Row], *, most: int = 40) -> list[Observation]:
    """Return the scored rows of transformers whose time is known and that can be converted to workloads. At most `most` rows of each source
    group are returned, evenly spaced."""
    found: list[Observation] = []
    for group in sorted({row.group for row in rows if row.scored}):
        mine = (row for row in rows if row.scored and row.group == group)
        said = [item for item in map(express, mine) if item.choices and item.transformer]
        timed = [(item, seconds) for item in said if (seconds := measured_seconds(item.row, item.choices[0])) is not None]
        stride = -(-len(timed) // most) if timed else 1
        found += [
            Observation(group, item.expert, tuple((workload, parts(workload)) for workload in item.choices), seconds)
            for item, seconds in timed[::stride]
        ]
    return found


def starts() -> Calibration:
    """Return the figures from which a fit starts."""
    return parse(files("megalith.cost").joinpath("starts.toml").read_text(encoding="utf-8"))


def without(group: str, everything: Sequence[Observation], start: Calibration, sweeps: int) -> Calibration:
    """Return the calibration that is fitted to all groups except `group`."""
    return fit([one for one in everything if one.group != group], start, sweeps=sweeps)


@cache
def left_out() -> Mapping[str, Calibration]:
    """Return for each source group the calibration that was fitted without it."""
    text = files("megalith.planner.published").joinpath(LEFT_OUT).read_text(encoding="utf-8")
    return {group: calibration().changed(figures) for group, figures in tomllib.loads(text).items()}


def as_changes(whole: Calibration, others: Mapping[str, Calibration]) -> str:
    """Return calibrations as TOML: for each source group the figures that differ from the fit to all groups."""
    lines = [f"# For each source group: figures of the fit without it that differ from calibration.toml: {COMMAND}"]
    for group, figures in others.items():
        flat, base = figures.flat(), whole.flat()
        lines += [
            "",
            f"[{group}]",
            *(f'"{name}" = {float(f"{value:.4g}")}' for name, value in flat.items() if value != base[name]),
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Fit the calibration, and write its files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=SWEEPS)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="number of fits that run in parallel")
    parser.add_argument(
        "--out", type=Path, help="folder for the three files; default: the folders from which the package reads them"
    )
    parser.add_argument("--doubt", action="store_true", help="only write doubt.toml, from the existing fits")
    arguments = parser.parse_args()
    here = arguments.out or Path(cost.__file__).parent
    other = arguments.out or Path(__file__).parent
    rows = read()
    if not arguments.doubt:
        start = starts()
        everything = observations(rows)
        groups = sorted({one.group for one in everything})
        _shared.update(everything=everything, start=start, sweeps=arguments.sweeps)
        with ProcessPoolExecutor(arguments.processes, get_context("fork")) as pool:
            whole, *others = pool.map(_job, ["", *groups])
        note, seen = f"groups: {', '.join(groups)}", measured(everything, start)
        (here / "calibration.toml").write_text(as_toml(whole, command=COMMAND, note=note, seen=seen))
        rounded = parse((here / "calibration.toml").read_text())
        (other / LEFT_OUT).write_text(as_changes(rounded, dict(zip(groups, others, strict=True))))
    table = tomllib.loads((other / LEFT_OUT).read_text())
    base = parse((here / "calibration.toml").read_text())
    found = residuals(rows, {group: base.changed(figures) for group, figures in table.items()}, base)
    (here / "doubt.toml").write_text(doubt.as_toml(doubt.estimated(found), command=COMMAND))
    print(f"written to {here} and {other}")


_shared: dict[str, Any] = {}
"""Arguments of every fit. Forked processes inherit these arguments instead of getting pickled copies, because traces are looked up by
identity."""


def _job(group: str) -> Calibration:
    found = without(group, **_shared)
    print(f"fitted without {group}" if group else "fitted on all", flush=True)
    return found


if __name__ == "__main__":
    main()
