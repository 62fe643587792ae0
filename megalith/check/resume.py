"""Check of a run file against the run that it resumes, or branches from."""

import os
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megalith.check.case import Found, error
from megalith.check.moments import crossings
from megalith.spec.base import AbsentError
from megalith.spec.phases import DATA, RAMP, Phases, during
from megalith.spec.plan import Plan
from megalith.spec.problem import Problem
from megalith.spec.run import RunSpec
from megalith.spec.sites import own_batch, part_of_batch
from megalith.spec.toml import dotted, literal
from megalith.spec.validate import differing, flat

MAY_CHANGE: dict[str, str] = {
    "name": "a label",
    "cluster": "the reference of MFU",
    "plan": "the ranks that do the work; the result stays the same, unless `other_sets` yields a reason",
    "data.path": "the place of the data; an equal digest of the manifest shows that the data is the same",
    "data.copies": "the same",
    "train.steps": "the run may become longer",
    "stability": "the future response to a step with unusable numbers",
    "loss_scale": "the future response to gradients that overflow",
    "train.device": "where the work happens",
    "precision.watch_every": "comparisons, which do not change gradients",
    "precision.auto": "the blocks that may become wide in future steps",
    "optimizer.master": "the future form of the master weights; checkpoints have master weights in fp32",
    "optimizer.moments": "the future format of moments; moments of the checkpoint are converted",
    "optimizer.moment_block": "the same",
    "optimizer.moment_least": "the same",
    "validation": "measurements of the validation loss, which do not change weights",
    "checkpoint": "the same",
    "log": "output besides the event log",
    "alerts": "the people who are notified",
    "launch": "time limits and threads of ranks",
    "fleet": "the response to faults",
    "sites.addresses": "the addresses of sites",
    "sites.count": "the number of sites in future merges",
    "sites.site": "the site that a command trains",
    "sites.decides": "the site that can continue without the other sites",
    "sites.each": "the plans of sites, and the shares of samples that sites get after the next merge",
    "sites.grace": "the time that a merge waits for a site",
    "sites.place": "the place of anchors, velocities and rounding errors",
    "sites.link": "the link that predictions assume",
    "sites.link.megabits": "the same",
    "sites.link.milliseconds": "the same",
    "sites.tls": "the encryption of connections between sites",
    "sites.tls.certificate": "the same",
    "sites.tls.key": "the same",
    "sites.tls.authority": "the same",
}
"""Keys, or whole tables, whose values may differ when a run is resumed -> a description of what these values set."""


IDLE = ("sites.nesterov", "sites.error_feedback", "sites.feedback_decay")
"""Keys that have no effect if sites exchange gradients. Earlier versions let them be set nevertheless."""


def check_resume(
    saved: RunSpec,
    asked: RunSpec,
    *,
    samples: int | None = None,
    deal: Mapping[str, Any] | None = None,
    provenance: Mapping[str, str] | None = None,
    checkpoint: str = "",
    may: Collection[str] = (),
) -> list[Problem]:
    """Return the changes because of which the run `asked` cannot resume the run `saved`; empty if it can. `samples`: the number of
    samples consumed. Phases that begin at sample number `samples` or later may change; if None, no phase may change. `deal`: the record of
    how the sites divide samples now (`deal_in`), which is that of an earlier number of sites until the next merge. `checkpoint`: the
    checkpoint that describes the saved run, if the run folder's own run file does not describe it. `may`: further keys that may differ.
    Nothing is said of values that `asked` lacks because they are invalid."""
    changes = changed_keys(saved, asked)
    if saved.sites is not None and saved.sites.exchanges_gradients:
        may = (*may, *IDLE)
    reason = "the run in this folder has {}; another value would make another run"
    way_out = "Restore the value, or start another run with --run-dir."
    another = (
        "Restore the value, or start another run with --run-dir and train.init_from = this run's checkpoints: the new run "
        "begins with their weights, but not with the optimizer's state."
    )
    if checkpoint:
        reason = f"{checkpoint} was saved by a run with {{}}, so this run cannot resume from it"
        way_out = (
            "Restore the value, move that checkpoint away, or start another run with --run-dir (train.init_from takes the "
            "checkpoint's weights)."
        )
        branch = getattr(asked, "branch", None)  # absent if it is invalid
        if branch is not None and getattr(branch, "checkpoint", "") == checkpoint:
            reason = f"the branch begins from {checkpoint}, which was saved by a run with {{}}"
            way_out = "Restore the value, or use train.init_from, which takes only the checkpoint's weights, instead of a branch."
        another = way_out
    found = [
        error(name, now, reason.format(literal(before)), another if name == "optimizer.kind" else way_out)
        for name, (before, now) in changes.items()
        if not {name, name.partition(".")[0]} & {*MAY_CHANGE, *may, RAMP, DATA}
    ]
    with suppress(AbsentError):  # values that cannot be read are changes, reported above, or are invalid
        if not found:
            found += _altered_phases(saved, asked, samples, way_out)
        found += other_sets(saved, asked.plan, "plan")
        found += _other_moments(saved, asked)
        found += _another_number(saved, asked, way_out)
        found += _released_in_parts(saved, asked, samples, deal)
    return [replace(problem, source=(provenance or {}).get(problem.key, "")) for problem in found]


