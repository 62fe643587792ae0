"""Artefacts for the engines that start runs on machines: a batch script, a manifest or a job. Each is text that a pure function makes
from a run."""

from megalith.fleet.engines.given import given
from megalith.fleet.engines.launch import Artefact, Launch, problems
from megalith.fleet.engines.table import ENGINES, emit

__all__ = ["ENGINES", "Artefact", "Launch", "emit", "given", "problems"]
