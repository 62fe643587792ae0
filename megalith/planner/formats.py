"""The number format of a plan: formats that the devices support, and the `[precision]` values that `--format` stands for on these
devices. No torch."""

import json
from dataclasses import dataclass
from typing import Any

from megalith.check.case import Case
from megalith.check.remedies import changed_by, combinations
from megalith.check.rules import found_by
from megalith.cost.narrow.pays import Layer, gained, losers, pays
from megalith.planner.problems import problem
from megalith.spec.cluster import ClusterSpec
from megalith.spec.numbers import PRECISIONS, PrecisionSpec, in_codes, is_narrow
from megalith.spec.plan import Plan
from megalith.spec.problem import Problem
from megalith.spec.run import RunSpec

RECIPES = (PrecisionSpec(multiply="codes"), PrecisionSpec(multiply="codes", granularity="tensor"))
"""Values of `[precision]` with 8-bit products; the first that a device supports is used."""


def format_of(
    named: str | None, own: str | None, cluster: ClusterSpec | None, problems: list[Problem], *, ours: bool
) -> str | None:
    """Return the named number format, else the run's format. `ours`: True if Megalith's trainer computes in the format."""
    found = named or own or "bf16"
    if found not in PRECISIONS:
        problems.append(problem("--format", found, "is not known", f"Known: {', '.join(PRECISIONS)}."))
        return None
    problems += unable(found, cluster, ours=ours) if cluster is not None else []
    return found


def unable(format: str, cluster: ClusterSpec, *, ours: bool) -> list[Problem]:
    """Return a problem if a cluster's devices do not compute in a number format. `ours`: True for Megalith's trainer, which also emulates
    narrow formats by products in a wide format."""
    peak = cluster.accelerator.peak
    rates = {name: one.rate if ours else one.factors.rate for name, one in PRECISIONS.items()}
    if not peak or rates[format] in peak:
        return []
    able = ", ".join(name for name, rate in rates.items() if rate in peak)
    reason = f"{cluster.accelerator.name} does not compute in {format}, according to published figures"
    return [problem("--format", format, reason, f"This device computes in {able}.")]


def multiplies_in_8_bits(run: RunSpec, cluster: ClusterSpec) -> bool:
    """Return True if dense layers of a run multiply 8-bit codes on a cluster's devices."""
    capability = cluster.accelerator.compute_capability
    return run.precision.multiply == "codes" and in_codes(run.precision, run.train.precision, capability)


def is_rehearsed(run: RunSpec, cluster: ClusterSpec) -> bool:
    """Return True if a run in a narrow precision multiplies rounded factors in bf16 or fp32, not 8-bit codes."""
    return is_narrow(run.train.precision) and not multiplies_in_8_bits(run, cluster)


def follows_others(run: RunSpec) -> bool:
    """Return True if scales depend on numbers on several ranks that hold parts of a tensor, which a compiler cannot see."""
    return is_narrow(run.train.precision) and run.precision.granularity != "tile"


def recipe(run: RunSpec, cluster: ClusterSpec) -> PrecisionSpec:
    """Return the `[precision]` values that the planner chooses for the narrow precision of a run on a cluster's devices. If the devices
    have 8-bit products, all layers that gain use them; otherwise the values are the defaults."""
    choices = _able(run, cluster)
    if choices is None:
        return PrecisionSpec()
    whole = run.model_copy(update={"precision": choices, "plan": Plan(compile=True)})
    return choices.model_copy(update={"wide": losing(whole, cluster)})


def _able(run: RunSpec, cluster: ClusterSpec) -> PrecisionSpec | None:
    """Return the first values of RECIPES that a cluster's devices support for the precision of a run; None if there are none."""
    capability = cluster.accelerator.compute_capability
    return next((choices for choices in RECIPES if in_codes(choices, run.train.precision, capability)), None)


def losing(run: RunSpec, cluster: ClusterSpec) -> tuple[str, ...]:
    """Return patterns of narrow layers that 8-bit products make slower under the run's plan. Return no patterns if no choice of layers
    makes the run faster."""
    layers = pays(run, cluster, run.precision)
    lost = losers(layers)
    if gained(layers, lost) <= 0:
        return ()
    return tuple(pattern for pattern in lost if pattern not in run.precision.wide)


