"""Rules about a run's response to spikes."""

from megalith.check.case import Case, Found, advice, error
from megalith.spec.run import ANSWERS


def answers_are_a_ladder(case: Case) -> Found:
    """Each response is listed once, from the mildest to the most severe, and the run watches its loss."""
    stability = case.spec.stability
    ladder = tuple(answer for answer in ANSWERS if answer in stability.answers)
    if stability.answers != ladder:
        reason = "must list each response once, beginning with the mildest"
        yield error("stability.answers", list(stability.answers), reason, f"Use {list(ladder)}.")
    if stability.answers and not stability.watch:
        reason = "has responses to spikes, but stability.watch = false detects no spikes"
        yield error("stability.answers", list(stability.answers), reason, "Use stability.watch = true, or an empty list.")


def rewinds_have_copies(case: Case) -> Found:
    """A run rewinds to copies in memory, or else to checkpoints."""
    spec = case.spec
    if "rewind" not in spec.stability.answers:
        return
    on_disk = case.plan.state.optimizer == "disk"  # such a run makes no copies in memory
    in_memory = spec.fleet.recover and spec.fleet.memory_every > 0 and not on_disk
    copies = "" if on_disk else "Use fleet.recover = true and fleet.memory_every = 1"
    if not in_memory and not spec.checkpoint.every:
        reason = "includes rewinds, but the run has nothing to rewind to: no copies in memory, and no checkpoint before the end"
        way_out = f"{copies}, or set checkpoint.every." if copies else "Set checkpoint.every."
        yield error("stability.answers", list(spec.stability.answers), reason, way_out)
    elif not in_memory:
        reason = f"includes rewinds, but the run can only rewind to checkpoints, one every {spec.checkpoint.every} steps"
        way_out = (
            f"{copies}: copies for rewinds are made in memory every stability.keep_every steps."
            if copies
            else "Save more often, or keep the state on the device or the host, with fleet.recover = true and fleet.memory_every = 1: "
            "state on disk has no copies in memory."
        )
        yield advice("stability.answers", list(spec.stability.answers), reason, way_out)
