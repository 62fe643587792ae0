"""How far the planner's predictions are from published measurements.

    python benchmarks/planner_accuracy.py [FILE.csv] [--json] [--rows]

Every row of the file (the bundled one by default) that can be said as a workload is predicted; for the others the reason is given.
Scored are primary, measured, unflagged rows: the median absolute error of each source group, then the average over groups, for dense,
expert and hybrid models apart; memory apart; and the rank correlation of predicted and measured speed in groups that vary the layout of
one model.
Groups kept for checking (every second one by name) had no part in the calibration, and are reported apart from the others.
"""

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megalith.cost.calibrate import choose, mean
from megalith.cost.constants import Calibration, calibration, parse
from megalith.cost.estimate import Estimate
from megalith.cost.memory import every_rank
from megalith.cost.parts import parts
from megalith.cost.workload import Workload
from megalith.planner.published.express import Expressed, express, measured_seconds
from megalith.planner.published.rows import GIB, Row, checking_groups, read


@dataclass(frozen=True)
class Result:
    """One row, predicted."""

    row: Row
    kind: str
    checking: bool
    workload: Workload
    estimate: Estimate
    seconds: float | None
    """Measured."""
    memory: float
    """Predicted peak bytes of the rank the source speaks of."""

    @property
    def time_error(self) -> float | None:
        return None if self.seconds is None else self.estimate.time.step / self.seconds - 1

    @property
    def memory_error(self) -> float | None:
        measured = self.row.memory
        return None if measured is None else self.memory / measured - 1


def predict(said: Expressed, figures: Calibration, *, checking: bool) -> Result:
    """The planner's pick among what the row can mean."""
    workload, found = choose([(choice, parts(choice)) for choice in said.choices], figures)
    seconds = measured_seconds(said.row, workload)
    kind = "hybrid" if not said.transformer else "expert" if said.expert else "dense"
    return Result(said.row, kind, checking, workload, found, seconds, _memory(said.row, workload, found, figures))


def _memory(row: Row, workload: Workload, found: Estimate, figures: Calibration) -> float:
    kind = row.text("peak_mem_kind").lower()
    if "last rank" not in kind and "rank-0" not in kind:
        return found.memory.allocated
    ranks = every_rank(workload, parts(workload), figures.generations[workload.practice.generation])
    return ranks[-1 if "last rank" in kind else 0].allocated


def rank_correlation(one: list[float], other: list[float]) -> float:
    """Spearman's, with equal values sharing their ranks."""
    first, second = _ranks(one), _ranks(other)
    m, n = mean(first), mean(second)
    above = sum((a - m) * (b - n) for a, b in zip(first, second, strict=True))
    below = (sum((a - m) ** 2 for a in first) * sum((b - n) ** 2 for b in second)) ** 0.5
    return above / below if below else 1.0


