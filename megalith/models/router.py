"""Router: chooses and weights the experts of each token, and balances the experts' loads."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from megalith.kernels.deferred import is_recomputed, weight_gradient
from megalith.models.batch import Batch
from megalith.spec.model import RouterSpec


@dataclass(frozen=True)
class Routing:
    """The `active` experts of each token of [batch, seq], best first."""

    choices: Tensor  # [batch, seq, active], numbers of experts
    weights: Tensor  # [batch, seq, active], fp32, differentiable; carries the balance losses
    kept: Tensor | None  # [batch, seq, active], False where the expert was full; None: no expert is ever full
    balanced: bool  # evenly, without asking the scores, so that all counts are known in advance


class BalanceSets(Protocol):
    """The sets of tokens over which the experts' loads are measured. Ranks whose tokens belong to one set add up their counts."""

    sequence_ranks: int  # ranks that have a part each of every sequence

    def over_sequence(self, counts: Tensor) -> Tensor:
        """Return, from counts [batch, experts] for this rank's part of each sequence, the counts for the whole sequences."""
        ...

    def over_batch(self, counts: Tensor) -> Tensor:
        """Return, from counts [experts] for this rank's part of a microbatch, the counts for this microbatch on all data ranks together."""
        ...

    def spans(self, seq: int) -> tuple[range, ...]:
        """Return the positions of this rank's `seq` tokens within the sequence, in order."""
        ...

    def earlier(self, choices: Tensor) -> Tensor:
        """Return, for each choice [batch, seq, active], how many earlier tokens of the whole sequence chose the same expert."""
        ...

    def own(self, choices: Tensor) -> Tensor:
        """Select from `choices` [batch, seq, ...] the tokens that only this rank counts, so that no token is counted twice."""
        ...


class LocalBalanceSets:
    """Balance sets of a process that has all tokens of a microbatch."""

    sequence_ranks = 1

    def over_sequence(self, counts: Tensor) -> Tensor:
        return counts

    def over_batch(self, counts: Tensor) -> Tensor:
        return counts

    def spans(self, seq: int) -> tuple[range, ...]:
        return (range(seq),)

    def earlier(self, choices: Tensor) -> Tensor:
        return earlier(choices)

    def own(self, choices: Tensor) -> Tensor:
        return choices


@dataclass(frozen=True)
class RoutingRecord:
    """The routing of one microbatch, to compare two runs. A choice may differ by rounding only if its margin is small."""

    batch: Batch
    choices: Tensor  # [batch, seq, active], ascending
    margins: Tensor  # [batch, seq]: by how much the last chosen expert (or group) beat the first one left out


