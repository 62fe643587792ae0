"""Rules about nodes and faults: ranks per node, verification, copies on disk, the fallback plan."""

import os
from pathlib import Path

from megalith.check.case import Case, Found, advice, divisors, error
from megalith.check.resume import other_sets
from megalith.mesh import Mesh
from megalith.spec.numbers import PRECISIONS
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.treatment import kinds


def nodes_share_the_ranks(case: Case) -> Found:
    """Every node has the same number of ranks, so that any node can take the place of another."""
    ranks, nodes = case.spec.ranks, case.spec.fleet.nodes
    if ranks % nodes:
        yield error("fleet.nodes", nodes, f"does not divide the plan's {ranks} ranks", divisors("fleet.nodes", ranks, nodes))


def fallback_is_the_same_run(case: Case) -> Found:
    """The fallback plan for fewer nodes keeps the sets of tokens over which experts are balanced."""
    if case.spec.fleet.fallback is not None and case.model is not None:
        yield from other_sets(case.spec, case.spec.fleet.fallback, "fleet.fallback")


def verification_has_a_replica(case: Case) -> Found:
    """Verification needs another replica: a rank that recomputes its own gradients only detects transient errors."""
    plan, fleet = case.plan, case.spec.fleet
    if fleet.recover and fleet.verify_every and not Mesh.of(plan).replica_shift:
        reason = (
            f"does not detect errors that a rank repeats: with plan.data = {plan.data}, "
            f"each rank only recomputes its own gradients"
        )
        once = (
            ""
            if fleet.verify == "all"
            else ', and with fleet.verify = "one" training does not use the gradients that a rank recomputes'
        )
        way_out = (
            'Use more data ranks, or verify_every = 0. fleet.verify = "all" detects one-off errors even without more data ranks.'
        )
        yield advice("fleet.verify_every", fleet.verify_every, reason + once, way_out)


def verification_repeats_bits(case: Case) -> Found:
    """Verification needs reproducible bits. On a GPU, half-precision attention adds up gradients in no fixed order."""
    train, fleet, cluster = case.spec.train, case.spec.fleet, case.cluster
    compute = PRECISIONS[train.precision].compute
    gpu = train.device == "cuda" or (cluster is not None and not cluster.accelerator.is_processor and train.device == "auto")
    if gpu and compute.width < 4 and fleet.recover and fleet.verify_every:
        reason = f"would blame healthy ranks: on GPUs, attention in {compute.name} does not give the same bits twice"
        yield error("fleet.verify_every", fleet.verify_every, reason, 'Use verify_every = 0, or train.precision = "fp32".')


def updates_can_be_repeated(case: Case) -> Found:
    """A rank that keeps a copy of another rank's state can repeat the update of this state only if the update of each element depends on
    that element alone."""
    fleet = case.spec.fleet
    if not (fleet.recover and fleet.verify_every and fleet.memory_every) or case.spec.sites is not None:  # sites keep no copies
        return
    kind = next((kind for kind in kinds(case.spec.optimizer) if OPTIMIZERS[kind].unit != "element"), None)
    if kind is not None:
        whole = OPTIMIZERS[kind].unit
        reason = (
            f"verifies gradients but no updates: an update by {kind} needs each whole {whole}, but a copy holds one rank's share"
        )
        yield advice("fleet.verify_every", fleet.verify_every, reason, 'With optimizer.kind = "adamw", updates are verified too.')
    elif case.spec.train.gradients != "fp32":
        reason = (
            'verifies gradients but no updates: an update can be repeated only from fp32 gradients, but train.gradients = "bf16"'
        )
        yield advice("fleet.verify_every", fleet.verify_every, reason, 'With train.gradients = "fp32", updates are verified too.')
    elif (master := case.spec.optimizer.master) != "fp32":
        reason = (
            f'verifies gradients but no updates: with optimizer.master = "{master}" a copy does not record the place of its weights in '
            "the whole tensors"
        )
        yield advice(
            "fleet.verify_every", fleet.verify_every, reason, 'With optimizer.master = "fp32", updates are verified too.'
        )
    elif (moments := case.spec.optimizer.moments) != "fp32":
        reason = (
            f"verifies gradients but no updates: moments are rounded to {moments} depending on their place in the whole tensor, but "
            "copies do not record this place"
        )
        yield advice(
            "fleet.verify_every", fleet.verify_every, reason, 'With optimizer.moments = "fp32", updates are verified too.'
        )


def disk_takes_copies(case: Case) -> Found:
    """Copies of the state on a node's disk are written from copies in memory, and need a writable folder."""
    fleet, sites = case.spec.fleet, case.spec.sites is not None
    if not (fleet.recover and fleet.disk_every):
        return
    if sites or case.plan.state.optimizer == "disk":
        kind = "sites" if sites else "state on disk"
        reason = f"has no effect: copies on disk are written from copies in memory, and runs with {kind} keep no copies in memory"
        way_out = "Use fleet.disk_every = 0: after a fault the run resumes from its newest checkpoint."
        yield advice("fleet.disk_every", fleet.disk_every, reason, way_out)
        return
    if not fleet.memory_every:
        reason = "writes the copies in memory to disk, but fleet.memory_every = 0 makes no copies in memory"
        yield error("fleet.disk_every", fleet.disk_every, reason, f"For example, use fleet.memory_every = {fleet.disk_every}.")
    folder = Path(fleet.disk).absolute()
    there = next(one for one in (folder, *folder.parents) if one.exists())
    if case.files and not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        wrong = "is not a folder" if not there.is_dir() else "is not writable"
        reason = f"{there} {wrong}, so no node could keep copies of the state there"
        yield error("fleet.disk", fleet.disk, reason, "Give a folder on each node's own disk, or set fleet.disk_every = 0.")
