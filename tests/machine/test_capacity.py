"""The resources of a machine for training."""

from pathlib import Path

import pytest

from megalith.machine import capacity
from megalith.machine.capacity import find_gpus, measure, memory_left_in_groups, memory_limit

GIB = 2.0**30


def machine(folder: Path, group: str, **limits: str) -> tuple[float, str]:
    """Return the memory limit of a process in the cgroup `group` on a machine of 8 GiB. `limits`: file below /sys/fs/cgroup ->
    text."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/meminfo").write_text("MemFree: 1 kB\nMemTotal:        8388608 kB\n")
    (folder / "proc/self/cgroup").write_text(group)
    for name, text in limits.items():
        file = folder / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return memory_limit(proc=folder / "proc", groups=folder / "groups")


@pytest.mark.parametrize(
    ("group", "limits", "limit", "name"),
    [
        ("0::/\n", {}, 8, "this machine"),
        ("0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": f"{3 * 2**30}"}, 3, "groups/job"),
        ("0::/gone\n", {"memory.max": f"{2**30}"}, 1, "groups"),
        ("4:memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": f"{2 * 2**30}"}, 2, "groups/memory/job"),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, 8, "this machine"),
    ],
)
def test_memory_is_the_machines_or_that_of_the_narrowest_control_group(
    tmp_path: Path, group: str, limits: dict[str, str], limit: float, name: str
):
    found, of = machine(tmp_path, group, **limits)
    assert found == limit * GIB
    assert of.endswith(name)


@pytest.mark.parametrize(
    ("group", "limits", "left"),
    [
        ("0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": f"{3 * 2**30}", "job/memory.current": f"{2**30}"}, 2),
        ("0::/\n", {"memory.max": f"{3 * 2**30}", "memory.current": f"{2**31}", "memory.stat": f"inactive_file {2**30}"}, 2),
        (
            "4:memory:/job\n",
            {f"memory/job/memory.{name}_in_bytes": f"{2**30}" for name in ("limit", "usage")}
            | {"memory/job/memory.stat": f"inactive_file 0\ntotal_inactive_file {2**29}"},
            0.5,
        ),
        ("0::/job\n", {"job/memory.max": "max"}, float("inf")),
        ("0::/gone\n", {}, float("inf")),
    ],
    ids=["of the group above", "cached files", "version 1", "no limit", "no group"],
)
def test_memory_left_is_that_of_the_group_nearest_to_its_limit(tmp_path: Path, group: str, limits: dict[str, str], left: float):
    machine(tmp_path, group, **limits)
    assert memory_left_in_groups(proc=tmp_path / "proc", groups=tmp_path / "groups") == left * GIB


def test_a_machine_without_proc_has_some_memory(tmp_path: Path):
    assert memory_limit(proc=tmp_path, groups=tmp_path)[0] > GIB / 4


@pytest.mark.parametrize(
    ("named", "count", "least"),
    [
        (None, 3, 40.0),
        ("", 0, float("inf")),
        ("-1", 0, float("inf")),
        ("0,2", 2, 80.0),
        ("1", 1, 40.0),
        ("0,7,1", 1, 80.0),
        ("GPU-1234,MIG-5678", 2, float("inf")),
    ],
)
def test_gpus_are_those_that_cuda_would_show(monkeypatch: pytest.MonkeyPatch, named: str | None, count: int, least: float):
    monkeypatch.setattr(capacity, "_nvml", lambda: [80.0, 40.0, 80.0])
    assert find_gpus({} if named is None else {"CUDA_VISIBLE_DEVICES": named}) == (count, least)


def test_gpus_that_nvml_does_not_know_of_are_not_denied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(capacity, "_nvml", list)
    monkeypatch.setattr(capacity, "OTHER_DEVICES", (tmp_path,))
    assert find_gpus({})[0] is None
    monkeypatch.setattr(capacity, "OTHER_DEVICES", (tmp_path / "none",))
    assert find_gpus({})[0] == 0
    monkeypatch.setattr(capacity, "_nvml", lambda: None)
    assert find_gpus({})[0] is None


def test_this_machine_has_processors_and_memory():
    here = measure()
    assert here.processors >= 1
    assert GIB / 4 < here.memory < 2.0**60
