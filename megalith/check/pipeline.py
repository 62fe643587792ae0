"""Rules about the pipeline: its stages, its schedule and its bubble."""

from contextlib import suppress

from megalith.check.case import Case, Found, advice, error, format_bytes
from megalith.check.memory import state_bytes
from megalith.schedule.table import FILE, SCHEDULES, Kind, kind, schedule_problems
from megalith.spec.base import AbsentError


def every_stage_has_a_block(case: Case) -> Found:
    """Every stage has a block, because a stage without a block only passes messages on, unless it has the embedding or the head."""
    layers, stages, blocks = case.plan.layers, case.plan.stages, case.spec.model.layers
    if stages > blocks and not (layers and case.plan.places(blocks)):
        reason = f"with chunks = {case.plan.chunks} makes {stages} stages, but the model has {blocks} blocks"
        way_out = f"Use pipeline x chunks <= {blocks}"
        way_out += f", or plan.layers = {[0, *(1,) * blocks, 0]}." if stages == blocks + 2 else "."
        yield error("plan.pipeline", case.plan.pipeline, reason, way_out)
    if layers and 0 in layers[1:-1]:
        reason = f"leaves stage {layers.index(0, 1)} without a block: it would only pass messages on"
        way_out = "Use 0 only for the first and the last stage, which have the embedding and the head."
        yield error("plan.layers", layers, reason, way_out)


def layers_fill_the_stages(case: Case) -> Found:
    """`plan.layers` names every stage and places every block."""
    layers, blocks = case.plan.layers, case.spec.model.layers
    if layers is None:
        return
    if sum(layers) != blocks:
        yield error("plan.layers", layers, f"places {sum(layers)} blocks, but the model has {blocks}", _split(case))
    stages = case.plan.stages
    if len(layers) != stages:
        yield error("plan.layers", layers, f"names {len(layers)} stages, but pipeline x chunks makes {stages}", _split(case))


def _split(case: Case) -> str:
    """Return the advice to split the blocks evenly."""
    with suppress(AbsentError):
        stages, blocks = case.plan.stages, case.spec.model.layers
        share, more = divmod(blocks, stages)
        if share:  # else there are too many stages, which another rule reports
            return f"Use {[share + (s < more) for s in range(stages)]}, for example, or remove plan.layers."
    return "Give each stage its number of blocks, or remove plan.layers."


def schedule_is_there(case: Case) -> Found:
    """The schedule is in the table of schedules, or comes from a file."""
    name = case.plan.schedule
    if not name.startswith(FILE) and name not in SCHEDULES:
        for problem in schedule_problems(name, ranks=1, microbatches=1, chunks=1):
            yield error("plan.schedule", problem.value, problem.reason, problem.way_out)


def schedule_can_be_built(case: Case) -> Found:
    """The schedule supports the plan's numbers of ranks, microbatches and chunks, and its ZeRO stage."""
    plan = case.plan
    fields = {"ranks": "pipeline", "microbatches": "microbatch"}
    known = plan.schedule.startswith(FILE) or plan.schedule in SCHEDULES
    if known and case.spec.microbatches:  # else the batch does not divide, which another rule reports
        for problem in schedule_problems(
            plan.schedule, ranks=plan.pipeline, microbatches=case.spec.microbatches, chunks=plan.chunks, zero=plan.zero
        ):
            yield error(f"plan.{fields.get(problem.field, problem.field)}", problem.value, problem.reason, problem.way_out)
    chunks = kind(plan.schedule).chunks
    if chunks.least <= plan.chunks < chunks.usual and plan.pipeline > 1:
        reason = f'interleaves nothing with schedule = "{plan.schedule}"'
        yield advice("plan.chunks", plan.chunks, reason, f"Use chunks = {chunks.usual} or more.")


