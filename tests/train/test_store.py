"""The stores through which ranks connect: ours with a key, and torch's at one address."""

import os
import signal
import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megalith.fleet.environment import Place
from megalith.fleet.secure import key
from megalith.fleet.secure.key import NoKey
from megalith.fleet.secure.store_client import StoreClient
from megalith.fleet.secure.store_server import listen
from megalith.spec.run import LaunchSpec
from megalith.train.run import join
from megalith.train.store import serve, tcp_store
from tests.keys import KEY
from tests.patience import PATIENCE
from tests.ranks import run_ranks


@pytest.fixture
def meeting() -> Iterator[str]:
    server = listen("127.0.0.1", 0)
    address = f"megalith://127.0.0.1:{server.getsockname()[1]}"
    keeper = serve(server, KEY)
    yield address
    os.kill(keeper, signal.SIGKILL)
    os.waitpid(keeper, 0)


def test_a_store_in_a_process_of_its_own_is_shared_and_survives_its_clients(meeting: str) -> None:
    first, second = (StoreClient(meeting, KEY, seconds=PATIENCE) for _ in range(2))
    first.set("word", "said")
    first.close()
    assert second.get("word") == b"said" and second.add("count", 2) == 2
    assert not second.check(["nothing"]) and second.delete_key("word")


def _meet(rank: int, store: str, generation: str) -> int:
    dist.destroy_process_group()
    os.environ |= KEY.variables
    join(Place(rank, 3, rank, 3, "local", store, generation), launch=LaunchSpec(), device=torch.device("cpu"))
    pair = dist.new_group([0, 2])
    total = torch.tensor(10**rank)
    dist.all_reduce(total)
    if isinstance(pair, dist.ProcessGroup):
        dist.all_reduce(total, group=pair)
    return int(total)


@pytest.mark.slow
def test_ranks_meet_in_the_store_that_strangers_cannot_reach_again_and_again(meeting: str) -> None:
    for generation in ("one", "two"):
        assert run_ranks(_meet, 3, meeting, generation) == [222, 111, 222]
    client = StoreClient(meeting, KEY, seconds=PATIENCE)
    before = client.num_keys()
    client.delete_prefix("one/")
    assert 0 < client.num_keys() < before


def test_a_rank_without_the_key_says_so(meeting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(key.VARIABLE, raising=False)
    with pytest.raises(NoKey, match="MEGALITH_KEY is not set"):
        join(Place(0, 1, 0, 1, "local", meeting, "g"), launch=LaunchSpec(), device=torch.device("cpu"))


def test_torchs_store_listens_at_the_address_it_was_told_alone() -> None:
    store = tcp_store("tcp://127.0.0.1:0", serves=True, timeout=timedelta(seconds=PATIENCE))
    other = tcp_store(f"tcp://127.0.0.1:{store.port}", serves=False, timeout=timedelta(seconds=PATIENCE))
    store.set("word", "said")
    assert other.get("word") == b"said"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", store.port), timeout=PATIENCE)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"127\.0\.0\.1, port {port}"):
            listen("127.0.0.1", port)
        with pytest.raises(OSError, match="MEGALITH_LISTEN"):
            listen("192.0.2.1", port)
