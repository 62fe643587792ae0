"""The check of a machine."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalith.commands import doctor
from megalith.machine.health import Finding
from megalith.prove import calibrate as calibration
from megalith.spec.cluster import load
from tests.commands.calling import call
from tests.specs import tiny_run


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
    monkeypatch.setattr(doctor, "doctor", lambda folder, burn_in, ranks, spec: findings)
    result = call("doctor")
    assert result.exit_code == status
    assert "Set [it]" in result.stdout
    assert ("NOT fit" in result.stdout) == (status == 1)
    said = json.loads(call("doctor", "--json").stdout)
    assert (said["ok"], said["worst"], len(said["findings"])) == (status == 0, verdict, 2)


def test_the_doctor_checks_the_folders_of_a_runs_files(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The folder of state is there, on a disk slower than the cluster file says; the folder of activations is not."""
    monkeypatch.setattr("megalith.machine.health.doctor", lambda folder: [])
    monkeypatch.setattr("megalith.machine.gpus.doctor", list)
    (tmp_path / "fast.toml").write_text('accelerator = "cpu"\ncount = 1\n[host]\ndisk_bandwidth = 1e15\n')
    places = ['plan.state.optimizer="disk"', f'plan.state.folder="{tmp_path}"', f'cluster="{tmp_path / "fast.toml"}"']
    places += ['plan.retain.blocks="disk"', f'plan.retain.folder="{tmp_path / "missing"}"']
    said = call("doctor", str(run), "--burn-in", "0", "--json", *(text for one in places for text in ("--set", one)))
    assert said.exit_code == 0, said.stderr
    found = {one["check"]: one for one in json.loads(said.stdout)["findings"]}
    for key in ("plan.state.folder", "plan.retain.folder"):
        assert {key, f"{key}, direct I/O", f"{key}, free space", f"{key}, rate"} <= set(found)
    assert (found["plan.state.folder"]["verdict"], found["plan.retain.folder"]["verdict"]) == ("ok", "warn")
    assert "does not exist, so the run would create it in" in found["plan.retain.folder"]["value"]
    rate = found["plan.state.folder, rate"]
    assert rate["verdict"] == "warn" and "90 % of host.disk_bandwidth" in rate["limit"] and "/s read" in rate["value"]
    alone = call("doctor", str(run), "--burn-in", "0", "--json")
    assert json.loads(alone.stdout)["findings"] == []
    assert "Give the run file, too" in " ".join(call("doctor", "--set", "plan.data=2").stderr.split())


@pytest.mark.parametrize(("gpus", "ranks"), [(None, 1), (2, 2), (8, 4)])
def test_without_a_cluster_room_is_needed_for_the_ranks_that_this_machine_can_have(
    gpus: int | None, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rooms = list[float]()
    monkeypatch.setattr("megalith.machine.capacity.find_gpus", lambda: (gpus, 0.0))
    monkeypatch.setattr("megalith.check.here.folders_of_files", lambda case: [("plan.state.folder", "", 5.0)])
    monkeypatch.setattr("megalith.machine.state_disk.check_folder", lambda *given, room, rate: rooms.append(room) or [])
    spec = tiny_run(plan={"data": 4})
    list(doctor._files_of(spec, tmp_path, ranks=None))
    list(doctor._files_of(spec, tmp_path, ranks=3))
    assert rooms == [5.0 * ranks, 15.0]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch):
    """Calibrate with small sizes, on the CPU."""
    sizes = calibration.Sizes(product=64, inner=(16, 32), memory=1 << 16, attention=(64, 2, 16), collective=(1 << 10, 1 << 14))
    monkeypatch.setitem(calibration.SIZES, "cpu", sizes)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr("megalith.machine.capacity.find_gpus", lambda: (0, 0.0))


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_a_calibration_is_a_cluster_file_that_is_not_overwritten_unasked(tmp_path: Path):
    file = tmp_path / "machine.toml"
    found = call("doctor", "--calibrate", str(file), "--seconds", "0", "--ranks", "2", "--json")
    assert found.exit_code == 0, found.stderr
    said = json.loads(found.stdout)
    cluster = load(str(file))
    assert (said["ok"], said["out"], said["cluster"]["count"], cluster.count) == (True, str(file), 2, 2)
    assert {"kind", "of", "size", "seconds"} == set(said["points"][0])
    before = file.read_text()
    again = call("doctor", "--calibrate", str(file), "--seconds", "0")
    assert again.exit_code == 1 and "exists already. Use --overwrite" in again.stderr and file.read_text() == before
    over = call("doctor", "--calibrate", str(file), "--seconds", "0", "--overwrite")
    assert over.exit_code == 0 and f'cluster = "{file}" in a run file whose plan has 1 rank' in over.stdout
    assert load(str(file)).count == 1


@pytest.mark.parametrize(
    ("name", "environment", "said"),
    [
        ("machine.json", {}, "Use a name that ends in .toml"),
        (
            "machine.toml",
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "Run the command without torchrun or srun",
        ),
    ],
)
def test_a_calibration_that_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, environment: dict[str, str], said: str
):
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    found = call("doctor", "--calibrate", str(tmp_path / name))
    assert found.exit_code == 1 and said in found.stderr
    assert not (tmp_path / name).exists()
