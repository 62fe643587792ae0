"""Tables of the vocabulary hand over their gradients in tiles."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from megalith.parallel.data import Bucket
from megalith.parallel.tables import StreamedTable
from megalith.train.reexecution import GradientProbe


def test_a_sum_of_finite_gradients_in_fp16_is_finite() -> None:
    taken: list[Tensor] = []
    compute = nn.Parameter(torch.empty(8, 4, dtype=torch.float16))
    weight: Any = SimpleNamespace(compute=compute, sums=torch.float32, add_rows=lambda rows, gradient: taken.append(gradient))
    bucket: Any = SimpleNamespace(weights=[weight], observe=None)
    bucket.take_in = lambda *given: Bucket.take_in(bucket, *given)
    table, probe = StreamedTable(weight, bucket, 4), GradientProbe([bucket])
    for rows in table.tiles:
        table.give(rows, torch.full((4, 4), 60000.0, dtype=torch.float16))
    assert probe.finite()
    table.give(table.tiles[0], torch.full((4, 4), torch.inf, dtype=torch.float16))
    assert not probe.finite()
    assert {gradient.dtype for gradient in taken} == {torch.float32}
