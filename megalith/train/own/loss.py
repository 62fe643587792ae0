"""Replaces cross-entropy by a user's own loss per token."""

from collections.abc import Iterable
from typing import Any

from megalith import own
from megalith.models.head import CrossEntropy
from megalith.models.stage import Stage
from megalith.parallel.tensor import VocabularyCrossEntropy


def use_loss(stages: Iterable[Stage], name: str) -> None:
    """Make each stage's output layer use a user's own loss per token in place of cross-entropy."""
    of_token: Any = own.load(name)
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, CrossEntropy | VocabularyCrossEntropy):
                module.of_token = of_token
