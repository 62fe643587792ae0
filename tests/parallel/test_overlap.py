"""Activations in pieces give the same results as whole ones, and each piece is sent while another is multiplied."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith.kernels.deferred import Queue, deferring
from megalith.kernels.multiply import Multiply
from megalith.mesh import Mesh
from megalith.models.batch import Batch
from megalith.parallel.groups import Groups
from megalith.parallel.overlap import PendingPiece, Pieces
from megalith.parallel.tensor import Split, split_part
from megalith.spec.families import Model
from tests.models.deepseek import deepseek
from tests.models.families import DENSE
from tests.models.plain import llama, stage
from tests.ranks import run_ranks

SEQ = 12  # a rank's share is 6: in four pieces, some longer than others
MODELS: dict[str, Model] = {
    "heads of keys for half of the ranks": llama(layers=1, kv_heads=1),
    "biases": DENSE["gpt"],
    "parallel": DENSE["palm"],
    "latent": deepseek(layers=2, dense_layers=2),
    "latent queries": deepseek(layers=2, dense_layers=2, q_rank=12),
}
DELAY = 0.03  # seconds that a piece is in flight
COMPUTES = 0.01  # that a product takes


def _block(model: Model, split: Split) -> tuple[torch.nn.Module, Batch]:
    made = stage(model, 1, 2)
    block = made.get_submodule("blocks.0")
    with torch.no_grad():
        for number, parameter in enumerate(block.parameters()):
            parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(number))
    batch = made.prepare(Batch(torch.zeros(2, SEQ, dtype=torch.long)))
    return split_part(block, split), batch


def _run(model: Model, split: Split, *, later: bool) -> dict[str, Tensor]:
    """Return the block's output and all gradients. `later`: weight gradients are deferred."""
    block, batch = _block(model, split)
    x, grad = torch.randn(2, 2, SEQ, model.dim, generator=torch.Generator().manual_seed(1))
    if split.sequence:
        x, grad = (whole.chunk(split.size, 1)[split.rank].clone() for whole in (x, grad))
    out = block(x.requires_grad_(), batch)
    queue = Queue()
    with deferring(queue) if later else nullcontext():
        out.backward(grad)
    queue.run_all()
    grads = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return grads | {"out": out.detach(), "x": x.grad}


def _compare(rank: int) -> None:
    groups = Groups.build(Mesh(tensor=2), device="cpu")
    for name, model in MODELS.items():
        for sequence in (True, False):
            expected = _run(model, Split(groups.tensor, sequence=sequence), later=False)
            for pieces in (2, 4):
                found = _run(model, Split(groups.tensor, sequence=sequence, pieces=pieces), later=pieces > 2)
                assert found.keys() == expected.keys()
                for key, value in expected.items():
                    scale = float(value.abs().max())
                    torch.testing.assert_close(found[key], value, rtol=0, atol=1e-5 * scale, msg=lambda m: f"{name}: {key}\n{m}")  # noqa: B023
    dist.barrier()


@pytest.mark.slow
def test_pieces_give_what_the_boundary_gives_at_once() -> None:
    run_ranks(_compare, 2)


# --- on a padded link ---


@dataclass
class Transfer:
    """A piece that arrives DELAY seconds after it was sent."""

    pending: PendingPiece
    started: float = field(default_factory=time.perf_counter)
    asked: float = 0.0

    def wait(self) -> Tensor:
        self.asked = time.perf_counter()
        time.sleep(max(0.0, self.started + DELAY - self.asked))
        return self.pending.wait()

    def hidden(self, products: list[tuple[float, float]]) -> bool:
        """True if a product ran between the start of the transfer and the wait for it."""
        return any(self.started <= start and end <= self.asked for start, end in products)


@dataclass
class Watched:
    """One pass through a block: transfers in the order of their starts, and the times of products."""

    transfers: list[Transfer] = field(default_factory=list)
    products: list[tuple[float, float]] = field(default_factory=list)

    def send(self, start: Callable[[Pieces, Tensor], PendingPiece], pieces: Pieces, x: Tensor) -> Any:
        self.transfers.append(Transfer(start(pieces, x)))
        return self.transfers[-1]

    def product(self, multiply: Callable[..., Tensor], *args: Any, **how: Any) -> Tensor:
        start = time.perf_counter()
        time.sleep(COMPUTES)
        out = multiply(*args, **how)
        self.products.append((start, time.perf_counter()))
        return out

    @property
    def hidden(self) -> list[bool]:
        return [transfer.hidden(self.products) for transfer in self.transfers]


def _watch(rank: int, pieces: int, sequence: bool) -> tuple[list[bool], list[bool]]:
    """Return for each dispatch of a block's forward, and of its backward, whether a product was computed meanwhile."""
    groups = Groups.build(Mesh(tensor=2), device="cpu")
    block, batch = _block(llama(layers=1), Split(groups.tensor, sequence=sequence, pieces=pieces))
    share = SEQ // 2 if sequence else SEQ
    x = torch.randn(2, share, 32, requires_grad=True)
    watched = Watched()
    for name in ("gather", "add_up"):
        start = getattr(Pieces, name)
        setattr(Pieces, name, lambda self, x, start=start: watched.send(start, self, x))  # this process ends with the function
    for name in ("fprop", "dgrad", "wgrad"):
        product = getattr(Multiply, name)
        setattr(Multiply, name, lambda *args, product=product, **how: watched.product(product, *args, **how))
    out = block(x, batch)
    forward = watched.hidden
    watched.transfers.clear()
    out.sum().backward()
    dist.barrier()
    return forward, watched.hidden


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [2, 3])
def test_every_piece_but_the_first_in_and_the_last_out_is_sent_while_another_is_multiplied(pieces: int) -> None:
    """Attention comes first, then the MLP. In backward the last transfer is hidden too, behind the weight gradients."""
    comes, leaves = [False, *[True] * (pieces - 1)], [*[True] * (pieces - 1), False]
    for forward, backward in run_ranks(_watch, 2, pieces, True):
        assert forward == (comes + leaves) * 2
        assert backward == (comes + [True] * pieces) * 2


@pytest.mark.slow
def test_without_split_sequences_sums_are_sent_so() -> None:
    for forward, backward in run_ranks(_watch, 2, 2, False):
        assert forward == [True, False] * 2
        assert backward == [True, True] * 2
