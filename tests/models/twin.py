"""transformers' models for tests, under the names of either of its major versions."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.huggingface import configuration, to_theirs
from megalith.kernels.cross_entropy import Loss
from megalith.models.batch import Batch
from megalith.models.stage import Stage
from megalith.spec.families import Model


def config_of(spec: Model) -> Any:
    """Return transformers' configuration. Skips the test if transformers is not installed."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (a dependency of the tests only)")
    settings = configuration(spec)
    return transformers.CONFIG_MAPPING[settings["model_type"]].from_dict(settings)


def twin(spec: Model, ours: Stage) -> Any:
    """Return transformers' model with our weights."""
    import transformers  # slow to import, and only these tests need it

    # eager: transformers' only attention that caps scores
    theirs = transformers.AutoModelForCausalLM.from_config(config_of(spec), attn_implementation="eager")
    weights = to_theirs(spec, {name: parameter.detach() for name, parameter in ours.parameters_by_name().items()})
    missing = theirs.load_state_dict(weights, strict=False).missing_keys
    assert missing == (["lm_head.weight"] if spec.tied else []), missing
    return theirs


def same_loss(ours: Stage, theirs: Any, tokens: Tensor) -> None:
    """Assert that both models have the same loss on the same tokens [2, seq], and compute both models' gradients."""
    expected = theirs(tokens, labels=tokens).loss
    expected.backward()
    targets = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), dim=1)
    loss = ours(tokens, Batch(tokens, targets=targets, loss_scale=1 / int((targets >= 0).sum())))
    assert isinstance(loss, Loss)
    loss.objective.backward()
    torch.testing.assert_close(loss.nll, expected.detach(), rtol=0, atol=1e-5)
