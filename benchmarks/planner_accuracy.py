"""Compare the planner's predictions with published measurements.

    python benchmarks/planner_accuracy.py [FILE.csv] [--json] [--rows] [--markdown]

Every row of the file (by default the bundled one) that can be expressed as a workload is predicted; for the others the reason is printed.
Only primary, measured, unflagged rows are scored: the median absolute error of each source group, averaged over groups, separately for
dense, expert and hybrid models and for memory. No group is judged by a fit that included it: a group of the bundled file is predicted with
the figures of a fit without it (planner/published/left_out.toml). The report also has the coverage and width of 80 % intervals, errors
once a few rows of a stack are known, and, where several layouts of one model were measured, the cost of choosing by predictions.
`--markdown` prints the tables of docs/planner.md: the fitted figures beside their starting values, and these errors.
"""

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from megalith.cost import doubt
from megalith.cost.calibrate import mean
from megalith.cost.constants import Calibration, calibration, parse
from megalith.planner.published import coverage
from megalith.planner.published.express import ExpressedRow, express
from megalith.planner.published.fit import left_out, starts
from megalith.planner.published.residuals import Result, predict
from megalith.planner.published.rows import GIB, Row, read


def predicted(said: ExpressedRow, left: Mapping[str, Calibration], whole: Calibration) -> Result | str:
    """Return a row's prediction, or the reason why there is none."""
    try:
        return predict(said, left.get(said.row.group, whole))
    except (KeyError, TypeError, ValueError, AssertionError, ZeroDivisionError) as error:
        return f"cannot be predicted ({type(error).__name__}: {error})"


def rank_correlation(one: list[float], other: list[float]) -> float:
    """Return Spearman's rank correlation, in which equal values share their ranks."""
    first, second = _ranks(one), _ranks(other)
    m, n = mean(first), mean(second)
    above = sum((a - m) * (b - n) for a, b in zip(first, second, strict=True))
    below = (sum((a - m) ** 2 for a in first) * sum((b - n) ** 2 for b in second)) ** 0.5
    return above / below if below else 1.0


