"""Exchanges of values between ranks: nothing that arrives can execute code."""

import ast
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalith import exchange
from megalith.exchange import ExchangeError, ObjectCollectives, gather_tensors
from megalith.kernels.numbers import DTYPE
from tests.ranks import run_ranks

PRODUCT = Path(exchange.__file__).parent


@dataclass(frozen=True)
class _Value:
    names: dict[str, tuple[int, ...]]
    path: Path | None
    seconds: float


def _value(rank: int) -> _Value:
    return _Value({"a\udcff" * rank: (1, rank)}, Path("/x\udcff") if rank else None, float("inf") if rank else 0.1)


def _exchanged(rank: int) -> Any:
    ranks = ObjectCollectives(dist.group.WORLD)
    parts = [{(name, (rank,)) for name in "ab"[:rank]} for rank in range(3)]
    tensors = [torch.arange(rank), torch.tensor(rank, dtype=torch.bfloat16), torch.tensor([[rank == 1]])]
    return (
        ranks.gather(_value(rank), _Value), ranks.all_gather(_value(rank), _Value), ranks.broadcast(_value(rank), _Value),
        ranks.scatter(parts if rank == 0 else None, set[tuple[str, tuple[int, ...]]]), ranks.all_gather({"any": [rank, None]}, Any),
        gather_tensors(tensors[:rank], ranks.group) if ranks.group else None,
    )  # fmt: skip


def test_values_and_tensors_arrive_as_they_were_sent():
    everyone = [_value(rank) for rank in range(3)]
    for rank, (gathered, all_gathered, broadcast, scattered, plain, tensors) in enumerate(run_ranks(_exchanged, 3)):
        assert gathered == (None if rank else everyone)
        assert all_gathered == everyone
        assert broadcast == everyone[0]
        assert scattered == {(name, (rank,)) for name in "ab"[:rank]}
        assert plain == [{"any": [one, None]} for one in range(3)]
        if rank == 0:
            assert [[str(one.dtype) for one in row] for row in tensors] == [
                [],
                ["torch.int64"],
                ["torch.int64", "torch.bfloat16"],
            ]
            assert [one.tolist() for one in tensors[2]] == [[0, 1], 2.0]


class _Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('executed')",)


@pytest.mark.parametrize(
    "message", [pickle.dumps(_Evil()), b"", b'{"a": "x"}', b"[1, 2", b"[" * 100_000, json.dumps([{"path": 3}]).encode()]
)
def test_a_message_that_was_altered_on_its_way_is_refused(message: bytes):
    octets = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
    with pytest.raises(ExchangeError, match="altered on its way"):
        exchange._decoded(octets, _Value)


@pytest.mark.parametrize("sizes", [[3, exchange.LONGEST + 1], [-1, 3]])
def test_an_announced_size_that_no_message_has_is_refused_before_memory_is_taken(sizes: list[int]):
    with pytest.raises(ExchangeError, match="at most 1,073,741,824 bytes"):
        exchange._checked(torch.tensor(sizes), most=exchange.LONGEST)
    with pytest.raises(ExchangeError, match="dtypes and shapes"):
        exchange._cut(torch.zeros(8, dtype=torch.uint8), [("torch.float32", (3,))])


PICKLED = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
"""torch's collectives that exchange pickles; its functions that save and load checkpoints use them too."""


def test_no_other_exchange_between_ranks_sends_pickles():
    for path in PRODUCT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            assert named not in PICKLED, f"{path}:{node.lineno}"  # type: ignore[attr-defined]
            if isinstance(node, ast.ImportFrom) and node.module:
                assert node.module not in {
                    "torch.distributed.checkpoint.state_dict_saver",
                    "torch.distributed.checkpoint.state_dict_loader",
                }


def _any_number(rank: int) -> Any:
    assert dist.group.WORLD is not None
    return gather_tensors([torch.ones(3, dtype=dtype) for dtype in DTYPE.values()], dist.group.WORLD)


def _alone(rank: int) -> Any:
    ranks = ObjectCollectives(dist.group.WORLD)
    return ranks.all_gather([1], Any), ranks.gather(2, Any), ranks.broadcast(3, Any), ranks.scatter([4], Any)


def test_one_rank_alone_exchanges_with_itself():
    assert run_ranks(_alone, 1) == [([[1]], [2], 3, 4)]


def test_tensors_of_every_number_that_state_is_kept_in_arrive():
    gathered, _ = run_ranks(_any_number, 2)
    assert [[one.dtype for one in each] for each in gathered] == [[*DTYPE.values()]] * 2
