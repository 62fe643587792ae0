"""Chooses, from the checkpoints that sites offer each other when they meet, the one from which all begin."""

from collections.abc import Mapping, Sequence

from megalith.spec.sites import SitesSpec
from megalith.train.sites.messages import CheckpointOffer


def called(offered: Mapping[int, Sequence[CheckpointOffer]], spec: SitesSpec) -> tuple[CheckpointOffer | None, int]:
    """Return the checkpoint to begin from (None: the initial weights), and the site that decides merges from there on.

    `offered`: the checkpoints of each present site. The newest checkpoint records which sites trained when it was saved. The first choice
    is the newest checkpoint that is held by all sites that trained when the newest one was saved (not counting sites that are absent or
    have no checkpoint), because no site's state is then lost. The second choice is the newest checkpoint that a quorum holds; the other
    sites get its weights. The last choice is the newest checkpoint of all. Merges are decided by the site that the run file names, or else
    by the first site that holds the chosen checkpoint. Raises ValueError if the named site has no checkpoint but other sites have one.
    """
    age = lambda cut: (cut.samples, cut.step, cut.mark)  # noqa: E731
    every, decides = {cut for cuts in offered.values() for cut in cuts}, spec.decides
    holders = {cut: [site for site, cuts in offered.items() if cut in cuts] for cut in every}
    newest = max(every, key=age, default=None)
    if newest is None:
        return None, min(offered) if decides is None else decides
    if decides is not None and not offered.get(decides):
        raise ValueError(
            f"sites.decides = {decides}, but {spec.named(decides)} has no checkpoint of the run, and other sites have one of step "
            f"{newest.step}. Restore the run folder of {spec.named(decides)}, or set sites.decides to a site that has a checkpoint"
        )
    trained = {site for site, cuts in offered.items() if cuts and site in newest.members}
    usable = {cut for cut in every if trained and trained <= set(holders[cut])} or {
        cut for cut in every if spec.quorum(holders[cut])
    }
    if decides is not None:
        usable = {cut for cut in usable if decides in holders[cut]} or set(offered[decides])
    cut = max(usable or every, key=age)
    return cut, min(holders[cut]) if decides is None else decides
