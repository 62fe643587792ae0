"""The safetensors library can read our files and writes the same bytes, with the same digest."""

import hashlib

import pytest
import torch
from safetensors.torch import load_file

from megalith.checkpoint import tensors


def test_every_dtype_and_shape_reads_back_bit_for_bit(tmp_path):
    generator = torch.Generator().manual_seed(0)
    made = {
        f"{name}.{rank}": torch.randint(-99, 99, shape, generator=generator).to(dtype)
        for dtype, name in tensors.DTYPES.items()
        for rank, shape in enumerate([(), (3,), (5, 7), (0, 4)])
    }
    digest = tensors.write(tmp_path / "made.safetensors", made)
    back = load_file(tmp_path / "made.safetensors")
    assert back.keys() == made.keys()
    for name, tensor in made.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert torch.equal(back[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    content = (tmp_path / "made.safetensors").read_bytes()
    assert digest == tensors.FileDigest(len(content), hashlib.sha256(content).hexdigest())


def test_views_and_parameters_are_written_by_their_values(tmp_path):
    square = torch.arange(12.0).reshape(3, 4)
    tensors.write(tmp_path / "f", {"transposed": square.T, "row": square[1], "parameter": torch.nn.Parameter(square)})
    back = load_file(tmp_path / "f")
    assert torch.equal(back["transposed"], square.T)
    assert torch.equal(back["row"], square[1])
    assert torch.equal(back["parameter"], square)


@pytest.mark.parametrize("piece", [1, 7, 64])
def test_the_size_of_the_pieces_does_not_matter(tmp_path, monkeypatch, piece):
    whole = tensors.write(tmp_path / "a", {"x": torch.arange(100)})
    monkeypatch.setattr(tensors, "PIECE", piece)
    assert tensors.write(tmp_path / "b", {"x": torch.arange(100)}) == whole
