"""TensorBoard beside the event log."""

from pathlib import Path

import pytest

from megalith.events import Problem, Step, Validation, read

pytest.importorskip("tensorboard", reason="needs the extra tensorboard")


def test_what_tensorboard_cannot_write_costs_its_files_alone(tmp_path: Path) -> None:
    from megalith.train.measure.tensorboard import BoardLog  # imports the extra

    (tmp_path / "tensorboard").write_text("a file, where a folder is needed")
    log = BoardLog(tmp_path)
    log.write(Validation(step=2, loss=4.5, domains={}, seconds=1.0))
    log.close()
    problem, validation = read(tmp_path)
    assert isinstance(problem, Problem) and "TensorBoard's files are no longer written" in problem.message
    assert isinstance(validation, Validation)


def test_what_tensorboard_shows_is_what_the_event_log_says(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # an extra

    from megalith.train.measure.tensorboard import BoardLog  # imports the extra

    log = BoardLog(tmp_path)
    rest = {"grad_norm": 2.0, "lr": 0.1, "tokens": 8, "seconds": 1.0, "tokens_per_second": 8.0, "mfu": None, "memory": {}}
    for step in (1, 2):
        log.write(Step(step=step, loss=5.0 - step, tokens_seen=8 * step, breakdown={"forward": 0.5}, **rest))
    log.write(Validation(step=2, loss=4.5, domains={"tale": 4.25}, seconds=1.0))
    log.close()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [(1, 4.0), (2, 3.0)]
    assert [event.value for event in board.Scalars("validation/tale")] == [4.25]
    assert "train/mfu" not in board.Tags()["scalars"], "an unknown MFU is not a zero"
    assert [type(event) for event in read(tmp_path)] == [Step, Step, Validation]
