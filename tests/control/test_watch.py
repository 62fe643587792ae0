"""When a silence is a hang."""

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megalith.control import watch
from megalith.control.pace import Limits
from megalith.control.watch import MOST_LIMITS, Watch
from megalith.fleet.heartbeat import Beat
from megalith.fleet.job import Job

LIMIT = 10.0


def _seconds_until_a_hang(monkeypatch: pytest.MonkeyPatch, queued: Callable[[float], float], beats: list[Beat]) -> float:
    """Of two ranks that say nothing any more. `queued`: seconds they waited for a processor until then."""
    clock, running = SimpleNamespace(now=0.0), {0, 1}

    def wait(seconds: float) -> list[Any]:
        clock.now += seconds
        return []

    def send(number: int, ranks: object) -> None:
        assert number == signal.SIGKILL
        running.clear()

    nodes = SimpleNamespace(
        wait=wait, send=send, beats=lambda: beats, running=lambda: frozenset(running), queued=lambda: {"": queued(clock.now), "idle": 0.0},
        look=lambda ranks: {}, log=lambda rank: Path("log"),
    )  # fmt: skip
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now))
    job = Job("nobody:calls", {}, ranks=2, run_dir=Path("run"), start_timeout=1000.0)
    one = Watch(job, cast(Any, nodes), [], limits=Limits(LIMIT, LIMIT))
    one.until_all_ended(lambda: None)
    assert one.hang is not None
    return clock.now


READY = [Beat(1, 0.0, 3, True, "step")] * 2


@pytest.mark.parametrize("beats", [READY, [READY[0], Beat(1, 0.0, -1, False, "building")]], ids=["steps", "start"])
def test_ranks_that_wait_for_a_processor_do_not_hang_until_they_wait_for_something_else(
    beats: list[Beat], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(queued: Callable[[float], float]) -> Any:
        return pytest.approx(_seconds_until_a_hang(monkeypatch, queued, beats), abs=0.3)

    assert hang(lambda now: 0.0) == LIMIT
    assert hang(lambda now: 100.0) == LIMIT, "what they waited before does not count"
    assert hang(lambda now: min(now, 2 * LIMIT)) == 2.5 * LIMIT, "half a limit after the machine had time for them"
    assert hang(lambda now: 8 * now) == MOST_LIMITS * LIMIT, "not for ever"
