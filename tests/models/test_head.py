"""Logits without targets, the loss with them."""

import torch

from megalith.kernels.cross_entropy import Loss
from megalith.models.batch import Batch
from tests.models.plain import lively, llama, logits, tokens_of


def test_the_loss_is_the_cross_entropy_of_the_logits():
    spec = llama()
    model, tokens, targets = lively(spec), tokens_of(spec), tokens_of(spec, seed=1)
    targets[0, :7] = -100
    with torch.no_grad():
        loss = model(tokens, Batch(tokens, targets=targets, loss_scale=0.5, z_loss=0.01))
        rows = logits(model, tokens)
    assert isinstance(loss, Loss)
    nll = torch.nn.functional.cross_entropy(rows.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(loss.nll, nll * 0.5)
    z = (rows.logsumexp(-1).square() * (targets >= 0)).sum()
    torch.testing.assert_close(loss.objective, (nll + 0.01 * z) * 0.5)
