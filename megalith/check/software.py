"""Rules about installed software: PyTorch and its compiler, packages of the extras, and the program for alerts."""

import os
import re
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
"""The first PyTorch release that was seen to give right gradients for compiled blocks that are split among ranks, or whose
products have rounded factors. PyTorch 2.11 gives wrong gradients."""


VOLTA = 7.0
"""Compute capability of a V100. From PyTorch 2.11 on, only the builds for CUDA 12.6 have kernels for the V100
(pytorch/pytorch RELEASE.md, "PyTorch CUDA Support Matrix"); CUDA 13 supports compute capability 7.5 and above."""
VOLTA_CUDA = (12, 6)
SHELL = frozenset((".", ":", "case", "cd", "command", "eval", "exec", "exit", "export", "for", "if", "read", "readonly", "set", "shift",
                   "trap", "ulimit", "umask", "unset", "until", "wait", "while"))  # fmt: skip
"""First words of a command that the shell itself executes."""


def torch_has_the_kernels(case: Case) -> Found:
    """PyTorch's build has kernels for the cluster's devices."""
    device = case.cluster.accelerator if case.cluster else None
    if device is None or device.compute_capability != VOLTA or (cuda := cuda_of_torch()) is None or cuda <= VOLTA_CUDA:
        return
    reason = (
        f"names {device.name} of compute capability {VOLTA}, but the installed PyTorch {version('torch')} is built for CUDA "
        f"{'.'.join(map(str, cuda))}, without kernels for this device: from 2.11 on, only builds for CUDA 12.6 have them"
    )
    way_out = (
        "Install a build for CUDA 12.6 where the run trains: pip install torch --index-url "
        "https://download.pytorch.org/whl/cu126."
    )
    yield advice("cluster", case.spec.cluster, reason, way_out)


def cuda_of_torch() -> tuple[int, ...] | None:
    """Return the CUDA version that the installed PyTorch is built for, read from disk; None for a build without CUDA."""
    found = find_spec("torch")  # imports nothing
    if found is None or found.origin is None:
        return None
    with suppress(OSError):
        text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
        if numbers := re.search(r"^cuda\b[^=]*=\s*'(\d+)\.(\d+)", text, re.MULTILINE):
            return int(numbers[1]), int(numbers[2])
    return None


def transfers_can_hide(case: Case) -> Found:
    """Overlapped transfers need uncompiled blocks: the trainer starts and awaits transfers between products."""
    plan = case.plan
    if plan.overlap_tensor > 1 and plan.compile:
        reason = "does not work with compile = true, which compiles each block as a whole"
        yield error("plan.overlap_tensor", plan.overlap_tensor, reason, "Use overlap_tensor = 1, or compile = false.")


def compiler_keeps_collectives(case: Case) -> Found:
    """Older compilers silently drop the sums over tensor ranks from backward (tests/promises/test_any_plan.py)."""
    plan = case.plan
    split = next((axis for axis in ("tensor", "context", "expert") if getattr(plan, axis) > 1), None)
    if not plan.compile or split is None:
        return
    yield from _compiles(f"plan.{split} = {getattr(plan, split)}")


def compiler_keeps_roundings(case: Case) -> Found:
    """Older compilers give wrong gradients in layers whose factors are rounded, because the device cannot multiply
    layers of these sizes in 8 bits."""
    if case.plan.compile and case.spec.precision.multiply == "codes" and is_narrow(case.spec.train.precision):
        yield from _compiles('precision.multiply = "codes"')


def _compiles(setting: str) -> Found:
    """Yield an error if the installed PyTorch gives wrong gradients for blocks compiled with this setting."""
    installed = version("torch")  # read from disk
    if tuple(map(int, installed.split(".")[:2])) < COMPILES:
        reason = (
            f"does not work with {setting} on torch {installed}, which computes wrong gradients in blocks compiled with this "
            "setting"
        )
        yield error("plan.compile", True, reason, f"Use torch {'.'.join(map(str, COMPILES))} or newer, or compile = false.")


def sinks_are_there(case: Case) -> Found:
    """The packages of the tools that a run logs to are installed."""
    log = case.spec.log
    asked = [name for name in SINKS if getattr(log, name)]
    for name in asked:
        if case.files and find_spec(name) is None:
            way_out = f'Install the extra "{name}" (uv sync --extra {name}), or set log.{name} = false.'
            yield error(f"log.{name}", True, f"the package {name} is not installed", way_out)
    if log.online and not set(asked) & set(SERVED):
        yield advice(
            "log.online",
            True,
            "has no effect: no tool that the run logs to has a server",
            f"Set one of log.{', log.'.join(SERVED)}.",
        )


def alerts_can_be_sent(case: Case) -> Found:
    """The address for alerts is valid, and this machine has the program that sends them."""
    alerts = case.spec.alerts
    if alerts.post is not None and not alerts.post.startswith(ENVIRONMENT):
        try:
            address_of(alerts.post, {})
        except ValueError as error_:
            yield error(
                "alerts.post",
                alerts.post,
                str(error_),
                "Write the address for alerts as https://..., or as env:NAME if the environment variable NAME has it.",
            )
    elif alerts.post is not None and case.files:
        try:
            address_of(alerts.post, os.environ)
        except ValueError as error_:
            yield advice(
                "alerts.post",
                alerts.post,
                f"{error_} on this machine",
                "Set the environment variable on the machine that starts the run.",
            )
    program = re.match(r"\s*([\w./+-]+)(?=\s|$)", alerts.run or "")  # a plain word: the shell may change any other one
    if case.files and program and program[1] not in SHELL and shutil.which(program[1]) is None:
        way_out = "Install the program, or give its full path."
        yield advice("alerts.run", alerts.run, f"this machine has no program {program[1]}", way_out)
