"""Copies in memory that are kept for a rewind, and the text stored with each copy."""

from pathlib import Path

import pytest
import torch

from megalith.checkpoint.memory import CopyError, Memory
from megalith.fleet.rank_info import RankInfo, node_folder
from megalith.fleet.tiers import copies
from tests.keys import KEY


def memory_of(root: Path, live: dict[str, torch.Tensor], *, good: int = 2) -> Memory:
    return Memory(live, rank_info=RankInfo(0, 1, ("n0",), root, key=KEY), keep=2, good=good, text_bytes=64)


def filled(root: Path) -> tuple[Memory, dict[str, torch.Tensor]]:
    """Steps 1 to 9, of which 3, 5 and 6 are good."""
    live = {"weights.a": torch.zeros(100)}
    memory = memory_of(root, live)
    for step in range(1, 10):
        live["weights.a"].fill_(step)
        memory.copy(step, 8 * step, text=f"after {step}", good=step in (3, 5, 6))
    return memory, live


def test_the_last_good_ones_stay_beside_the_newest(tmp_path: Path) -> None:
    memory, _ = filled(tmp_path)
    assert memory.steps() == {5, 6, 7, 8, 9}


def test_going_back_forgets_what_was_made_since(tmp_path: Path) -> None:
    memory, live = filled(tmp_path)
    label = memory.go_back(6, now=10)
    assert (label.step, label.samples, memory.text) == (6, 48, "after 6")
    assert live["weights.a"].unique().tolist() == [6.0]
    assert memory.steps() == {5, 6}
    memory.copy(10, 80, updates=6)
    assert memory.steps() == {5, 6, 10}
    with pytest.raises(CopyError, match="there is none"):
        memory.go_back(8, now=11)


def test_marks_outlive_the_process_and_a_copy_of_the_same_step(tmp_path: Path) -> None:
    filled(tmp_path)
    live = {"weights.a": torch.full((100,), 6.0)}
    again = memory_of(tmp_path, live)
    again.forget_after(6)
    again.copy(6, 48)
    for step in range(7, 12):
        again.copy(step, 8 * step)
    assert {5, 6} <= again.steps()


def test_a_flipped_bit_of_the_text_is_noticed(tmp_path: Path) -> None:
    memory, _ = filled(tmp_path)
    assert memory.layout.entries[-1].name == "told"
    assert copies.corrupt_piece(node_folder(tmp_path, "n0"), key=KEY, rank=0, step=6, bit=8 * memory.layout.entries[-1].offset)
    with pytest.raises(CopyError, match="digest"):
        memory.go_back(6, now=10)


def test_a_text_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    memory, _ = filled(tmp_path)
    with pytest.raises(ValueError, match="room for 64 bytes of text, but this text has 65"):
        memory.copy(11, 88, text="x" * 65)
