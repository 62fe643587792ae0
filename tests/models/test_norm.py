"""RMSNorm by its formula."""

import pytest
import torch

from megalith.models.norm import RMSNorm


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
def test_it_divides_by_the_root_of_the_mean_square(eps):
    norm, x = RMSNorm(16, eps), torch.randn(3, 5, 16)
    torch.nn.init.normal_(norm.weight)
    expected = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)


def test_the_mean_is_taken_in_fp32():
    """300² is beyond what bf16 can add up exactly, and small next to 65,536 of them summed in it."""
    x = torch.full((4096,), 3.0, dtype=torch.bfloat16)
    x[0] = 100.0
    norm = RMSNorm(4096, 1e-5).bfloat16()
    torch.nn.init.ones_(norm.weight)
    expected = x.float() / x.float().square().mean().sqrt()
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x).float(), expected, rtol=2**-8, atol=0)
