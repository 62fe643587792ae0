"""Rules about what is installed: the compiler, and packages that are extras."""

import os
import re
import shlex
import shutil
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from megalith.check.case import Case, Found, advice, error
from megalith.spec.alerts import ENVIRONMENT, address_of
from megalith.spec.numbers import is_narrow
from megalith.spec.run import SERVED, SINKS

COMPILES = (2, 15)
"""The first PyTorch release seen to give right gradients for compiled blocks that are split among ranks, or whose products have rounded
factors; 2.11 gives wrong ones."""


VOLTA = 7.0
"""Compute capability of a V100. From PyTorch 2.11 on, of its builds only those for CUDA 12.6 have kernels for it (pytorch/pytorch
RELEASE.md, "PyTorch CUDA Support Matrix"); CUDA 13 begins at 7.5."""
VOLTA_CUDA = (12, 6)


def torch_has_the_kernels(case: Case) -> Found:
    """PyTorch's build has kernels for the cluster's devices."""
    device = case.cluster.accelerator if case.cluster else None
    if device is None or device.compute_capability != VOLTA or (cuda := cuda_of_torch()) is None or cuda <= VOLTA_CUDA:
        return
    reason = (
        f"names {device.name}, compute capability {VOLTA}, and PyTorch {version('torch')} here is built for CUDA "
        f"{'.'.join(map(str, cuda))}, without kernels for it: from 2.11 on, only builds for CUDA 12.6 have them"
    )
    way_out = "Where it trains, install that build: pip install torch --index-url https://download.pytorch.org/whl/cu126."
    yield advice("cluster", case.spec.cluster, reason, way_out)


def cuda_of_torch() -> tuple[int, ...] | None:
    """Return the CUDA version that the installed PyTorch is built for, read from disk; None if it has none."""
    found = find_spec("torch")  # imports nothing
    if found is None or found.origin is None:
        return None
    with suppress(OSError):
        text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
        if numbers := re.search(r"^cuda\b[^=]*=\s*'(\d+)\.(\d+)", text, re.MULTILINE):
            return int(numbers[1]), int(numbers[2])
    return None


def transfers_can_hide(case: Case) -> Found:
    """Overlapped transfers are started and awaited between products. A compiler would have to see through that."""
    plan = case.plan
    if plan.overlap_tensor > 1 and plan.compile:
        reason = "with compile = true, which compiles each block as a whole"
        yield error("plan.overlap_tensor", plan.overlap_tensor, reason, "Use one or the other.")


def compiler_keeps_collectives(case: Case) -> Found:
    """Older compilers silently drop the sums over tensor ranks from backward (tests/promises/test_any_plan.py)."""
    plan = case.plan
    split = next((axis for axis in ("tensor", "context", "expert") if getattr(plan, axis) > 1), None)
    if not plan.compile or split is None:
        return
    yield from _compiles(f"plan.{split} = {getattr(plan, split)}")


def compiler_keeps_roundings(case: Case) -> Found:
    """Older compilers give wrong gradients where factors are rounded: in layers whose sizes the device cannot multiply in 8 bits."""
    if case.plan.compile and case.spec.precision.multiply == "codes" and is_narrow(case.spec.train.precision):
        yield from _compiles('precision.multiply = "codes"')


def _compiles(setting: str) -> Found:
    """Compile only with a version of PyTorch that compiles right what a setting asks for."""
    installed = version("torch")  # read from disk
    if tuple(map(int, installed.split(".")[:2])) < COMPILES:
        reason = f"with {setting} on torch {installed}, a version that compiles such blocks to wrong gradients"
        yield error("plan.compile", True, reason, f"Use torch {'.'.join(map(str, COMPILES))}, or compile = false.")


def sinks_are_there(case: Case) -> Found:
    """Tools that the run's numbers are sent to are installed."""
    log = case.spec.log
    asked = [name for name in SINKS if getattr(log, name)]
    for name in asked:
        if case.files and find_spec(name) is None:
            way_out = f'Install the extra "{name}" (uv sync --extra {name}), or set log.{name} = false.'
            yield error(f"log.{name}", True, f"the package {name} is not installed", way_out)
    if log.online and not set(asked) & set(SERVED):
        yield advice(
            "log.online", True, "and the run logs to no tool that has a server", f"Set one of log.{', log.'.join(SERVED)}."
        )


def alerts_can_be_sent(case: Case) -> Found:
    """The address is valid, and the command that sends alerts exists on this machine."""
    alerts = case.spec.alerts
    if alerts.post is not None and not alerts.post.startswith(ENVIRONMENT):
        try:
            address_of(alerts.post, {})
        except ValueError as error_:
            yield error("alerts.post", alerts.post, str(error_), "Write https://..., or env:NAME for an address in a variable.")
    elif alerts.post is not None and case.files:
        try:
            address_of(alerts.post, os.environ)
        except ValueError as error_:
            yield advice("alerts.post", alerts.post, f"{error_} on this machine", "Set the variable where the run is started.")
    if case.files and alerts.run:
        with suppress(ValueError):  # quotes that do not end: the shell says it
            program = (shlex.split(alerts.run) or [""])[0]
            if program and program.isprintable() and "=" not in program and shutil.which(program) is None:
                way_out = "Install it, or write the path of a program."
                yield advice("alerts.run", alerts.run, f"no program {program} is found on this machine", way_out)
