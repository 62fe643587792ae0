"""The coding of differences in few bits."""

import numpy as np
import pytest
import torch

from megalith.prove import site_merges as reference
from megalith.spec.sites import Piece, encoded_bytes
from megalith.train.sites import pieces
from megalith.train.sites.codes import decode, encode

SIZES = (1, 3, 127, 128, 129, 130, 255, 1000)
BITS = (2, 4, 8, 32)


def _values(size: int, *, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * 1e-3).astype(np.float32)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", SIZES)
def test_codes_and_bytes_are_the_references(size: int, bits: int) -> None:
    values = _values(size, seed=size)
    values[:: max(1, size // 3)] = 0
    found, wanted = encode(torch.from_numpy(values), bits), reference.encode(values, bits)
    assert found.numpy().tobytes() == wanted
    assert len(wanted) == encoded_bytes(size, bits)
    assert decode(found, size, bits).numpy().tobytes() == reference.decode(wanted, (size,), bits).tobytes()


@pytest.mark.parametrize("bits", BITS)
def test_a_block_of_zeros_stays_zero(bits: int) -> None:
    zeros = torch.zeros(200)
    assert torch.equal(decode(encode(zeros, bits), 200, bits), zeros)


def test_full_width_keeps_every_bit() -> None:
    values = torch.from_numpy(_values(77))
    assert torch.equal(decode(encode(values, 32), 77, 32), values)


def test_what_is_lost_is_what_theory_says() -> None:
    """For normally distributed elements four equal steps lose 0.1188 of the variance (Max 1960); 15 and 255 levels lose the variance
    within a step."""
    values = torch.from_numpy(_values(128 * 2000)).double()
    lost = {
        bits: float((decode(encode(values.float(), bits), len(values), bits) - values).square().mean() / values.square().mean())
        for bits in (2, 4, 8)
    }
    assert lost[2] == pytest.approx(0.119, rel=0.03)
    assert lost[4] == pytest.approx(0.0127, rel=0.1)
    assert lost[8] < 6e-5


def test_error_feedback_sends_everything_in_time() -> None:
    """Values sent over many rounds add up to the whole, up to one rounding."""
    values, left, sent = torch.from_numpy(_values(256)), torch.zeros(256), torch.zeros(256)
    for _ in range(200):
        code = encode(values + left, 2)
        told = decode(code, 256, 2)
        left = values + left - told
        sent += told
    assert float((sent / 200 - values).abs().max()) < 0.05 * float(values.abs().max())


def test_another_number_of_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 bytes cannot be 5 values of 8 bits, which take 9"):
        decode(torch.zeros(3, dtype=torch.uint8), 5, 8)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("top_k", [1, 64, 1000, 4095])
@pytest.mark.parametrize("shape", [(1, 1), (3, 50), (64, 64), (1, 4097), (130, 100)])
def test_the_largest_elements_are_the_references(shape: tuple[int, int], top_k: int, bits: int) -> None:
    """This holds even if magnitudes are equal."""
    piece = Piece("a", shape, bits, top_k)
    values = np.round(_values(piece.numel, seed=top_k).reshape(shape), 4)
    found, wanted = pieces.encode(torch.from_numpy(values), piece), reference.encode_piece(values, piece)
    assert found.numpy().tobytes() == wanted and len(wanted) == piece.bytes
    told = pieces.decode(found, piece)
    assert told.numpy().tobytes() == reference.decode_piece(wanted, piece).tobytes()
    if bits == 32:
        assert torch.equal(told[told != 0], torch.from_numpy(values)[told != 0])


def test_places_are_sent_in_few_bits() -> None:
    """64 of 4,096 places take 8 bits each; the information in such a choice is 7.36 bits each."""
    piece = Piece("a", (4096, 256), 2, 64)
    count = 64 * 256
    assert piece.bytes == count + 4 * count // 128 + count * 2 // 8
    with pytest.raises(ValueError, match="indices arrived, but"):
        pieces.decode(torch.zeros(piece.bytes, dtype=torch.uint8), piece)