def notes_on(run: RunSpec, cluster: ClusterSpec, *, chosen: bool) -> tuple[str, ...]:
    """Return notes on how the trainer computes in a run's narrow precision. `chosen`: the planner, not the run file, chose
    the values of `[precision]`."""
    precision, device, choices = run.train.precision, cluster.accelerator.name, run.precision
    if not is_narrow(precision):
        return ()
    if is_rehearsed(run, cluster):
        real = [
            name
            for name in ("fp8", "mxfp8", "nvfp4", "mxfp4")
            if name == precision and PRECISIONS[name].factors.rate in cluster.accelerator.peak
        ]
        other = f"; --software megatron-te predicts software that multiplies in {precision} on this device" if real else ""
        return (
            f"{precision} is emulated on {device}: the trainer multiplies rounded numbers in bf16 or fp32, "
            f"which takes longer than training in bf16{other}",
        )
    shared = {"tile": "a tile", "row": "a row", "tensor": "a tensor"}[choices.granularity]
    own = "" if not chosen else ", chosen for this device"
    found = [
        f'{precision} on {device}: dense layers multiply in 8 bits (precision.multiply = "codes"), with a scale for {shared}{own}'
    ]
    if chosen and choices.wide:
        found.append(f"layers stay wide if {precision} would make them slower: precision.wide = {list(choices.wide)}")
    elif not losing(run, cluster) and gained(pays(run, cluster, choices), choices.wide) <= 0:
        found.append(f"no layer gains from {precision} on this device: bf16 is as fast or faster")
    return tuple(found)


def precision_problems(run: RunSpec) -> list[Problem]:
    """Return the errors of a run's precision that occur under every plan."""
    case = Case(run.model_copy(update={"plan": Plan()}), None, files=False)
    found = found_by(
        case, ("narrow", "products", "packed", "moments")
    )  # all rules would also look for a way to make this plan fit
    keys = ("precision.", "optimizer.master", "train.gradients")
    return [one for one in found if one.severity == "error" and one.key.startswith(keys)]


def state_of(run: RunSpec) -> dict[str, Any]:
    """Return the values of a run that decide in which numbers its state is kept."""
    return {
        "optimizer.moments": run.optimizer.moments,
        "optimizer.master": run.optimizer.master,
        "train.gradients": run.train.gradients,
    }


def forms_of_state(run: RunSpec) -> list[dict[str, Any]]:
    """Return the values of each other form of master weights and gradients that needs less memory and that `check` accepts, the one that
    changes least first."""
    found = combinations(run.model_copy(update={"plan": Plan()}))
    less = (values for values in found if {*values} <= {"optimizer.master", "train.gradients"} and "fp32" not in values.values())
    return [values for values in less if not precision_problems(changed_by(run, values))]


@dataclass(frozen=True)
class Gains:
    """Time that 8-bit products save or cost in each layer of a run on its devices, and the values that save most."""

    device: str
    precision: str
    """The narrow precision that bf16 is compared with."""
    choices: PrecisionSpec
    """The run's `[precision]` if it multiplies in 8 bits, else the recipe for its devices."""
    layers: tuple[Layer, ...]

    @property
    def wide(self) -> tuple[str, ...]:
        """Patterns of all layers that stay wide: layers that the run names, and layers that 8-bit products slow down."""
        return tuple(dict.fromkeys((*self.choices.wide, *losers(self.layers))))

    @property
    def saved(self) -> float:
        """Seconds that narrow products save in a microbatch, over all blocks, if the layers of `wide` stay wide."""
        return gained(self.layers, self.wide)

    @property
    def recipe(self) -> dict[str, Any]:
        """The proposed values of `[precision]`; empty if no layer gains."""
        return self.choices.model_copy(update={"wide": self.wide}).model_dump(exclude_defaults=True) if self.saved > 0 else {}

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"device": self.device, "precision": self.precision, "saved": self.saved, "recipe": self.recipe}
        return found | {"layers": [one.to_json() for one in self.layers]}


def gains(run: RunSpec, cluster: ClusterSpec) -> Gains | None:
    """Return the gains of a run's layers; None if its devices have no suitable 8-bit products."""
    if not multiplies_in_8_bits(run, cluster):
        run = run.model_copy(update={"train": run.train.model_copy(update={"precision": "fp8"}), "precision": PrecisionSpec()})
        choices = _able(run, cluster)
        if choices is None:
            return None
        run = run.model_copy(update={"precision": choices})
    return Gains(cluster.accelerator.name, run.train.precision, run.precision, pays(run, cluster, run.precision))


def advice_on(run: RunSpec, cluster: ClusterSpec) -> list[Problem]:
    """Return advice about the layers of a run with 8-bit products that would be faster in bf16 under its plan."""
    if not multiplies_in_8_bits(run, cluster) or (found := gains(run, cluster)) is None:
        return []
    more = [pattern for pattern in found.wide if pattern not in run.precision.wide]
    if not more:
        return []
    key, device = "precision.multiply", cluster.accelerator.name
    if not found.recipe:
        lost = losers(found.layers)
        gain = gained(found.layers, lost) > 0
        layers = "every layer that is not in precision.wide" if gain else "every layer"
        reason = f"8-bit products are predicted to make {layers} slower than bf16 on {device} under this plan"
        way_out = f"Use precision.wide = {json.dumps(lost)}." if gain else 'Use train.precision = "bf16".'
        return [Problem("advice", key, "codes", reason, way_out)]
    reason = f"8-bit products are predicted to make {', '.join(more)} slower than bf16 on {device} under this plan"
    return [
        Problem(
            "advice",
            key,
            "codes",
            reason,
            f"Use precision.wide = {json.dumps(found.wide)}; megalith check --fp8 shows each layer.",
        )
    ]
