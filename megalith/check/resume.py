"""What a run may change when it is resumed."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from megalith.check.case import Found, error
from megalith.spec.plan import Plan
from megalith.spec.problem import Problem
from megalith.spec.run import RunSpec
from megalith.spec.toml import dotted, literal
from megalith.spec.validate import leaves

MAY_CHANGE: dict[str, str] = {
    "name": "a label",
    "cluster": "what MFU is measured against",
    "plan": "where the work happens, never its result (but see other_sets)",
    "data.path": "where the data lies; that it is the same data is checked by its manifest's digest",
    "data.copies": "the same",
    "train.steps": "a run may be made longer",
    "stability": "how a step whose numbers cannot be used is answered from now on",
    "loss_scale": "how gradients that overflow are answered from now on",
    "train.device": "where the work happens",
    "validation": "looks at the weights and leaves them as they are",
    "checkpoint": "the same",
    "log": "what is written besides the event log",
    "launch": "ranks and their limits",
    "fleet": "how faults are met",
}
"""What may differ when a run is resumed, and why: keys, or whole tables."""


def check_resume(
    saved: RunSpec, asked: RunSpec, *, provenance: Mapping[str, str] | None = None, checkpoint: str = ""
) -> list[Problem]:
    """What would make the run `asked` for another one than the `saved` run it is to go on with; empty when it may.

    `checkpoint`: the one that says what was saved, where that is not the run folder's own file.
    """
    before = {dotted(leaf.path): leaf.value for leaf in leaves(saved)}
    now = {dotted(leaf.path): leaf.value for leaf in leaves(asked)}
    changed = [name for name in dict.fromkeys([*now, *before]) if now.get(name) != before.get(name)]
    reason = "the run in this folder has {}, and would no longer be the same run"
    way_out = "Set it back, or start another run with --run-dir."
    another = (
        "Set it back, or start another run with --run-dir and train.init_from = this run's checkpoints: the weights go with it, the "
        "optimizer's state does not."
    )
    if checkpoint:
        reason = f"{checkpoint} was saved by a run with {{}}, and is not this run's"
        way_out = (
            "Set it back, move that checkpoint away, or start another run with --run-dir (train.init_from takes its weights)."
        )
        another = way_out
    found = [
        error(name, now.get(name), reason.format(literal(before.get(name))), another if name == "optimizer.kind" else way_out)
        for name in changed
        if not {name, name.partition(".")[0]} & set(MAY_CHANGE)
    ]
    found += other_sets(saved, asked.plan, "plan")
    return [replace(problem, source=(provenance or {}).get(problem.key, "")) for problem in found]


def check_checkpoint(
    checkpoint: str, meta: Mapping[str, Any], asked: RunSpec, *, provenance: Mapping[str, str] | None = None
) -> list[Problem]:
    """What makes a checkpoint that says `meta` of itself another run's than the one `asked` for; empty when that may go on from it."""
    try:
        saved = RunSpec.model_validate(meta["spec"])
    except (KeyError, ValidationError) as fault:
        why = (
            f"{dotted(map(str, fault.errors()[0]['loc']))}: {fault.errors()[0]['msg']}"
            if isinstance(fault, ValidationError)
            else "none"
        )
        reason = f"holds no description of a run that this version can read ({why})"
        way_out = "Move it away, or start another run with --run-dir (train.init_from takes its weights)."
        return [error(checkpoint, None, reason, way_out)]
    return check_resume(saved, asked, provenance=provenance, checkpoint=checkpoint)


def other_sets(run: RunSpec, plan: Plan, name: str) -> Found:
    """Why a run could not go on under another plan, called `name`: its balance loss would be over other sets of tokens."""
    before, now = run.plan.set_sequences, plan.set_sequences
    if before != now and run.model.build().balances_microbatches:
        field = "data" if plan.data != run.plan.data else "microbatch"
        reason = (
            f"with {name}.data x {name}.microbatch = {now} balances experts over sets of {now} sequences, and the run over sets of "
            f"{before}: it would no longer be the same run"
        )
        way_out = (
            f'Use {name}.data x {name}.microbatch = {before}. Runs with model.balance_set = "sequence" are free to change it.'
        )
        yield error(f"{name}.{field}", getattr(plan, field), reason, way_out)
