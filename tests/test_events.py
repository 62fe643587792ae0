"""The event log."""

from pathlib import Path

from megalith.events import FILE, EventLog, Problem, Sample, read


def test_what_is_written_is_read_back_in_order(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.write(Problem("warning", "a line\nand another", rank=3))
    log.write(Sample(step=7, prompt="é", text="✓"))
    assert [(e["type"], e.get("rank"), e.get("text")) for e in read(tmp_path)] == [("problem", 3, None), ("sample", None, "✓")]


def test_a_log_without_a_run_is_empty(tmp_path: Path) -> None:
    assert list(read(tmp_path)) == []


def test_half_a_line_of_a_dead_writer_costs_that_line_only(tmp_path: Path) -> None:
    EventLog(tmp_path).write(Problem("warning", "first"))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"type": "step", "lo')
    assert [e["message"] for e in read(tmp_path)] == ["first"]
    EventLog(tmp_path).write(Problem("warning", "second"))
    assert [e["message"] for e in read(tmp_path)] == ["first", "second"]
