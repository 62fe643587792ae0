"""Tests that one GPU can run. Without one, those whose law holds on any device run on the CPU, so that they keep up with the product; each
other one is skipped and says why."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalith.kernels.product import sum_in_fp32

HERE = Path(__file__).parent


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run these tests last: other tests fork, and children of a process that has used a GPU cannot compute gradients."""
    items.sort(key=lambda item: HERE in item.path.parents)


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> torch.device:
    """The GPU, computing fp32 in fp32."""
    if not torch.cuda.is_available():
        if request.node.get_closest_marker("any_device"):
            return torch.device("cpu")
        # the set is collected everywhere, so that what it imports is checked, and runs where there is a device
        pytest.skip("needs a CUDA device, and torch.cuda.is_available() is False")
    assert torch.get_float32_matmul_precision() == "highest", "TF32 is on: comparisons with the CPU would mean nothing"
    sum_in_fp32()
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


@pytest.fixture
def alone(gpu: torch.device, tmp_path: Path) -> Iterator[None]:
    """This process as the only rank, with NCCL for the GPU and gloo for the CPU."""
    backends = "cpu:gloo,cuda:nccl" if gpu.type == "cuda" else "gloo"
    dist.init_process_group(backends, store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
