"""Plans that were found, as tables for a terminal of 80 columns."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from megalith.cost import host
from megalith.cost.estimate import Estimate
from megalith.planner.answer import Answer, Point, short, spare
from megalith.planner.price import Price
from megalith.planner.search import Choice
from megalith.spec.plan import Plan

GIB = 2**30


def heading(found: Answer) -> str:
    """Summarize the request in a line."""
    asked, cluster, train = found.asked, found.asked.cluster, found.asked.run.train
    tokens = train.seq_len * train.global_batch
    step = "of prompts" if asked.forward_only else "a step"
    sequences = f"{train.global_batch:,} sequence{'s' * (train.global_batch > 1)}"
    nodes = f"{cluster.nodes:,} node{'s' * (cluster.nodes > 1)} of {min(cluster.per_node, cluster.count)}"
    where = f"{cluster.count:,} {cluster.accelerator.name} ({nodes})"
    return f"{asked.run.model.name} on {where}, {sequences} of {train.seq_len:,} = {tokens:,} tokens {step}, {asked.format}"


def best(found: Answer) -> str:
    """The answer in a line: the best layout, its speed and memory, and what the training comes to if its length is known."""
    choice = found.found.best
    if choice is None:
        return ""
    estimate = choice.estimate
    memory = f"{estimate.memory.total / GIB:.1f} GiB" + (f" of {estimate.limit / GIB:.0f}" if estimate.limit else "")
    speed = f"{amount(estimate.tokens_per_second * choice.plan.ranks)} tokens/s in all, {estimate.mfu:.1%} MFU"
    said = [f"best: {short(choice.plan)}", speed, f"{memory} on the fullest device"]
    if found.trainings:
        one = found.trainings[0]
        said.append(f"{one.days:,.1f} days for {amount(one.tokens)} tokens")
        said += [f"${amount(one.dollars)}"] if one.dollars is not None else []
    return ", ".join(said)


def table(choices: Sequence[Choice], own: Choice | None = None) -> Table:
    """Choices, best first, and the run's own plan last."""
    drawn = _table("layout", "again", "tok/s", "MFU", "step", "GiB", "bubble", "exposed")
    for choice in choices:
        drawn.add_row(short(choice.plan), _again(choice.plan), *_figures(choice.estimate))
    if own is not None:
        drawn.add_row(f"[bold]{short(own.plan)} (yours)[/]", _again(own.plan), *_figures(own.estimate))
    return drawn


def frontier(points: Sequence[Point]) -> Table:
    """Layouts that nothing beats in time, cost and memory at once."""
    drawn = _table("devices", "layout", "again", "step", "tok/s", "MFU", "GiB", "free", "$/B tok")
    for point in points:
        plan, estimate = point.choice.plan, point.choice.estimate
        free = f"{1 - estimate.memory.total / estimate.limit:.0%}" if estimate.limit else "-"
        price = f"{point.dollars:,.0f}" if point.dollars is not None else "-"
        rate = amount(estimate.tokens_per_second * point.devices)
        drawn.add_row(
            f"{point.devices:,}", short(plan), _again(plan), seconds(estimate.time.step), rate, f"{estimate.mfu:.1%}",
            f"{estimate.memory.total / GIB:.1f}", free, price,
        )  # fmt: skip
    return drawn


def what_ifs(found: Answer) -> Table:
    """The best layout of each change, beside the best as things are."""
    drawn = _table("if", "layout", "tok/s", "MFU", "step", "GiB", "days", "cost")
    as_it_is = ("as it is", found.found.best, next(iter(found.trainings), None))
    for change, choice, training in (as_it_is, *((one.change, one.choice, one.training) for one in found.what_ifs)):
        if choice is None:
            drawn.add_row(escape(change), "nothing fits")
            continue
        estimate = choice.estimate
        days = f"{training.days:,.1f}" if training else "-"
        cost = f"${amount(training.dollars)}" if training and training.dollars is not None else "-"
        drawn.add_row(
            escape(change), short(choice.plan), f"{estimate.tokens_per_second:,.0f}", f"{estimate.mfu:.1%}",
            seconds(estimate.time.step), f"{estimate.memory.total / GIB:.1f}", days, cost,
        )  # fmt: skip
    return drawn


def prices(broken: Sequence[Price]) -> Table:
    """Broken rules, the plan that follows each, and the difference."""
    drawn = _table("broken rule", "followed", "step", "GiB", "cost", "")
    drawn.columns[-1].justify, drawn.columns[-1].no_wrap = "left", False
    for one in broken:
        rule = f"{one.problem.key} = {one.problem.value}"
        if one.instead is None:
            drawn.add_row(escape(rule), "", "", "", "", one.verdict)
            continue
        dollars = "" if one.dollars is None else f"{'-' if one.dollars < 0 else ''}${amount(abs(one.dollars))}"
        drawn.add_row(escape(rule), escape(one.change), f"{one.share:+.1%}", f"{one.memory / GIB:+.1f}", dollars, one.verdict)
    return drawn


def _table(*columns: str) -> Table:
    """All columns but the first two keep to the right, and are not broken."""
    drawn = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in drawn.columns[2:]:
        column.justify = "right"
        column.no_wrap = True
    return drawn


