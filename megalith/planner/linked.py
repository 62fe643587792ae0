"""Parts of a request across sites: the batch of all sites, the tensors of merges, and the choice for their link. No torch."""

from collections.abc import Callable

from megalith.cost.across import LinkChoice, left_out, link_choice
from megalith.planner.request import ResolvedRequest
from megalith.spec.run import RunSpec
from megalith.spec.sites import SitesSpec, outer_slots
from megalith.spec.state import Slot


def linked(request: ResolvedRequest, step: float, alone: Callable[[], float | None]) -> LinkChoice | None:
    """Return `link_choice` for the sites of a request."""
    return None if request.sites is None else link_choice(request.run.model_copy(update={"sites": request.sites}), step, alone)


def whole_batch(request: ResolvedRequest) -> RunSpec:
    """The requested run with the batch of all its sites."""
    train, sites = request.run.train, request.sites
    mine = sites.shares[sites.site or 0] if sites is not None and sites.shares else 1
    batch = train.global_batch * (1 if sites is None else sites.parts) // mine
    return request.run.model_copy(update={"train": train.model_copy(update={"global_batch": batch})})


def outer(sites: SitesSpec | None) -> tuple[Slot, ...]:
    """The tensors that merges keep for each weight; the largest possible set if `bits` is not chosen yet."""
    return outer_slots(sites.model_copy(update={"bits": 4}) if sites is not None and "bits" in left_out(sites) else sites)
