"""Tensors that wait outside the device come back with the same bits, ahead of their backward, and leave nothing behind."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith.models.batch import Batch
from megalith.parallel.passes import Runner
from megalith.parallel.retain import OffloadShelf, PlacedFunction, Retention, SavedTensor, unpack_saved
from megalith.train.offload.retained import HostMemory
from megalith.train.step import train_step
from tests.full import sampled
from tests.parallel.running import microbatches, trainer_of
from tests.ranks import run_ranks
from tests.specs import brief_run

CPU = torch.device("cpu")
HOST, DISK = {"blocks": "host"}, {"blocks": "disk"}
HALF = HOST | {"share": 0.5}
PARTS = {"parts": {"attention": "host", "attention.core": "keep", "mlp.activation": "host"}}

PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any], list[dict[str, Any]]]] = {
    "one rank, microbatches": (1, {}, {}, [HOST, HALF, DISK]),
    "inputs of recomputed blocks": (1, {"recompute": "full"}, {}, [HALF, DISK]),
    "inputs of segments": (2, {"data": 2, "zero": 2, "recompute": "segments:2"}, {}, [HOST, DISK]),
    "parts recomputed, zero 3": (2, {"data": 2, "zero": 3, "recompute": "selective"}, {}, [HOST, DISK]),
    "tensor, interleaved": (4, {"tensor": 2, "pipeline": 2, "schedule": "interleaved", "chunks": 2}, {}, [HOST]),
    "context, backward split in two": (4, {"context": 2, "pipeline": 2, "schedule": "zb-v", "chunks": 2, "zero": 2}, {}, [HALF]),
    "experts, both ways": (
        4,
        {"pipeline": 2, "data": 2, "expert": 2, "schedule": "dualpipe"},
        {"preset": "deepseek-tiny"},
        [HOST],
    ),
    "experts, parts recomputed": (
        2,
        {"data": 2, "expert": 2, "zero": 0, "recompute": "selective", "recompute_parts": ["mlp.shared", "mlp.experts"]},
        {"preset": "deepseek-tiny"},
        [HOST, DISK],
    ),
    "parts of blocks": (
        2,
        {"tensor": 2, "recompute": "selective", "recompute_parts": ["mlp_norm"]},
        {},
        [PARTS, DISK | {"parts": {"attention": "keep", "mlp.activation": "recompute"}}],
    ),
    "parts of experts, heads again": (
        2,
        {"data": 2, "expert": 2, "recompute": "selective", "recompute_parts": ["attention.up", "mlp.experts.activation"]},
        {"preset": "deepseek-tiny"},
        [
            {"parts": {"attention.core": "host", "mlp.experts": "host", "mlp.shared": "keep"}},
            DISK | {"parts": {"attend": "keep"}},
            DISK | {"parts": {"attention.core": "host", "mlp.experts": "host", "mlp.shared": "keep"}},
        ],
    ),
    "parts in both places, zero 3": (
        2,
        {"context": 2, "zero": 3},
        {},
        [{"parts": {"attention": "disk", "attention.core": "host", "mlp": "host", "mlp.activation": "disk"}}],
    ),
    "update before the norm is known": (2, {"pipeline": 2, "schedule": "zb-h2", "post_validation": True}, {}, [HOST]),
}


def _trained(
    rank: int, plan: dict[str, Any], model: dict[str, Any], places: list[dict[str, Any]]
) -> list[tuple[dict[str, Tensor], int, int]]:
    """Return this rank's weights and moments after two steps, and for each place the bytes at most in the tier with the fewest, and
    those in all at the end."""
    found = []
    for place in places:
        trainer = trainer_of(brief_run(plan=plan | {"retain": place}, model=model))
        for step in range(2):
            train_step(trainer, microbatches(trainer, step), step=step)
        tiers = [tier.counted for tier in trainer.tiers.values()]
        held = min((tier.most for tier in tiers), default=0), sum(tier.held for tier in tiers)
        found.append(({name: share.clone() for name, share in trainer.state.shares().items()}, *held))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
@sampled(3)
def test_no_bit_changes_and_nothing_is_left(name: str) -> None:
    ranks, plan, model, places = PLANS[name]
    for (plain, *none), *others in run_ranks(_trained, ranks, plan, model, [{}, *places]):
        assert none == [0, 0]
        for other, most, left in others:
            assert other.keys() == plain.keys()
            assert all(torch.equal(other[key], plain[key]) for key in plain)
            assert most > left == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of the compiler
def test_what_compiled_blocks_keep_leaves_without_a_changed_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler divides forward and backward as always, and torch's own kernels compute both. The first run of a process rounds
    otherwise than later ones, without `plan.retain` too."""
    compiled = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled(module, backend="aot_eager_decomp_partition"))
    plan, model = {"compile": True, "recompute": "selective"}, {"layers": 1}
    parts = [{"parts": {"mlp": "host", "attention": "disk"}}, HOST | {"parts": {"attend": "keep", "mlp.activation": "disk"}}]
    _, (plain, *_), *others = run_ranks(_trained, 1, plan, model, [{}, {}, HOST, *parts])[0]
    for other, most, left in others:
        assert all(torch.equal(other[key], plain[key]) for key in plain)
        assert most > left == 0


# --- order ---


