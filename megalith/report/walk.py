"""The steps of `megalith plan --guide` to a first plan, as sentences and tables for a terminal of 80 columns."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from megalith.planner.plan_result import headroom, short
from megalith.planner.search import Candidate
from megalith.planner.walk import Row, Walk, a_parameter, rounds
from megalith.report import plans

GIB = 2**30


def pages(found: Walk) -> Iterator[RenderableType]:
    """Yield the steps (fit, batch, throughput), each with a few sentences and a table; the best plan is last."""
    yield from map(escape, found.request.notes)
    yield from ("", "[bold]1. Does it fit?[/]", escape(_fit_words(found)), _fit(found))
    first = found.first
    if first is None or found.result is None:
        yield "Nothing fits."
        return
    yield from ("", "[bold]2. Which batch?[/]", escape(_batch_words(found, first)), _batch(found))
    yield from ("", "[bold]3. What makes it fast?[/]", _throughput_words(found), _throughput(found))
    yield from ("", escape(plans.best(found.result)), escape(plans.trainings(found.result)))


def _fit_words(found: Walk) -> str:
    request = found.request
    limit = request.cluster.accelerator.memory
    room = (
        f"a device has {limit / GIB:.0f} GiB, of which plans leave {headroom():.0%} free"
        if limit
        else "a device's memory is not known"
    )
    return (
        f"{plans.amount(found.parameters)} parameters x {a_parameter(request)} = {found.state / GIB:,.0f} GiB of state; {room}. "
        "Activations, logits and buffers need further memory. "
        "Each row allows its technique and those tried before it, and shows the layout that needs the least memory:"
    )


def _fit(found: Walk) -> Table:
    drawn = plans.columns("with", "layout", "GiB", "")
    _to_the_left(drawn)
    for row in found.fit:
        drawn.add_row(row.technique.name, _layout(row.choice), *_held(row), row.technique.does if not row.why else row.why)
    return drawn


def _held(row: Row) -> tuple[str]:
    if row.choice is None:
        return ("-",)
    estimate = row.choice.estimate
    return (f"{estimate.memory.total / GIB:,.1f}{'' if estimate.fits else '!'}",)


def _batch_words(found: Walk, first: Candidate) -> str:
    train, data = found.request.run.train, first.plan.data
    each = train.global_batch // data
    return (
        f"{train.global_batch:,} sequences of {train.seq_len:,} tokens are {train.global_batch * train.seq_len:,} tokens a step. "
        f"{data:,} data rank{'s' * (data > 1)} read {each:,} sequences each, in microbatches whose gradients are added. Apart "
        f"from rounding, the result does not depend on the size of microbatches. Larger microbatches compute faster, but need more "
        f"memory (! marks too much), and leave pipeline ranks idle for longer:"
    )


def _batch(found: Walk) -> Table:
    drawn = plans.columns("sequences", "microbatches", "step", "GiB")
    for one in found.batch:
        estimate = one.estimate
        held = f"{estimate.memory.total / GIB:,.1f}{'' if estimate.fits else '!'}"
        drawn.add_row(str(one.plan.microbatch), f"{rounds(one.plan, found.request):,}", plans.seconds(estimate.time.step), held)
    return drawn


def _throughput_words(found: Walk) -> str:
    return (
        "The first row allows only the techniques that made the model fit. Each further row allows one more, and shows the fastest "
        "layout; techniques that gain nothing are left out:"
    )


def _throughput(found: Walk) -> Table:
    drawn = plans.columns("with", "layout", "tokens/s", "MFU", "step", "GiB", "gain")
    for number, row in enumerate(found.throughput):
        if row.choice is None:
            continue
        estimate = row.choice.estimate
        rate = plans.amount(estimate.tokens_per_second * row.choice.plan.ranks)
        gain = f"{row.gain:.1%}" if number else ""
        figures = rate, f"{estimate.mfu:.1%}", plans.seconds(estimate.time.step), f"{estimate.memory.total / GIB:.1f}", gain
        drawn.add_row(row.technique.name, _layout(row.choice), *figures)
    return drawn


def _layout(choice: Candidate | None) -> str:
    if choice is None:
        return "-"
    return short(choice.plan) + (f" ({plans.recomputed(choice.plan)})" if choice.plan.recompute != "none" else "")


def _to_the_left(drawn: Table) -> None:
    drawn.columns[-1].justify, drawn.columns[-1].no_wrap = "left", False