class Router(nn.Module):
    """Scores of each expert in fp32 (Switch Transformer, Fedus et al. 2022, section 2.4: bf16 here diverges), and the choice of experts by
    these scores.

    - Switch (arXiv:2101.03961): softmax; only the best expert, weighted by its probability; `capacity` limits the tokens of an expert in a
      sequence.
    - Mixtral (arXiv:2401.04088): softmax over the logits of the chosen two experts, which equals the softmax over all experts, normalised.
    - DeepSeek-V2 (arXiv:2405.04434): softmax; experts from the `active_groups` groups whose best experts score highest.
    - DeepSeek-V3 (arXiv:2412.19437, section 2.1.2): sigmoid; a bias that affects only the choice, and that each step changes to even out
      loads; groups ranked by the sum of their two best scores; weights normalised, then scaled.

    Loads are counted in backward: it runs once per microbatch, even if recomputation repeats the forward, and it does not run in
    validation. `end_of_step` uses the loads.
    """

    weight: nn.Parameter
    bias: Tensor | None
    load: Tensor
    counts: Tensor
    dropped: Tensor

    def __init__(self, dim: int, experts: int, spec: RouterSpec) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(experts, dim))
        self.register_buffer("bias", torch.zeros(experts) if spec.bias_rate else None)
        self.register_buffer("load", torch.zeros(experts))  # choices of each expert in the newest step's global batch
        self.register_buffer(
            "counts", torch.zeros(experts + 1, dtype=torch.int64), persistent=False
        )  # this step's; last: dropped
        self.register_buffer("dropped", torch.zeros(()), persistent=False)  # choices dropped in the newest step's global batch
        self.records: list[RoutingRecord] | None = None
        self.reset()

    def reset(self) -> None:
        """Set the weight and the buffers to their first values, on whichever device they are."""
        nn.init.normal_(self.weight, std=0.02)
        for buffer in self.buffers():
            buffer.zero_()

    def forward(self, x: Tensor, batch: Batch, sets: BalanceSets) -> Routing:
        """x [batch, seq, dim]. Without data (meta and fake tensors) there are no scores, and tokens are distributed evenly."""
        logits = _Logits.apply(x, self.weight)
        assert isinstance(logits, Tensor)
        scores = logits.softmax(-1) if self.spec.scores == "softmax" else logits.sigmoid()
        balanced = self.spec.balanced or x.is_meta or isinstance(x, FakeTensor)
        choices = self._balanced_choices(scores, sets) if balanced else self._chosen(scores.detach(), batch)
        if balanced and self.records is not None:
            self._record(batch, choices, [torch.full_like(scores[..., 0], float("inf"))])
        kept = None
        if self.spec.capacity is not None and not balanced:
            kept = sets.earlier(choices) < self._room(x.shape[1] * sets.sequence_ranks)
        weights = scores.gather(-1, choices)
        if self.spec.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # DeepSeek's guard: all sigmoids may underflow
        weights = weights * self.spec.scale
        if torch.is_grad_enabled():
            objective = self._objective(logits, scores, choices, batch, sets)
            own = None if kept is None else sets.own(kept)
            weights = _Attach.apply(weights, objective, self._counted(sets.own(choices), own), self, batch.gradient_scale)
            assert isinstance(weights, Tensor)
        return Routing(choices, weights, kept, balanced)

    def end_of_step(self, counts: Tensor) -> None:
        """Update the biases from `counts`, summed over all ranks, after the step: experts with less than the mean load get a
        higher bias, the others a lower one (Wang et al. 2024, arXiv:2408.15664, algorithm 1)."""
        load = counts[:-1].float()
        self.load.copy_(load)
        self.dropped.copy_(counts[-1])
        if self.bias is not None:
            self.bias += self.spec.bias_rate * (load.mean() - load).sign()
        self.counts.zero_()

    def metrics(self) -> dict[str, float]:
        """Return measures of the balance of the newest step's loads. Waits for the device."""
        load, dropped = self.load.double(), float(self.dropped)
        total = float(load.sum())
        if total == 0:
            return {}
        shares = load[load > 0] / total
        entropy = -float((shares * shares.log()).sum()) / float(torch.tensor(float(len(load))).log()) if len(load) > 1 else 1.0
        return {"max_load": float(load.max()) / total * len(load), "entropy": entropy, "dropped": dropped / total}

    # --- choosing ---

    def _chosen(self, scores: Tensor, batch: Batch) -> Tensor:
        wanted = scores if self.bias is None else scores + self.bias
        margins = None if self.records is None else []
        if self.spec.groups > 1:
            wanted = self._within_groups(wanted, margins)
        best = _best(wanted, self.spec.active, margins)
        if margins is not None:
            self._record(batch, best, margins)
        return best

    def _within_groups(self, wanted: Tensor, margins: list[Tensor] | None) -> Tensor:
        grouped = wanted.unflatten(-1, (self.spec.groups, -1))
        worth = grouped.amax(-1) if self.spec.group_score == "max" else grouped.topk(2, -1).values.sum(-1)
        allowed = torch.zeros_like(worth, dtype=torch.bool)
        allowed.scatter_(-1, _best(worth, self.spec.active_groups, margins), True)
        return grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)

    def _balanced_choices(self, scores: Tensor, sets: BalanceSets) -> Tensor:
        """Choice j of the token at position p of its sequence is expert (p * active + j) mod experts, on any plan."""
        rows, seq, experts = scores.shape
        positions = torch.cat([torch.arange(s.start, s.stop, device=scores.device) for s in sets.spans(seq)])
        numbers = positions.unsqueeze(-1) * self.spec.active + torch.arange(self.spec.active, device=scores.device)
        return (numbers % experts).expand(rows, -1, -1)

    def _room(self, tokens: int) -> int:
        """Return the maximum number of tokens of one sequence that an expert accepts (Switch Transformer, equation 3): at least one."""
        assert self.spec.capacity is not None
        return max(1, int(self.spec.capacity * tokens * self.spec.active / self.weight.shape[0]))

    # --- what keeps loads even ---

    def _objective(self, logits: Tensor, scores: Tensor, choices: Tensor, batch: Batch, sets: BalanceSets) -> Tensor | None:
        """Return this microbatch's part of the auxiliary losses on this rank; the parts of all microbatches and ranks add up to the mean
        over the sets of the global batch.

        Balance loss: weight * Σ_e f_e P_e, where f_e = experts / (active * tokens) * the number of choices of expert e in the set, and P_e
        is the mean of e's score over the set's tokens, with each token's scores normalised to sum to 1. With even loads, the balance loss
        equals `weight`. With one active expert, the balance loss is Switch's alpha * N Σ f P (equations 4 to 6); with sequences as sets, it
        is DeepSeek-V3's (equations 17 to 20). f has no gradient and P is a sum over tokens, so each token adds its own part. z-loss: weight
        * mean of logsumexp(logits)² (ST-MoE, arXiv:2202.08906, equation 5).
        """
        tokens = batch.sequences * scores.shape[1] * sets.sequence_ranks  # of the global batch
        terms: list[Tensor] = []
        if self.spec.balance_weight:
            shares = scores if self.spec.scores == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
            terms.append((shares * self._loads(choices, sets)).sum() * (self.spec.balance_weight / tokens))
        if self.spec.z_weight:
            terms.append(logits.logsumexp(-1).square().sum() * (self.spec.z_weight / tokens))
        return torch.stack(terms).sum() if terms else None

    def _loads(self, choices: Tensor, sets: BalanceSets) -> Tensor:
        """Return f, fp32 [batch or 1, 1, experts]: how often the tokens of each set chose each expert, divided by the number of choices
        under even loads."""
        if self.spec.balance_set == "global":
            total = self.load.sum()
            even = torch.ones_like(self.load)
            return torch.where(total > 0, self.load * (len(even) / total.clamp(min=1)), even)[None, None]
        counts = self._count(choices.flatten(1))
        counts = sets.over_sequence(counts) if self.spec.balance_set == "sequence" else sets.over_batch(counts.sum(0))[None]
        return (counts.float() * (counts.shape[1] / counts.sum(1, keepdim=True))).unsqueeze(1)

    def _count(self, choices: Tensor) -> Tensor:
        counts = choices.new_zeros(choices.shape[0], self.weight.shape[0])
        return counts.scatter_add_(1, choices, torch.ones_like(choices))

    def _counted(self, choices: Tensor, kept: Tensor | None) -> Tensor:
        """Return the number of choices of each expert, and then the number of dropped choices, in the form of `Router.counts`."""
        dropped = choices.new_zeros(1) if kept is None else (~kept).sum().view(1)
        return torch.cat((self._count(choices.flatten().unsqueeze(0))[0], dropped))

    def _record(self, batch: Batch, choices: Tensor, margins: Sequence[Tensor]) -> None:
        assert self.records is not None
        if not any(record.batch is batch for record in self.records):  # a forward that recomputation repeats
            closest = torch.stack(tuple(margins)).amin(0)
            self.records.append(RoutingRecord(batch, choices.sort(-1).values, closest))


