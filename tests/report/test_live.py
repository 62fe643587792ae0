import re
from io import StringIO

import pytest
from rich.console import Console

from megalith import events
from megalith.report.live import LiveLine
from tests.report.run_folder import start, step


def console(terminal: bool) -> Console:
    return Console(file=StringIO(), force_terminal=terminal, width=120)


def text(shown: Console) -> str:
    return shown.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def log(tmp_path):
    found = events.EventLog(tmp_path)
    yield found
    found.close()


def test_a_file_gets_the_first_step_and_the_last_without_escape_codes(tmp_path, log):
    shown = console(terminal=False)
    with LiveLine(tmp_path, 5, shown) as follow:
        for i in range(1, 6):
            log.write(step(i, loss=6.0 - i))
            follow.poll()
    assert re.findall(r"step (\d)/5  loss ([\d.]+)", text(shown)) == [("1", "5.0000"), ("5", "1.0000")]
    assert "\x1b" not in text(shown)
    assert "8.19k tokens/s  MFU 14.7 %" in text(shown)


def test_a_file_gets_a_line_at_every_interval(tmp_path, log):
    shown = console(terminal=False)
    with LiveLine(tmp_path, 5, shown, seconds=0.0) as follow:
        for i in range(1, 6):
            log.write(step(i))
            follow.poll()
    assert re.findall(r"step (\d)/5", text(shown)) == ["1", "2", "3", "4", "5"]


def test_a_terminal_gets_one_line_that_is_redrawn(tmp_path, log):
    shown = console(terminal=True)
    with LiveLine(tmp_path, 5, shown) as follow:
        for i in range(1, 6):
            log.write(step(i))
            follow.poll()
    assert "\x1b" in text(shown)
    assert "step 5/5" in text(shown)


def test_what_was_written_before_is_not_shown(tmp_path, log):
    log.write(step(1))
    shown = console(terminal=False)
    with LiveLine(tmp_path, 5, shown) as follow:
        follow.poll()
        assert text(shown) == ""
        log.write(step(2, mfu=None))
    assert re.findall(r"step (\d)/5", text(shown)) == ["2"]


def test_a_log_that_does_not_exist_yet_is_waited_for(tmp_path):
    shown = console(terminal=False)
    with LiveLine(tmp_path / "later", 5, shown) as follow:
        follow.poll()
        late = events.EventLog(tmp_path / "later")
        late.write(step(1))
        late.close()
    assert "step 1/5" in text(shown)


def test_a_line_that_is_half_written_is_shown_when_it_is_whole(tmp_path):
    shown = console(terminal=False)
    source = events.EventLog(tmp_path / "whole")
    source.write(step(3))
    source.close()
    line = (tmp_path / "whole" / events.FILE).read_bytes()
    with LiveLine(tmp_path, 5, shown) as follow, (tmp_path / events.FILE).open("ab", buffering=0) as file:
        file.write(line[:30])
        follow.poll()
        assert text(shown) == ""
        file.write(line[30:])
        follow.poll()
        assert "step 3/5" in text(shown)


def test_a_line_torn_by_a_dead_writer_is_passed_over(tmp_path):
    (tmp_path / events.FILE).write_bytes(b'{"type":"step","st')
    shown = console(terminal=False)
    with LiveLine(tmp_path, 5, shown):
        log = events.EventLog(tmp_path)
        log.write(step(1))
        log.write(step(2, mfu=None))
        log.close()
    assert "step 2/5" in text(shown)


@pytest.mark.parametrize(
    "line", ["[1, 2]", "null", '{"step":3}', '{"type":"step","time":1.0,"step":"three"}', '{"type":"weather","time":1.0}']
)
def test_a_line_that_holds_nothing_to_show_does_not_end_the_display(tmp_path, log, line):
    shown = console(terminal=False)
    with LiveLine(tmp_path, 5, shown), (tmp_path / events.FILE).open("a") as file:
        file.write(f"{line}\n")
        file.flush()
        log.write(step(2, mfu=None))
    assert re.findall(r"step (\d)/5", text(shown)) == ["2"]


