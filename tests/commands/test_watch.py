"""`megalith watch` as JSON, as a file, and as a server that runs until the user ends it."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megalith.cli import app
from megalith.control.orders import Orders
from tests.patience import PATIENCE
from tests.report.run_folder import write_run


@pytest.mark.slow
def test_a_panel_as_json_of_one_run_and_of_several(tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "run"))
    found = CliRunner().invoke(app, ["watch", run, "--json", "alive"])
    assert found.exit_code == 0 and json.loads(found.output)["step"] == 40
    found = CliRunner().invoke(app, ["watch", run, run, "--json", "loss", "--ask", "from=30", "--ask", "to=31"])
    assert [one["step"] for one in json.loads(found.output)["runs"]] == [[30, 31]] * 2
    found = CliRunner().invoke(app, ["watch", run, "--json", "alive", "--out", str(tmp_path / "page.html")])
    assert json.loads(found.output)["step"] == 40 and (tmp_path / "page.html").exists()


@pytest.mark.slow
def test_the_page_as_a_file(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    found = CliRunner().invoke(app, ["watch", str(write_run(tmp_path / "run")), "--out", str(out)])
    assert found.exit_code == 0 and "first light" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--json", "heat"], 2, "'heat' is not a panel. Use one of alive, loss, speed, rank-heatmap"),
        (["--json", "alive"], 1, "holds no run"),
        (["--port", "70000"], 2, "Input should be less than or equal to 65535"),
    ],
)
def test_what_it_is_not_asked_right(arguments: list[str], status: int, said: str, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["watch", str(tmp_path / "nowhere"), *arguments])
    assert found.exit_code == status
    assert said in " ".join(found.output.replace("│", " ").split())


@pytest.mark.slow
def test_it_serves_until_it_is_ended_and_leaves_nothing(tmp_path: Path) -> None:
    run, scratch = write_run(tmp_path / "run"), tmp_path / "scratch"
    scratch.mkdir()
    before = sorted(path.name for path in run.iterdir())
    command = [sys.executable, "-m", "megalith.cli", "watch", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(scratch)})
    assert process.stdout is not None
    address = process.stdout.readline().split(": ", 1)[1].strip()
    with urllib.request.urlopen(address, timeout=30) as page:
        assert b"first light" in page.read()
    niceness = os.getpriority(os.PRIO_PROCESS, process.pid)
    assert niceness > os.getpriority(os.PRIO_PROCESS, 0) or niceness == 19, "ranks on this machine come first"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    process.stdout.close()
    assert not list(scratch.iterdir()) and sorted(path.name for path in run.iterdir()) == before


@pytest.mark.slow
def test_an_order_given_with_the_printed_link_becomes_a_file_for_the_controller(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with subprocess.Popen(
        [sys.executable, "-m", "megalith.cli", "watch", str(run), "--act"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        address, _, second = lines[2].split()[-1].partition("#act=")
        for token, status in ((second + "x", 403), (second, 202)):
            request = urllib.request.Request(
                f"{address}order", data=b'{"run": 0, "what": "save"}', headers={"X-Megalith-Act": token}
            )
            try:
                answer = urllib.request.urlopen(request, timeout=PATIENCE)
            except urllib.error.HTTPError as error:
                answer = error
            with answer:
                assert answer.status == status
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    (order,) = Orders(run).take()
    assert (order.what, order.node) == ("save", "")
