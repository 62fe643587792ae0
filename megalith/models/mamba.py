"""Mamba-2 (Dao & Gu 2024, arXiv:2405.21060): a linear recurrence over the sequence, computed in chunks as matrix products."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from megalith.models.batch import Batch, SegmentLengths
from megalith.models.linear import Linear
from megalith.spec.model import MambaSpec

Documents = Int[Tensor, "batch seq"]


class CausalConv(nn.Module):
    """Causal convolution: for each channel, a weighted sum of the last `width` values, plus a bias. Values from before the token's document
    count as zero."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels))

    def forward(self, x: Float[Tensor, "batch seq channels"], documents: Documents | None) -> Float[Tensor, "batch seq channels"]:
        seq, width = x.shape[1], self.weight.shape[1]
        out = x * self.weight[:, -1] + self.bias
        for back in range(1, min(width, seq)):
            past = x[:, :-back]
            if documents is not None:
                past = past * (documents[:, back:] == documents[:, :-back]).unsqueeze(-1)
            out = out + F.pad(past * self.weight[:, -1 - back], (0, 0, back, 0))
        return out


class GatedNorm(nn.Module):
    """RMS norm of x silu(gate), in fp32 or wider. Each group of `width` channels is normalised by itself, so a rank with a share of the
    groups runs the same code."""

    def __init__(self, channels: int, width: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.empty(channels))

    def forward(self, x: Float[Tensor, "... channels"], gate: Float[Tensor, "... channels"]) -> Float[Tensor, "... channels"]:
        work = _work(x)
        gated = (x.to(work) * F.silu(gate.to(work))).unflatten(-1, (-1, self.width))
        normal = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.eps)
        return (normal.flatten(-2) * self.weight.to(work)).to(gate.dtype)


