"""Tries a user's own optimizer on small tensors: its rule may read and keep only the tensors that the optimizer declares."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megalith import own
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.run import OptimizerSpec
from megalith.train.optimizers.global_tensors import GlobalTensors
from megalith.train.optimizers.rule import Part, Rule, rule_of

ROWS, COLUMNS = 8, 4
PIECES = "if the optimizer is given its share of a tensor in flat pieces, as with state off the device or in few bits"
WHOLE = "if the optimizer is given its whole share of a tensor, as with state off the device or in few bits"
OPENED = "Read and change weights and slots only within megalith.train.optimizers.rule.opened"


@torch.no_grad()
def try_rule(kind: str, spec: OptimizerSpec, *, away: bool = False) -> None:
    """Update a small matrix twice, in several ways: as a whole, as a whole with a new rule object for each update and, if the update is
    declared elementwise, as two halves of its rows.

    Raises own.OwnPartError if a new rule object changes the result, because the rule then keeps state outside its slots, which no
    checkpoint saves. Also raises own.OwnPartError if the update is declared elementwise but the halves give another result. `away`: also
    update with weights and slots that exist only within `opened`, as with state off the device (`train.offload.home`) or in few bits
    (`train.optimizers.small`); an elementwise update then gets flat pieces."""
    row = OPTIMIZERS[kind]
    if row.unit == "element" and any(slot.shape != "like" for slot in row.slots):
        raise own.OwnPartError(
            f'the optimizer {kind} has a slot for each row or column, so its unit cannot be "element". Use "tensor" or "matrix"'
        )
    at_once, anew = _updated(kind, spec, [slice(None)]), _updated(kind, spec, [slice(None)], anew=True)
    if not torch.equal(at_once, anew):
        raise own.OwnPartError(
            f"{kind} gives a different second update if a new rule object computes this update. Keep lasting state only in slots"
        )
    if row.unit == "element":
        halves = _updated(kind, spec, [slice(0, ROWS // 2), slice(ROWS // 2, ROWS)])
        if not torch.allclose(at_once, halves, rtol=1e-5, atol=1e-7):
            raise own.OwnPartError(
                f'{kind} updates a cut parameter differently from a whole one, but its unit is "element". Say unit = "tensor" or "matrix", '
                "and compute sums over all shares of a parameter with GlobalTensors.add_up"
            )
    if away:
        how = PIECES if row.unit == "element" else WHOLE
        try:
            found = _updated(kind, spec, [slice(None)], away=True)
        except Exception as error:  # the user's own code runs
            raise own.OwnPartError(
                f"{kind} fails {how}: {type(error).__name__}: {error}. {OPENED}, and accept any shape"
            ) from error
        if not torch.equal(at_once, found):
            raise own.OwnPartError(f"{kind} gives a different update {how}. {OPENED}, and change them in place")


class _Pieces:
    masters = True

    def __init__(self, weight: Tensor, slots: Mapping[str, Tensor], *, whole: bool) -> None:
        self.weight, self.slots, self.whole = weight, slots, whole

    def stream(self, parts: Sequence[Part]) -> Iterator[Part]:
        for part in parts:
            if self.whole:
                yield part._replace(weight=self.weight, slots=self.slots, home=None)
                continue
            half = part.weight.numel() // 2
            for here in (slice(0, half), slice(half, None)):
                slots = {name: slot.view(-1)[here] for name, slot in self.slots.items()}
                weight, gradient = self.weight.view(-1)[here], part.gradient.view(-1)[here]
                yield part._replace(weight=weight, gradient=gradient, slots=slots, first=here.start, home=None)


def _updated(kind: str, spec: OptimizerSpec, cuts: Sequence[slice], *, anew: bool = False, away: bool = False) -> Tensor:
    """Update each of the `cuts` of a matrix twice; return the matrix. `anew`: a new rule object makes the second update. `away`: weights
    and slots exist only within `opened`."""
    generator = torch.Generator().manual_seed(0)
    weight, *gradients = (torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(3))
    for gradient in gradients:
        gradient[ROWS // 2 :] *= 100  # so that a norm over half of the rows is far from one over all
    for cut in cuts:
        share = weight[cut].clone()
        slots = {slot.name: torch.zeros(slot.shape_of(share.shape)) for slot in OPTIMIZERS[kind].slots}
        rule: Rule | None = None
        for number, gradient in enumerate(gradients):
            if rule is None or anew:
                rule = rule_of(kind)(spec, GlobalTensors.alone({"trial": share}))
            part = Part("trial", share, gradient[cut].clone(), slots)
            if away:  # a change of its weight outside of `opened` is lost, as it is where the bits that it needs are elsewhere
                home = _Pieces(share, slots, whole=OPTIMIZERS[kind].unit != "element")
                part = part._replace(weight=share.clone(), slots={}, home=home)
            left = rule.update([part], number=number, lr=0.1)
            if left is not None:
                left()
        weight[cut] = share
    return weight
