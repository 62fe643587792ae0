"""Admission of machines, at the start and when they return."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megalith.fleet import messages
from megalith.fleet.job import Job
from megalith.fleet.local import LocalNodes
from megalith.fleet.observations import HealthChecked
from megalith.fleet.rank_info import node_folder
from megalith.fleet.remote import RemoteNodes
from megalith.machine import admission, health, link
from megalith.machine.admission import MINIMUM, UnfitError, admit, await_fitness, before_start, burnt, failures
from megalith.machine.health import Finding, Needs
from megalith.spec.fleet import FleetSpec
from tests.fleet.stores import Dictionary
from tests.patience import PATIENCE

HUGE = 1e24
SHORT = Finding("memory", "fail", "1 MiB", "at least 2 MiB", "Stop other programs on this machine")


def test_this_machine_may_start_and_nothing_is_left_behind(tmp_path: Path) -> None:
    assert not failures(before_start(tmp_path))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["memory", "disk", "descriptors"])
def test_what_is_short_stops_a_start(name: str, tmp_path: Path) -> None:
    short = [one.check for one in before_start(tmp_path, needs=Needs(**{**vars(MINIMUM), name: HUGE})) if one.verdict == "fail"]
    assert len(short) == 1


def test_what_is_measured_by_time_never_stops_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = Needs(**{**vars(MINIMUM), "loopback": HUGE, "clock": -1.0, "shared_memory": HUGE})
    verdicts = {one.check: one.verdict for one in before_start(tmp_path, needs=needs)}
    assert {verdicts[check] for check in ("loopback", "clock", "shared memory")} == {"warn"}
    monkeypatch.setattr(health, "_send_to_yourself", _too_late)
    assert not failures(before_start(tmp_path))
    assert health.loopback(1.0).verdict == "fail"  # the machine check, which runs when there is time, rejects it


def _too_late(size: int, patience: float) -> float:
    raise TimeoutError("timed out")


def test_a_loopback_that_is_down_stops_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(size: int, patience: float) -> float:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(health, "_send_to_yourself", down)
    assert "Network is unreachable" in failures(before_start(tmp_path))


def test_a_run_folder_that_cannot_be_written_stops_a_start() -> None:
    assert "run folder" in failures(before_start(Path("/proc")))


def test_a_refusal_names_value_limit_and_ways_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    warning = Finding("clock", "warn", "70 ms off", "at most 500 ms", "Let chrony slew it")
    monkeypatch.setattr(admission, "before_start", lambda folder: [warning, SHORT])
    with pytest.raises(UnfitError, match=r"memory: 1 MiB \(limit: at least 2 MiB\)\. Stop other programs.*fleet\.check"):
        admit(Path())
    assert "70 ms off" in capsys.readouterr().err


def test_a_machine_that_becomes_fit_is_let_in_and_one_that_does_not_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "FIRST_PAUSE", 0.01)
    looks, told = iter([[SHORT], [SHORT], []]), list[str]()
    monkeypatch.setattr(admission, "before_start", lambda folder: next(looks))
    assert await_fitness(Path(), seconds=PATIENCE, notify=told.append)
    assert len(told) == 1 and "1 MiB" in told[0]
    monkeypatch.setattr(admission, "before_start", lambda folder: [SHORT])
    assert not await_fitness(Path(), seconds=0.05, notify=told.append)


def test_the_controller_is_notified_of_who_is_not_admitted_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Dictionary()
    nodes = RemoteNodes(store, Job("a:b", {}, ranks=1, run_dir=tmp_path), FleetSpec())
    messages.refuse(store, "b", "memory: 1 MiB")
    [sign] = nodes.wait(0.0)
    assert isinstance(sign, HealthChecked)
    assert (sign.node, sign.passed, sign.there, sign.text) == ("b", False, False, "memory: 1 MiB")
    assert "node b is not admitted: memory: 1 MiB" in capsys.readouterr().err
    with pytest.raises(TimeoutError, match="b was refused: memory: 1 MiB"):
        nodes.await_nodes(1, 1, seconds=0.0)


def _says(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def _finding(verdict: str) -> tuple[str, ...]:
    record = Finding("burn-in", "fail" if verdict == "fail" else "ok", "3 products differ", "the same bits").as_json()
    return _says(f"print({json.dumps(json.dumps([record]))})")


def test_a_burn_ins_findings_are_taken_over() -> None:
    assert [one.verdict for one in burnt(_finding("ok"), seconds=PATIENCE)] == ["ok"]
    assert [one.value for one in burnt(_finding("fail"), seconds=PATIENCE)] == ["3 products differ"]


@pytest.mark.parametrize(
    ("command", "seconds", "why"),
    [
        (_says("raise SystemExit('no torch here')"), PATIENCE, "no torch here"),
        (_says("print('[]')"), PATIENCE, "it printed nothing"),
        (_says("import time; time.sleep(1000)"), 0.2, "not finished within 0.2 s"),
        (("/no/such/program",), PATIENCE, "could not be started"),
    ],
)
def test_a_burn_in_that_comes_to_nothing_fails(command: tuple[str, ...], seconds: float, why: str) -> None:
    [found] = burnt(command, seconds=seconds)
    assert found.verdict == "fail" and why in found.value


def _checked(nodes: LocalNodes) -> HealthChecked:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        for sign in nodes.wait(0.01):
            if isinstance(sign, HealthChecked):
                return sign
    raise AssertionError("no verdict came")


@pytest.mark.parametrize("verdict", ["ok", "fail"])
def test_a_node_returns_only_if_it_computes_right(verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission.health, "doctor", lambda folder: [])
    nodes = LocalNodes(Job("a:b", {}, ranks=1, run_dir=tmp_path, burn_in=_finding(verdict)))
    nodes.check("0")
    sign = _checked(nodes)
    assert sign.there and sign.passed == (verdict == "ok")
    assert ("3 products differ" in sign.text) == (verdict == "fail")
    nodes.close(forget=True)


def test_a_node_does_not_return_while_the_interface_of_its_ranks_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other nodes may reach the store. Otherwise this node would be admitted, fail, and be admitted again."""
    monkeypatch.setattr(admission.health, "doctor", lambda folder: [])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    nodes = LocalNodes(Job("a:b", {}, ranks=1, run_dir=tmp_path))
    for state, why in ((0x8, "its interface lo is down"), (0x49, "")):
        monkeypatch.setattr(link, "flags", lambda name, state=state: state)
        nodes.check("0")
        sign = _checked(nodes)
        assert (sign.passed, sign.text) == (not why, why)
    nodes.close(forget=True)


