"""The commands of the other sites of a run on one machine."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from megalith.commands.shared import siblings
from megalith.commands.shared.arguments import RunRequest
from megalith.fleet.exit_codes import ExitCode
from megalith.spec.run import RunSpec
from tests.patience import PATIENCE
from tests.specs import tiny_run


def _ending(monkeypatch: pytest.MonkeyPatch, statuses: dict[int, str]) -> None:
    """Make each site's command run these lines of Python."""

    def begin(request: RunRequest, folder: Path, site: int, more: object) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, "-c", statuses[site]])

    monkeypatch.setattr(siblings, "_start", begin)
    monkeypatch.setattr(siblings.os, "environ", {})


def _train(spec: RunSpec, folder: Path) -> None:
    """Watch the other sites for as long as the first site would train."""
    began = time.monotonic()
    with siblings.running(RunRequest(folder / "run.toml"), spec, folder) as others:
        while time.monotonic() - began < PATIENCE:
            others.poll()
            time.sleep(0.01)


@pytest.mark.parametrize(("line", "status"), [("exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", ExitCode.LOST)])
def test_a_site_whose_command_fails_ends_the_others_that_are_no_quorum(
    line: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This takes far less than `fleet.wait_limit`, for which they would otherwise wait for the failed site."""
    _ending(monkeypatch, {1: line})
    spec = tiny_run(sites={"count": 2})
    with pytest.raises(
        siblings.SiteEndedError, match=r"site 1 ended with status .*site-1/train.log. The remaining sites form no"
    ) as ended:
        _train(spec, tmp_path)
    assert ended.value.exit_code == status


@pytest.mark.parametrize(
    ("count", "decides", "lines"),
    [(3, None, {1: "exit(3)", 2: "import time; time.sleep(600)"}), (2, 0, {1: "exit(3)"}), (2, None, {1: "exit(75)"})],
)
def test_a_quorum_goes_on(
    count: int, decides: int | None, lines: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same holds if one site was asked to stop: the merge tells all sites."""
    _ending(monkeypatch, lines)
    spec = tiny_run(sites={"count": count, "decides": decides})
    with siblings.running(RunRequest(tmp_path / "run.toml"), spec, tmp_path) as others:
        others._processes[0].wait(PATIENCE)
        others.poll()
        for process in others._processes:
            process.kill()
            process.wait()
