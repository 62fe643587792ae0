import json
from dataclasses import replace
from pathlib import Path

import pytest

from megalith.control import incidents
from megalith.control.observed import GenerationEnd
from megalith.control.outcome import LINE_CHARACTERS, MAX_LINES, Outcome
from megalith.fleet.causes import Exit, Failure
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.heartbeat import Beat
from megalith.fleet.observations import RankFailed

TRACEBACK = """Traceback (most recent call last):
  File "/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1, in _call_impl
    return forward_call(*args)
  File "/here/megalith/train/step.py", line 7, in forward
    raise ValueError(text)
ValueError: wrong
1. the first thing
2. the second"""


def _lines(outcome: Outcome) -> list[str]:
    lines = outcome.message().splitlines()
    assert len(lines) <= MAX_LINES
    return lines


def _failure(rank: int, reason: str, error: str = "", traceback: str = "", *, secondary: bool = False, code: int = 1) -> Failure:
    return Failure(rank, reason, error, traceback, Path(f"r{rank}.log"), float(rank), code, secondary)


CAUSE = _failure(1, "raised ValueError in phase `step`", "ValueError: wrong", TRACEBACK)
PEER = _failure(0, "raised RuntimeError in phase `step`", "RuntimeError: closed by peer", "frame #0\n" * 30, secondary=True)
EXITS = (Exit(0, 1, 2.0), Exit(1, 1, 1.0), Exit(2, -9, 3.0), Exit(3, 0, 0.5))


def test_the_message_begins_with_the_first_cause_and_ends_with_where_the_rest_is():
    outcome = Outcome(1, False, CAUSE, (PEER,), EXITS, (2,), 0.1, file=Path("incidents/001.txt"))
    assert _lines(outcome) == [
        "rank 1 raised ValueError in phase `step`",
        "ValueError: wrong",
        "1. the first thing",
        "2. the second",
        "  in /here/megalith/train/step.py, line 7, in forward: raise ValueError(text)",
        "rank 0 failed after it; rank 2 was ended; rank 3 had ended normally",
        "output of rank 1: r1.log",
        "tracebacks and the output of each rank are in incidents/001.txt",
    ]


def test_a_report_of_the_policy_says_the_cause_and_it_is_not_said_again():
    report = "rank 1 on 0: ValueError: wrong: for the third time at step 3"
    lines = _lines(Outcome(1, False, CAUSE, (PEER,), EXITS, (), 0.1, report=report))
    assert lines[:3] == [report, "1. the first thing", "2. the second"]
    assert sum("ValueError: wrong" in line for line in lines) == 1
    other = _lines(Outcome(1, False, CAUSE, (), EXITS, (), 0.1, report="no spare is left"))
    assert other[:2] == ["no spare is left", "ValueError: wrong"]
    written = "megalith.fleet.report.Reported: a flipped bit"  # in the form in which a rank writes it
    for cause in (
        PEER,
        _failure(1, "raised Reported", written, TRACEBACK, code=ExitCode.REPORTED),
        _failure(1, "raised Reported", written, TRACEBACK, code=-9),  # the supervisor was faster than the rank's own exit
    ):
        lines = _lines(Outcome(1, False, cause, (), EXITS, (), 0.1, report="no spare is left"))
        assert lines[0] == "no spare is left"
        assert lines[1].startswith("rank 3 had ended normally")


def test_a_lost_connection_shows_no_stack_and_a_long_error_is_cut():
    assert _lines(Outcome(1, False, PEER, (), EXITS, (), 0.1))[1] == "RuntimeError: closed by peer"
    memory = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. " + "See documentation. " * 100
    lines = _lines(Outcome(1, False, _failure(1, "raised", memory, f"Traceback\n{memory}"), (), EXITS, (), 0.1))
    assert "CUDA out of memory" in lines[1]
    assert len(lines[1]) == LINE_CHARACTERS


def test_a_death_without_an_error_shows_the_end_of_its_output_and_a_stack_its_innermost_calls():
    printed = "\n".join(f"line {i}" for i in range(20))
    assert _lines(Outcome(71, False, _failure(1, "killed", "", printed), (), EXITS, (), 0.1))[1:4] == [
        "  line 17",
        "  line 18",
        "  line 19",
    ]
    stack = (
        'Current thread 0x1 (most recent call first):\n  File "a.py", line 1 in deep\n  File "b.py", line 2 in main\n' + printed
    )
    assert "in deep" in _lines(Outcome(71, False, _failure(1, "stands still", "", stack), (), EXITS, (), 0.1))[2]


def test_a_thousand_ranks_take_one_line():
    exits = tuple(Exit(rank, -9, 1.0) for rank in range(1000))
    lines = _lines(Outcome(71, False, CAUSE, (), exits, (0, 2, *range(4, 1000)), 0.1))
    assert "ranks 0, 2, 4 to 999 were ended" in lines


def test_the_file_of_an_incident_holds_every_traceback_whole(tmp_path: Path):
    log = tmp_path / "rank-1.log"
    whole = (
        "Traceback (most recent call last):\n"
        + "\n".join(f'  File "a.py", line {i}, in f' for i in range(99))
        + "\nValueError: wrong"
    )
    record = {"type": "ValueError", "message": "wrong", "traceback": whole, "time": 1.0, "phase": "step"}
    (tmp_path / "rank-1.error.json").write_text(json.dumps(record))
    outcome = incidents.write(Outcome(1, False, replace(CAUSE, log=log), (PEER,), EXITS, (2,), 0.1), tmp_path, number=7)
    assert outcome.file == tmp_path / "incidents/007.txt"
    text = (tmp_path / "incidents/007.txt").read_text()
    assert "line 0, in f" in text
    assert "RuntimeError: closed by peer" in text
    assert "rank 2: -9" in text
    peaceful = Outcome(0, False, None, (), (), (), None)
    assert incidents.write(peaceful, tmp_path) is peaceful
    assert incidents.write(replace(outcome, file=None), tmp_path).file == tmp_path / "incidents/002.txt", (
        "the next one that is free"
    )


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (ExitCode.FINISHED, "finished"),
        (ExitCode.STOPPED, "and the state was saved: the same command resumes the run"),
        (ExitCode.INTERRUPTED, "the same command resumes from the newest copy of the state"),
        (ExitCode.TERMINATED, "the same command resumes from the newest copy of the state"),
    ],
)
def test_an_end_without_a_failure_says_what_became_of_the_state(code, said):
    assert said in Outcome(code, True, None, (), (), (), None).message()


def test_a_dead_fork_server_is_that_of_its_own_node() -> None:
    """The first node was blamed, and in the end replaced."""
    failure = Failure(None, "was killed by SIGKILL (on n3)", "", "", Path("log"), 1.0, ExitCode.LOST, node="n3")
    outcome = Outcome(ExitCode.LOST, False, failure, (), (), (), None)
    seen = GenerationEnd(outcome, [Beat()] * 8, ("n0", "n1", "n2", "n3"), 8, 5).failed(failure).observation
    assert isinstance(seen, RankFailed) and (seen.node, seen.slot, seen.rank) == ("n3", 3, None)
    local = GenerationEnd(outcome, [Beat()] * 8, ("",), 8, 5).failed(replace(failure, node="")).observation
    assert isinstance(local, RankFailed) and local.node == ""
