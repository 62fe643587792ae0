"""The safetensors library can read our files and writes the same bytes, with the same digest."""

import hashlib
from itertools import product

import pytest
import torch
from safetensors.torch import load_file

from megalith.checkpoint import tensors
from megalith.checkpoint.folder import Chunk, Piece
from megalith.prove.meter import Meter


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


class _Opened(dict[str, torch.Tensor]):
    """Stands for an open file."""

    def get_tensor(self, name: str) -> torch.Tensor:
        return self[name]


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize(("shape", "cuts"), [((5, 7), (10, 20, 5)), ((35,), (1, 34)), ((5, 7), (35,)), ((), (1,))], ids=str)
def test_a_chunk_in_pieces_is_read_box_by_box_and_never_held_twice(dtype: str, shape: tuple[int, ...], cuts: tuple[int, ...]):
    """Pieces are padded. Boxes of whole slices of the first dim need no memory."""
    values = torch.randn(shape).to(tensors.TORCH_DTYPES[dtype])
    parts = [part.contiguous().view(torch.uint8) for part in values.reshape(-1).split(cuts)]
    content = _Opened({str(number): torch.cat([part, part.new_zeros(9)]) for number, part in enumerate(parts)})
    chunk = Chunk((0,) * len(shape), shape, "file", tuple(Piece(str(number), len(part)) for number, part in enumerate(parts)))
    ranges = [[(low, high) for low in range(0, size, 2) for high in range(low + 1, size + 1, 3)] for size in shape]
    for spans in product(*ranges):
        with Meter() as meter:
            into = torch.zeros([high - low for low, high in spans], dtype=values.dtype)
            tensors.read(content, "x", chunk, dtype, into=into, offset=[low for low, _ in spans])
        assert torch.equal(into, values[tuple(slice(*span) for span in spans)])
        whole = all(high - low == size for (low, high), size in zip(spans[1:], shape[1:], strict=True))
        assert (sum(meter.memory().peak.values()) == into.nbytes) == whole
