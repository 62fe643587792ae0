"""The index of a log agrees with the log, wherever indexing resumes."""

from pathlib import Path

import numpy as np
import pytest

from megalith import events, pyramid
from megalith.events import RunStarted, Step, of_kind
from megalith.events import log as event_log
from megalith.watch import index
from megalith.watch.index import Index, numbers
from megalith.watch.source import Source
from tests.report.run_folder import start, step, write_run


def _source(folder: Path) -> Source:
    source = Source(folder, predicts=False)
    while source.poll():
        pass
    return source


def _losses(source: Source) -> list[tuple[int, float]]:
    view = source.steps(["loss"], most=10_000)
    return list(zip(view.first.tolist(), view.mean[:, 0].tolist(), strict=True))


def _logged(folder: Path) -> list[tuple[int, float]]:
    return [(one.step, pytest.approx(one.loss, rel=1e-6)) for one in of_kind(events.read(folder), Step)]


def test_a_source_knows_every_step_and_event_of_a_log(tmp_path: Path) -> None:
    source = _source(write_run(tmp_path))
    assert _losses(source) == _logged(tmp_path)  # 21 to 25 twice, since they were trained twice
    assert len(source.starts) == 2 and len(source.holdings) == 4 and len(source.spans) == 1
    assert source.finished is not None and source.finished.reason == "finished"
    assert source.last_step() == 40


@pytest.mark.parametrize("cut", [0, 1, 13, 40, 41, 52, 60])
def test_what_was_kept_and_what_came_later_make_the_whole(cut: int, tmp_path: Path) -> None:
    """The process that writes the index may end anywhere, and another one continues, or only reads."""
    write_run(tmp_path)
    lines = (tmp_path / events.FILE).read_bytes().splitlines(keepends=True)
    (tmp_path / events.FILE).write_bytes(b"".join(lines[:cut]) + lines[cut][:20])
    kept = Index(tmp_path, tmp_path / index.FOLDER)
    kept.poll()  # the writer is killed, so the index is never closed
    (tmp_path / events.FILE).write_bytes(b"".join(lines))
    watching = _source(tmp_path)
    assert _losses(watching) == _logged(tmp_path)
    again = Index(tmp_path, tmp_path / index.FOLDER)
    again.poll()
    again.close()
    assert _losses(_source(tmp_path)) == _logged(tmp_path)
    assert len(_source(tmp_path).starts) == 2 and len(_source(tmp_path).validations) == len(watching.validations) == 4
    kept.close()


def test_a_live_log_is_followed_and_half_a_line_waits(tmp_path: Path) -> None:
    log = events.EventLog(tmp_path)
    log.write(start())
    source = _source(tmp_path)
    assert source.last_step() is None
    line = event_log._line(step(1))
    with (tmp_path / events.FILE).open("ab") as file:
        file.write(line[:30])
        file.flush()
        assert not source.poll()
        file.write(line[30:])
    assert source.poll()
    assert source.last_step() == 1


def test_garbage_in_a_log_is_no_event(tmp_path: Path) -> None:
    log = events.EventLog(tmp_path)
    log.write(start())
    with (tmp_path / events.FILE).open("ab") as file:
        file.write(b"\xff\xfe\n{}\n[1]\n" + b"x" * 100 + b"\n" + b'{"type":"step","time":"noon"}\n')
    log.write(step(1))
    assert _losses(_source(tmp_path))[0][0] == 1


def test_a_line_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    log = events.EventLog(tmp_path)
    log.write(start())
    log.write(events.Sample(1, "p", "x" * 5000))
    log.write(step(1))
    read = Index(tmp_path, tmp_path / "own")
    found = [event for _ in range(40) for event in read.poll(most=1000)]
    assert [type(event) for event in found] == [RunStarted, events.Sample, Step]


def test_a_log_that_was_removed_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = events.EventLog(tmp_path)
    for event in (start(), step(1), step(2)):
        log.write(event)
    source = _source(tmp_path)
    (tmp_path / events.FILE).unlink()
    log.write(step(3))
    while source.poll():
        pass
    assert source.last_step() == 3


def test_numbers_that_a_step_does_not_say_are_missing() -> None:
    found = dict(zip(index.VALUES, numbers(step(3, mfu=None, experts={})).tolist(), strict=True))
    assert found["loss"] == pytest.approx(step(3).loss) and found["forward"] == pytest.approx(0.12)
    assert np.isnan(found["mfu"]) and np.isnan(found["max_load"]) and found["bubble"] == 0


def test_a_run_folder_that_goes_away_while_its_log_is_read_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    write_run(run)
    lines = (run / events.FILE).read_bytes().splitlines(keepends=True)
    (run / events.FILE).write_bytes(b"".join(lines[:10]))
    kept, parse = Index(run, run / index.FOLDER), events.parse

    def away(line: str) -> events.Event | None:
        if not elsewhere.exists():
            run.rename(elsewhere)
        return parse(line)

    with monkeypatch.context() as patched:
        patched.setattr(events, "parse", away)
        kept.poll()
    assert not run.exists()
    elsewhere.rename(run)
    with (run / events.FILE).open("ab") as log:
        log.write(b"".join(lines[10:]))
    kept.poll()
    kept.close()
    assert pyramid.Reader(run / index.FOLDER).span()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no run.*--run-dir"):
        Source(tmp_path)


def test_a_disk_that_cannot_take_the_index_ends_nothing(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "ranks").write_text("in the way")
    kept = Index(tmp_path, tmp_path / index.FOLDER)
    assert len(kept.poll()) > 40
    kept.close()
    assert pyramid.Reader(tmp_path / index.FOLDER).newest() is None
