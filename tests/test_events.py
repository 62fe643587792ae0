"""The event log."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalith.events import (
    FILE,
    EarlyUpdatesPaused,
    Event,
    EventLog,
    Holding,
    Lowered,
    Merge,
    Problem,
    Reader,
    RunFinished,
    RunStarted,
    Sample,
    Skipped,
    Spans,
    Step,
    Unknown,
    dump,
    load,
    of_kind,
    parse,
    read,
)

OLD = Path(__file__).parent / "old_events.jsonl"
"""A log with an event of every kind, written by a version from before the event classes. Its first step is from a version without
experts."""


def _reader(folder: Path, text: str) -> Reader:
    (folder / FILE).write_text(text)
    return read(folder)


def _with_subclasses(kind: type[Event]) -> set[type[Event]]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def test_what_is_written_is_read_back_in_order(tmp_path: Path) -> None:
    written = [Problem("warning", "a line\nand another", rank=3), Sample(step=7, prompt="é", text="✓")]
    log = EventLog(tmp_path)
    for event in written:
        log.write(event)
    assert list(read(tmp_path)) == written


def test_a_log_without_a_run_is_empty(tmp_path: Path) -> None:
    reader = read(tmp_path)
    assert (list(reader), reader.skipped) == ([], 0)


def test_half_a_line_of_a_dead_writer_costs_that_line_only(tmp_path: Path) -> None:
    EventLog(tmp_path).write(Problem("warning", "first"))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"type": "step", "lo')
    reader = read(tmp_path)
    assert [e.message for e in of_kind(reader, Problem)] == ["first"]
    assert reader.skipped == 1
    EventLog(tmp_path).write(Problem("warning", "second"))
    assert [e.message for e in of_kind(reader, Problem)] == ["first", "second"]
    assert reader.skipped == 1, "counted anew in each iteration"


def test_every_kind_of_event_of_an_old_log_is_read(tmp_path: Path) -> None:
    reader = _reader(tmp_path, OLD.read_text())
    found = list(reader)
    assert {type(event) for event in found} == _with_subclasses(Event) - {Event, Unknown, Skipped}  # old logs cannot have it
    assert reader.skipped == 0
    assert not any(event.extra for event in found)
    first, second = of_kind(found, Step)
    assert (first.experts, first.mfu, second.experts["max_load"]) == ({}, None, 1.5)


def test_an_event_is_written_as_an_old_log_has_it() -> None:
    """Lines are equal to the byte, except for fields newer than the line."""
    for line in OLD.read_text().splitlines(keepends=True):
        event = parse(line)
        assert event is not None
        expected = line
        if isinstance(event, Step):
            experts = "" if event.experts else ',"experts":{}'
            expected = line.removesuffix("}\n") + experts + ',"updates":null,"noise":{},"scale":null,"passes":1}\n'
        if isinstance(event, Holding):
            expected = line.removesuffix("}\n") + ',"host_bytes":0,"disk_bytes":0}\n'
        if isinstance(event, Merge):
            newer = ',"number":-1,"merged":[],"left":[],"joined":[],"count":0,"samples":0,"total":0,"mark":"","decided":null'
            expected = line.removesuffix("}\n") + newer + ',"taken":[],"ages":[],"weights":[],"names":[],"rule":1}\n'
        if isinstance(event, EarlyUpdatesPaused):
            expected = line.removesuffix("}\n") + ',"key":"plan.state.release"}\n'
        if isinstance(event, Lowered):
            expected = line.removesuffix("}\n") + ',"at_most":null}\n'
        if isinstance(event, Spans):
            expected = line.removesuffix("}\n") + ',"collecting":0.0,"since":0}\n'
        if isinstance(event, RunStarted):
            expected = line.removesuffix("}\n") + ',"own":{}}\n'
        assert json.dumps(dump(event), separators=(",", ":")) + "\n" == expected


def test_the_bytes_of_a_line_stay_as_they_are(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.write(Spans(step=3, spans=[(0, "0F0", 0.0, 0.5)], time=1.5))
    log.write(RunFinished("stopped", 3, time=2.0))
    log.close()
    assert (tmp_path / FILE).read_text() == (
        '{"type":"spans","time":1.5,"step":3,"spans":[[0,"0F0",0.0,0.5]],"collecting":0.0,"since":0}\n'
        '{"type":"run_finished","time":2.0,"reason":"stopped","step":3}\n'
    )


def test_a_field_that_a_log_lacks_has_its_default_or_the_neutral_value_of_its_type() -> None:
    step = load({"type": "step", "time": 1, "step": 4})
    assert isinstance(step, Step)
    assert step.loss != step.loss
    assert (step.step, step.tokens, step.mfu, step.memory, step.experts, step.extra) == (4, 0, None, {}, {}, {})
    assert load({"type": "problem", "time": 1.0}) == Problem("", "", None, time=1.0)


def test_fields_and_kinds_of_another_version_are_kept_as_they_are(tmp_path: Path) -> None:
    newer: list[dict[str, Any]] = [
        {"type": "run_finished", "time": 1.0, "reason": "finished", "joules": 3.0, "step": 9},
        {"type": "weather", "time": 2.0, "rain": [1, 2]},
    ]
    reader = _reader(tmp_path, "".join(json.dumps(record) + "\n" for record in newer))
    finished, weather = reader
    assert finished == RunFinished("finished", 9, time=1.0, extra={"joules": 3.0})
    assert weather == Unknown("weather", time=2.0, extra={"rain": [1, 2]})
    assert [dump(event) for event in (finished, weather)] == newer
    assert reader.skipped == 0
    both = load({"type": "run_finished", "time": 1.0, "why": "finished", "step": 9})
    assert both == RunFinished("", 9, time=1.0, extra={"why": "finished"}), "one is missing and one is unknown"


STRANGE = {
    "no JSON": "step 3",
    "half a line": '{"type":"step","ti',
    "a blank line": "",
    "a list": '[{"type":"step"}]',
    "a number": "3",
    "null": "null",
    "no type": '{"time":1.0,"step":3}',
    "a type that is not text": '{"type":["step"],"time":1.0}',
    "no time": '{"type":"run_finished","reason":"finished","step":3}',
    "a time that is not a number": '{"type":"weather","time":"noon"}',
    "a field of another type": '{"type":"run_finished","time":1.0,"reason":"finished","step":"three"}',
    "a number without end": '{"type":"run_finished","time":' + "1" * 5000 + "}",
    "brackets without end": '{"type":"run_finished","time":1.0,"reason":' + "[" * 100_000,
}


@pytest.mark.parametrize("line", STRANGE.values(), ids=STRANGE)
def test_a_line_that_holds_no_event_is_skipped_and_counted(tmp_path: Path, line: str) -> None:
    whole = '{"type":"run_finished","time":2.0,"reason":"finished","step":9}\n'
    reader = _reader(tmp_path, f"{line}\n{whole}{line}\n{whole}")
    assert list(reader) == [RunFinished("finished", 9, time=2.0)] * 2
    assert reader.skipped == 2


def test_bytes_that_are_no_text_end_no_reader(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b'{"type":"problem","time":1.0,"severity":"error","message":"\xff","rank":null}\n\x00\xfe\n')
    reader = read(tmp_path)
    assert [event.message for event in of_kind(reader, Problem)] == ["\N{REPLACEMENT CHARACTER}"]
    assert reader.skipped == 1
