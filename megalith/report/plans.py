"""Results of the planner as tables for a terminal of 80 columns."""

import json
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from math import inf

from rich.markup import escape
from rich.table import Table

from megalith.cost.across import GOOD, INTERVALS, Across, LinkChoice
from megalith.cost.doubt import Interval
from megalith.cost.estimate import Estimate
from megalith.planner.confidence import Confidence
from megalith.planner.formats import Gains
from megalith.planner.plan_result import PlanResult, Point, headroom, short
from megalith.planner.price import Price
from megalith.planner.search import Candidate
from megalith.planner.site_plans import SitesResult
from megalith.planner.slowdown import SlowdownReport
from megalith.report import units
from megalith.spec.plan import Plan
from megalith.spec.treatment import copied_each_step, kinds, why_not_ahead

GIB = 2**30


def heading(found: PlanResult) -> str:
    """Summarize the request in a line."""
    request, cluster, train = found.request, found.request.cluster, found.request.run.train
    tokens = train.seq_len * train.global_batch
    step = "of prompts" if request.forward_only else "a step"
    sequences = f"{train.global_batch:,} sequence{'s' * (train.global_batch > 1)}"
    nodes = f"{cluster.nodes:,} node{'s' * (cluster.nodes > 1)} of {min(cluster.per_node, cluster.count)}"
    where = f"{cluster.count:,} {cluster.accelerator.name} ({nodes})"
    return f"{request.run.model.name} on {where}, {sequences} of {train.seq_len:,} = {tokens:,} tokens {step}, {request.format}"


def best(found: PlanResult) -> str:
    """Describe the best plan in sentences: time, layout, cost and uncertainty."""
    choice, sure = found.found.best, found.confidence
    if choice is None:
        return ""
    estimate, plan = choice.estimate, choice.plan
    memory = f"{estimate.memory.total / GIB:.1f} GiB" + (f" of {estimate.limit / GIB:.0f}" if estimate.limit else "")
    rate = amount(estimate.tokens_per_second * plan.ranks)
    step = f"a step takes {seconds(estimate.time.step)} ({between(estimate.time.step, sure.time, seconds)})"
    said = [
        f"{short(plan)}: {step}, {rate} tokens/s in all, {estimate.mfu:.1%} MFU, {memory} on the device with the highest peak."
    ]
    if found.trainings:
        one = found.trainings[0]
        cost = "" if one.dollars is None else f" and ${amount(one.dollars)} ({between(one.dollars, sure.time, dollars)})"
        said.insert(0, f"{amount(one.tokens)} tokens take {days(one.days)} ({between(one.days, sure.time, days)}){cost} with")
    said.append(f"Brackets hold 80 % intervals. {sure.words}.")
    return " ".join(said)


def between(value: float, interval: Interval, write: Callable[[float], str]) -> str:
    """Return both ends of the interval around a value as text."""
    return f"{write(value * interval.low)} to {write(value * interval.high)}"


def days(value: float) -> str:
    """Days with three digits, or hours."""
    return f"{value:,.0f} days" if value >= 100 else f"{value:.3g} days" if value >= 1.5 else f"{24 * value:.3g} hours"


def dollars(value: float) -> str:
    """Dollars in short."""
    return f"${amount(value)}"


def table(found: PlanResult) -> Table:
    """Tabulate the best layouts, fastest first, with criteria for a choice among equally fast ones; the run's own plan is in the
    last row."""
    choices, own = found.found.choices, found.own
    drawn = columns("layout", "recompute", "MFU", "step", "80 %", "GiB", "waits", "beside the first")
    drawn.columns[-1].justify, drawn.columns[-1].no_wrap = "left", False
    for choice in choices:
        drawn.add_row(
            short(choice.plan),
            recomputed(choice.plan),
            *_figures(choice.estimate, found.confidence),
            _beside(choice, choices[0], found),
        )
    if own is not None:
        figures = *_figures(own.estimate, found.confidence), _beside(own, choices[0], found)
        drawn.add_row(f"[bold]{short(own.plan)} (yours)[/]", recomputed(own.plan), *figures)
    return drawn


