"""Checkpoints that sites offer each other when they meet, and the choice of the one that all begin from."""

from collections.abc import Mapping, Sequence

from megalith.spec.sites import SitesSpec
from megalith.train.sites.messages import CheckpointOffer


def called(offered: Mapping[int, Sequence[CheckpointOffer]], spec: SitesSpec) -> tuple[CheckpointOffer | None, int]:
    """Return the checkpoint to begin from (None: the initial weights), and the site that decides merges from there on.

    `offered`: the checkpoints of each present site. The newest checkpoint records which sites trained at that time. The first choice is
    the newest checkpoint that all of these sites hold (apart from those absent or without checkpoints), because it loses no site's
    state. The second is the newest that a quorum holds; the other sites get its weights. The last is the newest of all. The site that
    the run file names decides merges; else the first site that holds the checkpoint. Raises ValueError if the named site has no
    checkpoint, but others do.
    """
    age = lambda cut: (cut.samples, cut.step, cut.mark)  # noqa: E731
    every, decides = {cut for cuts in offered.values() for cut in cuts}, spec.decides
    holders = {cut: [site for site, cuts in offered.items() if cut in cuts] for cut in every}
    newest = max(every, key=age, default=None)
    if newest is None:
        return None, min(offered) if decides is None else decides
    if decides is not None and not offered.get(decides):
        raise ValueError(
            f"sites.decides = {decides}, and {spec.named(decides)} has no checkpoint of the run, but others have one of step "
            f"{newest.step}. Copy its run folder back, or name a site that has one"
        )
    trained = {site for site, cuts in offered.items() if cuts and site in newest.members}
    usable = {cut for cut in every if trained and trained <= set(holders[cut])} or {
        cut for cut in every if spec.quorum(holders[cut])
    }
    if decides is not None:
        usable = {cut for cut in usable if decides in holders[cut]} or set(offered[decides])
    cut = max(usable or every, key=age)
    return cut, min(holders[cut]) if decides is None else decides
