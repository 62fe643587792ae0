"""Fit of the calibration's figures to measured steps: by coordinate descent from physical starting values, within physical
bounds."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log

from megalith.cost.constants import Calibration
from megalith.cost.estimate import Estimate, estimate
from megalith.cost.memory import Memory, memory
from megalith.cost.parts import Parts
from megalith.cost.workload import Workload


@dataclass(frozen=True)
class Observation:
    """A measured step. `choices`: all workloads that the source's description allows, with their traces."""

    group: str
    expert: bool
    choices: tuple[tuple[Workload, Parts], ...]
    seconds: float


@dataclass(frozen=True)
class Bounds:
    """Limits of a figure. The figure is usually within a factor of e^`doubt` of its starting value."""

    low: float
    high: float
    doubt: float = 0.4


BOUNDS: Mapping[str, Bounds] = {
    "wide": Bounds(0.4, 0.97, 0.06),
    "narrow": Bounds(0.3, 0.97, 0.15),
    "quarter": Bounds(0.2, 0.97, 0.4),
    "idle": Bounds(0.05, 0.8, 0.5),
    "ramp": Bounds(10, 2000, 0.7),
    "attention_forward": Bounds(0.15, 0.9, 0.4),
    "attention_backward": Bounds(0.1, 0.9, 0.4),
    "memory": Bounds(0.5, 0.97, 0.15),
    "fast": Bounds(0.4, 0.95, 0.2),
    "slow": Bounds(0.2, 0.97, 0.3),
    "latency": Bounds(5e-6, 2e-4, 0.6),
    "hop": Bounds(5e-7, 3e-4, 1.0),
    "gap": Bounds(1e-6, 1e-5, 0.5),
    "host": Bounds(1e-6, 2e-4, 0.8),
    "launch": Bounds(3e-6, 5e-5, 0.5),
    "slower": Bounds(1.0, 4.0, 0.5),
    "routing": Bounds(1e-5, 2e-2, 0.5),
    "passes": Bounds(0.3, 2.5, 0.4),
    "tensor_exposed": Bounds(0.05, 1.5, 0.4),
    "expert_exposed": Bounds(0.05, 1.5, 0.5),
    "data_exposed": Bounds(0.005, 1.0, 0.7),
    "contention": Bounds(0.0, 0.5, 0.7),
    "step": Bounds(1e-3, 0.3, 0.8),
    "optimizer": Bounds(16, 120, 0.4),
    "straggle": Bounds(1e-4, 0.03, 0.2),
    "message_exposed": Bounds(0.02, 1.5, 0.7),
}
"""The fitted figures of time. Figures of memory and counts of hardware units are known, not fitted."""


TIED = {f"fused.{name}": f"packaged.{name}" for name in ("host", "launch", "routing")}
"""Figure -> the figure whose value it shares: tuned and untuned Megatron-Core take the same time to launch an operation,
unless CUDA graphs launch it."""


def choose(choices: Sequence[tuple[Workload, Parts]], figures: Calibration) -> tuple[Workload, Estimate]:
    """Return the workload that a planner would choose: the fastest workload that fits, or, if none fits, the workload that needs the
    least memory."""
    found = [(workload, estimate(workload, figures, traced, _space(workload, traced, figures))) for workload, traced in choices]
    fitting = [pair for pair in found if pair[1].fits]
    if fitting:
        return min(fitting, key=lambda pair: pair[1].time.step)
    return min(found, key=lambda pair: pair[1].memory.total)


_known: dict[tuple[int, int, tuple[float, ...]], tuple[Workload, Parts, Memory]] = {}


def _space(workload: Workload, traced: Parts, figures: Calibration) -> Memory:
    """Return the memory of a workload, cached until one of the few figures that it depends on changes. The cache also holds
    the workload and its parts, so that their ids stay unique."""
    overheads = figures.overheads[workload.software_profile.overheads]
    key = id(workload), id(traced), (overheads.working, overheads.reserve, overheads.slack)
    if key not in _known:
        _known[key] = workload, traced, memory(workload, traced, overheads)
    return _known[key][2]


