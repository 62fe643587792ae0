"""Attention over sequences that are spread over ranks equals attention in one process."""

import weakref
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from megalith.kernels.attention import Kernel, flash_cpu
from megalith.kernels.mask import mask_rows
from megalith.models.batch import Batch, SegmentLengths
from megalith.models.core import CausalCore
from megalith.parallel import context as module
from megalith.parallel.context import ContextCore, ContextGroups, Line, parts, split_context, take, together
from megalith.spec.plan import Plan
from tests.full import sampled
from tests.parallel.traffic import Traffic
from tests.processor import rest
from tests.ranks import run_ranks

METHODS = ("ring", "gather", "ulysses", "ulysses x ring", "ulysses x gather")
PIECES: dict[str, SegmentLengths | None] = {
    "whole rows": None,
    "documents": ((1, 1000, 5, 2, 3088),),
    "a document over all ranks between single tokens": ((1, 1, 4093, 1),),
    "documents the length of a part": ((256,) * 16,),
}


@dataclass(frozen=True)
class Case:
    """One case of attention: heads, kv_heads, channels, channels of v."""

    seq: int = 4096
    shape: tuple[int, int, int, int] = (4, 2, 4, 4)
    segments: SegmentLengths | None = None
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float32

    @property
    def rows(self) -> int:
        return 1 if self.segments is None else len(self.segments)

    @property
    def core(self) -> CausalCore:
        return CausalCore(window=self.window, softcap=self.softcap)

    def tensors(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return q, k, v and the gradient of the output, for whole sequences."""
        heads, kv_heads, channels, of_v = self.shape
        generator = torch.Generator().manual_seed(0)
        sizes = ((heads, channels), (kv_heads, channels), (kv_heads, of_v), (heads, of_v))
        return [
            torch.randn(self.rows, self.seq, *size, generator=generator).to(self.dtype).to(dtype or self.dtype) for size in sizes
        ]

    def whole(self) -> list[Tensor]:
        """Return output and gradients of one process, in fp64."""
        *inputs, grad = self.tensors(torch.float64)
        batch = Batch(torch.zeros(self.rows, self.seq), segments=self.segments)
        return output_and_gradients(self.core, inputs, grad, batch)


def output_and_gradients(core: nn.Module, inputs: list[Tensor], grad: Tensor, batch: Batch) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = core(*leaves, batch)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def groups_of(method: str, rank: int, ranks: int) -> ContextGroups:
    """Return groups with all ranks as the context ranks of one sequence. Products of methods have two neighbours inside."""
    ulysses = 2 if " x " in method else ranks if method == "ulysses" else 1
    plan = Plan(context=ranks, context_method="gather" if "gather" in method else "ring", ulysses=ulysses)
    return ContextGroups.build(plan, SimpleNamespace(world=dist.group.WORLD, context=dist.group.WORLD, rank=rank))  # pyright: ignore[reportArgumentType]


def errors(rank: int, ranks: int, method: str, cases: list[Case], wholes: list[list[Tensor]]) -> list[float]:
    """Return for each case the largest error of outputs and gradients, relative to the tensor's largest number. If a token
    attends to itself alone, the gradients of its query and key are rounding errors; then the error is relative to the largest
    number of all tensors."""
    found = []
    groups = groups_of(method, rank, ranks)
    for case, whole in zip(cases, wholes, strict=True):
        *inputs, grad = (take(x, 1, rank=rank, ranks=ranks) for x in case.tensors())
        batch = Batch(torch.zeros(case.rows, case.seq // ranks), segments=case.segments)
        ours = output_and_gradients(ContextCore(case.core, groups), inputs, grad, batch)
        assert [x.dtype for x in ours] == [case.dtype] * 4
        wanted = [take(x, 1, rank=rank, ranks=ranks) for x in whole]
        sizes = [float(x.abs().max()) for x in whole]
        sizes = [size if size > 1e-9 * max(sizes) else max(sizes) for size in sizes]
        found.append(max(float((x - y).abs().max()) / size for x, y, size in zip(ours, wanted, sizes, strict=True)))
    return found


@cache
def wholes(cases: tuple[Case, ...]) -> list[list[Tensor]]:
    return [case.whole() for case in cases]


@cache
def measured(ranks: int, method: str, cases: tuple[Case, ...]) -> dict[Case, float]:
    """Return the largest errors on any rank. Ranks are forked once for all cases."""
    found = run_ranks(errors, ranks, ranks, method, list(cases), wholes(cases))
    return {case: max(each) for case, each in zip(cases, zip(*found, strict=True), strict=True)}


def long_cases(ranks: int) -> tuple[Case, ...]:
    return tuple(Case(shape=(ranks, max(1, ranks // 4), 4, 4), segments=segments) for segments in PIECES.values())


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("segments", PIECES.values(), ids=PIECES.keys())
@pytest.mark.parametrize("ranks", [2, 4, 8])
@sampled(8, together=True)
def test_any_method_equals_one_process_on_long_sequences(ranks, segments, method):
    cases = long_cases(ranks)
    (case,) = (case for case in cases if case.segments == segments)
    assert measured(ranks, method, cases)[case] < 1e-5


TWO_ROWS = ((1, 60, 3), (40, 24))
SHORT = {
    "one key head": Case(64, (4, 1, 8, 8), TWO_ROWS),
    "as many key heads as ranks": Case(64, (8, 4, 8, 8), TWO_ROWS),
    "key heads that ranks do not divide": Case(64, (12, 3, 8, 8), TWO_ROWS),
    "fewer channels in values": Case(64, (4, 4, 12, 5), TWO_ROWS),
    "more channels in values": Case(64, (4, 2, 5, 12), TWO_ROWS),
    "window": Case(64, segments=((64,), (64,)), window=13),
    "window and documents": Case(64, segments=TWO_ROWS, window=13),
    "window of one token": Case(64, window=1),
    "capped": Case(64, softcap=1.5),
    "capped, window and documents, latent": Case(64, (4, 4, 6, 3), TWO_ROWS, 20, 0.7),
    "single tokens": Case(64, segments=((1,) * 64,)),
    "bf16": Case(64, segments=TWO_ROWS, dtype=torch.bfloat16),
    "bf16, long": Case(1024, dtype=torch.bfloat16),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", SHORT.values(), ids=SHORT.keys())
def test_any_method_equals_one_process_on_any_kind_of_attention(case, method):
    bound = 2e-2 if case.dtype == torch.bfloat16 else 1e-5  # about 3 units in the last of bf16's 8 bits
    assert measured(4, method, tuple(SHORT.values()))[case] < bound


# --- parts ---


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_parts_put_together_are_the_whole(ranks):
    x = torch.arange(3 * 48 * 2).view(3, 48, 2)
    shares = [take(x, 1, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert torch.equal(together(shares, 1), x)
    for share, runs in zip(shares, parts(48, ranks), strict=True):
        assert torch.equal(share, x[:, [i for first, end in runs for i in range(first, end)]])
        assert share.shape[1] == 48 // ranks


def test_parts_of_neighbours_are_a_part_among_fewer():
    for few, neighbours in ((4, 2), (2, 4), (1, 8)):
        fine, coarse = parts(64, 8), parts(64, few)
        for rank in range(few):
            mine = {i for runs in fine[rank * neighbours : (rank + 1) * neighbours] for run in runs for i in range(*run)}
            assert mine == {i for run in coarse[rank] for i in range(*run)}


def test_a_sequence_that_does_not_divide_is_refused_with_the_number_that_would():
    with pytest.raises(ValueError, match="divisible by 8"):
        parts(60, 4)


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_all_ranks_score_equally_many_pairs(ranks):
    seq = 8192
    whole, all_keys = parts(seq, ranks), ((0, seq),)
    gathered = [_scored(runs, all_keys) for runs in whole]
    ring = [sum(_scored(runs, keys) for keys in whole) for runs in whole]
    assert ring == gathered
    assert sum(ring) == seq * (seq + 1) // 2
    assert max(ring) == min(ring)  # the early and the late chunk of a rank together see equally much on every rank


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_no_rank_of_a_ring_waits_for_a_slower_one_at_any_step(ranks):
    whole = parts(8192, ranks)
    for step in range(1, ranks):
        assert len({_scored(whole[rank], whole[(rank - step) % ranks]) for rank in range(ranks)}) == 1


def _scored(queries, keys) -> int:
    return sum(pair.scored for row in mask_rows(queries, keys, batch=1) for pair in row.pairs)


# --- what is sent ---


BYTES = {dtype: Case(64, (8, 2, 6, 10), dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}


def all_sent(rank: int, ranks: int) -> dict[tuple[str, torch.dtype], dict[str, int]]:
    return {(method, dtype): sent(rank, ranks, method, case) for method in METHODS for dtype, case in BYTES.items()}


@cache
def sent_by_ranks(ranks: int) -> list[dict[tuple[str, torch.dtype], dict[str, int]]]:
    return run_ranks(all_sent, ranks, ranks)


def sent(rank: int, ranks: int, method: str, case: Case) -> dict[str, int]:
    """Return the bytes that this rank sends in forward and backward. In a collective over n ranks, 1/n stays on the rank."""
    groups = groups_of(method, rank, ranks)
    *inputs, grad = (take(x, 1, rank=rank, ranks=ranks) for x in case.tensors())
    leaves = [x.requires_grad_() for x in inputs]
    core, batch, found = ContextCore(case.core, groups), Batch(torch.zeros(case.rows, 1), segments=case.segments), {}
    with Traffic() as forward:
        out = core(*leaves, batch)
    with Traffic() as backward:
        out.backward(grad)
    for name, traffic in (("forward", forward), ("backward", backward)):
        found[name] = round(sum(call.sent for call in traffic.calls))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_bytes_sent_are_those_of_theory(method, dtype):
    ranks, case = 4, BYTES[dtype]
    heads, kv_heads, channels, of_v = case.shape
    tokens, size = case.seq // ranks, dtype.itemsize
    keys = tokens * kv_heads * (channels + of_v)
    queries = tokens * heads * (channels + of_v)
    forward = backward = 0.0
    inner = 2 if " x " in method else ranks if method == "ulysses" else 1
    if inner > 1:  # queries, keys and values to heads, outputs back: of each, all but the rank's own part
        copies = max(1, inner // kv_heads)
        forward += (1 - 1 / inner) * (queries + copies * keys) * size
        backward += (1 - 1 / inner) * (queries + copies * keys) * size
        keys *= copies  # each rank has inner times the tokens and 1 / inner of the heads
    outer = ranks // inner
    forward += (outer - 1) * keys * size
    backward += (outer - 1) * keys * (size + 4)  # keys and values again, and their gradients in fp32
    assert [each[method, dtype] for each in sent_by_ranks(ranks)] == [{"forward": forward, "backward": backward}] * ranks


# --- what is kept ---


class Memory(TorchDispatchMode):
    """Counts the live bytes that operations allocated, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.living, self.most = 0, 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and (key := leaf.untyped_storage()._cdata) not in self.known | given:
                storage = leaf.untyped_storage()
                self.known.add(key)
                self.living += storage.nbytes()
                weakref.finalize(storage, self._free, key, storage.nbytes())
        self.most = max(self.most, self.living)
        return out

    def _free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.living -= size


def memory(rank: int, ranks: int, method: str, case: Case) -> tuple[int, int]:
    """Return the bytes kept from forward to backward in addition to the inputs, and the peak of allocated bytes."""
    groups = groups_of(method, rank, ranks)
    *inputs, grad = (take(x, 1, rank=rank, ranks=ranks) for x in case.tensors())
    leaves = [x.requires_grad_() for x in inputs]
    with Memory() as seen:
        out = ContextCore(case.core, groups)(*leaves, Batch(torch.zeros(case.rows, 1)))
        rest(0.1)  # gloo's threads release sent tensors shortly after arrival
        kept = seen.living
        out.backward(grad)
    return kept, seen.most


@sampled(8, together=True)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_memory_of_a_rank_falls_as_one_over_ranks(method):
    case = Case(4096, (8, 8, 4, 4))
    by_ranks = {ranks: run_ranks(memory, ranks, ranks, method, case) for ranks in (2, 4, 8)}
    kept, most = ({ranks: max(each[i] for each in found) for ranks, found in by_ranks.items()} for i in (0, 1))
    one = case.seq * 8 * 4 * 4  # bytes of a tensor like q
    tensors = {"ring": 1.25, "ulysses": 5.25}[method]  # output and log-sum-exp; q, k, v and the output in both layouts
    assert kept == {ranks: tensors * one / ranks for ranks in kept}
    assert most[8] == pytest.approx(most[4] / 2, rel=0.15)
    assert most[4] < most[2]  # a ring of two has fewer blocks in flight


@pytest.mark.slow
def test_gathering_keeps_no_more_than_a_ring_though_it_needs_more_for_a_moment():
    case = Case(1024, (8, 8, 4, 4))
    ring, gather = (max(run_ranks(memory, 4, 4, method, case)) for method in ("ring", "gather"))
    assert gather[0] == ring[0]
    assert gather[1] > ring[1]


# --- how it runs ---


def order(rank: int, ranks: int) -> list[str]:
    """Return the actions of a rank in a ring's forward, in order."""
    events: list[str] = []
    pass_on = Line.pass_on

    def computing(*args: Any) -> tuple[Tensor, Tensor]:
        events.append("compute")
        return flash_cpu.forward(*args)

    def passing(self: Line, block: Tensor) -> Any:
        events.append("send")
        return pass_on(self, block)

    module.kernel_for = lambda *_: Kernel(computing, flash_cpu.backward)  # this process ends with the test
    Line.pass_on = passing
    case = Case(64)
    *inputs, _ = (take(x, 1, rank=rank, ranks=ranks) for x in case.tensors())
    ContextCore(case.core, groups_of("ring", rank, ranks))(*inputs, Batch(torch.zeros(1, 16)))
    return events


@pytest.mark.slow
def test_the_next_block_is_on_its_way_before_this_one_is_used():
    assert run_ranks(order, 4, 4) == [["send", "compute"] * 3 + ["compute"]] * 4


class Odd(nn.Module):
    """Attention of an unknown kind."""

    def __init__(self) -> None:
        super().__init__()
        self.core = CausalCore(window=5)
        self.inside = nn.ModuleDict({"deep": nn.Module()})
        self.inside["deep"].core = CausalCore()


def swapped(rank: int) -> list[str]:
    part = Odd()
    groups = groups_of("ring", rank, 2)
    split_context(part, groups)
    split_context(part, groups)  # finds nothing more
    return [type(each).__name__ for each in part.modules()]


def test_every_core_is_swapped_once_whatever_holds_it():
    names = ["Odd", "ContextCore", "CausalCore", "ModuleDict", "Module", "ContextCore", "CausalCore"]
    assert run_ranks(swapped, 2) == [names] * 2


def recomputed(rank: int) -> list[float]:
    """Return for each method the difference between results with and without recomputation."""
    found = []
    for method in METHODS:
        case = Case(64)
        *inputs, grad = (take(x, 1, rank=rank, ranks=4) for x in case.tensors())
        batch, core = Batch(torch.zeros(1, 16)), ContextCore(case.core, groups_of(method, rank, 4))
        kept = output_and_gradients(core, inputs, grad, batch)
        core.forward = partial(checkpoint, core.forward, use_reentrant=False, preserve_rng_state=False)
        again = output_and_gradients(core, inputs, grad, batch)
        found.append(max(float((x - y).abs().max()) for x, y in zip(kept, again, strict=True)))
    return found


@pytest.mark.slow
def test_computing_it_again_in_backward_changes_nothing():
    assert run_ranks(recomputed, 4) == [[0.0] * len(METHODS)] * 4


def refused(rank: int) -> str:
    core = ContextCore(CausalCore(), groups_of("ulysses", rank, 4))
    q, k = torch.zeros(1, 4, 6, 8), torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError) as caught:
        core(q, k, k, Batch(torch.zeros(1, 4)))
    return str(caught.value)


@pytest.mark.slow
def test_heads_that_ranks_cannot_share_out_are_refused():
    assert all("plan.ulysses=4 does not divide the 6 heads" in text for text in run_ranks(refused, 4))
