"""Resources that one machine lacks for a run: devices, memory, processors. The run itself may suit other machines."""

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megalith.check.case import Case, Found, advice, error, format_bytes
from megalith.check.memory import ROOM, outside_bytes, rank_bytes, state_bytes, state_on_disk, total_state_bytes
from megalith.check.remedies import cheapest
from megalith.check.retain import FREE_SPACE, files_in, kept_on_disk
from megalith.machine.capacity import Machine
from megalith.spec.base import AbsentError
from megalith.spec.cluster import CALIBRATE
from megalith.spec.plan import RetainSpec, StateSpec
from megalith.spec.problem import Problem, Severity
from megalith.spec.run import RunSpec


@dataclass(frozen=True)
class Here:
    """A run, a machine, and the number of ranks that would start on it."""

    case: Case
    machine: Machine
    count: Callable[[RunSpec], int]
    processor: str = ""
    """The name of the machine's processor; empty if not queried."""

    @property
    def ranks(self) -> int:
        return self.count(self.case.spec)

    @property
    def on_gpus(self) -> bool | None:
        """True if the ranks compute on GPUs of this machine; None if this is unknown."""
        device = self.case.spec.train.device
        if device != "auto":
            return device == "cuda"
        return None if self.machine.gpus is None else self.machine.gpus > 0


def all_ranks(spec: RunSpec) -> int:
    """Return the number of ranks that `megalith train` starts on a single machine: the ranks of all sites, or of the site
    that `sites.site` names."""
    if spec.sites is None or spec.sites.site is not None:
        return spec.ranks
    return sum(plan.ranks for plan in spec.sites.plans) or spec.sites.count * spec.ranks


