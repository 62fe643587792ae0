"""The cluster that a request names, changed by its settings (`--set cluster.KEY=VALUE`), and others for the same request. No torch."""

from collections.abc import Sequence

from megalith.planner.formats import unable
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


def unpredictable(name: str, cluster: ClusterSpec, format: str, *, ours: bool) -> list[Problem]:
    """Return the problems for which no step in a number format can be predicted on a cluster. `ours`: True for Megalith's trainer."""
    return [*unpublished(name, cluster), *unable(format, cluster, ours=ours)]


def roomy(devices: int, *, memory: float, format: str, ours: bool) -> list[str]:
    """Return the names of devices with this much memory. Steps can be predicted on this number of them."""
    large = (name for name, device in clusters.catalogue().items() if device.memory is not None and device.memory >= memory)
    return [name for name in large if not unpredictable(name, clusters.load(f"{name}:{devices}"), format, ours=ours)]
