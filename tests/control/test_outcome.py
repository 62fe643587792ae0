from pathlib import Path

import pytest

from megalith.control.outcome import Outcome
from megalith.fleet.causes import Exit, Failure
from megalith.fleet.exit_codes import ExitCode


def test_the_message_begins_with_the_first_cause_and_ends_with_what_followed():
    cause = Failure(1, "raised ValueError in phase `step`", "ValueError: wrong", "line one\nline two", Path("r1.log"), 1.0, 1)
    after = Failure(0, "raised RuntimeError in phase `step`", "RuntimeError: closed by peer", "", Path("r0.log"), 2.0, 1, True)
    exits = (Exit(0, 1, 2.0), Exit(1, 1, 1.0), Exit(2, -9, 3.0), Exit(3, 0, 0.5))
    lines = Outcome(1, False, cause, (after,), exits, (2,), 0.1).message().splitlines()
    assert lines[:2] == ["rank 1 raised ValueError in phase `step`", "ValueError: wrong"]
    assert "  line two" in lines
    assert "output of rank 1: r1.log" in lines
    assert lines[-3:] == [
        "  rank 0 RuntimeError: closed by peer",
        "  ended by the supervisor: rank 2",
        "had ended in order: rank 3",
    ]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (ExitCode.FINISHED, "finished"),
        (ExitCode.STOPPED, "the same command goes on from there"),
        (ExitCode.INTERRUPTED, "the same command goes on from the newest checkpoint"),
        (ExitCode.TERMINATED, "the same command goes on from the newest copy of the state"),
    ],
)
def test_an_end_without_a_failure_says_what_became_of_the_state(code, said):
    assert said in Outcome(code, True, None, (), (), (), None).message()
