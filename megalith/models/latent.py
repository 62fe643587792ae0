"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), in its training form, with expanded keys and values."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from megalith.kernels.rope import rotate
from megalith.models.batch import Batch
from megalith.models.core import CausalCore
from megalith.models.linear import Linear
from megalith.models.norm import RMSNorm
from megalith.models.rope import temperature
from megalith.spec.model import LatentAttentionSpec


class LatentAttention(nn.Module):
    """The keys and values of all heads are projected from one small latent vector per token; queries may be projected from a second latent
    vector.

    A head's query and key have `nope_dim` channels without rotation, followed by `rope_dim` rotated ones; all heads share the rotated part
    of the key. The code infers the number of heads (-1), so a rank with a share of the heads runs the same code. Tensor parallelism does
    not split the projections down to the latent vectors (`q_down`, `kv_down`) and the norms.
    """

    def __init__(self, dim: int, spec: LatentAttentionSpec, rope_slot: int = 0) -> None:
        super().__init__()
        self.spec = spec
        self.rope_slot = rope_slot  # which of `batch.rotary` is this layer's
        self.rotate = rotate  # a seam: a trace swaps it for a fused kernel
        queries, keys_and_values = spec.nope_dim + spec.rope_dim, spec.nope_dim + spec.v_dim
        if spec.q_rank is None:
            self.q = Linear(dim, spec.heads * queries)
        else:
            self.q_down = Linear(dim, spec.q_rank)
            self.q_norm = RMSNorm(spec.q_rank, spec.norm_eps)
            self.q_up = Linear(spec.q_rank, spec.heads * queries)
        self.kv_down = Linear(dim, spec.kv_rank + spec.rope_dim)
        self.kv_norm = RMSNorm(spec.kv_rank, spec.norm_eps)
        self.kv_up = Linear(spec.kv_rank, spec.heads * keys_and_values)
        self.out = Linear(spec.heads * spec.v_dim, dim)
        self.core: nn.Module = CausalCore(scale=temperature(spec.rope.scaling) * queries**-0.5)

    def forward(self, x: Float[Tensor, "batch seq dim"], batch: Batch) -> Float[Tensor, "batch seq dim"]:
        source = x if self.spec.q_rank is None else self.q_down(x)
        return self.out(self.attend(source, self.kv_down(x), batch).flatten(-2))

    def attend(self, source: Tensor, latent: Tensor, batch: Batch) -> Tensor:
        """Expand the latents to queries, keys and values, and compute attention. Recomputation of queries, keys and values replaces this
        method."""
        return self.core(*self.expand(source, latent, batch), batch)

    def expand(self, source: Tensor, latent: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [batch, seq, heads, channels]. `source`: the queries' latent vectors, or the layer's input if
        queries have no latent vectors; `latent`: the latent vectors of keys and values, followed by the key channels that all heads
        share."""
        spec, (cos, sin) = self.spec, batch.rotary[self.rope_slot]
        q = self.q(source) if spec.q_rank is None else self.q_up(self.q_norm(source))
        q = q.unflatten(-1, (-1, spec.nope_dim + spec.rope_dim))
        latent, shared = latent.split((spec.kv_rank, spec.rope_dim), dim=-1)
        shared = self.rotate(shared.unsqueeze(-2), cos, sin)  # batch seq 1 rope_dim
        keys_and_values = self.kv_up(self.kv_norm(latent)).unflatten(-1, (-1, spec.nope_dim + spec.v_dim))
        k, v = keys_and_values.split((spec.nope_dim, spec.v_dim), dim=-1)
        k = torch.cat((k, shared.expand(*k.shape[:-1], -1)), dim=-1)
        return self.rotate(q, cos, sin), k, v