def _ranks(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [(ordered.index(value) + len(ordered) - 1 - ordered[::-1].index(value)) / 2 for value in values]


def correlations(results: list[Result]) -> dict[str, dict[str, Any]]:
    """Return the rank correlation of tokens/s for each model, device, sequence and precision that a group measured in four layouts or
    more."""
    sets: dict[tuple[str, ...], list[Result]] = defaultdict(list)
    for result in results:
        if result.seconds is not None:
            row = result.row
            names = ("source_group", "model", "hardware", "n_gpus", "seq_len", "precision", "global_batch")
            sets[tuple(row.text(name) for name in names)].append(result)
    found: dict[str, dict[str, Any]] = {}
    for key, members in sets.items():
        layouts = {
            tuple(m.row.text(n) for n in ("tp", "pp", "vpp", "cp", "ep", "dp", "micro_batch", "recompute", "shard"))
            for m in members
        }
        if len(layouts) >= 4:
            measured = [m.workload.tokens / m.seconds for m in members if m.seconds]
            predicted = [m.workload.tokens / m.estimate.time.step for m in members]
            found["/".join(key)] = {
                "rows": len(members), "checking": members[0].checking, "rho": rank_correlation(predicted, measured),
            }  # fmt: skip
    return found


def summary(results: list[Result]) -> dict[str, Any]:
    """Errors of groups and their averages."""
    groups: dict[tuple[bool, str, str, str], list[float]] = defaultdict(list)
    for result in results:
        for what, error in (("time", result.time_error), ("memory", result.memory_error)):
            if error is not None:
                kind = result.kind if what == "time" or result.kind == "hybrid" else "all"
                groups[result.checking, what, kind, result.row.group].append(error)
    table = [
        {
            "sample": "out" if checking else "in", "what": what, "kind": kind, "group": group, "rows": len(errors),
            "median": median(map(abs, errors)), "p90": _quantile([abs(e) for e in errors], 0.9), "bias": median(errors),
        }
        for (checking, what, kind, group), errors in sorted(groups.items())
    ]  # fmt: skip
    averages = {
        f"{what} {kind} {name}": mean(
            line["median"] for line in table if (line["what"], line["kind"], line["sample"]) == (what, kind, sample)
        )
        for what, kind in (("time", "dense"), ("time", "expert"), ("time", "hybrid"), ("memory", "all"))
        for sample, name in (("in", "in-sample"), ("out", "out-of-sample"))
    }
    return {"groups": table, "averages": averages}


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def report(rows: list[Row], figures: Calibration) -> dict[str, Any]:
    """Everything the benchmark prints, as one value."""
    wanted = [row for row in rows if row.scored or row.ran_out]
    said = [express(row) for row in wanted]
    checking = checking_groups(rows)
    results = [predict(item, figures, checking=item.row.group in checking) for item in said if item.choices]
    scored = [result for result in results if result.row.scored]
    transformers = [item for item in said if item.transformer]
    ranks = correlations([result for result in scored if result.kind != "hybrid"])
    return {
        "coverage": {
            "rows": len(said), "transformers": len(transformers),
            "expressed": sum(bool(item.choices) for item in transformers),
            "share": mean(bool(item.choices) for item in transformers),
            "not_expressed": [{"id": item.row.name, "reason": item.reason} for item in said if not item.choices],
        },
        "checking_groups": sorted(checking),
        **summary(scored),
        "rank_correlation": {
            "sets": ranks,
            "in-sample": mean(v["rho"] for v in ranks.values() if not v["checking"]),
            "out-of-sample": mean(v["rho"] for v in ranks.values() if v["checking"]),
        },
        "fits": {
            "ran": len(scored), "fit": sum(result.estimate.fits for result in scored),
            "ran_out": sum(result.row.ran_out for result in results),
            "ran_out_and_do_not_fit": sum(result.row.ran_out and not result.estimate.fits for result in results),
            "wrong": [result.row.name for result in results if result.estimate.fits == result.row.ran_out],
        },
        "rows": [_line(result) for result in results],
    }  # fmt: skip


def _line(result: Result) -> dict[str, Any]:
    measured = result.row.memory
    return {
        "id": result.row.name, "group": result.row.group, "kind": result.kind, "sample": "out" if result.checking else "in",
        "seconds": {"predicted": result.estimate.time.step, "measured": result.seconds, "error": result.time_error},
        "memory_gib": {
            "predicted": result.memory / GIB, "measured": None if measured is None else measured / GIB, "error": result.memory_error,
        },
        "fits": result.estimate.fits, "recompute": result.workload.plan.recompute, "microbatch": result.workload.plan.microbatch,
    }  # fmt: skip


def show(found: dict[str, Any], *, rows: bool) -> None:
    """The report for people."""
    cover = found["coverage"]
    print(f"{cover['expressed']} of {cover['transformers']} transformer rows expressed ({cover['share']:.1%})")
    for item in cover["not_expressed"]:
        print(f"  {item['id']}: {item['reason']}")
    print(f"{'what':7} {'kind':7} {'sample':6} {'group':16} {'rows':>4} {'median':>7} {'p90':>7} {'bias':>7}")
    for line in found["groups"]:
        print(
            f"{line['what']:7} {line['kind']:7} {line['sample']:6} {line['group']:16} {line['rows']:4} "
            f"{line['median']:7.1%} {line['p90']:7.1%} {line['bias']:+7.1%}"
        )
    for name, value in found["averages"].items():
        print(f"{name}: {value:.1%}")
    ranks, fits = found["rank_correlation"], found["fits"]
    print(f"rank correlation: in-sample {ranks['in-sample']:.2f}, out-of-sample {ranks['out-of-sample']:.2f}")
    print(
        f"fits: {fits['fit']} of {fits['ran']} that ran; {fits['ran_out_and_do_not_fit']} of {fits['ran_out']} that ran out do not"
    )
    for line in found["rows"] if rows else ():
        seconds, memory = line["seconds"], line["memory_gib"]
        print(line["id"], *(f"{k} {v:.4g}" for k, v in seconds.items() if v), *(f"{k} {v:.4g}" for k, v in memory.items() if v))


def main() -> None:
    """Read, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="a file of measurements; default: the bundled one")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON value")
    parser.add_argument("--rows", action="store_true", help="print every row as well")
    parser.add_argument("--calibration", type=Path, help="another calibration.toml")
    arguments = parser.parse_args()
    figures = parse(arguments.calibration.read_text()) if arguments.calibration else calibration()
    found = report(read(arguments.file), figures)
    if arguments.json:
        json.dump(found, sys.stdout, indent=1)
        print()
    else:
        show(found, rows=arguments.rows)


if __name__ == "__main__":
    main()
