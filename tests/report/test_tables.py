from dataclasses import replace
from io import StringIO

from rich.console import Console

from megalith import events
from megalith.report.live import LiveLine
from megalith.report.page import write
from megalith.report.tables import summary
from tests.report.run_folder import start, step, write_run


def printed(folder) -> str:
    console = Console(file=StringIO(), width=120)
    console.print(summary(folder))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_summary_says_how_the_run_ended_and_how_fast_it_was(tmp_path):
    text = printed(write_run(tmp_path))
    for said in (
        "finished",
        "40 of 40",
        "4.0000 (austen 3.9000, python 4.1000)",
        "8.19k",
        "14.7 % of 2.5 TFLOP/s",
        "step 20",
        "repeated",
    ):
        assert said in text, (said, text)
    assert "error" not in text, "what a finished run has recovered from is no news"


def test_an_error_is_shown_in_a_line_until_the_ranks_start_again(tmp_path):
    log = events.EventLog(tmp_path)
    log.write(start())
    log.write(events.Problem("error", "ValueError: wrong\nframe #0", rank=3, time=1001.0))
    assert "error ValueError: wrong … (rank 3)" in printed(tmp_path)
    assert "frame" not in printed(tmp_path)
    log.write(replace(start(), time=1002.0))
    log.close()
    assert "ValueError" not in printed(tmp_path)


def test_an_unknown_peak_is_said(tmp_path):
    log = events.EventLog(tmp_path)
    log.write(start(peak=None))
    log.close()
    assert "running" in printed(tmp_path)


def test_a_folder_that_is_no_run_is_named(tmp_path):
    assert "has no events" in printed(tmp_path / "elsewhere").replace("\n", " ")


def test_lines_that_hold_no_event_are_counted(tmp_path):
    write_run(tmp_path)
    assert "without an event" not in printed(tmp_path)
    with (tmp_path / events.FILE).open("a") as log:
        log.write('["step", 41]\n{"type":"step","ti')
    assert "2 lines of the log without an event" in printed(tmp_path)


def test_a_loss_scale_is_shown_with_the_steps_that_overflowed(tmp_path):
    log, out = events.EventLog(tmp_path), StringIO()
    follow = LiveLine(tmp_path, 4, Console(file=out, width=200))
    log.write(start())
    log.write(step(1, scale=1024.0))
    names = {"part": "head", "tensor": "head.output.weight", "scale_before": 1024.0, "scale_after": 512.0}
    log.write(events.Skipped(step=2, reason="the gradients overflowed", tokens=64, seconds=1.0, left=10, **names))
    log.write(step(3, scale=512.0))
    log.close()
    follow.close()
    assert "warning: the update of step 2 was skipped: the gradients overflowed." in out.getvalue()
    assert "scale 512" in out.getvalue()
    assert "512, and 1 step overflowed" in printed(tmp_path)
    page = write(tmp_path).read_text(encoding="utf-8")
    assert "Loss scale of fp16; 1 step overflowed" in page and "2^" in page
    (tmp_path / "bf16").mkdir()
    assert "loss scale" not in printed(write_run(tmp_path / "bf16"))
