"""Answers to a request to stop."""

import errno
import os
import signal

import pytest

from megalith.control.stop_response import StopResponse
from megalith.fleet.heartbeat import Beat
from megalith.fleet.tiers import Copy, Tier

STORE = (Copy(Tier.STORE, 5), Copy(Tier.STORE, 10))
MEMORY = Copy(Tier.MEMORY, 12)


def _said(number: int, steps: list[int], copies: tuple[Copy, ...] | OSError) -> list[str]:
    def found() -> tuple[Copy, ...]:
        if isinstance(copies, OSError):
            raise copies
        return copies

    said = list[str]()
    beats = [Beat(1, 0.0, step, True, "step") for step in steps] or [Beat(1, 0.0, -1, False, "building")]
    StopResponse([(number, 0.0)], said.append, beats=lambda: beats, copies=found)()
    return said


@pytest.mark.parametrize(
    ("steps", "copies", "again"),
    [
        ([12, 12], STORE, "stop now and lose 2 steps (the newest copy of the state is step 10 in store)"),
        ([12, 11], STORE, "stop now and lose 1 step (the newest copy of the state is step 10 in store)"),
        ([12, 12], (*STORE, MEMORY), "stop now and lose only this step (the copy of step 12 in memory is kept)"),
        ([12, 12], (*STORE, Copy(Tier.MEMORY, 12, frozenset({0}))), "stop now and lose 2 steps"),
        ([3, 3], (), "stop now and lose all steps (there is no copy of the state)"),
        ([3, 3], OSError(errno.ESTALE, os.strerror(errno.ESTALE)), "(the copies cannot be listed at the moment)"),
        ([], STORE, "stop now"),
    ],
)
def test_a_second_ctrl_c_is_priced(steps: list[int], copies: tuple[Copy, ...] | OSError, again: str) -> None:
    stopping, priced = _said(signal.SIGINT, steps, copies)
    assert stopping == ("stopping after this step, then saving" if steps else "stopping: the ranks are still starting")
    assert priced.startswith("Ctrl-C again: stop now")
    assert again in priced


def test_a_schedulers_signal_is_named() -> None:
    stopping, priced = _said(signal.SIGTERM, [12], STORE)
    assert stopping == "SIGTERM: stopping after this step, then saving"
    assert priced.startswith("Ctrl-C: stop now and lose 2 steps")
