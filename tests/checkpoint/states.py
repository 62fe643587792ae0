"""A small training state in the layout of any plan, with the same values in every layout."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

State = dict[str, Tensor]
Layout = dict[str, int]  # sizes of the axes; other axes have size 1

AXES = ("pipeline", "dp_replicate", "dp_shard", "tensor")
SHAPES = {  # some cuts are uneven (7 rows on 2 x 3 ranks), some shares are empty (3 rows on 4)
    "embedding.weight": (12, 4),
    "blocks.0.attention_norm.weight": (6,),
    "blocks.0.attention.q.weight": (24, 6),
    "blocks.0.mlp.down.weight": (6, 8),
    "blocks.1.attention.q.weight": (7, 6),
    "head.norm.weight": (3,),
}
DTYPES = {"weights": torch.float32, "moments.second": torch.bfloat16}
TENSOR_DIM = {"embedding.weight": 0, "attention.q.weight": 0, "mlp.down.weight": 1}


def values(seed: int = 0) -> State:
    """Return the whole state, the same on every rank: fp32, bf16 and int64, matrices, vectors and a scalar."""
    generator = torch.Generator().manual_seed(seed)
    state = {
        f"{group}.{name}": torch.randn(shape, generator=generator).to(dtype)
        for group, dtype in DTYPES.items()
        for name, shape in SHAPES.items()
    }
    return state | {"step": torch.tensor(120 + seed), "samples": torch.tensor([1 << 40, 7 + seed])}


def zeros() -> State:
    """Return zeros in the form of `values`: the destination of a load."""
    return {key: torch.zeros_like(value) for key, value in values().items()}


def laid_out(state: State, layout: Layout) -> State:
    """Return this rank's part of the state on a pipeline x dp_replicate x dp_shard x tensor mesh, split by tensor parallelism and
    then FSDP2."""
    mesh = init_device_mesh("cpu", tuple(layout.get(axis, 1) for axis in AXES), mesh_dim_names=AXES)
    stage, stages = mesh.get_local_rank("pipeline"), layout.get("pipeline", 1)
    mine = {key: value for key, value in state.items() if value.dtype == torch.int64 or stage in _stages(key, stages)}
    whole = {key: value for key, value in mine.items() if value.dtype == torch.int64}  # plain tensors: every rank holds the same
    split = [key for key in mine if key not in whole]
    module = nn.ParameterList([_tensor(key, mine[key], mesh, layout) for key in split])
    fully_shard(module, mesh=mesh["dp_replicate", "dp_shard"])
    return whole | dict(zip(split, module, strict=True))


def _stages(key: str, stages: int) -> set[int]:
    """Place block 0 on the first stage, and block 1 and the head on the last. Both hold the tied embedding."""
    if "embedding" in key:
        return {0, stages - 1}
    return {0 if "blocks.0" in key else stages - 1}


def _tensor(key: str, value: Tensor, mesh: DeviceMesh, layout: Layout) -> Tensor:
    if layout.get("tensor", 1) == 1:
        return value
    dim = next((dim for name, dim in TENSOR_DIM.items() if name in key), None)
    return distribute_tensor(value, mesh["tensor"], [Replicate() if dim is None else Shard(dim)], src_data_rank=None)


def differing(state: State, expected: State) -> list[str]:
    """Return the keys whose local values differ in any bit."""
    assert state.keys() == expected.keys()
    return [key for key in state if not torch.equal(_bits(state[key]), _bits(expected[key]))]


def _bits(tensor: Tensor) -> Tensor:
    return local(tensor).contiguous().reshape(-1).view(torch.uint8)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's values, to read or to change."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