def _moves(rank: int, place: dict[str, Any]) -> list[str]:
    """Return the forwards and backwards of parts and the movements of a step, in their order."""
    trainer = trainer_of(brief_run(plan={"retain": place}, model={"layers": 3}, train={"global_batch": 1}))
    moves: list[str] = []
    number = {id(part): name for name, part in trainer.runners[0].stage.parts()}
    tier = trainer.tiers["host"]
    assert isinstance(tier, HostMemory)
    put, enter = tier.put, Runner._enter
    last: list[str] = []

    class Told:
        def __init__(self, copy: Any, block: str) -> None:
            self.copy, self.block = copy, block

        def fetch(self) -> Any:
            if moves[-1] != f"fetch {self.block}":
                moves.append(f"fetch {self.block}")
            return self.copy.fetch()

    def leaving(memories: Any) -> list[Told]:
        moves.append(f"leave {last[-1]}")
        return [Told(copy, last[-1]) for copy in put(memories)]

    def entered(self: Runner, at: int, then: int | None) -> None:
        last.append(number[id(self.parts[at])])
        moves.append(last[-1])
        enter(self, at, then)

    tier.put, Runner._enter = leaving, entered
    try:
        train_step(trainer, microbatches(trainer), step=0)
    finally:
        Runner._enter = enter
    return moves


def test_a_block_leaves_after_its_forward_and_comes_back_before_the_backward_of_the_block_after_it() -> None:
    forward = "embedding blocks.0,leave blocks.0,blocks.1,leave blocks.1,blocks.2,leave blocks.2,head"
    backward = "fetch blocks.2,head,fetch blocks.1,blocks.2,fetch blocks.0,blocks.1,blocks.0,embedding"
    expected = f"{forward},{backward}".replace("embedding blocks", "embedding,blocks").split(",")
    assert run_ranks(_moves, 1, HOST)[0] == expected


# --- a shelf ---


def _shelf(*stays: Tensor) -> OffloadShelf:
    return OffloadShelf({"host": HostMemory()}, frozenset(tensor.untyped_storage()._cdata for tensor in stays), CPU, rest="host")


def test_views_of_one_memory_move_once_and_come_back_as_they_were() -> None:
    whole = torch.arange(24, dtype=torch.float32)
    views = [whole.view(4, 6).t()[1:4, ::2], whole[5:7], whole.view(torch.int32)[3:]]
    expected = [view.clone() for view in views]
    tier = HostMemory()
    shelf = OffloadShelf({"host": tier}, frozenset(), CPU, rest="host")
    kept = [shelf.put(view) for view in views]
    shelf.leave()
    assert tier.counted.held == whole.nbytes
    whole.zero_()
    strides = [view.stride() for view in views]
    back = [unpack_saved(each) for each in kept]
    assert [each.stride() for each in back] == strides and [each.dtype for each in back] == [view.dtype for view in views]
    assert all(torch.equal(one, other) for one, other in zip(back, expected, strict=True))
    assert len({each.untyped_storage()._cdata for each in back}) == 1
    assert tier.counted.held == 0


def test_what_is_written_until_the_forward_ends_is_what_comes_back() -> None:
    """A buffer is filled piece by piece, and each piece is saved."""
    buffer, shelf = torch.zeros(2, 3), _shelf()
    kept = []
    for piece in buffer:
        piece += 1
        kept.append(shelf.put(piece))
    shelf.leave()
    assert all(torch.equal(unpack_saved(each), torch.ones(3)) for each in kept)


def test_memory_that_others_hold_stays() -> None:
    weight, empty = torch.ones(4), torch.empty(0)
    shelf = _shelf(weight)
    assert not isinstance(shelf.put(weight[1:]), SavedTensor)
    assert shelf.put(empty) is empty
    assert isinstance(shelf.put(torch.ones(2)), SavedTensor)


def test_memory_that_several_parts_keep_goes_to_the_nearest_of_their_places() -> None:
    one, both, near = (torch.ones(4 * size) for size in (1, 2, 3))
    for order in (1, -1):
        host, disk = HostMemory(), HostMemory()
        shelf, asked = OffloadShelf({"host": host, "disk": disk}, frozenset(), CPU, rest="disk"), [(both, "host"), (both, "disk")]
        for tensor, place in [(one, "disk"), (near, "host"), *asked[::order]]:
            PlacedFunction(lambda shelf=shelf, tensor=tensor: shelf.put(tensor), place=place)()
        shelf.leave()
        assert (host.counted.most, disk.counted.most) == (both.nbytes + near.nbytes, one.nbytes)


def test_what_a_named_part_keeps_goes_where_it_says() -> None:
    """Memory that a part keeps on the device stays, although another part would let it leave."""
    one, both, other = (torch.ones(4 * size) for size in (1, 2, 3))
    for leaves in (True, False):
        tier = HostMemory()
        outside, inside = ("host", "device") if leaves else ("device", "host")
        shelf = OffloadShelf({"host": tier}, frozenset(), CPU, rest=outside)
        kept = PlacedFunction(lambda shelf=shelf: [shelf.put(tensor) for tensor in (one, both)], place=inside)()
        kept += [shelf.put(tensor) for tensor in (both[1:], other)]
        shelf.leave()
        assert tier.counted.held == (other if leaves else one).nbytes
        assert all(
            torch.equal(unpack_saved(tensor), torch.ones(tensor.size)) for tensor in kept if isinstance(tensor, SavedTensor)
        )


def test_weights_buffers_and_tensors_of_the_microbatch_stay_and_no_shelf_moves_without_gradients() -> None:
    part = nn.LayerNorm(4)
    tokens, cos = torch.zeros(1, 4, dtype=torch.long), torch.ones(4)
    retention, batch = Retention({1: part}, {"host": HostMemory()}, CPU, rest="host"), Batch(tokens, rotary=((cos, cos.clone()),))
    shelf = retention.shelf(1, batch)
    assert shelf.moves and not retention.shelf(0, batch).moves
    assert not any(isinstance(shelf.put(tensor), SavedTensor) for tensor in (part.weight, tokens.view(-1), cos[1:]))
    with torch.no_grad():
        assert not retention.shelf(1, batch).moves