def node_ranks(spec: RunSpec) -> int:
    """Return the number of ranks that an agent starts on its machine."""
    return max(1, spec.ranks // spec.fleet.nodes)


def check_here(
    spec: RunSpec,
    machine: Machine,
    *,
    count: Callable[[RunSpec], int] = all_ranks,
    severity: Severity = "advice",
    provenance: Mapping[str, str] | None = None,
    processor: str = "",
    folder: Path | None = None,
) -> list[Problem]:
    """Return a problem for each resource that `machine` lacks for the ranks that would start on it; with `severity` = "advice", all of them
    are advice.
    `processor`: name of the machine's processor, which is compared with the processor of measured figures. `folder`: the run folder; None:
    the current directory stands for it."""
    here = Here(Case(spec, None, files=False, folder=folder), machine, count, processor)
    found: list[Problem] = []
    for rule in RULES:
        with suppress(AbsentError):
            found += rule(here)
    origins = provenance or {}
    return [
        replace(each, severity="advice" if severity == "advice" else each.severity, source=origins.get(each.key, ""))
        for each in found
    ]


def devices_are_here(here: Here) -> Found:
    """Each rank has a GPU of its own, or all ranks compute on the CPU."""
    device, gpus, ranks = here.case.spec.train.device, here.machine.gpus, here.ranks
    if gpus is None or device == "cpu":
        return
    if gpus < ranks and (device == "cuda" or gpus > 0):
        reason = f"{_counted(ranks, 'rank')} would start on this machine, but it has {_counted(gpus, 'GPU')}"
        yield error(
            "train.device", device, reason, 'Start one rank for each GPU (with torchrun or srun on more machines), or use "cpu".'
        )
    elif gpus == 0 and here.case.cluster is not None and not here.case.cluster.accelerator.is_processor:
        reason = f"names {here.case.cluster.accelerator.name}, but this machine has no GPU, so the run would compute on the CPU"
        yield advice(
            "cluster",
            here.case.spec.cluster,
            reason,
            'Train on another machine; with train.device = "cuda" a missing GPU is an error.',
        )


def memory_holds_the_state(here: Here) -> Found:
    """The available memory holds at least weights, gradients and moments."""
    case, machine = here.case, here.machine
    if case.model is None or case.plan.data % case.plan.replicate:
        return
    if here.on_gpus:
        held, limit, where = float(state_bytes(case, case.plan)), machine.gpu_memory, "each GPU of this machine"
        ranks, whose = 1, "of weights, gradients and moments a rank"
    elif here.on_gpus is False:
        ranks, limit, where = here.ranks, machine.memory, machine.memory_of
        held = total_state_bytes(case, _beside(case.spec).plan) * ranks / case.plan.ranks
        whose = f"of weights, gradients and moments for {_counted(ranks, 'rank')} on this machine"
    else:
        return
    if held > limit:
        reason = f"keeps at least {format_bytes(held)} {whose}, but {where} has {format_bytes(limit)}"

        def fits(changed: RunSpec) -> bool:
            other = replace(case, spec=changed if here.on_gpus else _beside(changed))
            return ranks * rank_bytes(other) <= ROOM * limit and not (
                here.on_gpus and _outside(replace(here, case=other)) > machine.memory
            )

        way_out = cheapest(case.spec, fits, host=here.on_gpus is not False)
        or_use = "Or use" if way_out else "Use"
        yield error(
            "model.name",
            case.spec.model.name,
            reason,
            f"{way_out}{or_use} a smaller model, or more machines with torchrun or srun.",
        )


def _beside(spec: RunSpec) -> RunSpec:
    """Return the run with the host's state and activations on the device: where ranks compute on processors, both share one memory."""
    plan = spec.plan
    state = StateSpec() if plan.state.optimizer == "host" else plan.state
    retain = RetainSpec(parts=plan.retain.parts) if plan.retain.blocks == "host" else plan.retain
    return spec.model_copy(update={"plan": plan.model_copy(update={"state": state, "retain": retain})})


def memory_holds_what_leaves_gpus(here: Here) -> Found:
    """The machine's memory holds the state and the activations that leave its GPUs."""
    plan, machine = here.case.plan, here.machine
    if not here.on_gpus or here.case.model is None or plan.data % plan.replicate:
        return
    if (held := _outside(here)) > machine.memory:
        named = {"plan.state.optimizer": plan.state.optimizer, "plan.retain.blocks": plan.retain.blocks}
        key = next((key for key, value in named.items() if value == "host"), "sites.place")
        place = "device" if key == "sites.place" else "disk"
        ranks = _counted(here.ranks, "rank")
        reason = f"needs about {format_bytes(held)} for {ranks} on this machine, but {machine.memory_of} has {format_bytes(machine.memory)}"
        yield error(key, "host", reason, f'Use "{place}", or more machines with torchrun or srun.')


def folders_of_files(case: Case) -> list[tuple[str, str, float]]:
    """Return, for each kind of files that a rank keeps on disk while it trains, the key of their folder, its value, and the least number of
    bytes."""
    plan = case.plan
    if case.model is None or plan.data % plan.replicate:
        return []
    found = (
        ("plan.state.folder", plan.state.folder, state_on_disk(case)),
        ("plan.retain.folder", plan.retain.folder, kept_on_disk(case)),
    )
    return [one for one in found if one[2]]


def disks_hold_what_leaves_the_ranks(here: Here) -> Found:
    """The disk holds the files of all ranks of this machine; `check` compares those of one rank."""
    for key, folder, least in folders_of_files(here.case):
        there = files_in(here.case, folder)
        free = shutil.disk_usage(there).free
        if least <= free < here.ranks * least:
            ranks = _counted(here.ranks, "rank")
            needs, has = (
                f"{format_bytes(here.ranks * least)} for {ranks} on this machine",
                f"{there} has {format_bytes(free)} free",
            )
            reason = f"needs at least {needs}, but {has}"
            yield error(key, folder, reason, FREE_SPACE)


def _outside(here: Here) -> float:
    """Return the bytes of this machine's memory that its ranks need beside their GPUs."""
    return here.ranks * outside_bytes(here.case).memory


def processors_run_the_ranks(here: Here) -> Found:
    """Each rank has a processor: ranks that share a processor take turns."""
    ranks, processors = here.ranks, here.machine.processors
    if ranks > processors:
        reason = f"{_counted(ranks, 'rank')} would share the {_counted(processors, 'processor')} of this machine, and take turns"
        yield advice(
            "plan.data",
            here.case.plan.data,
            reason,
            f"The run works, but slowly. On this machine, use a plan of at most {processors} ranks.",
        )


def figures_are_of_this_machine(here: Here) -> Found:
    """Measured figures only predict runs on the same processor, shared by the same number of ranks."""
    found = here.case.cluster.measured if here.case.cluster is not None else None
    if found is None or not found.in_turn:
        return
    if here.processor not in ("", found.processor):
        reason = (
            f"was measured on {found.processor}, but this machine has {here.processor}: predictions hold for the measured machine"
        )
        yield advice("cluster", here.case.spec.cluster, reason, f"{CALIBRATE} --ranks {here.ranks} here.")
    elif here.ranks != found.ranks:
        reason = (
            f"was measured while {_counted(found.ranks, 'rank')} computed, but the run starts {_counted(here.ranks, 'rank')} "
            "here: each rank has a different share of the processor than when measured, so the predictions do not apply"
        )
        yield advice("cluster", here.case.spec.cluster, reason, f"{CALIBRATE} --ranks {here.ranks} here.")


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


RULES: tuple[Callable[[Here], Found], ...] = (
    devices_are_here,
    memory_holds_the_state,
    memory_holds_what_leaves_gpus,
    disks_hold_what_leaves_the_ranks,
    processors_run_the_ranks,
    figures_are_of_this_machine,
)
