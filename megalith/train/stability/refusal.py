"""Describes gradients that are not finite, with the names of their parameters."""

from collections.abc import Mapping

from torch import Tensor

from megalith.parallel import gradients
from megalith.spec.sizes import model_parameters
from megalith.train.assemble import Trainer
from megalith.train.stability.loss_scale import Overflow, Scale


def overflowed(trainer: Trainer, reason: str, after: Scale) -> tuple[str, Overflow]:
    """Examine gradients that overflowed; return `reason`, extended by the name of a parameter, and the overflow. `after`: the next step's
    loss scale. All ranks call this together."""
    assert trainer.state.scale is not None
    found = {"world": trainer.groups.world, "forward": model_parameters(trainer.model), "freed": _freed(trainer)}
    tensor = next(iter(gradients.not_finite_elements(trainer.parameters, **found)), "")
    overflow = Overflow(tensor, trainer.state.scale.value, after.value)
    first = f"the first overflow is in {overflow.part}, in the gradient of {tensor}" if tensor else "only their norm overflowed"
    return f"{reason}; {first}; the loss scale of the next step is {after.value:,.0f}", overflow


def where_not_finite(trainer: Trainer) -> str:
    """Describe the parameters whose gradients are not finite. All ranks call this together."""
    found = {"forward": model_parameters(trainer.model), "freed": _freed(trainer)}
    return gradients.where_not_finite(trainer.parameters, world=trainer.groups.world, **found)


def _freed(trainer: Trainer) -> Mapping[str, Tensor]:
    return {} if trainer.release is None else trainer.release.odd


def refusal(trainer: Trainer, reason: str, *, step: int) -> gradients.NotFinite:
    """Return the error that ends the run because of a step. The error names the parameters whose gradients are not finite. All ranks call
    this together."""
    return gradients.not_finite(step, reason=reason, where=where_not_finite(trainer))
