import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalith.fleet import causes, evidence, observations, report
from tests.fleet.conftest import until
from tests.patience import PATIENCE

DUMP = """loss 3.1
Thread 0x00007f01 (most recent call first):
  File "parent_watch.py", line 48 in wait

Current thread 0x00007f02 (most recent call first):
  File "innermost.py", line 1 in deep
  File "outer.py", line 2 in main
"""


def test_the_main_stack_is_the_last_one_from_the_inside_out():
    assert evidence.main_stack(DUMP).splitlines()[1] == '  File "innermost.py", line 1 in deep'
    assert "parent_watch" not in evidence.main_stack(DUMP)


def test_a_deep_stack_keeps_its_innermost_calls():
    deep = "Current thread 0x01 (most recent call first):\n" + "\n".join(f"  call {i}" for i in range(100))
    kept = evidence.main_stack(deep).splitlines()
    assert len(kept) == evidence.TAIL_LINES
    assert kept[1] == "  call 0"


def test_a_crash_shows_the_innermost_calls_of_the_thread_that_crashed():
    """`faulthandler` writes a stack of any depth, and after it a list of extension modules."""
    calls = "\n".join(f"  call {i}" for i in range(100))
    current = "Current thread 0x02 (most recent call first):"
    crash = f"loss 3.1\nFatal Python error: Segmentation fault\n\nThread 0x01 (most recent call first):\n  waits\n\n{current}\n{calls}\n"
    found = evidence.last_words(crash + "\nExtension modules: numpy").splitlines()
    assert found[:4] == [
        "loss 3.1",
        "Fatal Python error: Segmentation fault",
        "Current thread 0x02 (most recent call first):",
        "  call 0",
    ]
    assert len(found) <= 2 * evidence.TAIL_LINES
    assert evidence.last_words("one\ntwo\n") == "one\ntwo"


def test_output_is_that_of_the_generation_only(tmp_path):
    log = tmp_path / "rank-0.log"
    log.write_text("==== then generation aa: rank 0 ====\nold\n==== now generation bb: rank 0 ====\nnew\nnewer\n")
    assert evidence.output(log, "bb") == "new\nnewer\n"
    assert evidence.output(tmp_path / "none", "bb") == ""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_process_is_seen_as_stopped():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        assert not evidence.is_stopped(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: evidence.is_stopped(process.pid), seconds=PATIENCE)
    finally:
        process.kill()
        process.wait()
    assert not evidence.is_stopped(None)
    assert evidence.oom_kills() >= 0


def test_what_ranks_left_in_a_store_that_is_away_ends_nobody_who_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(path: Path, *given: object, **more: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    observation = observations.NodeJoined(time=1.0, node="a")
    (tmp_path / "rank-0-1.json").write_text(json.dumps(observations.dump(observation)))
    with monkeypatch.context() as patch:
        for name in ("open", "stat", "glob"):
            patch.setattr(Path, name, away)
        assert evidence.output(tmp_path / "rank-0.log", "1f") == ""
        assert causes.read_error(tmp_path / "rank-0.error.json") is None
        assert report.collect(tmp_path) == []
    assert report.collect(tmp_path) == [observation]


def test_a_rank_that_gets_no_processor_has_as_much_longer_to_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller does not wait so long for a silent rank that has a processor, nor for ever for one that has none."""
    clock, log = SimpleNamespace(now=0.0), tmp_path / "rank-0.log"
    log.touch()

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if clock.now >= 5.0 and not log.stat().st_size:
            log.write_text(DUMP)

    monkeypatch.setattr(evidence, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))

    def asked(*, starved: float, answers: bool = True) -> str:
        clock.now = 0.0 if answers else 10.0
        log.write_text("" if answers else "before")
        found = evidence.dumps(
            {0: log}, ask=lambda: None, able=[0], seconds=2.0, waited=lambda: {0: 100.0 + starved * clock.now, 1: 7.0}
        )
        return found[0]

    assert asked(starved=0.0) == ""
    assert clock.now == pytest.approx(2.0, abs=0.1)
    assert "innermost.py" in asked(starved=0.9)
    assert clock.now < 9.0, "it had said what it had to say"
    assert asked(starved=1.0, answers=False) == ""
    assert clock.now == pytest.approx(10.0 + 2.0 * evidence.MAX_STARVED, abs=0.1)


def test_threads_that_only_look_for_work_do_not_wait_for_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "PROC", tmp_path)
    for number, (name, nanoseconds) in enumerate(
        (("python", 2_000_000_000), ("gloo_tcp_loop", 9_000_000_000), ("pt_gloo_runloop", 10**9))
    ):
        task = tmp_path / "7/task" / str(number)
        task.mkdir(parents=True)
        (task / "comm").write_text(f"{name}\n")
        (task / "schedstat").write_text(f"5 {nanoseconds} 3\n")
    (tmp_path / "7/task/9").mkdir()  # a process that has ended
    assert evidence.queued(7) == 3.0
    assert evidence.queued(8) == 0.0
