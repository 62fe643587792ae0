"""Training cost of a token, counted from the operations the modules really run."""

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megalith.kernels.cross_entropy import Loss
from megalith.models.batch import Batch
from megalith.models.stage import Stage
from megalith.spec.model import ModelSpec

CONVENTION = (
    "counted as for PaLM (Chowdhery et al. 2022, appendix B): matrix products, with full attention although it is causal, "
    "without recomputation"
)


def flops_per_token(spec: ModelSpec, seq_len: int) -> float:
    """Training FLOPs per token in sequences of `seq_len`, traced on the meta device, which computes nothing."""
    distinct = {block: (spec.blocks.count(block), 1 + spec.blocks.index(block)) for block in set(spec.blocks)}
    blocks = sum(count * _trace(spec, part, seq_len) for count, part in distinct.values())
    return (blocks + _trace(spec, len(spec.part_names) - 1, seq_len)) / seq_len


def _trace(spec: ModelSpec, part: int, seq_len: int) -> int:
    with torch.device("meta"):
        stage = Stage(spec, part, part + 1)
        x = torch.empty(1, seq_len, spec.dim, requires_grad=True)
        tokens = torch.empty(1, seq_len, dtype=torch.long)
        ahead = tokens.expand(spec.head.ahead.depth, -1, -1) if spec.head.ahead else None
        with FlopCounterMode(display=False) as counter:
            out = stage(x, Batch(tokens, targets=tokens, ahead=ahead, ahead_targets=ahead))
            _scalar(out).backward()
    return counter.get_total_flops()


def _scalar(out: Tensor | Loss) -> Tensor:
    return out.objective if isinstance(out, Loss) else out.sum()
