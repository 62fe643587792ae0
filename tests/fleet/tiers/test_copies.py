"""Copies of the state as files. Half-written or altered files do not count, and pieces add up to a whole copy."""

from pathlib import Path

import numpy as np
import pytest

from megalith.fleet.commands import QuarantineCopy
from megalith.fleet.rank_info import node_folder
from megalith.fleet.tiers import Copy, Tier, copies, newest
from megalith.fleet.tiers.copies import PAGE, Buffer, Label, Layout, Whose
from tests.keys import KEY, OTHER_KEY

WORLD = 4
LAYOUT = Layout.of([("weights.a", "F32", (5, 3), 60), ("moments.first.a", "F32", (5, 3), 60), ("empty", "F32", (0, 3), 0)])


def write(root: Path, node: str, rank: int, step: int, *, whose: Whose = "own", world: int = WORLD, buffer: int = 0) -> Buffer:
    """Write a rank's copy as the rank itself would."""
    text = LAYOUT.dump()
    file = Buffer.create(node_folder(root, node) / copies.file_name(whose, rank, buffer), len(text) + LAYOUT.payload, key=KEY)
    file.strike_out()
    file.memory[PAGE : PAGE + len(text)] = text
    words = np.random.default_rng([rank, step]).integers(0, 2**63, LAYOUT.payload // 8, dtype=np.uint64)
    file.memory[PAGE + len(text) :] = words.tobytes()
    digest = int(words.sum(dtype=np.uint64))
    file.commit(Label(step, 8 * step, rank, world, digest, len(text), LAYOUT.payload, "one"))
    return file


def node_of(rank: int) -> str:
    return f"n{rank // 2}"


def survey(root: Path, *placement: str) -> tuple[Copy, ...]:
    return copies.survey(root, placement=placement or ("n0", "n1"), world=WORLD, key=KEY)


def test_a_label_reads_back_and_half_of_one_does_not() -> None:
    label = Label(7, 56, 3, 8, 2**64 - 1, 4096, 8192, "generation")
    assert Label.unpack(label.pack(KEY), KEY) == label
    assert Label.unpack(label.pack(KEY)[:-1], KEY) is None and Label.unpack(bytes(200), KEY) is None
    altered = bytearray(label.pack(KEY))
    altered[9] ^= 1
    assert Label.unpack(bytes(altered), KEY) is None
    assert Label.unpack(label.pack(OTHER_KEY), KEY) is None, "of another run"


def test_a_layout_reads_back_and_no_two_tensors_share_a_word() -> None:
    assert Layout.load(LAYOUT.dump()) == LAYOUT
    first, second, empty = LAYOUT.entries
    assert first.offset + first.size <= second.offset <= second.offset + second.size <= empty.offset
    assert all(entry.offset % 64 == 0 for entry in LAYOUT.entries) and LAYOUT.payload % PAGE == 0


def test_a_step_is_whole_when_every_rank_has_its_piece(tmp_path: Path) -> None:
    for rank in range(WORLD):
        write(tmp_path, node_of(rank), rank, 5)
    assert survey(tmp_path) == (Copy(Tier.MEMORY, 5),)
    write(tmp_path, "n0", 0, 6, buffer=1)  # the other ranks have not reached that step
    write(tmp_path, "n0", 1, 6, buffer=1)
    assert survey(tmp_path) == (Copy(Tier.MEMORY, 6, frozenset({1})), Copy(Tier.MEMORY, 5))
    assert newest(survey(tmp_path)) == newest((Copy(Tier.MEMORY, 5),))


def test_what_was_struck_out_or_never_committed_is_no_copy(tmp_path: Path) -> None:
    files = [write(tmp_path, node_of(rank), rank, 5) for rank in range(WORLD)]
    files[3].strike_out()
    assert survey(tmp_path) == (Copy(Tier.MEMORY, 5, frozenset({1})),)
    files[1].strike_out()
    assert survey(tmp_path) == ()


@pytest.mark.parametrize("bit", [0, 1, 12345, 8 * 60, 8 * LAYOUT.payload - 1])
def test_a_flipped_bit_anywhere_in_the_payload_is_noticed(tmp_path: Path, bit: int) -> None:
    for rank in range(WORLD):
        write(tmp_path, node_of(rank), rank, 5)
    assert copies.corrupt_piece(node_folder(tmp_path, "n1"), key=KEY, rank=2, bit=bit)
    assert survey(tmp_path) == (Copy(Tier.MEMORY, 5, frozenset({1})),)
    assert not copies.corrupt_piece(node_folder(tmp_path, "n1"), key=KEY, rank=0)


def test_a_lost_nodes_pieces_are_found_at_its_buddy_and_a_spare_has_none(tmp_path: Path) -> None:
    for rank in range(WORLD):
        write(tmp_path, node_of(rank), rank, 5)
        write(tmp_path, node_of((rank + 2) % WORLD), rank, 5, whose="buddy")
    both = (Copy(Tier.MEMORY, 5), Copy(Tier.BUDDY, 5))
    assert survey(tmp_path) == both
    lost = survey(tmp_path, "n0", "spare")
    assert lost == (Copy(Tier.MEMORY, 5, frozenset({1})), Copy(Tier.BUDDY, 5, frozenset({0})))
    source = newest(lost)
    assert source is not None and source.elsewhere == ((1, Tier.BUDDY),)


def test_pieces_of_another_plan_and_of_a_slot_that_moved_do_not_count(tmp_path: Path) -> None:
    for rank in range(WORLD):
        write(tmp_path, node_of(rank), rank, 5, world=WORLD * 2)
    assert survey(tmp_path) == ()
    for rank in range(WORLD):
        write(tmp_path, node_of(rank), rank, 5)
    assert survey(tmp_path, "n1", "n0") == ()


def test_what_a_node_kept_for_others_in_another_slot_does_not_count(tmp_path: Path) -> None:
    for rank in range(WORLD):
        write(
            tmp_path, node_of(rank), rank, 5, whose="buddy"
        )  # each node keeps its own ranks' copies as a buddy's, which no placement does
    kept = copies.survey(tmp_path, placement=("n0", "n1"), world=WORLD, key=KEY, distance=1)
    assert kept == ()
    assert copies.survey(tmp_path, placement=("n1", "n0"), world=WORLD, key=KEY, distance=1) == (Copy(Tier.BUDDY, 5),)


def test_steps_are_forgotten_and_pieces_set_aside(tmp_path: Path) -> None:
    for rank in range(WORLD):
        for step in (5, 6):
            write(tmp_path, node_of(rank), rank, step, buffer=step)
    assert [copies.forget(node_folder(tmp_path, node), key=KEY, above=5) for node in ("n0", "n1")] == [2, 2]
    assert survey(tmp_path) == (Copy(Tier.MEMORY, 5),)
    assert copies.set_aside(tmp_path, QuarantineCopy(Tier.MEMORY, 5, 0), placement=("n0", "n1"), world=WORLD, key=KEY) == 2
    assert survey(tmp_path) == (Copy(Tier.MEMORY, 5, frozenset({0})),)
    assert len(list(node_folder(tmp_path, "n0").glob("aside-*"))) == 2


def test_a_buffer_of_the_right_size_is_kept_and_another_begins_empty(tmp_path: Path) -> None:
    file = write(tmp_path, "n0", 0, 5)
    again = Buffer.create(file.path, len(file.memory) - PAGE, key=KEY)
    assert again.label == file.label and not again.pinned
    again.pin(True)
    assert file.pinned
    assert Buffer.create(file.path, len(file.memory), key=KEY).label is None
