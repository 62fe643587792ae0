"""Silences that count as a hang."""

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megalith.control import watch
from megalith.control.outcome import Outcome
from megalith.control.pace import Limits
from megalith.control.watch import MAX_LIMITS, Hang, Watch
from megalith.fleet.causes import Failure
from megalith.fleet.heartbeat import SAVES_AGAIN, Beat
from megalith.fleet.job import Job

LIMIT = 10.0


def _until_a_hang(
    monkeypatch: pytest.MonkeyPatch, queued: Callable[[float], float], beats: Callable[[float], list[Beat]]
) -> tuple[float, Hang]:
    """Return the seconds until two ranks are called hung, and the hang. `queued`: seconds they waited for a processor until then."""
    clock, running = SimpleNamespace(now=0.0), {0, 1}

    def wait(seconds: float) -> list[Any]:
        clock.now += seconds
        return []

    def send(number: int, ranks: object) -> None:
        assert number == signal.SIGKILL
        running.clear()

    nodes = SimpleNamespace(
        wait=wait, send=send, beats=lambda: beats(clock.now), running=lambda: frozenset(running),
        queued=lambda: {"": queued(clock.now), "idle": 0.0}, inspect=lambda ranks: {}, log=lambda rank: Path("log"),
    )  # fmt: skip
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now))
    job = Job("nobody:calls", {}, ranks=2, run_dir=Path("run"), start_timeout=1000.0)
    one = Watch(job, cast(Any, nodes), [], limits=Limits(LIMIT, LIMIT))
    one.until_all_ended(lambda: None)
    assert one.hang is not None
    return clock.now, one.hang


READY = [Beat(1, 0.0, 3, True, "step")] * 2


@pytest.mark.parametrize("beats", [READY, [READY[0], Beat(1, 0.0, -1, False, "building")]], ids=["steps", "start"])
def test_ranks_that_wait_for_a_processor_do_not_hang_until_they_wait_for_something_else(
    beats: list[Beat], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(queued: Callable[[float], float]) -> Any:
        return pytest.approx(_until_a_hang(monkeypatch, queued, lambda now: beats)[0], abs=0.3)

    assert hang(lambda now: 0.0) == LIMIT
    assert hang(lambda now: 100.0) == LIMIT, "what they waited before does not count"
    assert hang(lambda now: min(now, 2 * LIMIT)) == 2.5 * LIMIT, "half a limit after the machine had time for them"
    assert hang(lambda now: 8 * now) == MAX_LIMITS * LIMIT, "not for ever"


def test_a_slow_start_with_heartbeats_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    def beats(now: float) -> list[Beat]:
        return [READY[0], Beat(1 + int(now), float(int(now)), -1, False, "building")]

    seconds, hang = _until_a_hang(monkeypatch, lambda now: 0.0, beats)
    assert seconds == pytest.approx(LIMIT, abs=0.3)
    assert (hang.limit, hang.phase) == (LIMIT, "building") and hang.silence < 1.5


@pytest.mark.parametrize("away", [False, True])
def test_a_last_checkpoint_that_is_retried_is_told_at_the_terminal_if_the_log_cannot_say_so(
    away: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if not away:
        (tmp_path / "run").mkdir()

    def beats(now: float) -> list[Beat]:
        return [Beat(1 + int(now), now, 3, True, phase) for phase in ("last checkpoint", f"{SAVES_AGAIN}3600")]

    with pytest.raises(_OverError):
        _until_a_hang(monkeypatch, lambda now: 0.0, lambda now: beats(now) if now < 3 else _end())
    words = (
        f"{tmp_path / 'run'} cannot be used (No such file or directory): saving the last checkpoint is retried for up to 3600 s"
    )
    assert capsys.readouterr().err.splitlines() == ([words] if away else [])


class _OverError(Exception):
    pass


def _end() -> list[Beat]:
    raise _OverError


def _seconds_until_the_rest_is_ended(
    monkeypatch: pytest.MonkeyPatch, failures: list[tuple[float, Failure]]
) -> tuple[float, Outcome]:
    """Let some of three ranks fail at given times. Return the seconds until the rest are ended, and the outcome."""
    clock, running, left = SimpleNamespace(now=0.0), {0, 1, 2}, list(failures)

    def wait(seconds: float) -> list[Any]:
        clock.now += seconds
        due = [failure for at, failure in left if at <= clock.now]
        left[:] = [(at, failure) for at, failure in left if at > clock.now]
        running.difference_update(failure.rank for failure in due if failure.rank is not None)
        return due

    nodes = SimpleNamespace(
        wait=wait, send=lambda number, ranks: running.clear(), beats=lambda: [READY[0]] * 3, running=lambda: frozenset(running),
    )  # fmt: skip
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now))
    job = Job("nobody:calls", {}, ranks=3, run_dir=Path("run"))
    outcome = Watch(job, cast(Any, nodes), []).until_all_ended(lambda: None)
    return clock.now, outcome


def _failure(rank: int, at: float, *, secondary: bool) -> Failure:
    return Failure(rank, "raised", "E: mine", "", Path("log"), at, 1, secondary)


def test_while_only_consequences_are_known_the_cause_is_waited_for_and_with_a_cause_other_errors_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = (1.0, _failure(0, 1.0, secondary=True))
    ended, outcome = _seconds_until_the_rest_is_ended(monkeypatch, [lost])
    assert ended == pytest.approx(1.0 + watch.CAUSE_SECONDS, abs=0.1)
    ended, outcome = _seconds_until_the_rest_is_ended(monkeypatch, [lost, (2.0, _failure(2, 2.0, secondary=False))])
    assert ended == pytest.approx(2.0, abs=0.1), "the first error was long enough ago"
    assert outcome.first_cause is not None
    assert (outcome.first_cause.rank, outcome.ended) == (2, (1,))
    ended, outcome = _seconds_until_the_rest_is_ended(monkeypatch, [(1.0, _failure(2, 1.0, secondary=False))])
    assert ended == pytest.approx(1.0 + watch.REPORT_SECONDS, abs=0.1)
