"""The loss of a trained model on the user's own text, with the newest checkpoint and its tokenizer, on one device."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megalith.checkpoint import folder
from megalith.kernels.cross_entropy import Loss
from megalith.models.batch import Batch
from megalith.models.stage import Stage
from megalith.train.generate import find_tokenizer, load_model
from megalith.train.run import choose_device


@dataclass(frozen=True)
class Score:
    """The mean loss over the tokens of some text, in nats per token. `tokens`: the number of predicted tokens. `text_bytes`: the text's
    bytes in UTF-8. To compare models with different tokenizers, use the loss in bits per byte."""

    step: int
    loss: float
    tokens: int
    text_bytes: int

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """The summed loss of all tokens in bits, divided by the bytes of the text."""
        return self.loss * self.tokens / math.log(2) / self.text_bytes


def evaluate(run_dir: Path, texts: Iterable[str], *, step: int | None = None, seq_len: int | None = None) -> Score:
    """Return the loss of a run's newest weights (or those of `step`) on `texts`, each of which is a document. Each document's tokens
    after its first, including the end-of-text token, are predicted from earlier tokens in windows of `seq_len` tokens (default: as in
    training). Raises ValueError if all texts are empty, or if `seq_len` exceeds the model's context.
    """
    checkpoint = folder.find(run_dir if step is None else folder.of_run(run_dir) / folder.name(step))
    manifest = folder.read_manifest(checkpoint)
    spec = manifest.meta["spec"]
    tokenizer = find_tokenizer(run_dir, spec.get("data", {}).get("path"))
    model = load_model(checkpoint, device=choose_device("auto", 0, 1))
    length = seq_len or int(spec.get("train", {}).get("seq_len", model.spec.context))
    if not 0 < length <= model.spec.context:
        raise ValueError(
            f"seq_len = {length} is not within the model's context of {model.spec.context} tokens. Use 1 to {model.spec.context}."
        )
    total, count, size = 0.0, 0, 0
    for text in texts:
        ids = [*map(int, tokenizer.encode(text)), tokenizer.end_of_text]
        total += sum(window_losses(model, ids, length))
        count += len(ids) - 1
        size += len(text.encode())
    if not count:
        raise ValueError("the text is empty, so there is nothing to predict. Give some text.")
    return Score(manifest.step, total / count, count, size)


@torch.no_grad()
def window_losses(model: Stage, ids: Sequence[int], length: int) -> list[float]:
    """Return the summed loss in nats of each window of `length` tokens; each token except the document's first is predicted once."""
    device = next(model.parameters()).device
    found = list[float]()
    for start in range(0, len(ids) - 1, length):
        part = torch.tensor(ids[start : start + length + 1], device=device)[None]
        batch = Batch(part[:, :-1], targets=part[:, 1:])
        loss = model(part[:, :-1], batch)
        assert isinstance(loss, Loss) and isinstance(loss.nll, Tensor)
        found.append(float(loss.nll))
    return found