def _beside(choice: Candidate, first: Candidate, found: PlanResult) -> str:
    ratio = choice.estimate.time.step / first.estimate.time.step
    if choice.plan == first.plan:
        return ""
    freed = (first.estimate.memory.total - choice.estimate.memory.total) / GIB
    fewer = _splits(first.plan) - _splits(choice.plan)
    reasons = [f"{freed:.0f} GiB more free"] if freed >= 1 else []
    reasons += ["fewer splits"] if fewer > 0 else []
    speed = "as fast" if ratio < found.confidence.apart else f"{ratio - 1:.0%} slower"
    return ", ".join([speed, *reasons])


def _splits(plan: Plan) -> int:
    return sum(size > 1 for size in (plan.tensor, plan.context, plan.pipeline, plan.expert, plan.data))


APART = 0.1
"""The least difference in memory, as a share of a device's memory, at which two layouts on the same number of devices are both
shown."""


def distinct(points: Sequence[Point]) -> list[Point]:
    """Return the points of a frontier, fastest first. A point is left out unless it frees clearly more memory than the point before it on
    the same number of devices."""
    found, newest = list[Point](), dict[int, float]()
    for point in points:
        memory = point.choice.estimate.memory.total
        if newest.get(point.devices, inf) - memory >= APART * (point.choice.estimate.limit or memory):
            found.append(point)
            newest[point.devices] = memory
    return found


def frontier(points: Sequence[Point]) -> Table:
    """Tabulate the Pareto frontier of time, cost and memory. Of several layouts with about the same memory, only the fastest is
    shown."""
    drawn = columns("devices", "layout", "recompute", "step", "tok/s", "MFU", "GiB", "free", "$/B tok")
    for point in distinct(points):
        plan, estimate = point.choice.plan, point.choice.estimate
        free = f"{1 - estimate.memory.total / estimate.limit:.0%}" if estimate.limit else "-"
        price = f"{point.dollars:,.0f}" if point.dollars is not None else "-"
        rate = amount(estimate.tokens_per_second * point.devices)
        drawn.add_row(
            f"{point.devices:,}", short(plan), recomputed(plan), seconds(estimate.time.step), rate, f"{estimate.mfu:.1%}",
            f"{estimate.memory.total / GIB:.1f}", free, price,
        )  # fmt: skip
    return drawn


def what_ifs(found: PlanResult) -> Table:
    """Tabulate the best layout under each what-if change, after the best layout without any change."""
    drawn = columns("if", "layout", "tok/s", "MFU", "step", "GiB", "days", "cost")
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
    """Tabulate each rule that the plan breaks, the change with which the plan would follow it, and how this changes time, memory
    and cost."""
    drawn = columns("broken rule", "followed", "step", "GiB", "cost", "")
    drawn.columns[-1].justify, drawn.columns[-1].no_wrap = "left", False
    for one in broken:
        rule = f"{one.problem.key} = {one.problem.value}"
        if one.instead is None:
            drawn.add_row(escape(rule), "", "", "", "", one.verdict)
            continue
        dollars = "" if one.dollars is None else f"{'-' if one.dollars < 0 else ''}${amount(abs(one.dollars))}"
        drawn.add_row(escape(rule), escape(one.change), f"{one.share:+.1%}", f"{one.memory / GIB:+.1f}", dollars, one.verdict)
    return drawn


