"""Rules about the optimizer: groups of parameters, clipping, parametrizations, and matrices that one rank holds whole."""

from collections.abc import Iterator
from fnmatch import fnmatchcase

from megalith.check.case import Case, Found, advice, error, format_bytes
from megalith.spec.numbers import NUMBERS
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.problem import near
from megalith.spec.sizes import Parameter, model_parameters
from megalith.spec.treatment import kinds, summary


def groups_match(case: Case) -> Found:
    """Each group of parameters has at least one parameter."""
    groups = case.spec.optimizer.groups
    if case.model is None or not groups:
        return
    names, patterns = list(model_parameters(case.model)), [group.pattern for group in groups]
    matched = ([number for number, pattern in enumerate(patterns) if fnmatchcase(name, pattern)] for name in names)
    counted = {numbers[-1] for numbers in matched if numbers}
    for number, group in enumerate(groups):
        if number in counted:
            continue
        mine = [name for name in names if fnmatchcase(name, group.pattern)]
        if mine:
            reason = (
                f"has no parameters left: later groups also match all {len(mine)} parameters that it matches, such as {mine[0]}"
            )
            way_out = (
                "Put this group after the later groups, or remove it: of all groups that match a parameter, the last one counts."
            )
        else:
            nearest = near(group.pattern.strip("*"), names) or names[len(names) // 2]
            reason = f"matches none of the model's {len(names)} parameters"
            way_out = f"A pattern must match a whole name, such as {nearest}; * matches any characters."
        yield error("optimizer.groups", group.pattern, reason, way_out)


def matrices_fit(case: Case) -> Found:
    """The rank that orthogonalises a matrix has memory for the whole matrix and the iteration's temporaries."""
    memory = case.cluster.accelerator.memory if case.cluster else None
    if memory is None or case.model is None:
        return
    width = NUMBERS[case.spec.optimizer.iteration].bytes
    largest = max(_whole(case), key=lambda each: _bytes(each, width), default=None)
    if largest is not None and (held := _bytes(largest, width)) > memory:
        shape = list(largest.shape[-2:])
        reason = f"takes {format_bytes(held)} on one rank for {largest.name} {shape}, but a device has {format_bytes(memory)}"
        way_out = f'Update this matrix by AdamW: [[optimizer.groups]] with pattern = "{largest.name}" and kind = "adamw".'
        yield error("optimizer.kind", case.spec.optimizer.kind, reason, way_out)


def clipping_makes_sense(case: Case) -> Found:
    """Adaptive clipping leaves gradients of the usual norm unchanged, and begins before the run ends. QK-clip needs attention heads that
    it can scale."""
    optimizer, steps = case.spec.optimizer, case.spec.train.steps
    if 0 < optimizer.adaptive_clip < 1:
        reason = "clips even a gradient of the usual norm, so the usual norm shrinks with every update"
        yield error(
            "optimizer.adaptive_clip",
            optimizer.adaptive_clip,
            reason,
            "Use a number above 1, such as 1.05, or 0 for no adaptive clipping.",
        )
    elif optimizer.adaptive_clip and optimizer.adaptive_clip_after >= steps:
        reason = f"leaves none of the run's {steps} updates to adaptive clipping"
        yield advice(
            "optimizer.adaptive_clip_after", optimizer.adaptive_clip_after, reason, "Use a smaller number, or adaptive_clip = 0."
        )
    if optimizer.qk_clip and case.model is not None:
        layers = sum(block.attention is not None for block in case.blocks)
        normed = sum(getattr(block.attention, "qk_norm", None) is not None for block in case.blocks)
        own = next((name for block in case.blocks if (name := getattr(block.attention, "own", None))), None)
        if not layers:
            yield error("optimizer.qk_clip", optimizer.qk_clip, "has no effect: this model has no attention", "Use qk_clip = 0.")
        elif own:
            reason = f"does not know which weights of your attention {own} make queries and keys"
            yield error("optimizer.qk_clip", optimizer.qk_clip, reason, "Use qk_clip = 0, or Megalith's attention.")
        elif normed:
            reason = f"scales queries and keys, but in {normed} of {layers} kinds of blocks qk_norm already bounds the logits"
            yield error("optimizer.qk_clip", optimizer.qk_clip, reason, "Use qk_clip = 0, or a model without qk_norm.")


def rates_scale(case: Case) -> Found:
    """A parametrization has base sizes, and defines how learning rates scale for each optimizer and part of the run."""
    model, optimizer = case.spec.model, case.spec.optimizer
    if model.parametrization == "standard":
        for name in ("base_dim", "base_layers", "base_head_dim"):
            if getattr(model, name) is not None:
                reason = 'changes nothing while model.parametrization = "standard"'
                way_out = 'Remove this key, or set parametrization = "completep" (for base_dim and base_head_dim also "mup").'
                yield advice(f"model.{name}", getattr(model, name), reason, way_out)
        return
    for name, asks in (("base_dim", ("mup", "completep")), ("base_layers", ("completep",))):
        if getattr(model, name) is None and model.parametrization in asks:
            what = "dim" if name == "base_dim" else "layers"
            way_out = (
                f"Give the {what} of the model for which the learning rate was tuned, such as {name} = {getattr(model, what)}."
            )
            yield error(f"model.{name}", None, f'is needed by parametrization = "{model.parametrization}"', way_out)
    for kind in kinds(optimizer):
        if OPTIMIZERS[kind].width is None or (kind == "adafactor" and optimizer.relative_step):
            what = "adafactor with relative_step" if kind == "adafactor" else kind
            reason = f'has no rule for {what}: "{model.parametrization}" does not define how the learning rate varies with width'
            known = ", ".join(name for name, row in OPTIMIZERS.items() if row.width is not None)
            yield error(
                "model.parametrization",
                model.parametrization,
                reason,
                f'Use parametrization = "standard", or one of the optimizers {known}.',
            )
    parts = {"Mamba-2": "mamba", "latent attention": "latent"}
    for what, name in parts.items():
        if any(block.mamba if name == "mamba" else getattr(block.attention, "kind", "") == name for block in case.blocks):
            reason = f"has no rule for {what}, whose inner widths need rules of their own"
            yield error("model.parametrization", model.parametrization, reason, 'Use "standard".')


def _whole(case: Case) -> Iterator[Parameter]:
    """Yield the parameters whose update needs whole matrices."""
    assert case.model is not None
    if not any(OPTIMIZERS[kind].unit == "matrix" for kind in kinds(case.spec.optimizer)):
        return  # a search asks this of many plans
    for row in summary(case.model, case.spec.optimizer):
        if OPTIMIZERS[row.treatment.kind].unit == "matrix":
            yield from row.parameters


def _bytes(parameter: Parameter, width: float) -> float:
    """Return the bytes to orthogonalise a matrix: its original, its values before and after a step, and two products with
    itself."""
    *_, rows, columns = parameter.shape
    return width * (3 * rows * columns + 2 * min(rows, columns) ** 2)
