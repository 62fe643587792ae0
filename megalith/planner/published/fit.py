"""`python -m megalith.planner.published.fit`: fit calibration.toml on the source groups that are not kept for checking.

From the physical values of starts.toml, with nothing drawn at random: the same rows and the same code give the same figures again.
"""

import argparse
from importlib.resources import files
from pathlib import Path

from megalith import cost
from megalith.cost.calibrate import Observation, as_toml, fit
from megalith.cost.constants import parse
from megalith.cost.parts import parts
from megalith.planner.published.express import express, measured_seconds
from megalith.planner.published.rows import checking_groups, read

COMMAND = "python -m megalith.planner.published.fit"

SWEEPS = 6
"""Over all figures; the bundled ones were found in so many."""


def observations(groups: frozenset[str], *, most: int = 40) -> list[Observation]:
    """The scored rows of so many groups that can be said, at most `most` of each, evenly taken."""
    found: list[Observation] = []
    rows = [row for row in read() if row.scored and row.group in groups]
    for group in sorted(groups):
        said = [item for item in (express(row) for row in rows if row.group == group) if item.choices and item.transformer]
        timed = [(item, seconds) for item in said if (seconds := measured_seconds(item.row, item.choices[0])) is not None]
        stride = -(-len(timed) // most) if timed else 1
        found += [
            Observation(group, item.expert, tuple((workload, parts(workload)) for workload in item.choices), seconds)
            for item, seconds in timed[::stride]
        ]
    return found


def main() -> None:
    """Fit and write."""
    parser = argparse.ArgumentParser(description="Fit the calibration on the source groups that are not kept for checking.")
    parser.add_argument("--sweeps", type=int, default=SWEEPS)
    parser.add_argument(
        "--swap", action="store_true", help="fit on the checking groups instead, to see how much the split matters"
    )
    parser.add_argument("--out", type=Path, default=Path(cost.__file__).parent / "calibration.toml")
    arguments = parser.parse_args()
    rows = read()
    checking = checking_groups(rows)
    groups = checking if arguments.swap else frozenset({row.group for row in rows if row.text("primary") == "1"}) - checking
    start = parse(files("megalith.cost").joinpath("starts.toml").read_text(encoding="utf-8"))
    fitted = fit(observations(groups), start, sweeps=arguments.sweeps, tell=lambda line, _: print(line, flush=True))
    arguments.out.write_text(as_toml(fitted, command=COMMAND, note=f"groups: {', '.join(sorted(groups))}"))
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
