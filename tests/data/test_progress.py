import io

import pytest
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from megalith.data import progress
from megalith.data.progress import Bars, bars


def test_bars_count_on_the_error_stream_and_only_when_shown(capsys):
    for shown in (False, True):
        with bars(shown) as made:
            bar = made.start("reading", total=1000)
            made.advance(bar, 400)
            made.finish(bar)
            made.finish(made.start("of unknown length", total=None))
            made.print_line("[all] done")
        captured = capsys.readouterr()
        assert captured.out == ""
        assert ("[all] done" in captured.err) == ("reading" in captured.err) == shown


def test_in_a_pipe_each_piece_is_one_line_once_it_is_done(capsys):
    with bars(True) as made:
        bar = made.start("reading", total=4_000_000)
        made.advance(bar, 4_000_000)
        assert capsys.readouterr().err == ""
        made.finish(bar)
        made.finish(made.start("learning", total=None))
    assert capsys.readouterr().err.splitlines() == ["reading: 4.0 MB in 0:00", "learning: done in 0:00"]


def test_on_a_terminal_a_bar_ends_with_what_was_done_and_without_a_question_mark(monkeypatch: pytest.MonkeyPatch):
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=100, color_system=None)
    now = [0.0]
    columns = (TextColumn("{task.description}"), BarColumn(24), progress._Amount())
    with Progress(*columns, console=console, get_time=lambda: now[0], auto_refresh=False) as drawn:
        made = Bars(drawn)
        bar = made.start("reading", total=2_000_000)
        now[0] = 2.0
        made.advance(bar, 1_000_000)
        now[0] = 4.0
        made.advance(bar, 500_000)
        assert progress.amount(drawn.tasks[bar]) == "1.5 MB of 2.0 MB, 250.0 kB/s, 0:02 left"
        made.finish(bar)
        other = made.start("learning", total=None)
        now[0] = 70.0
        assert progress.amount(drawn.tasks[other]) == "1:06"
        made.finish(other)
        drawn.refresh()
    shown = written.getvalue()
    assert "2.0 MB in 0:04" in shown and "done in 1:06" in shown
    assert "?" not in shown.replace("\x1b[?25", "")  # the live display hides the cursor
