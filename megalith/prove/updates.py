"""Updates of a whole model on one process, as references for updates under a plan. Most of these updates share no code with the
trainer's updates. For optimizers that are not in INDEPENDENT, and for moments below fp32, the trainer's own rule is used."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from megalith.spec.model import ModelSpec
from megalith.spec.run import OptimizerSpec
from megalith.spec.sizes import Parameter, model_parameters
from megalith.spec.treatment import Treatment, treatments
from megalith.train.optimizers.global_tensors import GlobalTensors
from megalith.train.optimizers.orthogonal import steps_of
from megalith.train.optimizers.rule import Optimizer
from megalith.train.state import State

Update: TypeAlias = Callable[[int, float], None]
"""Function that updates all parameters from their gradients. The function's arguments are the number of earlier updates and the
learning rate."""

UpdateFactory: TypeAlias = Callable[
    [Mapping[str, nn.Parameter], Mapping[str, Treatment], OptimizerSpec, Mapping[str, Parameter]], Update
]
"""Function that makes the update of some parameters. The function's arguments are the parameters and their treatments by name,
the optimizer's settings, and the model's description of each parameter."""


def update_of(parameters: Mapping[str, nn.Parameter], spec: OptimizerSpec, model: ModelSpec) -> Update:
    """Return the update of a whole model. The update uses an implementation that shares no code with the trainer's if there is
    one and moments are in fp32, else the trainer's own rule."""
    spec = spec.model_copy(update={"master": "fp32"})  # these parameters are in fp32, whatever they compute in
    treated, described = treatments(model, spec), model_parameters(model)
    updates: list[Update] = []
    for kind in dict.fromkeys(treatment.kind for treatment in treated.values()):
        mine = {name: each for name, each in treated.items() if each.kind == kind}
        made = (
            INDEPENDENT.get(kind, _by_rule) if spec.moments == "fp32" else _by_rule
        )  # no other rounds moments as this trainer does
        updates.append(made({name: parameters[name] for name in mine}, mine, spec, described))

    def update(number: int, lr: float) -> None:
        for each in updates:
            each(number, lr)

    return update


def _by_rule(
    parameters: Mapping[str, nn.Parameter],
    treated: Mapping[str, Treatment],
    spec: OptimizerSpec,
    described: Mapping[str, Parameter],
) -> Update:
    state = State(parameters, {}, {name: each.slots for name, each in treated.items()})
    rule = Optimizer(spec, treated, GlobalTensors.alone(parameters, described))

    @torch.no_grad()
    def update(number: int, lr: float) -> None:
        rule.update(state.parts(), number=number, lr=lr)

    return update


def _torchs(make: Callable[[Sequence[dict[str, Any]], OptimizerSpec], torch.optim.Optimizer]) -> UpdateFactory:
    """Return the factory of updates by one of torch's optimizers. `make` builds this optimizer from groups of parameters and the
    run's settings."""

    def made(
        parameters: Mapping[str, nn.Parameter],
        treated: Mapping[str, Treatment],
        spec: OptimizerSpec,
        described: Mapping[str, Parameter],
    ) -> Update:
        groups = [
            {"params": [parameters[name]], "weight_decay": each.weight_decay, "factor": each.lr, "eps": spec.eps * each.eps}
            for name, each in treated.items()
        ]
        optimizer = make(groups, spec)

        def update(number: int, lr: float) -> None:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["factor"]
            optimizer.step()

        return update

    return made


def _adamw(groups: Sequence[dict[str, Any]], spec: OptimizerSpec) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), foreach=False)


def _sgd(groups: Sequence[dict[str, Any]], spec: OptimizerSpec) -> torch.optim.Optimizer:
    nesterov = spec.nesterov and spec.momentum > 0
    return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, nesterov=nesterov, foreach=False)


# --- from the papers' formulas, in fp64 and one matrix at a time ---


def _from_paper(step: Callable[["Matrix", OptimizerSpec, int, float], Tensor]) -> UpdateFactory:
    """Return the factory of updates by a paper's formula `step`, which computes the new value of one matrix."""

    def made(
        parameters: Mapping[str, nn.Parameter],
        treated: Mapping[str, Treatment],
        spec: OptimizerSpec,
        described: Mapping[str, Parameter],
    ) -> Update:
        kept: dict[tuple[str, int], dict[str, Tensor]] = {}

        @torch.no_grad()
        def update(number: int, lr: float) -> None:
            for name, parameter in parameters.items():
                assert parameter.grad is not None
                experts = parameter.dim() == 3
                each = zip(parameter, parameter.grad, strict=True) if experts else [(parameter, parameter.grad)]
                for place, (weight, gradient) in enumerate(each):
                    state = kept.setdefault((name, place), {})
                    matrix = Matrix(weight.double(), gradient.double(), state, treated[name], described[name])
                    weight.copy_(step(matrix, spec, number + 1, lr * treated[name].lr))

        return update

    return made


