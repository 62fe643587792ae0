"""Choice of a merge method for the link between sites, and the gain over a single site. No torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megalith.check.sites import made_apart
from megalith.cost.across import CHOSEN, GOOD, Across, across, choose
from megalith.planner.request import ResolvedRequest
from megalith.spec.model import MoeSpec
from megalith.spec.run import RunSpec
from megalith.spec.sites import FULL, SitesSpec, outer_slots
from megalith.spec.sizes import model_parameters
from megalith.spec.state import Slot

KEPT = ("count", "site", "addresses", "each", "link", "tls")
"""Keys of `[sites]` with the same meaning whether weights or gradients are exchanged."""


@dataclass(frozen=True)
class LinkChoice:
    """Predictions for a run across sites. `said`: prediction with the run file's table [sites]. `chosen`: the run file's table, with
    missing keys chosen for the link, and `proposed`: the prediction with `chosen`; both are None if no key is missing. `gain`: tokens/s
    of all sites (as proposed, else as in the file), divided by the tokens/s of one site that trains the whole batch; None if one site
    cannot train it. `together`: prediction if sites exchange gradients in every step; None if the run cannot exchange gradients, or
    already does."""

    said: Across
    chosen: SitesSpec | None
    proposed: Across | None
    gain: float | None
    together: Across | None = None
    merging: Across | None = None

    def to_json(self) -> dict[str, Any]:
        """Return everything by name."""
        return {
            "across": self.said.to_json(),
            "proposed": None if self.proposed is None else self.proposed.to_json(),
            "gain": self.gain,
            "together": None if self.together is None else self.together.to_json(),
            "merging": None if self.merging is None else self.merging.to_json(),
        }


def linked(request: ResolvedRequest, step: float, alone: Callable[[], float | None]) -> LinkChoice | None:
    """Predict the sites of a run whose slowest site takes `step` seconds for a step; None without a link or with one site.
    `alone` returns the seconds of a step of one site that trains the whole batch, or None if no site can."""
    sites = request.sites
    shapes = {name: each.shape for name, each in model_parameters(request.model).items()}
    steps = request.run.train.steps
    said = None if sites is None else across(shapes, sites, step, steps=steps)
    if sites is None or said is None:
        return None
    rounds_well, free = request.run.optimizer.kind == "muon", _free(sites)
    chosen = choose(shapes, sites, step, free=free, rounds_well=rounds_well, longest=steps) if free else None
    exact = _together(request, sites)
    if exact is not None and chosen is not None and sites.model_fields_set <= {*KEPT} and _is_every_step(chosen):
        chosen = exact  # the same bytes, and no outer optimizer
    proposed = None if chosen is None else across(shapes, chosen, step, steps=steps)
    one = alone()
    gain = None if one is None else one * (proposed or said).use / step
    together = None if exact is None else across(shapes, exact, step, steps=steps)
    merging = None
    if said.gradients and said.use < GOOD:
        apart = choose(shapes, _with_kept(sites), step, free=CHOSEN, rounds_well=rounds_well, longest=steps)
        merging = across(shapes, apart, step, steps=steps)
    return LinkChoice(said, chosen, proposed, gain, together, merging)


def _with_kept(sites: SitesSpec, **values: Any) -> SitesSpec:
    """A table of sites with the keys in KEPT of another one, and with `values`."""
    return SitesSpec(**{key: getattr(sites, key) for key in KEPT if key in sites.model_fields_set}, **values)


def _together(request: ResolvedRequest, sites: SitesSpec) -> SitesSpec | None:
    """The run's table of sites, changed to exchange gradients; None if sites already exchange gradients, or if the run cannot exchange
    them."""
    run = request.run.model_copy(update={"sites": sites})
    experts = any(isinstance(block.mlp, MoeSpec) for block in request.model.blocks)
    guarded = run.fleet.recover and run.fleet.verify_every > 0
    if sites.exchanges_gradients or guarded or any(made_apart(run, experts=experts)):
        return None
    return _with_kept(sites, method="data-parallel")


def _is_every_step(sites: SitesSpec) -> bool:
    """True if sites exchange all weights after each step and wait for the merge."""
    return (sites.inner_steps, sites.fragments, sites.overlap, sites.bits, sites.top_k) == (1, 1, 0, FULL, None)


def whole_batch(request: ResolvedRequest) -> RunSpec:
    """The requested run with the batch of all its sites."""
    train, sites = request.run.train, request.sites
    mine = sites.shares[sites.site or 0] if sites is not None and sites.shares else 1
    batch = train.global_batch * (1 if sites is None else sites.parts) // mine
    return request.run.model_copy(update={"train": train.model_copy(update={"global_batch": batch})})


def outer(sites: SitesSpec | None) -> tuple[Slot, ...]:
    """The tensors that merges keep for each weight; the largest possible set if `bits` is not chosen yet."""
    return outer_slots(sites.model_copy(update={"bits": 4}) if sites is not None and "bits" in _free(sites) else sites)


def _free(sites: SitesSpec) -> tuple[str, ...]:
    """The keys that the run file leaves out, so that values are chosen for the link."""
    if sites.link is None or sites.count == 1 or sites.exchanges_gradients:
        return ()
    return tuple(key for key in CHOSEN if key not in sites.model_fields_set)
