"""Settings that `megalith train --branch` writes to the [branch] table of a run that begins from another run's checkpoint. No torch."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from megalith import epochs
from megalith.checkpoint.folder import DamagedCheckpointError, find_complete
from megalith.spec import files
from megalith.spec.problem import Problem, SpecErrors
from megalith.spec.toml import literal


def settings(checkpoint: Path, decay: int, folder: Path | None) -> tuple[str, ...]:
    """Return the settings of a branch whose learning rate decays over `decay` updates. `checkpoint`: a checkpoint's folder, or a run folder
    (its newest checkpoint).

    `folder`: the branch's run folder. If `folder` already holds this branch, returns its saved settings, because the original run may now
    have a newer checkpoint, or have deleted the branch's checkpoint. Raises SpecErrors if the checkpoint does not exist or is damaged.
    """
    if begun := _begun(checkpoint, decay, folder):
        return begun
    try:
        path, manifest = find_complete(checkpoint)
        position, saved = manifest.meta["position"], manifest.meta["spec"]
    except (OSError, KeyError, DamagedCheckpointError) as fault:
        reason = f"is not a checkpoint that a branch can begin from: {str(fault).rstrip('.')}"
        way_out = "Give the folder of a checkpoint, such as runs/first/checkpoints/step-00000100."
        raise SpecErrors([Problem("error", "--branch", str(checkpoint), reason, way_out, "command line")]) from fault
    updates = position.get("updates", position["step"])
    values = {"checkpoint": str(path.resolve()), "updates": updates, "samples": position["samples"], "decay": decay}
    return _written({**values, "steps": _steps_of(saved)}, updates + decay)


def _steps_of(saved: dict[str, Any]) -> int:
    """Return the length of a run's learning rate schedule in steps; for a branch, the length of the original run's schedule."""
    return (saved.get("branch") or {}).get("steps") or saved["train"]["steps"]


def _begun(checkpoint: Path, decay: int, folder: Path | None) -> tuple[str, ...]:
    """Return the saved settings of the branch in `folder` if it began from `checkpoint` with the same decay; otherwise an empty tuple."""
    with suppress(OSError, SpecErrors):
        if folder is not None:
            spec = files.read(epochs.newest(folder, files.FILE), saved=True).resolved.spec
            branch = spec.branch
            if branch is not None and branch.decay == decay and Path(branch.checkpoint).is_relative_to(checkpoint.resolve()):
                return _written(branch.model_dump(), branch.updates + decay)
    return ()


def _written(values: dict[str, Any], steps: int) -> tuple[str, ...]:
    return (*(f"branch.{name}={literal(value)}" for name, value in values.items()), f"train.steps={steps}")