@contextmanager
def recording(model: nn.Module) -> Iterator[dict[str, list[RoutingRecord]]]:
    """Record the routing of each microbatch inside this context, by the router's name in `model`, in the order of the first forwards."""
    routers = {name: module for name, module in model.named_modules() if isinstance(module, Router)}
    found: dict[str, list[RoutingRecord]] = {name: [] for name in routers}
    try:
        for name, router in routers.items():
            router.records = found[name]
        yield found
    finally:
        for router in routers.values():
            router.records = None


@dataclass(frozen=True)
class EvenRouting:
    """Computes, without any data, how many tokens choose each expert when choices are distributed evenly."""

    batch: int
    seq: int
    active: int
    experts: int

    def counts(self, spans: Sequence[range]) -> tuple[int, ...]:
        """Return, for each expert, how many of the tokens at positions `spans` of all sequences choose this expert."""
        return tuple(
            self.batch * sum(self._below(s.stop * self.active, e) - self._below(s.start * self.active, e) for s in spans)
            for e in range(self.experts)
        )

    def _below(self, number: int, expert: int) -> int:
        return (number - expert + self.experts - 1) // self.experts


def earlier(choices: Tensor) -> Tensor:
    """Return, for each choice [batch, seq, active], how many earlier tokens of its row chose the same expert."""
    flat = choices.flatten(1)
    ordered, order = flat.sort(stable=True, dim=1)
    place = torch.arange(flat.shape[1], device=flat.device).expand_as(flat)
    first = torch.searchsorted(ordered, ordered)  # where the run of this expert begins
    return torch.empty_like(flat).scatter_(1, order, place - first).view_as(choices)


def _best(values: Tensor, count: int, margins: list[Tensor] | None) -> Tensor:
    """Return the indices of the `count` largest values, largest first; of equal values, the one with the lowest index comes first. Append
    to `margins` the difference between the last chosen value and the largest value left out."""
    ordered, numbers = values.sort(stable=True, dim=-1, descending=True)
    if margins is not None:
        left = count < values.shape[-1]
        margins.append(ordered[..., count - 1] - ordered[..., count] if left else torch.full_like(ordered[..., 0], float("inf")))
    return numbers[..., :count]


class _Logits(torch.autograd.Function):
    """Computes x Wᵀ in fp32, for x of any dtype. Backward needs only x, which is saved in its own dtype."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.recomputed = weight, is_recomputed()  # the weight itself, since its `.grad` may be added to later
        return F.linear(x.float(), weight.float())

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,), weight = ctx.saved_tensors, ctx.weight
        of_x = (grad @ weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            rows = grad.flatten(0, -2)
            made = lambda: (rows.T @ x.flatten(0, -2).float()).to(weight.dtype)  # noqa: E731
            of_weight = weight_gradient(weight, made, recomputed=ctx.recomputed)
        return of_x, of_weight


class _Attach(torch.autograd.Function):
    """Returns `weights` unchanged. Backward adds the gradient of `objective`, as if `objective` were part of the loss, and adds the
    microbatch's counts to the router's counts. `scale`: the loss scale, by which the gradient of every loss is multiplied."""

    @staticmethod
    def forward(ctx, weights: Tensor, objective: Tensor | None, counts: Tensor, router: Router, scale: float) -> Tensor:
        ctx.counts, ctx.router = counts, router
        ctx.objective = None if objective is None else torch.full_like(objective, scale)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.router.counts += ctx.counts
        return grad, ctx.objective, None, None, None