def changed_keys(saved: RunSpec, asked: RunSpec) -> dict[str, tuple[Any, Any]]:
    """Return the keys whose values differ between two runs, each with both values; None for a key that a run does not have.
    Values that `asked` lacks because they are invalid are left out."""
    before, now = flat(saved), flat(asked)
    names = [name for name in differing(now, before) if not _absent(asked, name)]
    if "train.init_from" in names and is_same_start(saved.train.init_from, asked.train.init_from):
        names.remove("train.init_from")
    return {name: (before.get(name), now.get(name)) for name in names}


def is_same_start(saved: str | None, asked: str | None) -> bool:
    """True if the checkpoint `saved`, from whose weights a run began, is `asked` or in it: a run records the one checkpoint that it took
    from a folder."""
    if saved is None or asked is None:
        return saved == asked
    named = Path(os.path.abspath(saved)).is_relative_to(os.path.abspath(asked))
    return named or Path(saved).resolve().is_relative_to(Path(asked).resolve())


def _absent(spec: RunSpec, name: str) -> bool:
    """True if a spec lacks this value, or its table, because the user gave an invalid one."""
    value: Any = spec
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AbsentError:
            return True
        except AttributeError:  # a table that is not set, or a mapping
            return False
    return False


def _another_number(saved: RunSpec, asked: RunSpec, way_out: str) -> Found:
    """Yield an error if the number of sites that exchange gradients has changed: a new site would lack the optimizer's state."""
    was, now = saved.sites, asked.sites
    if was is not None and now is not None and now.exchanges_gradients and was.count != now.count:
        reason = (
            f'the run in this folder has {was.count}, and with sites.method = "data-parallel" '
            "a new site would lack the optimizer's state"
        )
        yield error("sites.count", now.count, reason, way_out)


def _released_in_parts(saved: RunSpec, asked: RunSpec, samples: int | None, deal: Mapping[str, Any] | None) -> Found:
    """Yield an error if the number of sites or their shares have changed, and this site's part of a step, which stays until the next merge,
    takes several microbatches: gradients that are released inside the backward would be complete only after the last one."""
    was, now = saved.sites, asked.sites
    if was is None or now is None or now.exchanges_gradients or not asked.plan.state.release:
        return
    count, shares = (was.count, was.shares) if deal is None else (deal["count"], deal.get("shares", ()))
    if (now.site or 0) >= count:
        return
    phase = Phases.of(saved).at(samples or 0)
    before, after = part_of_batch(phase.global_batch, now.site or 0, count, shares), own_batch(during(asked, phase))
    if before > after > 0:
        reason = (
            f"needs steps of {after} samples on this site, but until the next merge this site reads {before} samples a step, as before "
            "the number or the shares of sites changed"
        )
        way_out = "Use plan.state.release = false, or the number and the shares of before, until the run has made a merge."
        yield error("plan.state.release", True, reason, way_out)


def _other_moments(saved: RunSpec, asked: RunSpec) -> Found:
    """Yield the reasons why the run cannot read moments in another number format from its checkpoints."""
    was, now = saved.optimizer, asked.optimizer
    if was.small == now.small:
        return
    if asked.sites is not None:
        reason = f"the run in this folder has {literal(was.moments)}, and runs with sites cannot convert the moments of their checkpoints"
        yield error("optimizer.moments", now.moments, reason, "Set optimizer.moments, moment_block and moment_least back.")
    for found in crossings(saved.model.build(), asked.plan, was):
        reason = (
            f"leaves a rank {found.share} of the {found.numbers} numbers in a row of {found.name}, whose moments the checkpoint has in "
            f"blocks of {was.moment_block}: a block would lie on two ranks, and neither could read its scale"
        )
        way_out = f"Change optimizer.moments first, and plan.{found.axis} after the next checkpoint."
        yield error(f"plan.{found.axis}", getattr(asked.plan, found.axis), reason, way_out)
        return


