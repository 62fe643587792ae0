"""Plans that were found, as tables for a terminal of 80 columns. Reads what `planner` says as plain values."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

GIB = 2**30
COMMUNICATION = ("tensor", "context", "expert", "pipeline", "data")


def heading(found: Mapping[str, Any]) -> str:
    """What was asked, in a line."""
    cluster = found["cluster"]
    tokens = found["seq_len"] * found["global_batch"]
    step = "of prompts" if found["forward_only"] else "a step"
    sequences = f"{found['global_batch']:,} sequence{'s' * (found['global_batch'] > 1)}"
    where = f"{cluster['count']:,} {cluster['accelerator']} ({cluster['nodes']:,} of {cluster['per_node']})"
    return f"{found['model']} on {where}, {sequences} of {found['seq_len']:,} = {tokens:,} tokens {step}, {found['format']}"


def table(rows: Sequence[Mapping[str, Any]], own: Mapping[str, Any] | None = None) -> Table:
    """Choices, best first, and the run's own plan last."""
    drawn = _table("layout", "again", "tok/s", "MFU", "step", "GiB", "bubble", "exposed")
    for row in rows:
        drawn.add_row(row["layout"], _again(row["plan"]), *_figures(row["estimate"]))
    if own is not None:
        drawn.add_row(f"[bold]{own['layout']} (yours)[/]", _again(own["plan"]), *_figures(own["estimate"]))
    return drawn


