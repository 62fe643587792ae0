"""Table of devices by model size: the number of devices that a model needs, and its best layout according to the planner.

    python -m megalith.planner.rule_of_thumb

prints the table of docs/guide/planning.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalith.planner.find import find
from megalith.planner.plan_result import short
from megalith.planner.request import PlanRequest, ResolvedRequest, resolve
from megalith.planner.search import Candidate
from megalith.planner.walk import walk
from megalith.spec.problem import SpecErrors
from megalith.spec.sizes import count_model

MODELS = (
    "llama3.2-1b",
    "llama3.2-3b",
    "llama3.1-8b",
    "qwen3-32b",
    "llama3.1-70b",
    "mixtral-8x7b",
    "llama3.1-405b",
    "deepseek-v3",
)
DEVICE = "h100"
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TYPICAL = (64, 1024)
"""Numbers of devices, each with a column for the fastest layout on them."""


class FewestDevices(NamedTuple):
    """The fewest devices on which a model fits, and the simplest technique with which it fits."""

    devices: int
    techniques: str
    choice: Candidate


@dataclass(frozen=True)
class RuleOfThumb:
    """The table's line for one model."""

    model: str
    parameters: int
    least: FewestDevices | None
    typical: tuple[Candidate | None, ...]
    """The fastest layout on each number of devices in TYPICAL; None if nothing fits."""


def thumb(model: str, *, counts: Sequence[int] = COUNTS, typical: Sequence[int] = TYPICAL) -> RuleOfThumb:
    """Return the table's line for a model, with sequences of the model's context but at most 8,192 tokens, and 4M tokens a step."""
    request = resolve(PlanRequest(model=model, cluster=f"{DEVICE}:{typical[-1]}"))
    return RuleOfThumb(
        model, count_model(request.model).total, _least(model, counts), tuple(_best(model, count) for count in typical)
    )


def _asked(model: str, count: int) -> ResolvedRequest | None:
    """Return the request for a number of devices; None if no layout divides the batch evenly."""
    try:
        return resolve(PlanRequest(model=model, cluster=f"{DEVICE}:{count}"))
    except SpecErrors:
        return None


def _least(model: str, counts: Sequence[int]) -> FewestDevices | None:
    for count in counts:
        request = _asked(model, count)
        if request is None or find(request, top=1).best is None:
            continue
        found = walk(request)
        if found.first is not None:
            return FewestDevices(count, found.fit[-1].technique.name, found.first)
    return None


def _best(model: str, count: int) -> Candidate | None:
    request = _asked(model, count)
    return None if request is None else find(request, top=1).best


def table(models: Sequence[str] = MODELS) -> str:
    """Return the lines as a Markdown table."""
    columns = " | ".join(f"fastest on {count:,}" for count in TYPICAL)
    lines = [f"| model | parameters | fewest {DEVICE} | fits with | {columns} |", "|---|---|---|---|" + "---|" * len(TYPICAL)]
    for one in map(thumb, models):
        least = ("-", "-") if one.least is None else (str(one.least.devices), one.least.techniques)
        lines.append(f"| {one.model} | {one.parameters / 1e9:.3g}B | {' | '.join((*least, *map(_cell, one.typical)))} |")
    return "\n".join(lines)


def _cell(choice: Candidate | None) -> str:
    if choice is None:
        return "does not fit"
    again = "" if choice.plan.recompute == "none" else f", {choice.plan.recompute} recomputation"
    return f"`{short(choice.plan)}`{again}: {choice.estimate.mfu:.0%}"


if __name__ == "__main__":
    print(table())