def _altered_phases(saved: RunSpec, asked: RunSpec, samples: int | None, way_out: str) -> Found:
    """Yield an error for the first changed phase that has already begun."""
    consumed = sys.maxsize if samples is None else samples
    before, now = Phases.of(saved).begun(consumed), Phases.of(asked).begun(consumed)
    for old, new in zip_longest(before, now):
        if old is None or new is None or old.values != new.values:
            keys = [key for phase in (new, old) if phase is not None for key in reversed(phase.keys)]
            key = keys[0] if keys else DATA
            far = "" if samples is None else f": {samples:,} samples are consumed"
            was = f"a phase of {old.words} began with sample {old.first:,}{far}" if old else f"no phase began at this sample{far}"
            later = "" if samples is None else f" Phases that begin at sample {samples:,} or later may be added or changed."
            asks = None if new is None else f"from sample {new.first:,} on {new.words}"
            yield error(key, asks, f"{was}; this phase can no longer change" if old else was, f"{way_out}{later}")
            return


def check_checkpoint(
    checkpoint: str, meta: Mapping[str, Any], asked: RunSpec, *, provenance: Mapping[str, str] | None = None
) -> list[Problem]:
    """Return the reasons why the run `asked` cannot resume from a checkpoint of another run with this `meta`; empty if it can."""
    try:
        saved = RunSpec.model_validate(meta["spec"])
    except (KeyError, ValidationError) as fault:
        why = (
            f"{dotted(map(str, fault.errors()[0]['loc']))}: {fault.errors()[0]['msg']}"
            if isinstance(fault, ValidationError)
            else "none"
        )
        reason = f"has no description of its run that this version can read ({why})"
        way_out = (
            "Move the checkpoint away, or start another run with --run-dir (train.init_from takes the checkpoint's weights)."
        )
        return [error(checkpoint, None, reason, way_out)]
    deal = deal_in(meta)
    return check_resume(saved, asked, samples=consumed(meta), deal=deal, provenance=provenance, checkpoint=checkpoint)


def consumed(meta: Mapping[str, Any]) -> int | None:
    """Return the number of samples that the run of a checkpoint with this `meta` has consumed, or that its sites were assigned even if they
    returned some; None if `meta` lacks it."""
    deal = deal_in(meta)
    found = meta.get("position", {}).get("samples") if deal is None else deal["next"]
    return None if found is None else int(found)


def deal_in(meta: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the record of how sites divide samples from the `meta` of a checkpoint; None if the run has no sites."""
    return meta.get("sites", {}).get("deal")


def check_branch(meta: Mapping[str, Any], asked: RunSpec) -> list[Problem]:
    """Return the reasons why the run `asked` cannot branch from the run whose checkpoint has this `meta`; empty if it can.

    A branch keeps every value that its state and its data depend on. A branch may change the later updates of its weights."""
    branch = asked.branch
    assert branch is not None
    found = meta.get("position", {})
    there = {name: found.get(name) for name in ("updates", "samples")}
    if there != {"updates": branch.updates, "samples": branch.samples}:
        reason = (
            f"was saved after {there['updates']} updates and {there['samples']} samples, "
            f"but [branch] states {branch.updates} updates and {branch.samples} samples"
        )
        way_out = "Begin the branch with megalith train --branch, which fills in [branch]."
        return [error("branch.checkpoint", branch.checkpoint, reason, way_out)]
    try:
        saved = RunSpec.model_validate(meta["spec"])
    except (KeyError, ValidationError):
        reason = "has no description of its run that this version can read"
        return [error("branch.checkpoint", branch.checkpoint, reason, "Give another checkpoint.")]
    state = ("kind", "groups", "adaptive_clip")  # their values are part of the state
    own = {f"optimizer.{name}" for name in type(asked.optimizer).model_fields if name not in state}
    may = {
        *own,
        "branch",
        *(f"branch.{name}" for name in type(branch).model_fields),
        "train.init_from",
        "train.init_from_changes",
    }
    return check_resume(saved, asked, samples=branch.samples, checkpoint=branch.checkpoint, may=may)


def other_sets(run: RunSpec, plan: Plan, name: str) -> Found:
    """Yield the reasons why a run could not continue under another plan, called `name`: balance losses would use other sets
    of tokens, or the backward would read other numbers."""
    if run.plan.rounding != plan.rounding:
        rounded, was = (", ".join(each) or "nothing" for each in (plan.rounding, run.plan.rounding))
        reason = f"keeps {rounded} in 8 bits, but the run keeps {was} in 8 bits: this plan would make another run"
        yield error(f"{name}.retain.parts", plan.retain.parts, reason, f"Let {name} compress the same parts as the run's [plan].")
    before, now = run.plan.set_sequences, plan.set_sequences
    if before != now and run.model.build().balances_microbatches:
        field = "data" if plan.data != run.plan.data else "microbatch"
        reason = (
            f"with {name}.data x {name}.microbatch = {now} balances experts over sets of {now} sequences, but the run over "
            f"sets of {before} sequences: this plan would make another run"
        )
        way_out = (
            f'Use {name}.data x {name}.microbatch = {before}. Only runs with model.balance_set = "sequence" may change the '
            "product data x microbatch."
        )
        yield error(f"{name}.{field}", getattr(plan, field), reason, way_out)
