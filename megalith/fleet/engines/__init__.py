"""Artefacts for the engines that start runs on machines: a batch script, a manifest, a job. Pure functions from a run to text."""

from megalith.fleet.engines.given import given
from megalith.fleet.engines.launch import Artefact, Launch, problems
from megalith.fleet.engines.table import ENGINES, emit

__all__ = ["ENGINES", "Artefact", "Launch", "emit", "given", "problems"]
