import json
import mmap
import signal
import struct
import subprocess
import sys
import time
import zlib
from dataclasses import astuple

import pytest

from megalith.fleet import heartbeat
from megalith.fleet.heartbeat import KINDS, SLOT_BYTES, VARIABLE, Beat, Heartbeat, Heartbeats, StepMeasurement
from tests.fleet.conftest import ROOT


def test_what_a_rank_beats_is_what_the_supervisor_reads(tmp_path):
    board = Heartbeats.create(tmp_path / "heartbeats", 3)
    before = time.time()
    Heartbeat.open(tmp_path / "heartbeats", 1).beat("forward", 12)
    idle, beat, last = board.read()
    assert idle == last == Beat()
    assert (beat.count, beat.step, beat.phase, beat.ready) == (1, 12, "forward", False)
    assert before <= beat.time <= time.time()


def test_ready_stays_when_the_phase_moves_on(tmp_path):
    board = Heartbeats.create(tmp_path / "heartbeats", 1)
    slot = Heartbeat.open(tmp_path / "heartbeats", 0)
    slot.beat("ready")
    slot.beat("step", 1)
    assert board.read()[0].ready
    assert board.read()[0].count == 2


def test_every_beat_changes_the_slot_even_with_the_same_words(tmp_path):
    board = Heartbeats.create(tmp_path / "heartbeats", 1)
    slot = Heartbeat.open(tmp_path / "heartbeats", 0)
    seen = set()
    for _ in range(5):
        slot.beat("step", 1)
        seen.add(board.read()[0])
    assert len(seen) == 5


def test_a_half_written_slot_gives_the_beat_before(tmp_path):
    path = tmp_path / "heartbeats"
    board = Heartbeats.create(path, 2)
    Heartbeat.open(path, 1).beat("step", 4)
    whole = board.read()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[SLOT_BYTES + 16] ^= 1  # one bit of the step
    assert board.read() == whole


def test_a_long_phase_is_cut(tmp_path):
    board = Heartbeats.create(tmp_path / "heartbeats", 1)
    Heartbeat.open(tmp_path / "heartbeats", 0).beat("x" * 100)
    assert board.read()[0].phase == "x" * 32


def test_a_process_of_an_older_generation_does_not_disturb_the_new_one(tmp_path):
    path = tmp_path / "heartbeats"
    Heartbeats.create(path, 1)
    old = Heartbeat.open(path, 0)
    board = Heartbeats.create(path, 1)
    old.beat("step", 9)
    assert board.read() == [Beat()]


def test_a_rank_without_a_slot_is_refused(tmp_path):
    Heartbeats.create(tmp_path / "heartbeats", 2)
    with pytest.raises(ValueError, match=r"rank 2 has no heartbeat slot.*ranks 0 to 1"):
        Heartbeat.open(tmp_path / "heartbeats", 2)


def test_the_slot_is_found_in_the_environment_and_is_private_without_one(tmp_path):
    board = Heartbeats.create(tmp_path / "heartbeats", 2)
    Heartbeat.find({VARIABLE: str(tmp_path / "heartbeats"), "RANK": "1"}).beat("step", 3)
    private = Heartbeat.find({})
    private.beat("step", 8)
    assert private.read().step == 8
    assert [beat.step for beat in board.read()] == [-1, 3]


def test_beats_cross_processes_and_outlive_their_writer(tmp_path):
    board = Heartbeats.create(tmp_path / "heartbeats", 1)
    code = "\n".join(
        [
            "import os, signal, sys",
            "from pathlib import Path",
            "from megalith.fleet.heartbeat import Heartbeat",
            "Heartbeat.open(Path(sys.argv[1]), 0).beat('step', 5)",
            "os.kill(os.getpid(), signal.SIGKILL)",
        ]
    )
    writer = subprocess.run([sys.executable, "-c", code, str(board.path)], cwd=ROOT, check=False)
    assert writer.returncode == -signal.SIGKILL
    assert board.read()[0].step == 5


def test_a_beat_has_the_seconds_by_kind(tmp_path):
    board = Heartbeats.create(tmp_path / "heartbeats", 1)
    told = StepMeasurement(6, 2.0**30, {"own": 0.5, "forward": 0.25, "unheard of": 9.0})
    Heartbeat.open(tmp_path / "heartbeats", 0).beat("step", 7, compute=0.5, measured=told)
    (beat,) = board.read()
    assert (beat.step, beat.measured, beat.memory) == (7, 6, 2.0**30)
    assert dict(zip(KINDS, beat.seconds, strict=True)) == dict.fromkeys(KINDS, 0.0) | {"own": 0.5, "forward": 0.25}
    assert Beat.of(json.loads(json.dumps(astuple(beat)))) == beat


def test_a_slot_and_a_row_of_an_earlier_version_can_be_read(tmp_path):
    board = Heartbeats.create(tmp_path / "heartbeats", 1)
    fields = struct.pack("<Qdqd?32s", 3, 100.0, 12, 0.5, True, b"step")
    with (tmp_path / "heartbeats").open("r+b") as file:
        file.write(fields + struct.pack("<I", zlib.crc32(fields)))
    old = Beat(3, 100.0, 12, True, "step", 0.5)
    assert board.read() == [old]
    assert Beat.of([3, 100.0, 12, True, "step", 0.5]) == old


def test_a_slot_holds_all_that_a_beat_says():
    assert heartbeat._USED <= SLOT_BYTES