class Matrix:
    """One matrix or vector in fp64, with its gradient and its optimizer state."""

    def __init__(
        self, weight: Tensor, gradient: Tensor, kept: dict[str, Tensor], treatment: Treatment, described: Parameter
    ) -> None:
        self.weight, self.gradient, self.kept, self.described = weight, gradient, kept, described
        self.decay = treatment.weight_decay

    def average(self, name: str, value: Tensor, share: float) -> Tensor:
        """Update an exponential average, which begins at 0, and return it: keep `share` of it and add 1 - `share` of `value`."""
        self.kept[name] = share * self.kept.get(name, torch.zeros_like(value)) + (1 - share) * value
        return self.kept[name]


def _lion(matrix: Matrix, spec: OptimizerSpec, t: int, lr: float) -> Tensor:
    """Algorithm 2 of Chen et al. 2023."""
    before = matrix.kept.get("moment", torch.zeros_like(matrix.weight))
    sign = torch.sign(spec.beta1 * before + (1 - spec.beta1) * matrix.gradient)
    matrix.average("moment", matrix.gradient, spec.beta2)
    return matrix.weight - lr * (sign + matrix.decay * matrix.weight)


def _lamb(matrix: Matrix, spec: OptimizerSpec, t: int, lr: float) -> Tensor:
    """Algorithm 2 of You et al. 2020, where phi is the identity."""
    first = matrix.average("first", matrix.gradient, spec.beta1) / (1 - spec.beta1**t)
    second = matrix.average("second", matrix.gradient**2, spec.beta2) / (1 - spec.beta2**t)
    update = first / (torch.sqrt(second) + spec.eps) + matrix.decay * matrix.weight
    sizes = float(torch.norm(matrix.weight)), float(torch.norm(update))
    ratio = sizes[0] / sizes[1] if matrix.weight.dim() == 2 and min(sizes) > 0 else 1.0
    return matrix.weight - lr * ratio * update


def _adafactor(matrix: Matrix, spec: OptimizerSpec, t: int, lr: float) -> Tensor:
    """Algorithms 4 and 5 of Shazeer & Stern 2018, without the relative step if that is switched off."""
    beta2, square = 1 - t**-0.8, matrix.gradient**2 + 1e-30
    if matrix.weight.dim() == 2:
        rows, columns = matrix.average("rows", square.sum(1), beta2), matrix.average("columns", square.sum(0), beta2)
        second = torch.outer(rows, columns) / rows.sum()
    else:
        second = matrix.average("second", square, beta2)
    update = matrix.gradient / torch.sqrt(second)
    update = update / max(1.0, float(torch.sqrt(torch.mean(update**2))))
    size = max(1e-3, float(torch.sqrt(torch.mean(matrix.weight**2))))
    alpha = size * min(lr, t**-0.5) if spec.relative_step else lr
    return matrix.weight - lr * matrix.decay * matrix.weight - alpha * update


def _muon(matrix: Matrix, spec: OptimizerSpec, t: int, lr: float) -> Tensor:
    """Muon as in Jordan 2024, with the scale of Liu et al. 2025. Matrices that are stored as one tensor are separated by
    reshaping."""
    moment = matrix.average("moment", matrix.gradient, spec.momentum)
    moment = spec.momentum * moment + (1 - spec.momentum) * matrix.gradient if spec.nesterov else moment
    columns, heads = moment.shape[1], matrix.described.heads
    by_head = moment.reshape(heads, -1, columns)
    updates = []
    for piece in by_head.split(matrix.described.stacked or by_head.shape[1], dim=1):
        found = [_orthogonal(head, spec) for head in piece] if spec.split_heads else _orthogonal(piece.flatten(0, 1), spec)
        updates.append(torch.stack(found) if isinstance(found, list) else found.view_as(piece))
    return (1 - lr * matrix.decay) * matrix.weight - lr * torch.cat(updates, dim=1).view_as(moment)


def _orthogonal(matrix: Tensor, spec: OptimizerSpec) -> Tensor:
    """Return the orthogonal factor of a matrix, scaled to the root mean square of AdamW's updates."""
    x = matrix / max(float(torch.norm(matrix)), 1e-7)
    for a, b, c in steps_of(spec.coefficients, spec.iterations):
        x = a * x + b * (x @ x.T @ x) + c * (x @ x.T @ x @ x.T @ x)
    return 0.2 * max(matrix.shape) ** 0.5 * x


INDEPENDENT: dict[str, UpdateFactory] = {
    "adamw": _torchs(_adamw),
    "sgd": _torchs(_sgd),
    "lion": _from_paper(_lion),
    "lamb": _from_paper(_lamb),
    "adafactor": _from_paper(_adafactor),
    "muon": _from_paper(_muon),
}
"""Implementations that share no code with the trainer's, by kind of optimizer."""
