"""The ranks of a command's run."""

from pathlib import Path

from megalith.commands import ranks
from megalith.spec import files


def test_a_jobs_burn_in_is_for_the_device_it_computes_on(run: Path):
    spec = files.load(run, overrides=["train.device=cpu", "fleet.burn_in=3.0"]).spec
    command = ranks.job(spec, Path("x"), ranks.TRAIN, {}).burn_in
    assert command[command.index("--seconds") + 1] == "3.0" and command[-1] == "cpu"
