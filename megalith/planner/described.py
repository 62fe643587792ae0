"""The cluster that a request names, changed by its settings (`--set cluster.KEY=VALUE`). No torch."""

from collections.abc import Sequence

from megalith.planner.problems import unpublished
from megalith.spec import cluster as clusters
from megalith.spec.cluster import ClusterSpec
from megalith.spec.files import read_setting
from megalith.spec.problem import Problem, SpecErrors

TABLE = "cluster."
"""Prefix of the settings that change the cluster instead of the run."""


def of_cluster(settings: Sequence[str]) -> tuple[str, ...]:
    """Return the settings that change the cluster."""
    return tuple(text for text in settings if text.strip().startswith(TABLE))


def described(name: str, settings: Sequence[str], problems: list[Problem]) -> ClusterSpec | None:
    """Return the cluster of this name, changed by the settings. If the cluster is unknown, append to `problems` and return None. Append a
    problem also if a needed figure is unpublished."""
    try:
        found = clusters.load(name)
        for text in of_cluster(settings):
            found = clusters.changed(found, read_setting(text).values["cluster"])
    except SpecErrors as errors:
        problems += errors.problems
        return None
    problems += unpublished(name, found)
    return found