def _again(plan: Plan) -> str:
    """Describe the recomputation of a plan."""
    return {"none": "-", "selective": "+".join(plan.recompute_parts)}.get(plan.recompute, plan.recompute)


def _figures(estimate: Estimate) -> tuple[str, ...]:
    time, fits = estimate.time, "" if estimate.fits else "!"
    return (
        f"{estimate.tokens_per_second:,.0f}", f"{estimate.mfu:.1%}", seconds(time.step),
        f"{estimate.memory.total / GIB:.1f}{fits}", f"{time.bubble / time.step:.1%}", f"{time.exposed / time.step:.1%}",
    )  # fmt: skip


def seconds(value: float) -> str:
    """Seconds with three digits."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def legend(found: Answer) -> str:
    """Explain the columns."""
    device, search = found.asked.cluster.accelerator, found.found
    limit = f", of {device.memory / GIB:.1f}; plans leave {spare():.0%} free" if device.memory else ""
    denied = f", {search.refused:,} denied by `megalith check`" if search.refused else ""
    return (
        f"t tensor, c context, p pipeline x chunks (1F1B, unless named), e expert x parts of each, d data, z ZeRO stage, r copies, "
        f"m microbatch.\n"
        f"again: computed twice. "
        f"tok/s: a device. MFU: {found.convention} of {device.wide / 1e12:,.0f} TFLOP/s.\n"
        f"GiB: fullest rank{limit}. bubble, exposed communication: shares of the step.\n"
        f"{search.looked_at:,} plans looked at, {search.too_large:,} too large{denied}. Predicted: {found.assumption}."
        f"{_offloaded(found)}{beaten(found)}"
    )


def _offloaded(found: Answer) -> str:
    """A line on layouts that need their hosts' memory; empty where none is shown."""
    shown = [*found.found.choices, *(one.choice for one in found.frontier), *(one.choice for one in found.what_ifs)]
    if not any(choice is not None and choice.offload for choice in shown):
        return ""
    return (
        f"\no: % of the optimizer's state offloaded to host memory (at most {host.MEMORY / GIB:.0f} GiB a device, assumed), updated there: "
        f"{found.found.offloaded:,} plans fit only so; --no-offload leaves them out."
    )


def beaten(found: Answer) -> str:
    """A line on what the best plan has over the run's own, by the terms of a step; empty where there is no own, or none is faster."""
    if found.own is None:
        return ""
    best, own = found.found.choices[0].estimate.time, found.own.estimate.time
    gain = own.step - best.step
    if gain <= 0:
        return "\nNo plan that was looked at is faster than yours."
    terms = {name: value - vars(own)[name] for name, value in vars(best).items() if name != "step"}
    large = sorted(((name, value) for name, value in terms.items() if abs(value) > gain / 50), key=lambda term: term[1])
    said = ", ".join(f"{name} {value:+.3g} s" for name, value in large)
    return f"\nThe best beats yours by {gain / own.step:.1%} of the step ({said})."


def trainings(found: Answer) -> str:
    """Time, money and energy of the training under the best plan; empty where no length is known."""
    if not found.trainings:
        return ""
    one = found.trainings[0]
    parts = [f"{one.steps:,} steps", f"{one.days:,.1f} days", f"{amount(one.device_hours)} device-hours"]
    if one.dollars is None:
        parts.append("no price known (price_per_hour of a cluster file)")
    else:
        parts.append(f"${amount(one.dollars)} at ${found.asked.cluster.price_per_hour:g} an hour")
    if one.megawatt_hours is None:
        parts.append("no power known")
    else:
        parts.append(f"{one.megawatt_hours:,.3g} MWh" if one.megawatt_hours < 1e3 else f"{one.megawatt_hours / 1e3:,.3g} GWh")
    parts.append(f"{one.flops:.2g} FLOP")
    return f"{amount(one.tokens)} tokens with the best: {', '.join(parts)}; no faults counted (megalith simulate counts them)"


def phases(found: Answer) -> Table:
    """The best plan in each phase of the run."""
    drawn = _table("from sample", "a step", "steps", "step", "in all", "GiB")
    for one in found.phases:
        time, held = one.estimate.time.step, one.estimate.memory.total
        drawn.add_row(
            f"{one.phase.first:,}", f"{one.phase.global_batch:,} x {one.phase.seq_len:,}", f"{one.steps:,}", seconds(time),
            f"{time * one.steps / 3600:,.1f} h", f"{held / GIB:.1f}",
        )  # fmt: skip
    return drawn


def amount(value: float) -> str:
    """1.5T, 30.8M, 12,345."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:,.0f}"


def reasons(found: Answer) -> Table:
    """Tabulate the cost of each neighbour of the best plan."""
    step = found.found.choices[0].estimate.time.step
    drawn = Table("one change", "step", "GiB", "", "what grows", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in drawn.columns[1:3]:
        column.justify = "right"
    for one in found.neighbours:
        grows = one.grows if one.seconds > 0 else ""
        fits = "" if one.fits else "does not fit"
        drawn.add_row(escape(one.change), f"{one.seconds / step:+.1%}", f"{one.memory / GIB:+.1f}", fits, grows)
    return drawn
