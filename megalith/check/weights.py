"""Rules about a checkpoint that gives a run its first weights, or its whole state."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megalith import disk, epochs
from megalith.check.case import Case, Found, advice, error
from megalith.check.resume import check_branch
from megalith.checkpoint import folder as checkpoints
from megalith.checkpoint.folder import Index
from megalith.data.manifest import TOKENIZER_FILE, tokenizer_fingerprint
from megalith.spec import families
from megalith.spec.base import Spec
from megalith.spec.forward import Change, Difference, differences, other_rows
from megalith.spec.model import ModelSpec
from megalith.spec.sizes import model_parameters
from megalith.spec.toml import literal

KEY = "train.init_from"
NAMED = 5
"""Largest number of tensors that a message names one by one."""


def first_weights_fit(case: Case) -> Found:
    """The checkpoint of `train.init_from` is whole and has weights of the run's model and tokenizer, except for differences
    that the run names."""
    train = case.spec.train
    if train.init_from is None:
        if train.init_from_changes:
            reason = f"lists properties of the model that may differ from a checkpoint's, but {KEY} names no checkpoint"
            yield advice("train.init_from_changes", train.init_from_changes, reason, f"Remove this key, or set {KEY}.")
        return
    if not case.files or case.begun:
        return
    start = Path(train.init_from)
    if not disk.is_there(start):
        reason = f"no such checkpoint (looked for {start.absolute()}; relative paths start at the current directory)"
        yield error(KEY, str(start), reason, "Give a checkpoint folder, or remove this key.")
        return
    try:
        path, manifest = checkpoints.find_complete(start)
        index = checkpoints.read_index(path, manifest)
    except (OSError, checkpoints.DamagedCheckpointError) as fault:
        reason = f"has no usable checkpoint: {str(fault).rstrip('.')}"
        yield error(KEY, str(start), reason, "Give another checkpoint, or remove this key.")
        return
    yield from _tokenizer(case, start, path, manifest.meta)
    yield from _model(case, start, index, manifest.meta)


def branch_fits(case: Case) -> Found:
    """A branch fits the run whose checkpoint it begins from, and trains beyond that checkpoint."""
    branch, train = case.spec.branch, case.spec.train
    if branch is None:
        return
    if train.init_from is not None:
        reason = "gives a run its first weights, but [branch] gives the run its whole state"
        yield error(KEY, train.init_from, reason, "Remove train.init_from or [branch].")
    if train.steps <= branch.updates:
        reason = f"is not more than the {branch.updates} updates that the branch begins with: no update is left to train"
        yield error("train.steps", train.steps, reason, f"Use steps > {branch.updates}.")
    if not case.files or case.begun:
        return
    try:
        meta = checkpoints.read_manifest(Path(branch.checkpoint)).meta
    except (OSError, checkpoints.DamagedCheckpointError) as fault:
        reason = f"is not a usable checkpoint: {str(fault).rstrip('.')}"
        yield error("branch.checkpoint", branch.checkpoint, reason, "Give another checkpoint.")
        return
    yield from check_branch(meta, case.spec)


def _tokenizer(case: Case, start: Path, path: Path, meta: Mapping[str, Any]) -> Found:
    """The checkpoint's tokenizer is the one that made the data."""
    if case.manifest is None:
        return
    ours = case.manifest.tokenizer
    theirs, where = meta.get("data", {}).get("tokenizer"), f"{path.name}/{checkpoints.MANIFEST}"
    file = _file_beside(path)
    if theirs is None and file is not None:  # an import
        where = str(file)
        try:
            theirs = tokenizer_fingerprint(json.loads(file.read_bytes()), ours.end_of_text)
        except (OSError, ValueError, AttributeError) as fault:
            yield error(KEY, str(start), f"its tokenizer {file} cannot be read: {fault}", "Copy or import the checkpoint again.")
            return
    if theirs is None:
        reason = f"has no {TOKENIZER_FILE} in its folder, so it may have another tokenizer than {case.spec.data.path}"
        yield advice(
            KEY,
            str(start),
            reason,
            f"Put the model's {TOKENIZER_FILE} into the checkpoint's folder, so that both tokenizers can be compared.",
        )
    elif theirs != ours.fingerprint and "tokenizer" not in case.spec.train.init_from_changes:
        reason = (
            f"was trained with another tokenizer ({theirs[:12]}, {where}) than the data in {case.spec.data.path} was made with "
            f"({ours.fingerprint[:12]}): the same ids mean other text"
        )
        made = f"--tokenizer {file}" if file else "the checkpoint's tokenizer"
        way_out = f"Prepare the data with {made}{_named_so(('tokenizer',), case.spec.train.init_from_changes)}."
        yield error(KEY, str(start), reason, way_out)


