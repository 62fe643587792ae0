"""Calls of commands in the form in which a user types them."""

from pathlib import Path

from typer.testing import CliRunner, Result

from megalith.cli import app
from tests.prepared import hollow_data

RUN = """
name = "first"
model.preset = "tiny"
data.path = "data"
train = { steps = 100, global_batch = 64, seq_len = 128 }
optimizer.warmup = 10
"""


def call(*arguments: str) -> Result:
    """Run a command line in this process."""
    return CliRunner().invoke(app, list(arguments))


def write_run() -> None:
    """Write a run file of one rank, and its prepared data, to the current directory."""
    Path("run.toml").write_text(RUN)
    hollow_data(Path("data"), "austen")