def test_a_log_that_goes_away_or_is_removed_is_followed_again_once_it_is_back(tmp_path):
    shown, folder = console(terminal=False), tmp_path / "run"
    log = events.EventLog(folder)
    with LiveLine(folder, 9, shown, seconds=0.0) as follow:
        log.write(step(1))
        follow.poll()
        away = folder.rename(tmp_path / "away")
        for _ in range(3):
            follow.poll()
        log.write(step(2, mfu=None))
        away.rename(folder)
        follow.poll()
        (folder / events.FILE).unlink()
        log.write(step(3))
        follow.poll()
        assert follow.failed == ""
    log.close()
    assert re.findall(r"step (\d)/9", text(shown)) == ["1", "2", "3"]
    assert text(shown).count("cannot be read (No such file or directory): training continues") == 1


def test_a_console_that_fails_ends_no_run(tmp_path, log):
    class Gone(StringIO):
        def write(self, text):
            raise OSError("nobody reads this")

    with LiveLine(tmp_path, 5, Console(file=Gone(), force_terminal=False)) as follow:
        log.write(step(1))
        follow.poll()
    assert "nobody reads this" in follow.failed


def test_validation_and_problems_are_said(tmp_path, log):
    shown = console(terminal=False)
    with LiveLine(tmp_path, 5, shown) as follow:
        log.write(events.Validation(1, 4.25, {}, 0.1))
        log.write(events.Problem("warning", "rank 1 is slow", 1))
        log.write(step(1, mfu=None))
        follow.poll()
        log.write(step(2, mfu=None))
    assert "warning: rank 1 is slow (rank 1)" in text(shown)
    assert "val 4.2500  " in text(shown) and "val 4.2500 at 1  " in text(shown)
    assert "MFU" not in text(shown)


def _incident(number: int, reason: str, command: str) -> events.Incident:
    return events.Incident(number, 0.0, 3, "rank_failed", reason, None, 1, {}, [{"kind": command}])


def test_an_incident_is_said_in_a_line_and_once_and_what_ends_the_run_is_left_to_the_end(tmp_path, log):
    shown = console(terminal=False)
    with LiveLine(tmp_path, 5, shown, errors=lambda rank: False) as follow:
        log.write(events.Problem("error", "RuntimeError: Connection closed by peer\nframe #0", 0))
        log.write(_incident(1, "rank 1 on 0: ValueError: wrong\nand more", "restart"))
        log.write(_incident(2, "rank 1 on 0: ValueError: wrong, again at step 3\nand more", "restart"))
        log.write(_incident(3, "rank 1 on 0: ValueError: wrong: for the third time", "stop"))
        follow.poll()
        follow.print_line("stopping after this step, then saving")
    assert text(shown).splitlines() == [
        "incident at step 3: rank 1 on 0: ValueError: wrong",
        "incident at step 3: the same, again at step 3",
        "incident at step 3: the run stops",
        "stopping after this step, then saving",
    ]


def test_under_another_launcher_errors_of_ranks_are_said_in_a_line(tmp_path, log):
    shown = console(terminal=False)
    with LiveLine(tmp_path, 5, shown):
        for rank in (3, 4):
            log.write(events.Problem("error", "RuntimeError: Connection closed by peer\nframe #0", rank))
    assert text(shown) == "error: RuntimeError: Connection closed by peer … (rank 3)\n", "once"


def test_errors_that_ranks_of_this_machine_print_themselves_are_not_said_again(tmp_path, log):
    shown = console(terminal=False)
    with LiveLine(tmp_path, 5, shown, errors=lambda rank: rank not in range(2)):
        for rank, message in ((1, "NotFinite: step 2"), (3, "NotFinite: step 2"), (2, "ValueError: wrong")):
            log.write(events.Problem("error", message, rank))
    assert text(shown) == "error: ValueError: wrong (rank 2)\n"


def test_the_remaining_time_counts_what_lies_between_steps(tmp_path, log):
    shown = console(terminal=False)
    with LiveLine(tmp_path, 100, shown) as follow:
        log.write(start())
        log.write(step(1, time=1000.0))
        log.write(step(11, time=1020.0))  # steps take 0.5 s, but are 2 s apart
        follow.poll()
    assert "ETA 2:58" in text(shown)