def _file_beside(path: Path) -> Path | None:
    """Return the tokenizer of the checkpoint `path`: beside it, above it, or in the folder of its run; None if there is none."""
    of_a_run = epochs.is_named(path.parent, checkpoints.FOLDER)
    places = [
        epochs.newest_or_plain(folder, TOKENIZER_FILE) if of_a_run and number == 2 else folder / TOKENIZER_FILE
        for number, folder in enumerate((path, *path.parents[:2]))
    ]
    return next((place for place in places if place.is_file()), None)


def _model(case: Case, start: Path, index: Index, meta: Mapping[str, Any]) -> Found:
    """The checkpoint's model has the same forward pass and the same tensors as the run's model."""
    ours, changes = case.model, case.spec.train.init_from_changes
    if ours is None:
        return
    try:
        theirs = families.read(meta["spec"]["model"])
        found = differences(theirs.build(), ours)
    except (KeyError, TypeError, ValidationError):
        reason = f"its {checkpoints.MANIFEST} describes a model that this version does not know"
        way_out = (
            "Export the checkpoint with the version that wrote it (megalith export), and import the result (megalith import)."
        )
        yield error(KEY, str(start), reason, way_out)
        return
    unnamed = [each for each in found if each.forward and each.change not in changes]
    if unnamed:
        values = _by_key(theirs, case.spec.model, unnamed)
        has, wants = (", ".join(f"{name} = {_text(pair[side])}" for name, pair in values.items()) for side in (0, 1))
        names: set[Change] = {each.change for each in unnamed if each.change is not None}
        way_out = f"Give the run's [model] the checkpoint's values, or start from another checkpoint{_named_so(names, changes)}."
        yield error(KEY, str(start), f"has weights of a model with {has}, but the run's model has {wants}", way_out)
    elif wrong := _wrong_tensors(index, ours, changes):
        more = f", and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        reason = f"lacks weights that its manifest describes: {'; '.join(wrong[:NAMED])}{more}"
        yield error(KEY, str(start), reason, "Start from another checkpoint.")
    if taken := [each for each in found if each not in unnamed]:
        listed = "; ".join(f"{each.path} = {_text(each.before)} there, {_text(each.after)} here" for each in taken)
        yield advice(
            KEY,
            str(start),
            f"was trained with other values: {listed}",
            "If a value should not differ, set it to the checkpoint's value.",
        )


def _named_so(names: Collection[Change], changes: Collection[Change]) -> str:
    """Return the end of a suggested remedy, which tells how to name differences as intended; empty without differences."""
    return (
        f", or write train.init_from_changes = {literal(sorted({*changes, *names}))} if the difference is intended"
        if names
        else ""
    )


def _by_key(theirs: families.Model, ours: families.Model, found: Collection[Difference]) -> dict[str, tuple[Any, Any]]:
    """Return the keys of `[model]` that cause the differences `found`, each with both values. If the models are of two families, return
    the differing fields of the models' parts instead."""
    if type(theirs) is not type(ours):
        return {each.path: (each.before, each.after) for each in found}
    paths = {each.path for each in found}
    values = {name: (getattr(theirs, name), getattr(ours, name)) for name in type(ours).model_fields}

    def makes_a_difference(name: str) -> bool:
        try:
            changed = theirs.model_copy(update={name: values[name][1]}).build()
        except (ValidationError, ZeroDivisionError):  # it makes no model without the other keys
            return True
        return any(each.path in paths for each in differences(theirs.build(), changed))

    return {name: pair for name, pair in values.items() if pair[0] != pair[1] and makes_a_difference(name)}


def _text(value: Any) -> str:
    return literal(value.model_dump() if isinstance(value, Spec) else value)


def _wrong_tensors(index: Index, model: ModelSpec, changes: Collection[Change]) -> list[str]:
    """Return the parameters of `model` that the checkpoint lacks, or has in a shape that cannot be loaded."""
    wrong: list[str] = []
    free = other_rows(changes)
    for name, parameter in model_parameters(model).items():
        entry = index.get(f"weights.{name}")
        if entry is None:
            wrong.append(f"{name} is missing")
        elif entry.shape != parameter.shape and not (name in free and entry.shape[1:] == parameter.shape[1:]):
            wrong.append(f"{name} has shape {list(entry.shape)} in the checkpoint and {list(parameter.shape)} in the run")
    return wrong