class Rates(nn.Module):
    """Parameters of each head: the logarithm of its state's decay rate, the bias of its step sizes, and the factor of the input that
    bypasses the state."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.empty(heads))
        self.step = nn.Parameter(torch.empty(heads))
        self.skip = nn.Parameter(torch.empty(heads))


class MambaCore(nn.Module):
    """The part of a Mamba-2 layer between its projections: convolution, recurrence and gated norm. The code infers sizes (-1), so a rank
    with a share of the groups and their heads runs the same code. With `batch.segments`, each document begins with an empty state."""

    def __init__(self, spec: MambaSpec) -> None:
        super().__init__()
        self.spec = spec
        inner, shared = spec.heads * spec.head_dim, spec.groups * spec.state
        self.conv_x = CausalConv(inner, spec.conv)
        self.conv_b = CausalConv(shared, spec.conv)
        self.conv_c = CausalConv(shared, spec.conv)
        self.rates = Rates(spec.heads)
        self.norm = GatedNorm(inner, inner // spec.groups, spec.norm_eps)

    def forward(
        self,
        gate: Float[Tensor, "batch seq inner"],
        x: Float[Tensor, "batch seq inner"],
        b: Float[Tensor, "batch seq shared"],
        c: Float[Tensor, "batch seq shared"],
        step: Float[Tensor, "batch seq heads"],
        batch: Batch,
    ) -> Float[Tensor, "batch seq inner"]:
        spec, rates, work = self.spec, self.rates, _work(x)
        documents = None if batch.segments is None else documents_of(batch.segments, x.device)  # pyright: ignore[reportCallIssue]
        x = F.silu(self.conv_x(x, documents)).unflatten(-1, (-1, spec.head_dim))
        b, c = (
            F.silu(conv(each, documents)).unflatten(-1, (-1, spec.state)) for conv, each in ((self.conv_b, b), (self.conv_c, c))
        )
        step = F.softplus(step.to(work) + rates.step.to(work))
        decay = -step * rates.decay.to(work).exp()
        x = x.to(work)
        y = ssd(x * step.unsqueeze(-1), decay, b.to(work), c.to(work), chunk=spec.chunk, documents=documents)
        y = y + x * rates.skip.to(work).unsqueeze(-1)
        return self.norm(y.flatten(-2), gate)


class Mamba(nn.Module):
    """A Mamba-2 layer. Other implementations compute all inputs of the recurrence with one projection; this layer has one projection per
    input, so that each can be split by heads or groups."""

    def __init__(self, dim: int, spec: MambaSpec) -> None:
        super().__init__()
        inner, shared = spec.heads * spec.head_dim, spec.groups * spec.state
        self.gate = Linear(dim, inner)
        self.x = Linear(dim, inner)
        self.b = Linear(dim, shared)
        self.c = Linear(dim, shared)
        self.step = Linear(dim, spec.heads)
        self.core: nn.Module = MambaCore(spec)
        self.out = Linear(inner, dim)

    def forward(self, x: Float[Tensor, "batch seq dim"], batch: Batch) -> Float[Tensor, "batch seq dim"]:
        return self.out(self.core(self.gate(x), self.x(x), self.b(x), self.c(x), self.step(x), batch))


def ssd(
    x: Float[Tensor, "batch seq heads channels"],
    decay: Float[Tensor, "batch seq heads"],
    b: Float[Tensor, "batch seq groups state"],
    c: Float[Tensor, "batch seq groups state"],
    *,
    chunk: int,
    documents: Documents | None = None,
) -> Float[Tensor, "batch seq heads channels"]:
    """Return y of the recurrence h_t = exp(decay_t) h_{t-1} + x_t b_tᵀ, y_t = h_t c_t (section 6 of the paper). Inside a chunk of `chunk`
    tokens, the recurrence is computed as attention without softmax; between chunks, states are passed on. The result does not depend on the
    chunk length. The state h begins at 0 in every document. Heads of a group share b and c.
    """
    seq, groups = x.shape[1], b.shape[2]
    chunk = min(chunk, seq)
    x, decay, b, c = (_chunks(each, chunk) for each in (x, decay, b, c))  # batch chunks chunk ...
    x, decay = x.unflatten(3, (groups, -1)), decay.unflatten(3, (groups, -1)).movedim(2, -1)  # ... groups heads chunk
    total = decay.cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    inside, from_before, to_end, across = lower, None, None, None
    if documents is not None:
        which = _chunks(documents, chunk, mode="replicate")  # batch chunks chunk
        last = which[..., -1]
        before = F.pad(last[:, :-1], (1, 0), value=-1)
        inside = lower & (which.unsqueeze(-1) == which.unsqueeze(-2))[:, :, None, None]
        from_before, to_end = ((which == end.unsqueeze(-1))[:, :, None, None] for end in (before, last))
        across = (last == before)[:, :, None, None]
    gaps = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~inside, float("-inf"))
    scores = torch.einsum("zkign,zkjgn->zkgij", c, b).unsqueeze(3) * gaps.exp()
    y = torch.einsum("zkghij,zkjghp->zkighp", scores, x)
    weights = _where(to_end, (total[..., -1:] - total).exp())
    states = torch.einsum("zkjgn,zkjghp->zkghpn", b, x * weights.movedim(-1, 2).unsqueeze(-1))
    entering = _pass_on(states, _where(across, total[..., -1].exp()))
    read = torch.einsum("zkign,zkghpn->zkighp", c, entering)
    y = y + read * _where(from_before, total.exp()).movedim(-1, 2).unsqueeze(-1)
    return y.flatten(3, 4).flatten(1, 2)[:, :seq]


def _pass_on(states: Tensor, kept: Tensor) -> Tensor:
    """Return the initial state of each chunk. After each chunk, the state is multiplied by `kept` [batch chunks groups heads], and the
    chunk's own `states` [batch chunks groups heads channels state] are added."""
    held, found = torch.zeros_like(states[:, 0]), []
    for number in range(states.shape[1]):
        found.append(held)
        held = held * kept[:, number, ..., None, None] + states[:, number]
    return torch.stack(found, dim=1)


def _chunks(x: Tensor, chunk: int, mode: str = "constant") -> Tensor:
    """[batch, seq, ...] -> [batch, chunks, chunk, ...], padded at the end with zeros, or with the last value."""
    more = -x.shape[1] % chunk
    if more:
        end = x[:, -1:].expand(-1, more, *x.shape[2:]) if mode == "replicate" else x.new_zeros(x.shape[0], more, *x.shape[2:])
        x = torch.cat((x, end), dim=1)
    return x.unflatten(1, (-1, chunk))


def _where(mask: Tensor | None, x: Tensor) -> Tensor:
    return x if mask is None else x * mask


def _work(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@torch.compiler.disable  # the lengths differ in every batch: compiled code would be compiled again for each
def documents_of(segments: SegmentLengths, device: torch.device) -> Documents:
    """Return, for each token, the index of its document within its row."""
    return torch.tensor([[number for number, length in enumerate(row) for _ in range(length)] for row in segments], device=device)
