"""A rank's device, and its rendezvous with the others."""

import os
import socket
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from megalith.fleet.environment import Place
from megalith.machine.resident import keep_memory
from megalith.spec.run import LaunchSpec
from megalith.train.run import choose_device, join
from tests.ranks import run_ranks


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """Pretend that there are this many GPUs. Returns the list of those that were chosen."""

    def pretend(count: int) -> list[int]:
        chosen: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        monkeypatch.setattr("megalith.train.run.find_gpus", lambda: (count, float("inf")))
        return chosen

    return pretend


def test_the_cpu_is_a_choice_even_where_there_are_gpus(gpus):
    assert not gpus(8)
    assert choose_device("cpu", 0, 1) == torch.device("cpu")


def test_auto_is_the_cpu_where_there_is_no_gpu(gpus):
    gpus(0)
    assert [choose_device("auto", rank, 3) for rank in range(3)] == [torch.device("cpu")] * 3


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_each_rank_takes_the_gpu_of_its_number(gpus, wanted):
    chosen = gpus(4)
    assert [choose_device(wanted, rank, 4) for rank in range(4)] == [torch.device("cuda", rank) for rank in range(4)]
    assert chosen == [0, 1, 2, 3]


def test_a_gpu_adds_up_products_in_fp32(gpus):
    """By default torch lets a GPU round parts of a sum to 16 bits."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True
    gpus(1)
    choose_device("cuda", 0, 1)
    assert not matmul.allow_bf16_reduced_precision_reduction
    assert not matmul.allow_fp16_reduced_precision_reduction


@pytest.mark.parametrize(
    ("wanted", "count", "ranks"), [("cuda", 0, 1), ("cuda", 2, 3), ("cuda", 2, 8), ("auto", 1, 4), ("auto", 3, 4)]
)
def test_fewer_gpus_than_ranks_are_an_error_on_every_rank(gpus, wanted, count, ranks):
    """A5: under "auto" all ranks used the CPU without a message."""
    gpus(count)
    for rank in range(ranks):
        with pytest.raises(
            RuntimeError, match=rf"{ranks} ranks, and PyTorch can use {count} GPUs\. Use one rank per GPU, or set train.device"
        ):
            choose_device(wanted, rank, ranks)


@pytest.mark.parametrize("counted", [8, None])
def test_gpus_that_pytorch_cannot_use_are_no_reason_to_compute_on_the_cpu(gpus, monkeypatch, counted):
    gpus(0)
    monkeypatch.setattr("megalith.train.run.find_gpus", lambda: (counted, float("inf")))
    if counted is None:
        assert choose_device("auto", 0, 1) == torch.device("cpu")
        return
    with pytest.raises(RuntimeError, match=r"this machine has 8 GPUs, and PyTorch .* can use none of them"):
        choose_device("auto", 0, 1)
    assert choose_device("cpu", 0, 1) == torch.device("cpu")


def _meet(rank: int, store: str, generation: str) -> tuple[int, str]:
    dist.destroy_process_group()
    place = Place(rank, 2, rank, 2, "local", store, generation, serves=rank == 0)
    join(place, launch=LaunchSpec(), device=torch.device("cpu"))
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    return int(total), dist.get_backend()


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_ranks_meet_over_a_file_or_a_port(kind, tmp_path: Path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    store = f"file://{tmp_path}/meet" if kind == "file" else f"tcp://localhost:{port}"
    assert run_ranks(_meet, 2, store, "0") == [(3, "gloo")] * 2


def _listening(rank: int, store: str, named: str | None) -> tuple[str | None, set[str]]:
    """Return the interface that is named for gloo after the rendezvous, and the addresses at which this rank listens."""
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    if named:
        os.environ["GLOO_SOCKET_IFNAME"] = named
    _meet(rank, store, "0")
    open_ports = (each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN)
    return os.environ.get("GLOO_SOCKET_IFNAME"), {address.ip for address in open_ports}


@pytest.mark.parametrize("named", [None, "lo"])
def test_ranks_of_one_machine_listen_at_its_loopback(tmp_path: Path, named: str | None):
    """gloo would listen at the address of the machine's host name, which others on the network may reach."""
    for interface, addresses in run_ranks(_listening, 2, f"file://{tmp_path}/meet", named):
        assert interface == "lo" and addresses <= {"127.0.0.1"} and addresses


def test_ranks_of_several_machines_are_left_where_their_launcher_put_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr("megalith.train.run._store", lambda *_: (_ for _ in ()).throw(ConnectionError))
    with pytest.raises(ConnectionError):
        join(Place(0, 4, 0, 2, "local", "tcp://other:1", "0"), launch=LaunchSpec(), device=torch.device("cpu"))
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.slow
def test_a_store_that_held_an_earlier_generation_serves_the_next(tmp_path: Path):
    store = f"file://{tmp_path}/meet"
    for generation in ("0", "1", "2"):
        assert run_ranks(_meet, 2, store, generation) == [(3, "gloo")] * 2


def _memory(rank: int) -> bool:
    keep_memory()
    for _ in range(3):
        torch.ones(4_000_000).sum()
    return True


def test_kept_memory_still_computes():
    assert run_ranks(_memory, 1) == [True]