def frontier(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Layouts that nothing beats in time, cost and memory at once."""
    drawn = _table("devices", "layout", "again", "step", "tok/s", "MFU", "GiB", "free", "$/B tok")
    for row in rows:
        estimate = row["estimate"]
        limit = estimate["limit"]
        free = f"{1 - estimate['memory_total'] / limit:.0%}" if limit else "-"
        price = f"{row['dollars']:,.0f}" if row["dollars"] is not None else "-"
        rate = amount(estimate["tokens_per_second"] * row["devices"])
        drawn.add_row(
            f"{row['devices']:,}", row["layout"], _again(row["plan"]), seconds(estimate["time"]["step"]), rate, f"{estimate['mfu']:.1%}",
            f"{estimate['memory_total'] / GIB:.1f}", free, price,
        )  # fmt: skip
    return drawn


def what_ifs(found: Mapping[str, Any]) -> Table:
    """The best layout of each change, beside the best as things are."""
    drawn = _table("if", "layout", "tok/s", "MFU", "step", "GiB", "days", "cost")
    best = found["choices"][0]
    rows = [{"change": "as it is", **best}, *found["what_ifs"]]
    for row in rows:
        estimate, whole = row["estimate"], row.get("training")
        if estimate is None:
            drawn.add_row(escape(row["change"]), "nothing fits")
            continue
        days = f"{whole['days']:,.1f}" if whole else "-"
        cost = f"${amount(whole['dollars'])}" if whole and whole["dollars"] is not None else "-"
        drawn.add_row(
            escape(row["change"]), row["layout"], f"{estimate['tokens_per_second']:,.0f}", f"{estimate['mfu']:.1%}",
            seconds(estimate["time"]["step"]), f"{estimate['memory_total'] / GIB:.1f}", days, cost,
        )  # fmt: skip
    return drawn


def prices(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Broken rules, the plan that follows each, and the difference."""
    drawn = _table("broken rule", "followed", "step", "GiB", "cost", "")
    drawn.columns[-1].justify, drawn.columns[-1].no_wrap = "left", False
    for row in rows:
        problem = row["problem"]
        rule = f"{problem['key']} = {problem['value']}"
        if row["instead"] is None:
            drawn.add_row(escape(rule), "", "", "", "", row["verdict"])
            continue
        dollars = "" if row["dollars"] is None else f"{'-' if row['dollars'] < 0 else ''}${amount(abs(row['dollars']))}"
        drawn.add_row(
            escape(rule), escape(row["change"]), f"{row['share']:+.1%}", f"{row['memory'] / GIB:+.1f}", dollars, row["verdict"]
        )
    return drawn


def _table(*columns: str) -> Table:
    """All columns but the first two keep to the right, and are not broken."""
    drawn = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in drawn.columns[2:]:
        column.justify = "right"
        column.no_wrap = True
    return drawn


def _again(plan: Mapping[str, Any]) -> str:
    """What is computed again in backward."""
    policy = str(plan["recompute"])
    return {"none": "-", "selective": "+".join(plan["recompute_parts"])}.get(policy, policy)


def _figures(estimate: Mapping[str, Any]) -> tuple[str, ...]:
    time = estimate["time"]
    exposed = sum(time[kind] for kind in COMMUNICATION) / time["step"]
    fits = "" if estimate["fits"] else "!"
    return (
        f"{estimate['tokens_per_second']:,.0f}", f"{estimate['mfu']:.1%}", seconds(time["step"]),
        f"{estimate['memory_total'] / GIB:.1f}{fits}", f"{time['bubble'] / time['step']:.1%}", f"{exposed:.1%}",
    )  # fmt: skip


def seconds(value: float) -> str:
    """Seconds with three digits."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def legend(found: Mapping[str, Any]) -> str:
    """What the columns mean."""
    cluster = found["cluster"]
    memory = cluster["memory"]
    limit = f", of {memory / GIB:.1f}; plans leave {found['spare']:.0%} free" if memory else ""
    denied = f", {found['refused']:,} denied by `megalith check`" if found["refused"] else ""
    return (
        f"t tensor, c context, p pipeline x chunks (1F1B, unless named), e expert x parts of each, d data, z ZeRO stage, r copies, "
        f"m microbatch.\n"
        f"again: computed twice. "
        f"tok/s: a device. MFU: {found['convention']} of {cluster['peak'] / 1e12:,.0f} TFLOP/s.\n"
        f"GiB: fullest rank{limit}. bubble, exposed communication: shares of the step.\n"
        f"{found['looked_at']:,} plans looked at, {found['too_large']:,} too large{denied}. Predicted: {found['assumption']}."
        f"{_offloaded(found)}{beaten(found)}"
    )


def _offloaded(found: Mapping[str, Any]) -> str:
    """A line on layouts that need their hosts' memory; empty where none is shown."""
    shown = [*found["choices"], *found["frontier"], *found["what_ifs"]]
    if not any(row.get("offload") for row in shown):
        return ""
    room = f"{found['host_memory'] / GIB:.0f} GiB a device, assumed"
    return (
        f"\no: % of the optimizer's state offloaded to host memory (at most {room}), updated there: predicted only, the trainer cannot. "
        f"{found['offloaded']:,} plans fit only so; --no-offload leaves them out."
    )


def beaten(found: Mapping[str, Any]) -> str:
    """A line on what the best plan has over the run's own, by the terms of a step; empty where there is no own, or none is faster."""
    if found["own"] is None:
        return ""
    best, own = found["choices"][0]["estimate"]["time"], found["own"]["estimate"]["time"]
    gain = own["step"] - best["step"]
    if gain <= 0:
        return "\nNo plan that was looked at is faster than yours."
    terms = {name: best[name] - own[name] for name in best if name != "step" and abs(best[name] - own[name]) > gain / 50}
    said = ", ".join(f"{name} {value:+.3g} s" for name, value in sorted(terms.items(), key=lambda term: term[1]))
    return f"\nThe best beats yours by {gain / own['step']:.1%} of the step ({said})."


def trainings(found: Mapping[str, Any]) -> str:
    """Time, money and energy of the training under the best plan; empty where no length is known."""
    best, cluster = found["choices"][0], found["cluster"]
    one = best.get("training")
    if one is None:
        return ""
    parts = [f"{one['steps']:,} steps", f"{one['days']:,.1f} days", f"{amount(one['device_hours'])} device-hours"]
    if one["dollars"] is None:
        parts.append("no price known (price_per_hour of a cluster file)")
    else:
        parts.append(f"${amount(one['dollars'])} at ${cluster['price_per_hour']:g} an hour")
    if one["megawatt_hours"] is None:
        parts.append("no power known")
    else:
        parts.append(
            f"{one['megawatt_hours']:,.3g} MWh" if one["megawatt_hours"] < 1e3 else f"{one['megawatt_hours'] / 1e3:,.3g} GWh"
        )
    parts.append(f"{one['flops']:.2g} FLOP")
    return f"{amount(one['tokens'])} tokens with the best: {', '.join(parts)}; no faults counted (megalith simulate counts them)"


def amount(value: float) -> str:
    """1.5T, 30.8M, 12,345."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:,.0f}"


def reasons(found: Mapping[str, Any]) -> Table:
    """What each neighbour of the best plan would cost."""
    step = found["choices"][0]["estimate"]["time"]["step"]
    drawn = Table("one change", "step", "GiB", "", "what grows", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in drawn.columns[1:3]:
        column.justify = "right"
    for row in found["neighbours"]:
        grows = row["grows"] if row["seconds"] > 0 else ""
        fits = ("predicted only" if row["offload"] else "") if row["fits"] else "does not fit"
        drawn.add_row(escape(row["change"]), f"{row['seconds'] / step:+.1%}", f"{row['memory'] / GIB:+.1f}", fits, grows)
    return drawn
