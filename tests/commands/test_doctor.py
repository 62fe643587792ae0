"""The check of a machine."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalith.commands import doctor
from megalith.machine.health import Finding
from tests.commands.calling import call


def test_the_doctor_wants_a_folder(run: Path):
    with pytest.raises(NotADirectoryError, match="is a file"):
        doctor.doctor(run, burn_in=0)


def test_the_doctor_burns_in_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given: list[str] = []

    def burn_in(device: str, *, seconds: float) -> list[Finding]:
        given.append(device)
        return [Finding("burn-in", "ok", "2 products", "the same bits")]

    monkeypatch.setattr("megalith.prove.doctor.burn_in", burn_in)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    findings = doctor.doctor(tmp_path, burn_in=0.1)
    assert given == ["cuda:0", "cuda:1"]
    assert [one.check for one in findings[-2:]] == ["burn-in, cuda:0", "burn-in, cuda:1"]


@pytest.mark.parametrize(("verdict", "status"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_the_doctors_status_is_the_worst_finding(monkeypatch: pytest.MonkeyPatch, verdict: Any, status: int):
    findings = [Finding("memory", "ok", "4 GiB", "at least 2 GiB"), Finding("clock", verdict, "off", "at most 1 s", "Set [it]")]
    monkeypatch.setattr(doctor, "doctor", lambda folder, burn_in, ranks: findings)
    result = call("doctor")
    assert result.exit_code == status
    assert "Set [it]" in result.stdout
    assert ("NOT fit" in result.stdout) == (status == 1)
    said = json.loads(call("doctor", "--json").stdout)
    assert (said["ok"], said["worst"], len(said["findings"])) == (status == 0, verdict, 2)
