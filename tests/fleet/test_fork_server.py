"""The fork server refuses whatever would make forking unsafe."""

import sys

import pytest

from megalith.control import watch
from megalith.control.supervisor import run
from megalith.fleet.exit_codes import ExitCode
from tests.fleet.conftest import Clock

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")


def test_a_preload_that_leaves_a_thread_is_refused_with_a_way_out(job):
    outcome = run(job("finish", ranks=2, word="hello", preload=("tests.fleet.threaded",)))
    assert outcome.code == ExitCode.FAILED
    assert outcome.exits == ()
    message = outcome.message()
    assert "2 threads" in message
    assert "importing tests.fleet.threaded" in message
    assert "MEGALITH_START=spawn" in message


def test_a_preload_that_cannot_be_imported_is_named(job, tmp_path):
    outcome = run(job("finish", ranks=2, word="hello", preload=("no.such.module",)))
    assert outcome.code == ExitCode.FAILED
    assert outcome.first_cause is not None
    assert outcome.first_cause.rank is None
    assert "No module named 'no'" in outcome.first_cause.error
    assert "No module named 'no'" in (tmp_path / "ranks" / "server.log").read_text()


def test_a_slow_preload_is_named_when_time_is_up(job, tmp_path, monkeypatch):
    begun = tmp_path / "begun"
    monkeypatch.setattr(watch, "time", Clock(begun.exists, seconds=1.0))
    slow = {"preload": ("tests.fleet.slow",), "environment": {"MEGALITH_TEST_SIGN": str(begun)}}
    outcome = run(job("finish", ranks=2, word="hello", start_timeout=0.5, **slow))
    assert outcome.code == ExitCode.LOST
    message = outcome.message()
    assert "importing tests.fleet.slow" in message
    assert "slow.py" in message


def test_what_a_preloaded_module_prints_does_not_disturb_the_reports(job, tmp_path):
    outcome = run(job("finish", ranks=1, word="hello", preload=("this",)))  # the module prints a poem when imported
    assert outcome.code == ExitCode.FINISHED
    assert "Beautiful is better than ugly." in (tmp_path / "ranks" / "server.log").read_text()
