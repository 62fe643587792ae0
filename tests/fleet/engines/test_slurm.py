"""The batch script under real Slurm."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megalith.events import Checkpoint, Kind, RunFinished, RunStarted, Step, of_kind, read
from megalith.fleet.engines import Launch, emit
from megalith.fleet.exit_codes import ExitCode
from megalith.spec.files import load
from tests.fleet.engines.cluster import missing, slurm
from tests.patience import PATIENCE
from tests.runs import assert_same_bits, final_state, position, prepare_text, train

ROOT = Path(__file__).parents[3]
RUN = """
name = "queued"
model = {{ layers = 2, dim = 32, heads = 4, kv_heads = 2, ffn = 48, vocab = 264, context = 64 }}
plan = {{ data = 2, zero = 1 }}
data.path = "{data}"
train = {{ steps = 400, global_batch = 8, seq_len = 32, precision = "fp32" }}
optimizer.warmup = 2
checkpoint.every = 40
launch = {{ threads = 1, start_timeout = 250.0 }}
"""


@pytest.mark.engines
@pytest.mark.timeout(PATIENCE)
@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_a_job_that_is_told_to_end_and_then_loses_its_node_ends_with_the_same_bits(tmp_path: Path) -> None:
    """One job for both cases, since each start costs imports. Signalled by scancel, it requeues itself; after a lost node, Slurm
    requeues it."""
    (tmp_path / "run.toml").write_text(RUN.format(data=prepare_text(tmp_path)))
    spec, folder, output = load(tmp_path / "run.toml").spec, tmp_path / "run", tmp_path / "output"
    launch = Launch(
        run_file=str(tmp_path / "run.toml"), run_dir=str(folder), ranks_per_node=2, grace=60, workdir=str(ROOT),
        environment={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    made = emit("slurm", spec, launch)
    (tmp_path / made.file).write_text(made.text)
    train(spec, tmp_path / "whole")
    with slurm(tmp_path / "slurm") as cluster:
        job = cluster.say("sbatch", "--parsable", f"--output={output}", str(tmp_path / made.file)).strip()
        until_event(folder, Step, output, lambda event: event.step >= 5)
        cluster.say("scancel", "--batch", "--signal=USR1", job)
        stopped = until_event(folder, RunFinished, output)
        assert stopped.reason == "stopped"

        again = until_event(folder, RunStarted, output, lambda event: event.time > stopped.time)
        assert again.resumed_step == stopped.step
        assert f"ended with status {ExitCode.STOPPED}; queued again: yes" in output.read_text()
        assert cluster.field(job, "Restarts") == "1"

        until_event(folder, Checkpoint, output, lambda event: event.step > stopped.step)
        cluster.power_off()
        until(lambda: cluster.node_is("down"), output)
        cluster.power_on()
        until(lambda: cluster.field(job, "JobState") == "COMPLETED", output)
        assert cluster.field(job, "Restarts") == "2"
    assert_same_bits(final_state(tmp_path / "whole"), final_state(folder))
    assert position(tmp_path / "whole") == position(folder)


def until_event(folder: Path, kind: type[Kind], output: Path, fits: Callable[[Kind], bool] = lambda event: True) -> Kind:
    """Wait for the first matching event of a class in the run's log, and return it."""
    found: list[Kind] = []

    def look() -> bool:
        found[:] = [event for event in of_kind(read(folder), kind) if fits(event)]
        return bool(found)

    until(look, output)
    return found[0]


def until(true: Callable[[], bool], output: Path) -> None:
    """Wait for a condition; raise with the job's output if it takes too long."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, output.read_text()[-5000:] if output.exists() else "no output"
        time.sleep(0.2)
