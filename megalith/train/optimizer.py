"""AdamW (Loshchilov & Hutter 2019) on this rank's shares as plain tensors, and the learning rate over the steps."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from megalith.parallel.gradients import local
from megalith.spec.run import OptimizerSpec


def learning_rate(step: int, *, spec: OptimizerSpec, steps: int) -> float:
    """The rate of step `step` (0 is the first): linear warm-up, then the schedule down to `min_lr * lr` at the last step."""
    if step < spec.warmup:
        return spec.lr * (step + 1) / spec.warmup
    low = spec.lr * spec.min_lr
    done = (step - spec.warmup) / max(1, steps - 1 - spec.warmup)
    match spec.schedule:
        case "constant":
            return spec.lr
        case "linear":
            return spec.lr - (spec.lr - low) * done
        case "cosine":
            return low + (spec.lr - low) * 0.5 * (1 + math.cos(math.pi * done))
        case "wsd":  # warm up, stay, decay linearly over the last share of all steps (Hu et al. 2024)
            left = (steps - 1 - step) / max(1.0, spec.decay * steps)
            return low + (spec.lr - low) * min(1.0, left)


class AdamW:
    """Decoupled weight decay on matrices only; moments are fp32 and split exactly as the parameters are."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], spec: OptimizerSpec) -> None:
        self.parameters = parameters
        self.spec = spec
        self.first = {name: torch.zeros_like(local(p), dtype=torch.float32) for name, p in parameters.items()}
        self.second = {name: torch.zeros_like(m) for name, m in self.first.items()}

    def step(self, number: int, *, lr: float) -> None:
        """Update all weights from their gradients and drop these. `number`: updates done before this one (for bias correction)."""
        self.update(number, lr=lr)
        self.drop_gradients()

    @torch.no_grad()
    def update(self, number: int, *, lr: float) -> None:
        """Update all weights; their gradients stay as they are."""
        for decay, names in self._by_decay():
            grads = [local(g) for name in names if (g := self.parameters[name].grad) is not None]
            assert len(grads) == len(names), "a parameter without gradient"
            count = torch.tensor(float(number), device=grads[0].device) if grads else None
            adamw(
                [local(self.parameters[name]) for name in names],
                grads,
                [self.first[name] for name in names],
                [self.second[name] for name in names],
                [],
                [count.clone() for _ in names] if count is not None else [],
                fused=True,
                amsgrad=False,
                beta1=self.spec.beta1,
                beta2=self.spec.beta2,
                lr=lr,
                weight_decay=decay,
                eps=self.spec.eps,
                maximize=False,
            )

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def changed(self) -> list[Tensor]:
        """What an update changes: this rank's shares of the weights and their moments."""
        return [*(local(p) for p in self.parameters.values()), *self.first.values(), *self.second.values()]

    def _by_decay(self) -> list[tuple[float, list[str]]]:
        """Weight decay and the names it acts on, without shares that are empty on this rank."""
        held = [name for name, p in self.parameters.items() if local(p).numel()]
        matrices = [name for name in held if self.parameters[name].dim() >= 2]
        return [(self.spec.weight_decay, matrices), (0.0, [name for name in held if self.parameters[name].dim() < 2])]

    def state(self) -> dict[str, Tensor]:
        """The moments under `moments.first.NAME` and `moments.second.NAME`, with the global shape and split of their parameter."""
        kinds = {"first": self.first, "second": self.second}
        return {
            f"moments.{kind}.{name}": like(m, self.parameters[name]) for kind, all_ in kinds.items() for name, m in all_.items()
        }


def like(share: Tensor, parameter: Tensor) -> Tensor:
    """`share` as a tensor of the parameter's global shape and split."""
    if not isinstance(parameter, DTensor):
        return share
    return DTensor.from_local(
        share, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