def fit(
    observations: Sequence[Observation],
    start: Calibration,
    *,
    sweeps: int = 3,
    prior: float = 0.004,
    notify: Callable[[str, Calibration], None] = lambda line, figures: None,
) -> Calibration:
    """Return the calibration with the lowest loss on the observations.

    The loss is the weighted mean over groups of the mean absolute log error (each error capped at 0.7 to limit the effect of outliers),
    plus `prior` times each figure's squared distance from its start in units of its doubt: figures that the data cannot separate keep their
    starting values.
    """
    first = start.flat()
    figures, values = start, dict(first)
    users = _users(observations, start)
    steps = {name: 0.25 for name in first if name not in TIED and _bounds(name) and users.get(name.partition(".")[0])}
    for sweep in range(sweeps):
        # what a source leaves open is settled once a sweep: every trial with every choice would take several times as long
        settled = [replace(one, choices=(_picked(one.choices, figures),)) for one in observations]
        errors = {i: _error(one, figures) for i, one in enumerate(settled)}
        best = _loss(settled, errors) + prior * _distance(values, first)
        for name in list(steps):
            bounds = _bounds(name)
            assert bounds is not None
            improved = matters = False
            for sign in (1, -1):
                value = min(bounds.high, max(bounds.low, values[name] * exp(sign * steps[name])))
                if value == values[name]:
                    continue
                same = {name: value} | {follower: value for follower, leader in TIED.items() if leader == name}
                trial = figures.changed(same)
                owners = {key.partition(".")[0] for key in same}
                changed = errors | {i: _error(settled[i], trial) for owner in owners for i in users.get(owner, ())}
                matters = matters or changed != errors
                loss = _loss(settled, changed) + prior * _distance(values | {name: value}, first)
                if loss < best - 1e-7:
                    figures, errors, best, improved = trial, changed, loss, True
                    values[name] = value
                    break
            steps[name] *= 1.3 if improved else 0.5
            if not matters:
                del steps[name]
        notify(f"sweep {sweep + 1}: loss {best:.4f}", figures)
    return figures


def _picked(choices: Sequence[tuple[Workload, Parts]], figures: Calibration) -> tuple[Workload, Parts]:
    workload, _ = choose(choices, figures)
    return next(pair for pair in choices if pair[0] is workload)


def _bounds(name: str) -> Bounds | None:
    return BOUNDS.get(name.partition(".")[2])


def _users(observations: Sequence[Observation], figures: Calibration) -> dict[str, list[int]]:
    """Map each device or software generation to the observations that its figures affect."""
    found: dict[str, list[int]] = defaultdict(list)
    for i, one in enumerate(observations):
        workload = one.choices[0][0]
        found[figures.families[workload.cluster.accelerator.name]].append(i)
        found[workload.software_profile.overheads].append(i)
        if host := figures.beside.get(workload.cluster.accelerator.name):
            found[host].append(i)
    return found


def _error(one: Observation, figures: Calibration) -> float:
    return log(choose(one.choices, figures)[1].time.step / one.seconds)


def _loss(observations: Sequence[Observation], errors: Mapping[int, float]) -> float:
    """Return the weighted mean error. A group's weight is the square root of its number of rows: large groups count more, but
    none dominates. Groups of expert models count twice, because there are few."""
    groups: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for i, error in errors.items():
        groups[observations[i].group, observations[i].expert].append(min(abs(error), 0.7))
    weights = {key: len(values) ** 0.5 * (2 if key[1] else 1) for key, values in groups.items()}
    return sum(weights[key] * mean(values) for key, values in groups.items()) / sum(weights.values())


def _distance(values: Mapping[str, float], first: Mapping[str, float]) -> float:
    total = 0.0
    for name, value in values.items():
        if (bounds := _bounds(name)) and value > 0 and first[name] > 0:
            total += (log(value / first[name]) / bounds.doubt) ** 2
    return total


def mean(values: Iterable[float]) -> float:
    """Return the mean; 0 if there are no values."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def measured(observations: Sequence[Observation], figures: Calibration) -> dict[str, list[str]]:
    """Return the generations of devices and software that occur in the observations."""
    found = [one.choices[0][0] for one in observations]
    return {
        "devices": sorted({figures.families[workload.cluster.accelerator.name] for workload in found}),
        "generations": sorted({workload.software_profile.overheads for workload in found}),
    }


def as_toml(figures: Calibration, *, command: str, note: str, seen: Mapping[str, Sequence[str]]) -> str:
    """Return the text of calibration.toml. `seen`: the result of `measured`."""
    lines = [
        "# Figures fitted on published measurements; see docs/planner.md. Units: seconds, bytes, shares.",
        "[fitted]",
        f'command = "{command}"',
        f'note = "{note}"',
        *(f"{kind} = {list(names)}".replace("'", '"') for kind, names in seen.items()),
        "",
        "[families]",
        *(f'{name} = "{family}"' for name, family in figures.families.items()),
        "",
        "[beside]",
        *(f'{name} = "{host}"' for name, host in figures.beside.items()),
    ]
    for title, table in (("device", figures.devices), ("generation", figures.overheads), ("host", figures.hosts)):
        for owner, row in table.items():
            lines += ["", f"[{title}.{owner}]", *(f"{key} = {_number(value)}" for key, value in vars(row).items())]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(f"{value:.4g}"))
