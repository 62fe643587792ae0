"""Files for launchers ("engines") such as Slurm or Kubernetes: a batch script, a manifest or a job. A pure function of the run
writes the text of each file."""

from megalith.fleet.engines.given import given
from megalith.fleet.engines.launch import Artefact, Launch, problems
from megalith.fleet.engines.table import ENGINES, emit

__all__ = ["ENGINES", "Artefact", "Launch", "emit", "given", "problems"]
