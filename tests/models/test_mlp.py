"""SwiGLU by its formula."""

import torch

from megalith.models.mlp import SwiGLU


def test_it_is_down_of_silu_of_gate_times_up():
    mlp, x = SwiGLU(8, 12), torch.randn(2, 3, 8)
    gate, up, down = mlp.gate.weight, mlp.up.weight, mlp.down.weight
    g = x @ gate.T
    torch.testing.assert_close(mlp(x), (g * g.sigmoid() * (x @ up.T)) @ down.T)
