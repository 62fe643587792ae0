"""Starting, watching and ending ranks: real processes, without torch except where it is named."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megalith.control import watch
from megalith.control.owner import hold
from megalith.control.supervisor import Job, run
from megalith.fleet.evidence import is_stopped
from megalith.fleet.exit_codes import ExitCode
from tests.fleet.conftest import Clock, beats, is_alive, processes, until
from tests.patience import PATIENCE

linux = pytest.mark.skipif(sys.platform != "linux", reason="the fork server and /proc are Linux's")
both_ways = pytest.mark.parametrize("method", [pytest.param("fork", marks=linux), "spawn"])


@both_ways
def test_all_ranks_finish_and_their_output_is_in_their_logs(job, tmp_path, monkeypatch, method):
    monkeypatch.setenv("MEGALITH_START", method)
    outcome = run(job("finish", ranks=3, word="hello"))
    assert outcome.code == ExitCode.FINISHED, outcome.message()
    assert outcome.first_cause is None
    assert [(end.rank, end.code) for end in outcome.exits] == [(0, 0), (1, 0), (2, 0)]
    assert outcome.ready_seconds is not None
    for rank in range(3):
        assert f"hello from rank {rank} of 3\n" in (tmp_path / "ranks" / f"rank-{rank}.log").read_text()
    assert not list((tmp_path / "ranks").glob("store-*"))


def test_the_ranks_of_another_epoch_have_a_folder_of_their_own(job, tmp_path):
    described = job("finish", ranks=1, word="hello")
    with hold(described.run_dir) as own:
        own._claim = replace(own._claim, epoch=1)
        assert run(described, owner=own).code == ExitCode.FINISHED
    assert "hello" in (tmp_path / "ranks" / "epoch-1" / "rank-0.log").read_text()
    assert not (tmp_path / "ranks" / "job.json").exists()


def test_a_log_is_continued_and_each_generation_has_a_header(job, tmp_path):
    run(job("finish", ranks=1, word="first"))
    run(job("finish", ranks=1, word="second"))
    lines = (tmp_path / "ranks" / "rank-0.log").read_text().splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["====", "first", "====", "second"]
    assert lines[0] != lines[2]


@both_ways
def test_an_error_ends_the_others_and_is_the_first_cause(job, monkeypatch, method):
    monkeypatch.setenv("MEGALITH_START", method)
    outcome = run(job("one_raises_rest_waits", ranks=3, own=1))  # the other ranks would wait for ever
    assert outcome.code == ExitCode.FAILED
    assert outcome.first_cause is not None
    assert (outcome.first_cause.rank, outcome.first_cause.error) == (1, "ValueError: mine")
    assert outcome.ended == (0, 2)
    message = outcome.message()
    assert 'raise ValueError("mine")' in message
    assert "rank-1.log" in message
    assert "ranks 0, 2" in message


def test_an_error_of_its_own_wins_over_earlier_lost_connections(job, monkeypatch):
    monkeypatch.setattr(watch, "CAUSE_SECONDS", PATIENCE)  # test_watch.py tests how long the supervisor waits
    outcome = run(job("one_raises", ranks=3, own=2))
    assert outcome.first_cause is not None
    assert outcome.first_cause.rank == 2, outcome.message()
    assert {failure.rank for failure in outcome.consequences} == {0, 1}
    assert all(failure.secondary for failure in outcome.consequences)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_rank_is_named_with_its_signal_and_place(job, number):
    outcome = run(job("kill_yourself", ranks=3, own=1, number=int(number)))
    assert outcome.code == ExitCode.LOST
    assert outcome.first_cause is not None
    assert outcome.first_cause.rank == 1
    assert f"killed by {number.name} in phase `forward`" in outcome.first_cause.reason
    assert ("out of memory" in outcome.first_cause.reason) == (number == signal.SIGKILL)
    assert ("in kill_yourself" in outcome.first_cause.traceback) == (number == signal.SIGSEGV)


@pytest.mark.slow
@both_ways
def test_a_rank_that_hangs_at_start_up_is_named_with_its_stack(job, tmp_path, monkeypatch, method):
    monkeypatch.setenv("MEGALITH_START", method)
    where = [("join", -1), ("run", -1), ("join", -1)]
    monkeypatch.setattr(watch, "time", Clock(lambda: beats(tmp_path, ranks=3) == where, seconds=3.5))
    outcome = run(job("never_ready", ranks=3, own=1, start_timeout=3.0))
    assert outcome.code == ExitCode.LOST
    cause = outcome.first_cause
    assert cause is not None
    assert cause.rank == 1
    assert "not ready within 3 s; the rank's last phase is `run`" in cause.reason
    assert "sleep_in_a_function_with_this_name" in cause.traceback
    assert {(failure.rank, "`join`" in failure.reason) for failure in outcome.consequences} == {(0, True), (2, True)}


def test_ranks_that_fall_silent_are_ended_and_the_one_furthest_behind_is_named(job, tmp_path, monkeypatch):
    where = [("step", 4), ("step", 4), ("step", 3)]
    monkeypatch.setattr(watch, "time", Clock(lambda: beats(tmp_path, ranks=3) == where, seconds=2.0))
    outcome = run(job("fall_silent", ranks=3, own=2, silence_timeout=0.5))
    assert outcome.code == ExitCode.LOST
    assert outcome.first_cause is not None
    assert outcome.first_cause.rank == 2
    assert "`step` of step 3" in outcome.first_cause.reason
    assert "in fall_silent" in outcome.first_cause.traceback


def _stopped(run_dir: Path, name: str, *, ranks: int) -> Callable[[], bool]:
    """Return a condition that stops one process once all ranks are ready, and holds once that process has stopped."""

    def stop() -> bool:
        if beats(run_dir, ranks=ranks) != [("ready", -1)] * ranks:
            return False
        os.kill(processes(run_dir)[name], signal.SIGSTOP)
        return is_stopped(processes(run_dir)[name])

    return stop


@linux
def test_a_stopped_process_is_distinguished_from_those_that_wait_for_it(job, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "time", Clock(_stopped(tmp_path, "pids-1", ranks=3), seconds=3.0))
    outcome = run(job("wait", ranks=3, silence_timeout=1.0))
    assert outcome.first_cause is not None
    assert outcome.first_cause.rank == 1
    assert "stopped (SIGSTOP)" in outcome.first_cause.reason
    assert not any(is_alive(process) for process in processes(tmp_path).values())


@pytest.mark.slow
@both_ways
def test_nothing_survives_a_killed_supervisor(supervise, tmp_path, method):
    supervisor = supervise("wait", ranks=3, method=method)
    left = processes(tmp_path)
    os.kill(left["pids-1"], signal.SIGSTOP)  # a stopped rank runs no code that could notice
    supervisor.send_signal(signal.SIGKILL)
    until(lambda: not any(is_alive(process) for process in left.values()), seconds=PATIENCE)


@linux
def test_a_killed_fork_server_is_reported_and_leaves_no_rank(job, tmp_path):
    def kill() -> None:
        until(lambda: len(processes(tmp_path)) == 4, seconds=PATIENCE)
        os.kill(processes(tmp_path)["parent"], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    outcome = run(job("wait", ranks=3))
    thread.join()
    assert outcome.code == ExitCode.LOST
    assert "the fork server was killed by SIGKILL" in outcome.message()
    until(lambda: not any(is_alive(process) for process in processes(tmp_path).values()), seconds=PATIENCE)


@linux
def test_a_stopped_fork_server_cannot_keep_ranks_alive(job, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "time", Clock(_stopped(tmp_path, "parent", ranks=2), seconds=3.0))
    outcome = run(job("wait", ranks=2, silence_timeout=1.0))
    assert outcome.code == ExitCode.LOST
    assert not any(is_alive(process) for process in processes(tmp_path).values())


@pytest.mark.slow
@both_ways
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_a_request_to_stop_reaches_every_rank_once(supervise, tmp_path, method, number):
    supervisor = supervise("save_when_asked", ranks=2, method=method)
    supervisor.send_signal(number)
    output, _ = supervisor.communicate(timeout=PATIENCE)
    assert supervisor.returncode == ExitCode.STOPPED, output
    assert "the state was saved" in output
    for rank in range(2):
        assert (tmp_path / "ranks" / f"rank-{rank}.log").read_text().count("saved") == 1


@pytest.mark.slow
def test_a_second_interrupt_ends_ranks_that_do_not_listen(supervise, tmp_path):
    supervisor = supervise("deaf", ranks=2)
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.stdout.readline() == "stopping: the ranks are still starting\n"
    assert supervisor.stdout.readline() == "Ctrl-C again: stop now\n"
    time.sleep(2 * watch.BOUNCE_SECONDS)  # not before the first was received: the two would count as one key press
    supervisor.send_signal(signal.SIGINT)
    output, _ = supervisor.communicate(timeout=PATIENCE)
    assert supervisor.returncode == ExitCode.INTERRUPTED, output
    assert not any(is_alive(process) for process in processes(tmp_path).values())


@pytest.mark.slow
def test_ranks_without_a_handler_end_without_a_failure(supervise):
    supervisor = supervise("wait", ranks=2)
    supervisor.send_signal(signal.SIGTERM)
    output, _ = supervisor.communicate(timeout=PATIENCE)
    assert supervisor.returncode == ExitCode.TERMINATED, output


def test_the_exit_status_an_error_asks_for_becomes_the_runs(job):
    assert run(job("leave_with", ranks=1, code=41)).code == 41


@linux
def test_what_a_rank_started_ends_with_it(job, tmp_path):
    run(job("start_a_process", ranks=1))
    grandchild = int((tmp_path / "grandchild").read_text())
    until(lambda: not is_alive(grandchild), seconds=PATIENCE)


def test_tick_is_called_and_its_error_leaves_no_rank(job, tmp_path):
    def tick() -> None:
        if len(processes(tmp_path)) == 3:
            raise KeyError("drawing failed")

    with pytest.raises(KeyError, match="drawing failed"):
        run(job("wait", ranks=2), tick=tick)
    assert not any(is_alive(process) for process in processes(tmp_path).values())


def test_signal_handlers_are_put_back(job):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    run(job("finish", ranks=1, word="hello"))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before


def test_a_job_that_cannot_start_says_all_that_is_wrong(tmp_path):
    wrong = Job(entry="no_function", arguments={"x": object()}, ranks=0, run_dir=tmp_path, start_timeout=0.0, threads=-1)
    with pytest.raises(ValueError, match="cannot be started") as caught:
        run(wrong)
    for part in ("'no_function'", "ranks = 0", "threads = -1", "start_timeout = 0.0", "JSON"):
        assert part in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_supervisors_do_not_share_a_run_folder(supervise, job):
    supervisor = supervise("wait", ranks=1)
    with pytest.raises(RuntimeError, match=f"in use by process {supervisor.pid}"):
        run(job("finish", ranks=1, word="hello"))


@pytest.mark.slow
def test_the_supervisor_does_not_import_torch():
    code = "import sys, megalith.control.supervisor, megalith.fleet.environment; raise SystemExit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.slow
@linux
def test_four_ranks_meet_over_the_file_store_and_an_error_wins_over_those_that_gloo_raises(job, tmp_path):
    outcome = run(job("all_reduce", ranks=4, fail=2, preload=("torch", "torch.distributed")))
    assert outcome.ready_seconds is not None
    print(f"ready after {outcome.ready_seconds:.2f} s")
    for rank in range(4):
        assert "first all-reduce" in (tmp_path / "ranks" / f"rank-{rank}.log").read_text()
    assert outcome.first_cause is not None
    assert (outcome.first_cause.rank, outcome.first_cause.error) == (2, "ValueError: mine"), outcome.message()
    assert all(failure.secondary for failure in outcome.consequences), outcome.message()


@pytest.mark.slow
@linux
def test_of_ranks_that_all_wait_the_one_is_named_whose_collective_is_missing(job, tmp_path, monkeypatch):
    """The rank is not stopped, its last heartbeat is as old as the others', and its stack shows the same wait."""
    preload, said = ("torch", "torch.distributed"), [("step", 3)] * 4

    def waits() -> bool:
        return len(list(tmp_path.glob("begun-*"))) == 3 and beats(tmp_path, ranks=4) == said

    monkeypatch.setattr(watch, "time", Clock(waits, seconds=5.0))
    outcome = run(job("wait_like_the_others", ranks=4, own=2, preload=preload, silence_timeout=2.0))
    assert outcome.first_cause is not None
    assert outcome.first_cause.rank == 2, outcome.message()
    assert (
        "the rank has begun 3 collectives in group 0 (4 ranks, 0 to 3), but another rank has begun 4"
        in outcome.first_cause.reason
    )
    assert "in wait" in outcome.first_cause.traceback
    assert all(failure.secondary for failure in outcome.consequences)
