"""Going on with another number of sites: what the sites of a checkpoint have not merged yet is merged first, so that no sample is lost."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megalith.checkpoint.checkpointer import Checkpointer
from megalith.checkpoint.load import Accept, Loaded
from megalith.spec.sites import sent_after
from megalith.train.sites import outer
from megalith.train.sites.merge import Sites


def sites_in(meta: Mapping[str, Any]) -> int | None:
    """Return the number of sites of the run that saved a checkpoint which says `meta` of itself; None: it had none."""
    sites = meta.get("spec", {}).get("sites")
    return None if sites is None else int(sites["count"])


@torch.no_grad()
def adopt(
    sites: Sites, checkpointer: Checkpointer, before: int, *, step: int | None, accept: Accept, warn: Callable[[str], None]
) -> Loaded | None:
    """Load a checkpoint of `before` sites, merge all of them in full precision, and begin with merged weights at every site.

    A site that was there keeps its moments; a new one begins without. Fragments under way, and what rounding left out, are dropped:
    the differences are taken anew, so all updates are in them. `warn` is told once.
    """
    state, site = sites.state, sites.site
    theirs = [{name: torch.zeros_like(share) for name, share in state.weights.items()} for _ in range(before)]
    wanted = state.merged()
    for number, weights in enumerate(theirs):
        wanted |= {f"sites.{number}.weights.{name}": tensor for name, tensor in state.cut(weights).items()}
    if site < before:
        wanted |= {f"sites.{site}.{key}": tensor for key, tensor in state.moments().items()}
    loaded = checkpointer.load(wanted, step=step, partial=True, accept=accept)
    if loaded is None:
        return None
    merged = _merged_in(loaded, sites)
    for name, anchor in state.anchors.items():
        if name in merged:
            state.weights[name].copy_(anchor)
            continue
        gradient = outer.mean([outer.difference(anchor, weights[name], None).cpu() for weights in theirs]).to(anchor.device)
        if state.is_trained(name):
            outer.outer_step(anchor, state.velocities.get(name), gradient, sites.spec)
        else:
            outer.average(anchor, gradient)
        state.weights[name].copy_(anchor)
    warn(_changed(loaded.step, before, sites.spec.count))
    return loaded


def _merged_in(loaded: Loaded, sites: Sites) -> set[str]:
    """The tensors that no site has trained since their last merge: another would only be a step of the outer momentum."""
    done, whole = loaded.meta["position"]["updates"], loaded.meta["spec"]["train"]["steps"]
    if done >= whole:
        return set(sites.state.anchors)
    fresh = set() if sites.spec.overlap else set(sent_after(done, sites.spec))
    return {piece.name for fragment in sites.fragments if fragment.number in fresh for piece in fragment.pieces}


def _changed(step: int, before: int, now: int) -> str:
    """Say what becomes of sites that come or go."""
    who = range(before, now) if now > before else range(now, before)
    names = f"site{'s' * (len(who) > 1)} {', '.join(map(str, who))}"
    what = "begins with merged weights and without moments" if len(who) == 1 else "begin with merged weights and without moments"
    if now < before:
        what = "left; the others read all samples that follow"
    return f"sites.count was {before} when step {step} was saved and is {now}: all differences were merged, and {names} {what}"
