"""Checks of a machine measure real values, and their results follow from these."""

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.machine import health
from megalith.machine.health import GIB, Finding, Needs, at_least, doctor, worst

HUGE = 1e24


def test_this_machine_gets_a_finding_for_each_check(tmp_path: Path) -> None:
    findings = doctor(tmp_path)
    assert len({finding.check for finding in findings}) == len(findings) == 8
    assert all(finding.way_out for finding in findings if finding.verdict != "ok")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "check",
    [
        lambda folder: health.memory(HUGE),
        lambda folder: health.disk_space(folder, HUGE),
        lambda folder: health.disk_speed(folder, HUGE, size=1 << 20),
        lambda folder: health.shared_memory(HUGE, folder),
        lambda folder: health.descriptors(10**15),
        lambda folder: health.loopback(HUGE, size=1 << 20),
    ],
)
def test_nothing_is_enough_for_a_boundless_need(check, tmp_path: Path) -> None:
    finding = check(tmp_path)
    assert finding.verdict == "fail"
    assert finding.way_out


@given(st.floats(0, 1e9), st.floats(1, 1e9), st.floats(1, 10))
def test_more_is_never_worse(value: float, limit: float, margin: float) -> None:
    order = {"ok": 0, "warn": 1, "fail": 2}
    here, above = (
        at_least("x", amount, limit, form=str, way_out="y", margin=margin).verdict for amount in (value, value * 2 + 1)
    )
    assert order[above] <= order[here]
    assert (here == "fail") == (value < limit)


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_above(tmp_path: Path) -> None:
    assert health.disk_space(tmp_path / "runs" / "mine", 1.0).verdict == "ok"
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(os.geteuid() != 0 and not Path("/proc").exists(), reason="needs /proc")
def test_a_folder_that_cannot_be_written_fails() -> None:
    assert health.disk_speed(Path("/proc"), 1.0).verdict == "fail"


def test_a_jumping_clock_fails_and_a_steady_one_does_not() -> None:
    jumps = iter([0.0, 5.0])
    assert health.clock(0.5, seconds=0.01, now=lambda: next(jumps)).verdict == "fail"
    assert health.clock(0.5, seconds=0.01, now=time.monotonic).verdict == "ok"


def test_the_control_groups_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "memory_left_in_groups", lambda: 1 * GIB)
    assert health.memory(2 * GIB).verdict == "fail"
    assert health.memory(GIB / 2).verdict == "ok"


def test_a_container_with_little_shared_memory_is_told_how_to_get_more(tmp_path: Path) -> None:
    assert "--shm-size" in health.shared_memory(HUGE, tmp_path).way_out


def test_the_worst_finding_decides() -> None:
    ok, warn, fail = (Finding("x", verdict, "", "") for verdict in ("ok", "warn", "fail"))
    assert [worst(found) for found in ([], [ok], [ok, warn], [warn, fail, ok])] == ["ok", "ok", "warn", "fail"]


def test_needs_are_what_is_judged_by(tmp_path: Path) -> None:
    named = {finding.check: finding for finding in doctor(tmp_path, needs=Needs(memory=HUGE))}
    assert named["memory"].verdict == "fail"
    assert named["file descriptors"].limit == "at least 1,024"
