"""The measure by which two runs are equal."""

import torch

from megalith.train.draw import AXES, legal
from megalith.train.parity import compare, reference
from megalith.train.prove import CPU

torch.set_num_threads(1)


def test_rounding_stays_rounding_from_step_to_step() -> None:
    """The same run, its samples one at a time and four at a time: other sums, and nothing that the optimizer or a step makes larger."""
    plain = {axis: next(iter(values)) for axis, values in AXES.items()}
    drawn = legal(tuple((plain | {"model": "latent attention, experts, tokens ahead"}).items()))
    assert drawn is not None
    one, four = (drawn.model_copy(update={"plan": drawn.plan.model_copy(update={"microbatch": many})}) for many in (1, 4))
    gaps = {
        row.quantity.split()[0]: row.gap for row in compare(reference(one, device=CPU), reference(four, device=CPU), spec=one)
    }
    assert 0 < gaps["gradients,"] < 5e-6, gaps
    assert 0 < gaps["weights"] < 1e-3, gaps
