"""The update of a rank's parameters: each by the rule that its row in `spec.optimizers` names."""

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module

import torch

from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.run import OptimizerSpec
from megalith.spec.treatment import Treatment
from megalith.train.optimizers.rule import Part, Rule
from megalith.train.optimizers.small import Small
from megalith.train.optimizers.whole import Whole


class Optimizer:
    """The rule of each parameter. Ranks of one pipeline place hold shares of the same parameters, so they use the same rules."""

    def __init__(self, spec: OptimizerSpec, treated: Mapping[str, Treatment], whole: Whole) -> None:
        """`treated`: how each parameter of the whole model is updated. A rank may repeat the update of another one, of another stage."""
        self.treated, self.whole = treated, whole
        kinds = dict.fromkeys(treatment.kind for treatment in treated.values())
        first = sorted(
            kinds, key=lambda kind: OPTIMIZERS[kind].unit != "matrix"
        )  # its messages are on their way while others compute
        self.rules: dict[str, Rule] = {kind: rule_of(kind)(spec, whole) for kind in first}

    def update(self, parts: Sequence[Part], *, number: int, lr: float) -> None:
        """Update all parts by their rules."""
        left = []
        for kind, rule in self.rules.items():
            alone = OPTIMIZERS[kind].unit == "element"
            mine = [
                self._treated(part, treatment, number)
                for part in parts
                if (treatment := self.treated[part.name]).kind == kind and (part.weight.numel() or not alone)
            ]
            if mine and (rest := rule.update(mine, number=number, lr=lr)) is not None:
                left.append(rest)
        for rest in left:
            rest()

    def prepared(self, parts: Iterable[Part], *, number: int) -> list[Part]:
        """Return the parts in the form for their rules, for a change of weights after an update: `opened` yields their master
        weights in fp32. `number`: the seed of stochastic rounding."""
        return [self._treated(part, self.treated[part.name], number) for part in parts]

    def _treated(self, part: Part, treatment: Treatment, number: int) -> Part:
        """Return the part in the form for its rule."""
        small = None
        narrow = part.gradient.dtype != torch.float32
        if narrow or treatment.moments.number != "fp32" or treatment.master != "fp32":
            alone = OPTIMIZERS[treatment.kind].unit == "element"
            small = Small.of(part.name, treatment.slots, number, self.whole.cuts[part.name], alone=alone, narrow=narrow)
        return part._replace(lr=treatment.lr, weight_decay=treatment.weight_decay, eps=treatment.eps, small=small)


def rule_of(kind: str) -> type[Rule]:
    """Import the rule of an optimizer."""
    module, _, name = OPTIMIZERS[kind].rule.partition(":")
    return getattr(import_module(module), name)
