"""Builds the event of a merge, on a site's leading rank."""

import math
from collections.abc import Collection, Mapping, Sequence

from megalith.events import Merge
from megalith.spec.sites import Fragment, SitesSpec, verdict_bytes, wire_bytes
from megalith.spec.sites.deal import RULE, Deal
from megalith.spec.sites.late import Taken
from megalith.train.sites.messages import Difference, Verdict


def membership(verdict: Verdict, returned: Mapping[int, int], spec: SitesSpec) -> list[str]:
    """Return a sentence about each site that leaves or joins with a merge. `returned`: the number of samples that each leaving site
    returns."""
    left = [
        f"{spec.named(site)} left at step {verdict.step}: its {returned.get(site, 0)} samples that no merge contains are dealt out again"
        for site in verdict.left
    ]
    joined = [
        f"{spec.named(site)} joined at step {verdict.step}: it trains with the merged weights and fresh moments"
        for site in verdict.joined
    ]
    return left + joined


def merge_event(
    verdict: Verdict,
    fragment: Fragment,
    taken: Sequence[Taken],
    messages: Sequence[Difference],
    *,
    site: int,
    decider: int,
    others: Collection[int],
    deal: Deal,
    total: int,
    mark: str,
    spread: Sequence[float],
    waited: float,
    seconds: float,
    names: Sequence[str] = (),
) -> Merge:
    """Return the event of a merge. `names`: the names of all sites. `others`: the sites to which this site sent its weight differences.
    `deal`: how samples are divided after the merge. `spread`: the squared norm of the mean difference, and the mean squared
    distance to it."""
    mine = sum(one.site == site for one in taken)
    telling = verdict_bytes(len(verdict.steps))
    norm, apart = (value**0.5 for value in spread)
    late = taken if verdict.steps else ()
    return Merge(
        step=verdict.step,
        sent=verdict.sent,
        fragment=verdict.fragment,
        sites=verdict.count,
        losses=[None if math.isnan(message.loss) else message.loss for message in messages],
        bytes_sent=len(others) * (mine * wire_bytes(fragment) + (telling if decider == site else 0)),
        bytes_received=(len(taken) - mine) * wire_bytes(fragment) + (0 if decider == site else telling),
        waited=waited,
        seconds=seconds,
        norm=norm,
        spread=apart,
        number=verdict.number,
        merged=[one.site for one in taken],
        left=list(verdict.left),
        joined=list(verdict.joined),
        count=verdict.count,
        samples=deal.merged,
        total=total,
        mark=mark,
        decided=decider,
        taken=[one.sent for one in late],
        ages=[one.age for one in late],
        weights=[one.weight for one in late],
        names=list(names),
        rule=RULE,
    )
