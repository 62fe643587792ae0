"""Part C: what ended runs, or misled those who plan for it."""

import re
import shlex
import signal
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.findings.product import TREE, events, megalith, running

LARGE = ["simulate", "--cluster", "h100:16384", "--days", "54", "--seeds", "2"]


def test_c10_waiting_for_nodes_calls_nobody_and_does_not_feed_itself(tmp_path: Path) -> None:
    """Without a spare a run waits. Idle nodes fail less often than busy ones, and a reboot is soon over."""
    said = megalith(*LARGE, "--spares", "0", "--profile", "memory", "--json", at=tmp_path).json
    assert said["stops"] < 3
    assert said["goodput"] > 0.05
    assert said["stops"] <= said["faults"]


def test_c10_the_counts_add_up(tmp_path: Path) -> None:
    printed = megalith(*LARGE, "--spares", "2", at=tmp_path).stdout
    for what in ("faults", "restarts"):
        found = re.search(rf"([\d.,]+) {what} = (.*)$", printed, re.MULTILINE)
        assert found, f"no sum of {what}"
        total, *parts = (float(number.replace(",", "")) for number in (found[1], *re.findall(r"(?:^| \+ )([\d.,]+) ", found[2])))
        assert total == pytest.approx(sum(parts), abs=0.5)


def test_c10_young_and_daly_stand_beside_the_best_interval(tmp_path: Path) -> None:
    said = megalith(*LARGE, "--profile", "cold", "--set", "fleet.memory_every=0", "--sweep", "intervals", at=tmp_path)
    assert said.status == 0
    assert "Daly" in said.stdout
    assert "Young" in said.stdout


@pytest.mark.parametrize("setting", ["interruptions=1e9", "reliability.rack_outages=1e12"])
def test_c10_more_than_can_be_played_is_a_problem(tmp_path: Path, setting: str) -> None:
    said = megalith("simulate", "--cluster", "h100:1024", "--set", setting, at=tmp_path)
    assert "Traceback" not in said.stderr
    assert said.status == 2
    assert "Use at most" in said.words


def test_c10_the_documented_table_is_what_its_command_prints(tmp_path: Path) -> None:
    page = (TREE / "docs/reliability.md").read_text(encoding="utf-8")
    table = page.partition("## What to expect of a cluster")[2].partition("\n## ")[0]
    rows = re.findall(r"^\|(.*)\| *([\d.]+) % *\|$", table, re.MULTILINE)
    assert rows
    commands = [(re.search(r"`megalith (simulate [^`]+)`", row), goodput) for row, goodput in rows]
    assert all(command for command, _ in commands), "a row does not say its command"
    command, goodput = commands[0]
    assert command
    assert f"goodput {goodput}%" in megalith(*shlex.split(command[1]), at=tmp_path).words


def test_c10_a_picture_tells_its_parts_apart_and_says_what_it_shows(tmp_path: Path) -> None:
    """Where a run waits for nodes and for a person both, and is planned and stopped."""
    asked = ["--spares", "0", "--set", "fleet.no_spare=stop", "--set", "planned=1", "--out", "goodput.svg"]
    assert megalith(*LARGE, *asked, at=tmp_path).status == 0
    space = "{http://www.w3.org/2000/svg}"
    root = ElementTree.parse(tmp_path / "goodput.svg").getroot()
    style = root.findtext(f"{space}style") or ""
    colours = dict(re.findall(r"--(c\d+):(#\w{6})", style.partition("@media")[0]))
    assert len(set(colours.values())) == len(colours) > 8, "there are more kinds of time than colours"
    words = {text.text or "" for text in root.iter(f"{space}text")}
    assert any("54 days" in one for one in words), "no title"
    assert any(one.startswith("goodput so far") and "(" not in one for one in words), "no name of the axis"
    assert any("seed" in one and "(" not in one for one in words), "no name of the curves"


# Runs that go on


def test_c1_a_line_of_the_log_that_is_no_event_ends_no_run(at: Path) -> None:
    """A display shows the log, and must never end what trains."""
    with running("train", "run.toml", "--run-dir", "shown", at=at) as command:
        command.until(lambda: events(at / "shown", "step"))
        with (at / "shown" / "events.jsonl").open("a") as log:
            log.write("123\n")
        done = len(events(at / "shown", "step"))
        command.until(lambda: len(events(at / "shown", "step")) > done + 3, or_ended=True)
        assert not command.ended, command.output[-500:]


def test_c9_ctrl_c_is_answered_with_what_a_second_one_does(at: Path) -> None:
    """A second one, typed because nothing was heard, lost the steps since the last checkpoint."""
    with running("train", "run.toml", "--run-dir", "stopped", at=at) as command:
        command.until(lambda: events(at / "stopped", "step"))
        command.process.send_signal(signal.SIGINT)
        command.until(lambda: command.ended, or_ended=True)
        assert "Ctrl-C again" in command.output
        assert command.process.returncode == 75
