"""Fused projection onto the vocabulary and cross-entropy, a few rows at a time, so that the fp32 logits of all tokens never exist at
once."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalith.kernels.chunks import chunk_rows
from megalith.kernels.multiply import PLAIN, Multiply

Reduce = Callable[[Tensor, str], Tensor]  # (values, "sum" | "max") -> the same, over the ranks that share the vocabulary
Gather = Callable[[Tensor], Tensor]  # columns of this rank's part of the vocabulary -> those of the whole
TokenLoss = Callable[[Tensor, Tensor], Tensor]  # logits [tokens, vocab] in fp32 and targets [tokens] -> the loss of each token
IGNORE = -100


class Loss(NamedTuple):
    """`objective` is the differentiated loss (nll + z-loss); `nll` is the cross-entropy alone. `objective` and `nll` are sums
    over valid targets, multiplied by `scale`."""

    objective: Tensor
    nll: Tensor


class Terms(NamedTuple):
    """The terms of a loss over a vocabulary, as in the arguments of `cross_entropy`."""

    scale: float
    z_loss: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None
    gradient_scale: float = 1.0
    offset: int = 0
    reduce: Reduce | None = None
    multiply: Multiply = PLAIN
    of_token: TokenLoss | None = None
    gather: Gather | None = None


def finish(products: Tensor, *, logit_scale: float = 1.0, softcap: float | None = None) -> Tensor:
    """Turn the products hidden @ weight.T into logits: scale them, then cap them by softcap * tanh(logits / softcap)."""
    logits = products if logit_scale == 1.0 else products * logit_scale
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def cross_entropy_plain(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    scale: float,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Loss:
    """The plain definition of the loss, for tests: hidden [tokens, dim], weight [vocab, dim], targets [tokens] (-100: none). All
    logits are in memory at once."""
    logits = finish((hidden @ weight.T).float(), logit_scale=logit_scale, softcap=softcap)
    valid = targets != IGNORE
    nll = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum") * scale
    z = (logits.logsumexp(-1).square() * valid).sum() * (scale * z_loss)
    return Loss(nll + z, nll.detach())


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    scale: float,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    gradient_scale: float = 1.0,
    offset: int = 0,
    reduce: Reduce | None = None,
    chunk: int | None = None,
    multiply: Multiply = PLAIN,
    of_token: TokenLoss | None = None,
    gather: Gather | None = None,
) -> Loss:
    """Compute `cross_entropy_plain` in chunks of `chunk` rows, with the gradients already in forward, while a chunk's logits are
    in memory. No logit is therefore computed twice, and no tensor of size tokens x vocab is kept.

    With `reduce`, `weight` is this rank's rows [offset, offset + len(weight)) of the vocabulary (Megatron-LM, Shoeybi et al. 2019, §3).
    `multiply` computes the three products with `weight`. Only gradients, not losses, are multiplied by `gradient_scale`. Without
    `gradient_scale`, small gradients would become 0 in the narrow format that gradients have from here on.

    `of_token`: a function for the loss of each token in place of cross-entropy; its loss is then also `Loss.nll`. `of_token` gets whole
    rows of finished logits; `gather` joins them if the vocabulary is split. Raises ValueError if the function does not return one
    floating-point value per token.
    """
    rows = chunk or chunk_rows(weight.shape[0], capped=softcap is not None)
    terms = Terms(scale, z_loss, logit_scale, softcap, gradient_scale, offset, reduce, multiply, of_token, gather)
    objective, nll = _Chunked.apply(hidden, weight, targets, terms, rows)  # pyright: ignore[reportGeneralTypeIssues]
    return Loss(objective, nll)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, terms, rows):
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        objective = torch.zeros((), dtype=torch.float32, device=hidden.device)
        nll = torch.zeros_like(objective)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            losses, grad = _chunk(hidden[part], weight, targets[part], terms, wants_hidden or wants_weight)
            objective += losses.objective
            nll += losses.nll
            if grad_hidden is not None:
                terms.multiply.dgrad(grad, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight += terms.multiply.wgrad(grad, hidden[part])
        ctx.save_for_backward(grad_hidden, grad_weight if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(nll)
        return objective, nll

    @staticmethod
    def backward(ctx, grad_objective, _grad_nll):  # pyright: ignore[reportIncompatibleMethodOverride]
        grads = [None if g is None else g * grad_objective.to(g.dtype) for g in ctx.saved_tensors]
        return *grads, None, None, None


def _chunk(hidden: Tensor, weight: Tensor, targets: Tensor, terms: Terms, wants_grad: bool) -> tuple[Loss, Tensor]:
    """Return the losses of a few rows, and the gradient of `hidden @ weight.T` in the dtype of `hidden` (meaningless without
    `wants_grad`)."""
    if terms.of_token is not None:
        return _own_chunk(hidden, weight, targets, terms, terms.of_token, wants_grad)
    scale, z_loss, offset, reduce = terms.scale, terms.z_loss, terms.offset, terms.reduce
    logits, slope = logits_of(hidden, weight, terms, wants_slope=wants_grad)
    here = targets - offset
    mine = (here >= 0) & (here < weight.shape[0])
    column = here.clamp(0, weight.shape[0] - 1).unsqueeze(-1)
    top = logits.amax(-1)
    if reduce is not None:
        top = reduce(top, "max")
    hit = logits.gather(-1, column).squeeze(-1) * mine
    exps = logits.sub_(top.unsqueeze(-1)).exp_()  # reuses the logits' memory: they are the largest thing here
    total = exps.sum(-1)
    if reduce is not None:
        total, hit = reduce(torch.stack((total, hit)), "sum").unbind()
    valid = (targets != IGNORE).float()
    logsumexp = top + total.log()
    nll = ((logsumexp - hit) * valid).sum() * scale
    objective = nll + (logsumexp.square() * valid).sum() * (scale * z_loss)
    if not wants_grad:
        return Loss(objective, nll), exps
    scale *= terms.gradient_scale
    exps *= (valid * scale * (1 + 2 * z_loss * logsumexp) / total).unsqueeze(-1)
    exps.scatter_add_(-1, column, (-scale * valid * mine).unsqueeze(-1))
    return Loss(objective, nll), gradient_of_products(exps, slope, terms).to(hidden.dtype)


def logits_of(hidden: Tensor, weight: Tensor, terms: Terms, *, wants_slope: bool) -> tuple[Tensor, Tensor | None]:
    """Return the logits [tokens, rows] in fp32 of `hidden` and rows of the vocabulary; with `wants_slope`, also the derivative of the
    soft cap, if there is one."""
    logits = terms.multiply.fprop(hidden, weight).float()
    if terms.logit_scale != 1.0:
        logits *= terms.logit_scale
    if terms.softcap is None:
        return logits, None
    bent = logits.div_(terms.softcap).tanh_()
    slope = torch.addcmul(torch.ones((), device=bent.device), bent, bent, value=-1) if wants_slope else None
    return bent.mul_(terms.softcap), slope


def gradient_of_products(grad: Tensor, slope: Tensor | None, terms: Terms) -> Tensor:
    """Turn, in place, the gradient of logits from `logits_of` into that of the products hidden @ weight.T."""
    if slope is not None:
        grad *= slope
    if terms.logit_scale != 1.0:
        grad *= terms.logit_scale
    return grad


def _own_chunk(
    hidden: Tensor, weight: Tensor, targets: Tensor, terms: Terms, of_token: TokenLoss, wants_grad: bool
) -> tuple[Loss, Tensor]:
    """Do what `_chunk` does for losses from `of_token`; autograd computes their gradient on whole rows of logits."""
    products = terms.multiply.fprop(hidden, weight).float()
    whole = products if terms.gather is None else terms.gather(products)
    valid = targets != IGNORE
    with torch.enable_grad():
        leaf = whole.detach().requires_grad_(wants_grad)
        logits = finish(leaf, logit_scale=terms.logit_scale, softcap=terms.softcap)
        each = of_token(logits, targets.clamp(min=0))
        if not isinstance(each, Tensor) or each.shape != targets.shape or not each.is_floating_point():
            kind = f"a {type(each).__name__}"
            found = f"{each.dtype} numbers of shape {list(each.shape)}" if isinstance(each, Tensor) else kind
            raise ValueError(
                f"train.loss must return one floating-point value for each of {len(targets)} tokens, but returned {found}"
            )
        own = torch.where(valid, each.float(), 0.0).sum() * terms.scale
        z = (logits.logsumexp(-1).square() * valid).sum() * (terms.scale * terms.z_loss) if terms.z_loss else 0.0
        objective = own + z
    losses = Loss(objective.detach(), own.detach())
    if not wants_grad:
        return losses, products
    (grad,) = torch.autograd.grad(objective, leaf)
    mine = grad[:, terms.offset : terms.offset + weight.shape[0]] * terms.gradient_scale
    return losses, mine.to(hidden.dtype)