def _ranks(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [(ordered.index(value) + len(ordered) - 1 - ordered[::-1].index(value)) / 2 for value in values]


def summary(results: list[Result]) -> dict[str, Any]:
    """Return errors of groups and their averages."""
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for result in results:
        for what, error in (("time", result.time_error), ("memory", result.memory_error)):
            if error is not None:
                kind = result.kind if what == "time" or result.kind == "hybrid" else "all"
                groups[what, kind, result.row.group].append(error)
    table = [
        {
            "what": what, "kind": kind, "group": group, "rows": len(errors),
            "median": median(map(abs, errors)), "p90": _quantile([abs(e) for e in errors], 0.9), "bias": median(errors),
        }
        for (what, kind, group), errors in sorted(groups.items())
    ]  # fmt: skip
    averages = {
        f"{what} {kind}": mean(line["median"] for line in table if (line["what"], line["kind"]) == (what, kind))
        for what, kind in (("time", "dense"), ("time", "expert"), ("time", "hybrid"), ("memory", "all"))
    }
    return {"groups": table, "averages": averages}


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def report(rows: list[Row], figures: Calibration, left: Mapping[str, Calibration], *, bundled: bool) -> dict[str, Any]:
    """Return everything the benchmark prints, as one value. `bundled`: a group's intervals come from the other groups of these rows."""
    wanted = [row for row in rows if row.scored or row.ran_out]
    said = [express(row) for row in wanted]
    tried = [(item, predicted(item, left, figures)) for item in said if item.choices]
    results = [found for _, found in tried if isinstance(found, Result)]
    failed = [{"id": item.row.name, "reason": found} for item, found in tried if isinstance(found, str)]
    scored = [result for result in results if result.row.scored]
    transformers = [item for item in said if item.transformer]
    expressed = sum(bool(item.choices) for item in transformers) - len(failed)
    return {
        "coverage": {
            "rows": len(said), "transformers": len(transformers), "expressed": expressed,
            "share": expressed / len(transformers) if transformers else 0.0,
            "not_expressed": [{"id": item.row.name, "reason": item.reason} for item in said if not item.choices] + failed,
        },
        **summary(scored),
        **_judged([one for one in scored if one.kind != "hybrid"], bundled=bundled),
        "fits": {
            "ran": len(scored), "fit": sum(result.estimate.fits for result in scored),
            "ran_out": sum(result.row.ran_out for result in results),
            "ran_out_and_do_not_fit": sum(result.row.ran_out and not result.estimate.fits for result in results),
            "wrong": [result.row.name for result in results if result.estimate.fits == result.row.ran_out],
            "surely_wrong": [result.row.name for result in scored if surely_too_large(result)],
        },
        "rows": [_line(result) for result in results],
    }  # fmt: skip


def surely_too_large(result: Result) -> bool:
    """Return True if even the lower end of the memory's interval is above the device."""
    limit = result.estimate.limit
    return limit is not None and result.estimate.memory.total * doubt.bundled()["memory"].interval().low > limit


def _judged(results: list[Result], *, bundled: bool) -> dict[str, Any]:
    """Return the figures of intervals, of few known rows and of choices, by kind of model."""
    residuals = [one for result in results for one in result.residuals()]
    kinds = {kind: groups for kind in doubt.KINDS if (groups := doubt.by_group(residuals, kind))}
    constant = coverage.one_for_all(list(kinds.values()))
    intervals, few = dict[str, Any](), dict[str, Any]()
    for kind, groups in kinds.items():
        alone = len(groups) < 3 or not bundled
        others = (lambda _, kind=kind: doubt.bundled()[kind]) if alone else coverage.others_of(groups)
        intervals[kind] = {name: asdict(one) for name, one in coverage.coverage(groups, others, constant).items()}
        few[kind] = {str(rows): coverage.few_shot(groups, others, rows) for rows in (1, 3)}
    sets = coverage.choosing(results)
    ranks = {
        name: rank_correlation([one.seconds or 0.0 for one in layouts], [one.estimate.time.step for one in layouts])
        for name, layouts in coverage.sets(results).items()
        if len(layouts) > 3
    }
    losses, pairs = [one["loss"] for one in sets.values()], sum(one["pairs"] for one in sets.values())
    return {
        "intervals": intervals,
        "few_rows": few,
        "choosing": {
            "sets": sets, "median": median(losses) if losses else None, "p90": _quantile(losses, 0.9) if losses else None,
            "pairs": pairs, "in_order": sum(one["in_order"] for one in sets.values()) / pairs if pairs else None,
            "rank_correlation": {"sets": ranks, "mean": mean(ranks.values())},
        },
    }  # fmt: skip


def _line(result: Result) -> dict[str, Any]:
    measured = result.row.memory
    return {
        "id": result.row.name, "group": result.row.group, "kind": result.kind,
        "seconds": {"predicted": result.estimate.time.step, "measured": result.seconds, "error": result.time_error},
        "memory_gib": {
            "predicted": result.memory / GIB, "measured": None if measured is None else measured / GIB, "error": result.memory_error,
        },
        "fits": result.estimate.fits, "recompute": result.workload.plan.recompute, "microbatch": result.workload.plan.microbatch,
    }  # fmt: skip


def show(found: dict[str, Any], *, rows: bool) -> None:
    """Print the report as text."""
    cover = found["coverage"]
    print(f"{cover['expressed']} of {cover['transformers']} transformer rows expressed ({cover['share']:.1%})")
    for item in cover["not_expressed"]:
        print(f"  {item['id']}: {item['reason']}")
    print(f"{'what':7} {'kind':7} {'group':16} {'rows':>4} {'median':>7} {'p90':>7} {'bias':>7}")
    for line in found["groups"]:
        print(
            f"{line['what']:7} {line['kind']:7} {line['group']:16} {line['rows']:4} "
            f"{line['median']:7.1%} {line['p90']:7.1%} {line['bias']:+7.1%}"
        )
    for name, value in found["averages"].items():
        print(f"{name}, by fits without the group: {value:.1%}")
    _show_judged(found)
    fits = found["fits"]
    print(
        f"fits: {fits['fit']} of {fits['ran']} that ran; {fits['ran_out_and_do_not_fit']} of {fits['ran_out']} that ran out do not; "
        f"surely too large, though they ran: {', '.join(fits['surely_wrong']) or 'none'}"
    )
    for line in found["rows"] if rows else ():
        seconds, memory = line["seconds"], line["memory_gib"]
        print(line["id"], *(f"{k} {v:.4g}" for k, v in seconds.items() if v), *(f"{k} {v:.4g}" for k, v in memory.items() if v))


def _show_judged(found: dict[str, Any]) -> None:
    print(f"{'intervals of 80 %':12} {'stack':9} {'rows':>5} {'groups':>6} {'inside':>7} {'half':>7} {'score':>7}")
    for kind, ways in found["intervals"].items():
        for name, one in ways.items():
            figures = f"{one['share']:7.1%} {one['width']:7.1%} {one['score']:7.3f}"
            print(f"{kind:17} {name:9} {one['rows']:5} {one['groups']:6} {figures}")
    for kind, by_rows in found["few_rows"].items():
        for rows, stacks in by_rows.items():
            if stacks:
                before, after, planted = (median(one[name] for one in stacks.values()) for name in ("before", "after", "planted"))
                worst = max(one["worse"] for one in stacks.values())
                named = mean(one["named"] for one in stacks.values())
                print(
                    f"{kind}, {rows} known of {len(stacks)} stacks: {before:.1%} -> {after:.1%}, worst {worst:+.1%}; "
                    f"one of them twice as long: {planted:.1%}, named in {named:.0%}"
                )
    one = found["choosing"]
    if one["pairs"]:
        print(
            f"choosing among {len(one['sets'])} sets: loss {one['median']:.1%} in the median, {one['p90']:.1%} at the 90th percentile; "
            f"{one['in_order']:.1%} of {one['pairs']} clear pairs in order; rank correlation {one['rank_correlation']['mean']:.2f}"
        )


DEVICES, GENERATIONS = ("ampere", "hopper", "hopper-500w", "blackwell"), ("plain", "eager", "compiled", "fused", "packaged")
"""Columns of the tables of fitted figures."""


def fitted(figures: Calibration, first: Calibration) -> list[str]:
    """Return the Markdown tables of the fitted figures of devices and of software; where the fit changed one, with its start."""
    lines = list[str]()
    tables = ((DEVICES, figures.devices, first.devices), (GENERATIONS, figures.overheads, first.overheads))
    for columns, now, before in tables:
        lines += ["", f"| figure | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for name in vars(now[columns[0]]):
            pairs = ((f"{getattr(of[column], name):.4g}" for of in (now, before)) for column in columns)
            cells = (value if value == start else f"{value} ({start})" for value, start in pairs)
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines[1:]


def as_markdown(found: dict[str, Any]) -> list[str]:
    """Return the tables of errors and intervals."""
    lines = [
        "| | average over groups |",
        "|---|---|",
        *(f"| {name} | {value:.1%} |" for name, value in found["averages"].items()),
    ]
    lines += ["", "| what | kind | group | rows | median | p90 | bias |", "|---" * 7 + "|"]
    for one in found["groups"]:
        shares = f"{one['median']:.1%} | {one['p90']:.1%} | {one['bias']:+.1%}"
        lines.append(f"| {one['what']} | {one['kind']} | {one['group']} | {one['rows']} | {shares} |")
    lines += ["", "| intervals of 80 % | stack | rows | groups | hold | half-width, median | score |", "|---" * 7 + "|"]
    for kind, ways in found["intervals"].items():
        for name, one in ways.items():
            shares = f"{one['share']:.1%} | {one['width']:.1%} | {one['score']:.2f}"
            lines.append(f"| {kind} | {name} | {one['rows']} | {one['groups']} | {shares} |")
    lines += ["", "| kind, known | as predicted | after | worst stack | one wrong by two |", "|---" * 5 + "|"]
    for kind, by_rows in found["few_rows"].items():
        for rows, stacks in by_rows.items():
            before, after, planted = (median(one[name] for one in stacks.values()) for name in ("before", "after", "planted"))
            worst, named = max(one["worse"] for one in stacks.values()), mean(one["named"] for one in stacks.values())
            known = f"{kind}, {rows} row{'s' * (rows != '1')} of {len(stacks)} stacks"
            shares = f"{before:.1%} | {after:.1%} | {100 * worst:+.1f} points | {planted:.1%}, named in {named:.0%}"
            lines.append(f"| {known} | {shares} |")
    return [re.sub(r"(\d)%", r"\1 %", line) for line in lines]


def main() -> None:
    """Read the file, predict its rows and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="a file of measurements; default: the bundled one")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON value")
    parser.add_argument("--rows", action="store_true", help="print every row as well")
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/planner.md instead")
    parser.add_argument("--calibration", type=Path, help="another calibration.toml, for all groups")
    arguments = parser.parse_args()
    figures = parse(arguments.calibration.read_text()) if arguments.calibration else calibration()
    left = {} if arguments.calibration else left_out()
    found = report(read(arguments.file), figures, left, bundled=arguments.file is None)
    if arguments.json:
        json.dump(found, sys.stdout, indent=1)
        print()
    elif arguments.markdown:
        print("\n".join([*fitted(figures, starts()), "", *as_markdown(found)]))
    else:
        show(found, rows=arguments.rows)


if __name__ == "__main__":
    main()
