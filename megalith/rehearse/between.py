"""Settings of merges between simulated sites: taken from the command line, else from the run file, else chosen for the link or assumed."""

from typing import Any

from megalith.cost.across import LinkChoice, across, link_choice
from megalith.spec.run import RunSpec
from megalith.spec.simulation import SimulationSpec
from megalith.spec.sites import SitesSpec
from megalith.spec.sizes import model_parameters

BETWEEN_SITES = ("merge_every", "merge_seconds", "return_seconds", "grace", "patience", "decides", "staleness")
"""Keys of a simulation that apply only to several sites."""
MERGE_SECONDS, RETURN_SECONDS, PATIENCE, MIN_GRACE = 300.0, 60.0, 4200.0, 5.0
"""Assumed values in seconds. PATIENCE is the least time for which a real run waits for a quorum, whatever its step times."""


def site_count(spec: SimulationSpec, run: RunSpec | None) -> int:
    """Return the number of sites."""
    return spec.sites or (run.sites.count if run is not None and run.sites is not None else 1)


def sites_linked(spec: SimulationSpec, run: RunSpec | None, step: float) -> LinkChoice | None:
    """Predict the merges of a run over its link, with the choice of `megalith plan` for keys that the run file leaves out; None without a
    link. One site alone is assumed to take as many times as long for the whole batch as for its part of it. Data parallelism is not
    chosen, because it cannot be simulated."""
    if run is None or (sites := _table(spec, run)) is None:
        return None
    alone = step * sites.parts / max(sites.shares or (1,))
    return link_choice(run.model_copy(update={"sites": sites}), step, lambda: alone, exact=False)


def _table(spec: SimulationSpec, run: RunSpec) -> SitesSpec | None:
    """The run's table of sites, for the simulated number of sites."""
    sites, count = run.sites, site_count(spec, run)
    if sites is None or sites.count == count:
        return sites
    return sites.model_copy(update={"count": count, "each": ()})  # the tables describe another number of sites


def between_sites(spec: SimulationSpec, run: RunSpec | None, step: float, linked: LinkChoice | None) -> dict[str, Any]:
    """Return the fields of a scenario that describe merges between sites. A run file has the settings of merges in its table
    `[sites]`; `linked` has those that it leaves out."""
    sites = (linked and linked.chosen) or (None if run is None else _table(spec, run))
    every, round_seconds, held, back = MERGE_SECONDS, MERGE_SECONDS, 0.0, RETURN_SECONDS
    if run is not None and sites is not None:
        round_seconds = sites.inner_steps * step
        every = round_seconds / sites.fragments
        if sites.link is not None:
            shapes = {name: each.shape for name, each in model_parameters(run.model.build()).items()}
            found = across(shapes, sites, step)
            held = found.waited / sites.fragments if found is not None else 0.0
            # weights and velocities, 8 bytes a parameter: twice a difference in fp32
            weights = 0 if found is None else 2 * found.instead / (sites.count - 1) / sites.inner_steps
            back = weights * 8e-6 / sites.link.megabits
    said = {name: getattr(spec, name) for name in BETWEEN_SITES if getattr(spec, name) is not None}
    return {
        "merge_every": every,
        "merge_seconds": held,
        "return_seconds": back,
        "grace": (sites.grace if sites is not None else None) or max(MIN_GRACE, said.get("merge_every", round_seconds)),
        "patience": run.launch.timeout + run.fleet.wait_limit if run is not None else PATIENCE,
        "decides": sites.decides if sites is not None else None,
        "staleness": sites.staleness if sites is not None else 0,
    } | said