def columns(*names: str) -> Table:
    """Return a table with the given columns. All columns but the first two are right-aligned and never wrapped."""
    drawn = Table(*names, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in drawn.columns[2:]:
        column.justify = "right"
        column.no_wrap = True
    return drawn


def recomputed(plan: Plan) -> str:
    """Return the words for a plan's recomputation."""
    return {"none": "-", "selective": "+".join(plan.recomputed_parts)}.get(plan.recompute, plan.recompute)


def _figures(estimate: Estimate, sure: Confidence) -> tuple[str, ...]:
    time, fits = estimate.time, "" if estimate.fits else "!"
    low, high = time.step * sure.time.low, time.step * sure.time.high
    both = f"{low:.3g}-{high:.3g}" if low >= 1 else f"{low * 1e3:.3g}-{high * 1e3:.3g}"
    return (
        f"{estimate.mfu:.1%}", seconds(time.step), both, f"{estimate.memory.total / GIB:.1f}{fits}",
        f"{(time.bubble + time.exposed) / time.step:.1%}",
    )  # fmt: skip


def seconds(value: float) -> str:
    """Seconds with three digits."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def legend(found: PlanResult) -> str:
    """Explain the columns."""
    device, search = found.request.cluster.accelerator, found.found
    limit = f", of {device.memory / GIB:.1f}; plans leave {headroom():.0%} free" if device.memory else ""
    denied = f", {search.refused:,} refused by `megalith check`" if search.refused else ""
    return (
        f"t tensor, c context, p pipeline x chunks (1F1B, unless named), e expert x parts of each, d data, z ZeRO stage, r copies, "
        f"m microbatch.\n"
        f"recompute: parts whose forward runs twice (sqrt: three times). "
        f"MFU: {found.convention} of {units.flops(device.wide)}.\n"
        f"GiB: worst rank{limit}. waits: share of the step in bubbles and exposed communication. as fast: less than "
        f"{found.confidence.apart - 1:.0%} slower, which is within the predictions' error.\n"
        f"{search.looked_at:,} plans examined, {search.too_large:,} too large{denied}. Predicted: {found.assumption}."
        f"{_offloaded(found)}{gain_over_own_plan(found)}"
    )


RELEASED = (
    "; released: updated in the backward, which frees gradients: "
    "a clipped step is computed twice, or each step unless all state is on disk"
)


def _offloaded(found: PlanResult) -> str:
    shown = [*found.found.choices, *(one.choice for one in found.frontier), *(one.choice for one in found.what_ifs)]
    if not any(choice is not None and choice.moves for choice in shown):
        return ""
    cluster, count = found.request.cluster, found.found.offloaded
    said = "" if cluster.host.memory else ", assumed"
    freed = any(choice is not None and choice.plan.state.release for choice in shown)
    made = any(choice is not None and choice.plan.state.weights != "device" for choice in shown)
    return (
        f"\no: % of the optimizer's state offloaded to host memory (at most {cluster.host_room / GIB:.0f} GiB a device{said}), "
        f"and updated there{_waiting(found)}; a: % of the blocks whose activations are kept there; disk: kept on disk instead"
        f"{RELEASED * freed}"
        f"{'; weights: computed from the offloaded state at each gather' * made}. "
        f"{count:,} {'plan fits' if count == 1 else 'plans fit'} only with --offload."
    )


def _waiting(found: PlanResult) -> str:
    """Return when state off the device is updated, unless gradients are released."""
    run = found.request.run
    if why_not_ahead(Plan(), kinds(run.optimizer), qk_clip=run.optimizer.qk_clip):
        return ""
    host = ", which state in host memory does only with fleet.memory_every above 1" if copied_each_step(run) else ""
    return f" once the norm is known, while the next forward computes{host}"


def gain_over_own_plan(found: PlanResult) -> str:
    """Describe how much faster the best plan is than the run's own, term by term of a step; empty if the request has no own plan."""
    if found.own is None:
        return ""
    best, own = found.found.choices[0].estimate.time, found.own.estimate.time
    gain = own.step - best.step
    if gain <= 0:
        return "\nNo examined plan is faster than yours."
    terms = {name: value - vars(own)[name] for name, value in vars(best).items() if name != "step"}
    large = sorted(((name, value) for name, value in terms.items() if abs(value) > gain / 50), key=lambda term: term[1])
    said = ", ".join(f"{name} {value:+.3g} s" for name, value in large)
    return f"\nThe best plan's step is {gain / own.step:.1%} shorter than yours ({said})."


def trainings(found: PlanResult) -> str:
    """Describe time, money and energy of the training under the best plan; empty if the number of tokens is not known."""
    if not found.trainings:
        return ""
    one = found.trainings[0]
    parts = [f"{one.steps:,} steps", f"{one.days:,.1f} days", f"{amount(one.device_hours)} device-hours"]
    if one.dollars is None:
        parts.append("price unknown (set price_per_hour in a cluster file)")
    else:
        parts.append(f"${amount(one.dollars)} at ${found.request.cluster.price_per_hour:g} an hour")
    if one.megawatt_hours is None:
        parts.append("no power known")
    else:
        parts.append(f"{one.megawatt_hours:,.3g} MWh" if one.megawatt_hours < 1e3 else f"{one.megawatt_hours / 1e3:,.3g} GWh")
    parts.append(f"{one.flops:.2g} FLOP")
    return f"{amount(one.tokens)} tokens with the best plan: {', '.join(parts)}; without time lost to faults (megalith simulate adds it)"


def across(linked: LinkChoice | None) -> str:
    """Describe how long sites wait for each other with the run file's method, and methods that suit their link; empty if the
    link's speed is not known."""
    if linked is None:
        return ""
    said, proposed = linked.said, linked.proposed
    lines = [f"{said.sites} sites with the run file's method: {_waits(said)}"]
    if linked.merging is not None:
        lines.append(f'To wait less, use method = "merge". With keys that suit this link: {_waits(linked.merging)}')
    elif said.use < GOOD:
        shortest = f"To compute for {GOOD:.0%} of the time, set inner_steps = {said.shortest}" if said.shortest else ""
        lines[0] += f" {shortest or f'With no inner_steps up to {INTERVALS[-1]} does a site compute for {GOOD:.0%} of the time'}."
    if proposed is not None and proposed != said:
        lines.append(f"method chosen for this link: {_waits(proposed)}")
    if (best := linked.merging or proposed) is not None and best != said and best.use < GOOD:
        lines.append(f"The link is too slow to compute for {GOOD:.0%} of the time with any method that was tried.")
    if linked.together is not None and linked.together != proposed:
        lines.append(f'with method = "data-parallel": {_waits(linked.together)}')
    if linked.gain is not None:
        much = f"{linked.gain:.2f} times as many tokens a second as one site that trains the whole batch"
        lines.append(
            f"{said.sites} sites process {much}."
            if linked.gain > 1
            else f"More than one site does not pay: together they process {much}."
        )
    return "\n".join(lines)


def sites(found: SitesResult) -> Table:
    """Tabulate the plans of all sites, one in each row."""
    drawn = columns("site", "cluster", "share", "samples", "layout", "step", "waits", "GiB")
    for one, row in zip(found.found, found.to_json(), strict=True):
        drawn.add_row(
            escape(row["site"]), escape(row["cluster"]), str(row["share"]), f"{row['samples']:,}", short(one.choices[0].plan),
            seconds(row["step"]), f"{row['idle']:.1%}", f"{row['memory'] / GIB:.1f}",
        )  # fmt: skip
    return drawn


def _waits(one: Across) -> str:
    if one.gradients:
        sent = f"{one.bytes / 1e6:,.3g} MB in each step, waits {seconds(one.waited)} for the exchange"
        return f"{one.method}. Each site sends {sent}, and computes for {one.use:.1%} of the time."
    more = (f", top_k = {one.top_k}" if one.top_k is not None else "") + (", eager" if one.eager else "")
    keys = f"inner_steps = {one.inner_steps}, fragments = {one.fragments}, overlap = {one.overlap}, bits = {one.bits}{more}"
    return (
        f"{one.method} ({keys}). Each site "
        f"sends {one.bytes / 1e6:,.3g} MB in each round, {one.instead / one.bytes:,.3g} times less than gradients, waits "
        f"{seconds(one.waited)} for the exchange, and computes for {one.use:.1%} of the time."
    )


def phases(found: PlanResult) -> Table:
    """Tabulate the step of the best plan in each phase of the run."""
    drawn = columns("from sample", "a step", "steps", "step", "in all", "GiB")
    for one in found.phases:
        time, held = one.estimate.time.step, one.estimate.memory.total
        drawn.add_row(
            f"{one.phase.first:,}", f"{one.phase.global_batch:,} x {one.phase.seq_len:,}", f"{one.steps:,}", seconds(time),
            f"{time * one.steps / 3600:,.1f} h", f"{held / GIB:.1f}",
        )  # fmt: skip
    return drawn


def slower(found: SlowdownReport) -> str:
    """Compare the measured step with the predicted one, and name the term that exceeds its prediction most."""
    blamed = found.to_blame
    off = found.measured / found.predicted - 1
    said = f"{found.name}: a step takes {seconds(found.measured)}, predicted {seconds(found.predicted)} ({off:+.1%})."
    if blamed is None:
        return f"{said} No term takes notably longer than predicted."
    return f"{said} {blamed.name} exceeds its prediction most: {seconds(blamed.measured)} instead of {seconds(blamed.predicted)}."


def terms(found: SlowdownReport) -> Table:
    """Tabulate the terms of a step; the term that exceeds its prediction most is first."""
    drawn = columns("term", "", "predicted", "measured", "over")
    for one in found.terms:
        over = f"{'-' if one.over < 0 else '+'}{seconds(abs(one.over))}"
        drawn.add_row(one.name, "", seconds(one.predicted), seconds(one.measured), over)
    return drawn


def tries(found: SlowdownReport) -> Table:
    """Tabulate the changes of the plan to try, with the largest predicted gain first."""
    drawn = columns("try", "", "should gain")
    for one in found.tries:
        drawn.add_row(escape(one.change), "", f"{seconds(one.gain)} ({one.gain / found.measured:.1%})")
    return drawn


def amount(value: float) -> str:
    """Return a number in short: 1.5T, 30.8M, 12,345."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:,.0f}"


def gains(found: Gains) -> Table:
    """Tabulate for each layer the time with bf16 and with 8-bit products, in milliseconds for each block and microbatch."""
    drawn = columns("layer", "weight", "blocks", "tokens", "bf16", "8 bits", "rounding", "gain", "")
    for one in found.layers:
        experts = f"{one.experts} x " if one.experts else ""
        patterns = (f"blocks.{block}.{one.module}" for block in one.blocks)
        wide = all(any(fnmatchcase(name, pattern) for pattern in found.wide) for name in patterns)
        times = (f"{1e3 * value:.3g}" for value in (one.wide, one.products, one.rounding))
        how = "wide" if wide else "" if one.codes else "rehearsed"
        sizes = f"{experts}{one.shape[0]} x {one.shape[1]}"
        drawn.add_row(one.name, sizes, str(len(one.blocks)), f"{one.tokens:,}", *times, f"{one.gain:.2f}", how)
    return drawn


def recipe_advice(found: Gains) -> str:
    """Explain the table of gains, and propose a recipe."""
    ways = (
        "predicted ms of a layer's forward and backward for one microbatch on a rank; gain: time in bf16 / time in 8 bits\n"
        "wide: the layer stays in bf16; rehearsed: emulated, because these sizes, or experts, have no 8-bit product"
    )
    if not found.layers:
        return "all blocks stay wide (precision.wide_first, precision.wide_last), so there is no layer to compare"
    if not found.recipe:
        return f"{ways}\nno layer gains from 8 bits on {found.device}: use bf16"
    keys = "\n".join(f"{key} = {json.dumps(value)}" for key, value in found.recipe.items())
    saved = f"{seconds(found.saved)} for each microbatch if a rank holds all blocks"
    tables = f'[train]\nprecision = "{found.precision}"\n\n[precision]\n{keys}\n'
    return f"{ways}\nproposed settings, which save {saved}:\n\n{tables}"


def reasons(found: PlanResult) -> Table:
    """Tabulate the predicted cost of each plan that differs from the best plan in one key."""
    step = found.found.choices[0].estimate.time.step
    drawn = Table("one change", "step", "GiB", "", "what grows", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in drawn.columns[1:3]:
        column.justify = "right"
    for one in found.neighbours:
        grows = one.grows if one.seconds > 0 else ""
        fits = "" if one.fits else "does not fit"
        drawn.add_row(escape(one.change), f"{one.seconds / step:+.1%}", f"{one.memory / GIB:+.1f}", fits, grows)
    return drawn