def test_a_check_that_breaks_off_is_one_that_was_not_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a result the node would never be checked again."""

    def doctor(folder: Path) -> list[Finding]:
        raise subprocess.CalledProcessError(1, "ip link show")

    monkeypatch.setattr(admission.health, "doctor", doctor)
    nodes = LocalNodes(Job("a:b", {}, ranks=1, run_dir=tmp_path))
    nodes.check("0")
    sign = _checked(nodes)
    assert sign.there and not sign.passed and "ip link show" in sign.text
    nodes.close(forget=True)


def test_a_run_folder_whose_store_is_away_fails_and_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may come back while a node waits for admission."""

    present = Path.stat

    def stat(path: Path, **more: bool) -> os.stat_result:
        if path.is_relative_to(tmp_path):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return present(path, **more)

    monkeypatch.setattr(Path, "stat", stat)
    found = {one.check: one for one in (*before_start(tmp_path), health.disk_speed(tmp_path, 1.0))}
    for check in ("disk space", "run folder", "disk speed"):
        assert found[check].verdict == "fail" and "Stale file handle" in found[check].value, found[check]


def test_nodes_rehearsed_on_one_machine_do_not_burn_in_beside_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission.health, "doctor", lambda folder: [])
    memory = tmp_path / "memory"
    nodes = LocalNodes(Job("a:b", {}, ranks=2, run_dir=tmp_path, burn_in=_finding("fail")), names=("0", "1"), memory=memory)
    node_folder(memory, "1").mkdir(parents=True, exist_ok=True)
    nodes.check("1")
    assert _checked(nodes).passed
    nodes.close(forget=True)


def test_the_loop_goes_on_while_a_node_burns_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    monkeypatch.setattr(admission, "before_return", lambda folder, burn_in, seconds: [] if done.wait(PATIENCE) else [SHORT])
    nodes = LocalNodes(Job("a:b", {}, ranks=1, run_dir=tmp_path))
    nodes.check("0")
    assert nodes.wait(0.0) == []
    done.set()
    assert _checked(nodes).passed
    nodes.close(forget=True)


def test_no_seconds_are_no_burn_in() -> None:
    assert admission.burn_in(0.0, "auto") == ()
    assert "megalith.prove.doctor" in admission.burn_in(2.0, "cpu")
