"""Nothing that only displays a run can end it: the live line, the event log, TensorBoard, reports, or the reader of its output."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from megalith.events import FILE, Problem, Recovery, RunStarted, Step, of_kind, read
from megalith.fleet.exit_codes import ExitCode
from tests.full import sampled
from tests.patience import PATIENCE
from tests.runs import assert_same_bits, await_step, final_state, prepare_text, process_of, typed

STEPS = 150
"""The number of steps of a run: enough to outlast the faults."""


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("typed")
    return typed(folder / "run.toml", prepare_text(folder), steps=STEPS)


@pytest.fixture(scope="module")
def unhurt(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("typed") / "whole"
    subprocess.run([*command, str(folder)], check=True, capture_output=True, timeout=PATIENCE)
    return folder


@sampled(1, together=True)
@pytest.mark.slow
def test_lines_of_others_a_lost_log_and_an_output_without_room_end_no_run(
    command: list[str], unhurt: Path, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "tensorboard").write_text("a file, where a folder is needed")
    with Path("/dev/full").open("w") as full:
        options = [str(folder), "--set", "log.tensorboard=true"]
        process = subprocess.Popen([*command, *options], stdout=full, stderr=subprocess.PIPE, text=True)
    await_step(4, folder, process)
    with (folder / FILE).open("a") as file:
        file.write('123\n"text"\n{"no": "type"}\n{"type": "step", "time": 1.0, "step": "three"}\n[]\nnothing\n')
    await_step(10, folder, process)
    (folder / FILE).unlink()
    said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == ExitCode.FINISHED, said
    assert "output were lost: stdout could not be written (No space left on device)" in said
    assert_same_bits(final_state(unhurt), final_state(folder))
    left = list(read(folder))
    notes = [event.message for event in of_kind(left, Problem)]
    lost = [
        note for note in notes if "log.tensorboard" not in note
    ]  # the process that feeds TensorBoard may fail before or after
    assert len(lost) == 1 and lost[0].startswith(f"{FILE} was removed or emptied during the run"), notes
    steps = [event.step for event in of_kind(left, Step)]
    assert steps == list(range(steps[0], STEPS + 1)) and steps[0] > 10
    assert [event.resumed_step for event in of_kind(left, RunStarted)] == [steps[0] - 1]
    assert (folder / "report.html").is_file()


@sampled(1, together=True)
@pytest.mark.slow
def test_a_run_whose_reader_has_gone_recovers_from_faults_and_ends_as_it_would(
    command: list[str], unhurt: Path, tmp_path: Path
) -> None:
    """The command is `megalith train ... | head`. A rank is killed while a folder is in the place of the log."""
    folder = tmp_path / "run"
    process = subprocess.Popen([*command, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    await_step(4, folder, process)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    os.kill(process_of(1, folder), signal.SIGKILL)
    with process.stderr:
        said = process.stderr.read()
    assert process.wait(timeout=PATIENCE) == ExitCode.FINISHED, said
    assert "output were lost: stdout could not be written (Broken pipe)" in said
    assert len(of_kind(read(folder), Recovery)) == 1
    assert_same_bits(final_state(unhurt), final_state(folder))
