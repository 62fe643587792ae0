"""The table splits known modules and refuses unknown ones."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from megalith.mesh import Mesh
from megalith.models.init import initialise
from megalith.models.stage import Stage
from megalith.parallel.groups import Groups
from megalith.parallel.tensor import LAYOUT, Split, split_part
from tests.models.plain import llama, stage
from tests.ranks import run_ranks


class Unheard(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


class Silent(nn.Module):
    """A module without parameters of its own has nothing to split."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()


def _split(ranks: int) -> Split:
    groups = Groups.build(Mesh(tensor=ranks), device="cpu")
    dist.barrier()  # a rank that ended now would break another rank's connection to it
    return Split(groups.tensor, sequence=True)


def _refuse(rank: int) -> None:
    part = stage(llama()).get_submodule("blocks.0")
    part.add_module("extra", Unheard())
    part.add_module("more", nn.LayerNorm(4))
    with pytest.raises(TypeError, match=r"covers the parameters of LayerNorm, Unheard; add a row, or use plan\.tensor = 1"):
        split_part(part, _split(1))
    fine = stage(llama()).get_submodule("blocks.0")
    fine.add_module("extra", Silent())
    split_part(fine, _split(1))


def test_a_class_with_parameters_and_no_row_is_refused_by_name():
    run_ranks(_refuse, 1)


def test_every_class_of_the_model_that_holds_parameters_has_a_row():
    rows = {type(module) for module in stage(llama()).modules() if list(module.parameters(recurse=False))}
    children = {type(stage(llama()).blocks["0"].attention.get_submodule(name)) for name in ("q", "k", "v", "out")}
    assert rows <= set(LAYOUT) | children


def _shares(rank: int, ranks: int, tied: bool) -> dict[str, tuple[Tensor, int | None, tuple[int, ...]]]:
    spec = llama(kv_heads=4, tied=tied)
    made, split = Stage(spec.build()), _split(ranks)
    for name, part in made.parts():
        initialise(part, name=name, spec=made.spec, seed=0)
        if tied and name == "head":
            made.head.output.weight = made.embedding.weight
        split_part(part, split)
    found = {}
    for name, parameter in made.parameters_by_name().items():
        placement = split.placed[parameter]
        dim = placement.dim if isinstance(placement, Shard) else None
        assert (parameter in split.partial) == (dim is None)
        sizes = [size * (ranks if axis == dim else 1) for axis, size in enumerate(parameter.shape)]
        found[name] = (parameter.detach(), dim, tuple(sizes))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tied"), [(2, False), (4, False), (2, True)])
def test_the_ranks_shares_put_together_are_the_whole_weight(ranks, tied):
    whole = stage(llama(kv_heads=4, tied=tied)).parameters_by_name()
    everyone = run_ranks(_shares, ranks, ranks, tied)
    assert everyone[0].keys() == whole.keys()
    for name, weight in whole.items():
        shares = [found[name][0] for found in everyone]
        dim, shape = everyone[0][name][1:]
        assert shape == tuple(weight.shape)
        if dim is None:
            assert "norm" in name and all(torch.equal(share, weight) for share in shares)
        else:
            assert torch.equal(torch.cat(shares, dim), weight), name
            assert all(share.numel() * ranks == weight.numel() for share in shares)


def test_outputs_are_split_before_and_inputs_after_a_head_or_hidden_unit():
    dims = {name.removeprefix("blocks.0."): dim for name, (_, dim, _) in run_ranks(_shares, 2, 2, False)[0].items()}
    assert {dims[f"attention.{name}.weight"] for name in "qkv"} | {dims["mlp.gate.weight"], dims["mlp.up.weight"]} == {0}
    assert {dims["attention.out.weight"], dims["mlp.down.weight"]} == {1}
    assert {dims["embedding.weight"], dims["head.output.weight"]} == {0}


def _tied(rank: int) -> None:
    made, split = Stage(llama(kv_heads=4, tied=True).build()), _split(1)
    assert made.head.output.weight is made.embedding.weight
    for _, part in made.parts():
        split_part(part, split)
    assert made.head.output.weight is made.embedding.weight
    assert len(split.shares) == 0, "nobody needs the whole weights any more"


def test_names_of_one_parameter_keep_one_share_across_parts():
    run_ranks(_tied, 1)