def zero_bubble_is_worth_its_memory(case: Case) -> Found:
    """A plan with ZB-H2 uses post-validation: ZB-H2 fills the bubble only if the next step begins before the global norm is known (Qi et
    al. 2024, section 4)."""
    plan = case.plan
    row = kind(plan.schedule)
    if row.needs_post_validation and not plan.post_validation and plan.pipeline > 1:
        most = row.in_flight(plan.pipeline, 2 * plan.pipeline)
        reason = f"keeps up to {most} microbatches in flight, but still waits for all ranks at the end of each step"
        ways = [] if case.spec.sites else ["plan.post_validation = true"]  # `sites_stay_together` refuses it
        if row.instead:
            ways.append(f'schedule = "{row.instead}", which keeps half as many microbatches in flight')
        yield advice("plan.schedule", plan.schedule, reason, f"Use {', or '.join(ways) or 'another schedule'}.")
    if plan.compile and row.splits_backward:
        reason = (
            "compiles each block as a whole, so weight gradients cannot be deferred, "
            f'but schedule = "{plan.schedule}" defers weight gradients'
        )
        yield advice("plan.compile", True, reason, "Use compile = false, or a schedule that defers no weight gradients.")


def second_copies_are_worth_it(case: Case) -> Found:
    """DualPipe is seldom worth its memory: it keeps every stage twice, for a bubble hardly smaller than DualPipeV's on the same ranks
    (Sea AI Lab, "cut in half")."""
    plan, ranks, microbatches = case.plan, case.plan.pipeline, case.spec.microbatches
    row = kind(plan.schedule)
    if not row.bidirectional or row.instead is None or ranks == 1 or case.model is None:
        return
    half = kind(row.instead)
    other = plan.model_copy(update={"schedule": row.instead, "chunks": half.chunks.usual})
    if len(case.model.blocks) < other.stages:
        return
    reason = f"keeps a second copy of each stage, about {format_bytes(state_bytes(case, plan) - state_bytes(case, other))} a rank"
    own, theirs = (_bubble(each, ranks, microbatches, chunks) for each, chunks in ((row, plan.chunks), (half, other.chunks)))
    if own is not None and theirs is not None:
        reason += f"; each rank idles for {own:.1%} of its useful time; with {row.instead!r} it idles for {theirs:.1%}"
    way_out = (
        f"Use schedule = {row.instead!r} and chunks = {other.chunks}, unless its doubled messages between stages cost more "
        "time than it saves."
    )
    yield advice("plan.schedule", plan.schedule, reason, way_out)


def bubble_is_small(case: Case) -> Found:
    """There are many more microbatches m than stages p: ranks idle for (p - 1) / m of the useful time (Narayanan et al. 2021)."""
    plan, microbatches, row = case.plan, case.spec.microbatches, kind(case.plan.schedule)
    if plan.pipeline == 1 or not 0 < microbatches < 4 * plan.pipeline or row.splits_backward:
        return
    bubble = _bubble(row, plan.pipeline, microbatches, plan.chunks)
    if bubble is None:
        return
    whole = bubble / (1 + bubble)
    reason = f"with {microbatches} microbatches leaves each rank idle for {whole:.1%} of a step ({bubble:.1%} of its useful time)"
    more = -(-4 * plan.pipeline * case.spec.train.global_batch // microbatches)
    way_out = f"Use train.global_batch >= {more}, a smaller microbatch or fewer stages."
    yield advice("plan.pipeline", plan.pipeline, reason, way_out)


def tied_weights_stay_together(case: Case) -> Found:
    """A pipeline with tied embeddings keeps the matrix at both ends, which exchange its gradient."""
    model = case.spec.model
    if model.tied and case.plan.pipeline > 1:
        size = format_bytes(4 * model.vocab * model.dim // case.plan.tensor)
        reason = f"with pipeline = {case.plan.pipeline} keeps the embedding at both ends, which exchange {size} of gradients in every step"
        yield advice(
            "model.tied", True, reason, "Use tied = false, or no pipeline, if these gradients are large compared with the model."
        )


def _bubble(row: Kind, ranks: int, microbatches: int, chunks: int) -> float | None:
    """Return the idle time over the useful time, if input gradients and weight gradients each take as long as a forward and messages take
    no time. None if the schedule has no closed form."""
    idle = None if row.idle is None else row.idle(ranks, microbatches, chunks, 2.0)
    return None if idle is None else idle / (3 * microbatches)
