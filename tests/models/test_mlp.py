"""The MLP equals its formulas."""

import pytest
import torch
import torch.nn.functional as F

from megalith.models.mlp import Mlp
from megalith.spec.model import Activation, MlpSpec


def test_it_is_down_of_silu_of_gate_times_up():
    mlp, x = Mlp(8, MlpSpec(hidden=12)), torch.randn(2, 3, 8)
    gate, up, down = mlp.gate.weight, mlp.up.weight, mlp.down.weight
    g = x @ gate.T
    torch.testing.assert_close(mlp(x), (g * g.sigmoid() * (x @ up.T)) @ down.T)


def test_without_a_gate_it_is_down_of_activation_of_up():
    mlp, x = Mlp(8, MlpSpec(hidden=12, gated=False, activation="gelu", bias=True)), torch.randn(2, 3, 8)
    assert mlp.gate is None
    u = x @ mlp.up.weight.T + mlp.up.bias
    expected = 0.5 * u * (1 + torch.erf(u / 2**0.5)) @ mlp.down.weight.T + mlp.down.bias
    torch.testing.assert_close(mlp(x), expected)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_every_activation_gates(activation: Activation):
    functions = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu}
    mlp, x = Mlp(8, MlpSpec(hidden=12, activation=activation, bias=True)), torch.randn(2, 3, 8)
    assert mlp.gate is not None
    torch.testing.assert_close(mlp(x), mlp.down(functions[activation](mlp.gate(x)) * mlp.up(x)))


def test_the_two_forms_of_gelu_differ():
    plain, tanh = (Mlp(8, MlpSpec(hidden=12, activation=name)) for name in ("gelu", "gelu_tanh"))
    tanh.load_state_dict(plain.state_dict())
    x = 3 * torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    assert 1e-6 < (plain(x) - tanh(x)).abs().max() < 1e-2
