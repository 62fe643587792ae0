"""Simulated merges of a run across sites. Each site has its own faults, and a site's work counts only if a merge includes this work.
Merges follow the rules of the trainer's council (`train.sites.council`): the grace period, the quorum, sites that leave and return,
and a restart of all sites if no site waits at a merge."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from megalith.rehearse.scenario import DAY, Scenario, TimeUse
from megalith.rehearse.site import Site


def alone(plan: Scenario) -> Scenario:
    """Return the scenario of one of several sites between merges. The site's only copies are checkpoints. After a fault, the site resumes
    from the newest merge: within `return_seconds` it gets the other sites' weights, or loads a checkpoint that all sites hold."""
    if plan.sites == 1:
        return plan
    times, each = plan.latencies, plan.merge_every / plan.store_every
    stall = {**times.stall, "store": times.stall["store"] * each}
    return replace(
        plan,
        fleet=plan.fleet.model_copy(update={"memory_every": 0, "disk_every": 0}),
        store_every=plan.merge_every,
        latencies=replace(times, stall=stall, restore={**times.restore, "store": plan.return_seconds}, write=0.0),
    )


@dataclass(frozen=True)
class _Period:
    """The part of a site's life whose work goes to one merge. `seconds`: the length of the period; `started`: the time in the
    period at which the ranks last restarted, None if they did not."""

    seconds: float
    started: float | None


@dataclass
class _Member:
    """One site, which began its period `number` at time `since`. `follows`: the site does not train yet, but can train from `since` on.
    `merged`: the number of periods whose work was merged; `lost`: the number of other periods. `lived`: the seconds of the site's
    simulated life that are used up. `missed`: the number of merges that the site missed because it was late."""

    periods: list[_Period]
    number: int = 0
    since: float = 0.0
    follows: bool = False
    merged: int = 0
    lost: int = 0
    lived: float = 0.0
    missed: int = 0

    @property
    def period(self) -> _Period:
        """Return the site's current period; after its last period, a period that never ends."""
        return self.periods[self.number] if self.number < len(self.periods) else _Period(inf, None)

    @property
    def restarted(self) -> bool:
        """True if the site's ranks restarted in this period: the other sites then merge without this site's work."""
        return not self.follows and self.period.started is not None

    @property
    def ready(self) -> float:
        """The time at which the site can join a merge: when the work of its period is done, or when it is back after a restart."""
        return self.since + (0.0 if self.follows else self.period.seconds if self.period.started is None else self.period.started)

    def may_miss(self, now: float, staleness: int) -> bool:
        """True if a later merge may include this site's work instead: the site is slower than others, and was not restarted."""
        return not self.follows and not self.restarted and self.ready > now and self.missed < staleness

    def catch_up(self, now: float) -> int:
        """End the finished periods for which a late site missed the merges, and return their number. After each period whose merge it
        missed, the late site continued to train without waiting."""
        done = 0
        while self.missed and not self.restarted and self.ready <= now:
            missed, done = self.missed - 1, done + 1
            self.end(self.ready, taken=True)
            self.missed = missed
        return done

    def end(self, now: float, *, taken: bool) -> None:
        """End the site's period: a merge included its work, or the work is lost. Unless the site is away, it continues to train."""
        self.missed = 0
        if self.follows:
            self.since, self.follows = max(now, self.since), self.since > now
            return
        done = not self.restarted and self.ready <= now
        self.lived += min(now, self.ready) - self.since
        self.merged, self.lost = self.merged + taken, self.lost + (done and not taken)
        away = self.restarted and self.ready > now
        self.number, self.since, self.follows = self.number + 1, self.ready if away else now, away


@dataclass
class MergeOutcome:
    """The merges of a simulated run. `left`: how often a site left; `anew`: new starts of all sites, because no training site or
    no quorum was present; `seconds`: seconds by use, averaged over the sites."""

    merges: int = 0
    left: int = 0
    anew: int = 0
    seconds: dict[TimeUse, float] = field(default_factory=dict)


def merged(plan: Scenario, sites: Sequence[Site]) -> MergeOutcome:
    """Simulate the merges of all sites, one after the other, until the run is over. Faults are memoryless, so a site's waits for other
    sites do not make its next fault more or less likely.
    """
    horizon, work = plan.days * DAY, plan.merge_every
    members = [_Member(_periods(site, work)) for site in sites]
    found, now, decides = MergeOutcome(), 0.0, plan.decides or 0
    unsaved: list[_Member] = []  # one entry for each period of a site that was merged since the newest checkpoint
    each_save = max(1, round(plan.store_every / work))
    while now < horizon:
        standing = [number for number, member in enumerate(members) if not member.follows and not member.restarted]
        noticed, own = now, members[decides]
        if standing and decides not in standing:
            noticed, decides = _noticed(plan, [members[number] for number in standing], own), standing[0]
            own = members[decides]
        now = max(noticed, _decided(plan, members, own)) if standing else inf
        goes_on = now < inf
        now = now if goes_on else _started_anew(plan, members, own, patience=plan.patience if standing else 0.0)
        if now >= horizon:
            break
        if not goes_on:
            found.anew += 1
            for member in unsaved:
                member.merged, member.lost = member.merged - 1, member.lost + 1
            unsaved.clear()
            for member in members:
                member.end(now, taken=False)
            there = [number for number, member in enumerate(members) if not member.follows]
            decides = plan.decides if plan.decides is not None else min(there, default=decides)
            continue
        found.merges += 1
        ended = now + plan.merge_seconds
        for member in members:
            unsaved += [member] * member.catch_up(now)
            if member.may_miss(now, plan.staleness):
                member.missed += 1
                continue
            taken = not member.follows and not member.restarted and member.ready <= now
            found.left += not taken and not member.follows
            unsaved += [member] * taken
            member.end(ended if taken or member.ready <= now else now, taken=taken)
        now = ended
        if found.merges % each_save == 0:
            unsaved.clear()
    shares = [_used(member, site, work, horizon) for member, site in zip(members, sites, strict=True)]
    found.seconds = {what: sum(share[what] for share in shares) / len(shares) for what in TimeUse}
    return found


def _decided(plan: Scenario, members: Sequence[_Member], own: _Member) -> float:
    """Return the time of the merge, on which the site `own` decides. The decider waits, for at most `plan.grace`, until every
    training site that must not miss the merge has done its work or was restarted. The decider also waits for a quorum of sites that have
    done their work. If the decider would wait longer than `plan.patience`, there is no merge, and the result is inf."""
    enough = max(own.ready, _quorum(plan, members))
    awaited = [member.ready for member in members if not member.follows and member.missed >= plan.staleness]
    now = max(enough, min(max(awaited, default=enough), own.ready + plan.grace))
    return now if now - own.ready <= plan.patience or now == own.ready else inf


def _noticed(plan: Scenario, standing: Sequence[_Member], decider: _Member) -> float:
    """Return the time at which the sites that wait at a merge notice that the decider was restarted, or has been silent for
    `plan.grace`."""
    waiting = min(member.ready for member in standing)
    return max(waiting, min(decider.ready, waiting + plan.grace))


def _started_anew(plan: Scenario, members: Sequence[_Member], own: _Member, *, patience: float) -> float:
    """Return the time at which all sites train again from the newest checkpoint, because no site waits at the merge, or too few
    arrived within `patience`."""
    return max(own.ready + patience + plan.latencies.restart + plan.return_seconds, _quorum(plan, members))


def _quorum(plan: Scenario, members: Sequence[_Member]) -> float:
    """Return the time at which more than half of the sites have arrived or, if the run names a deciding site, that site. A late
    site first makes up for the merges that it has missed."""
    if plan.decides is not None:
        return members[plan.decides].ready
    return sorted(member.ready + member.missed * plan.merge_every for member in members)[len(members) // 2]


def _periods(site: Site, work: float) -> list[_Period]:
    """Cut a site's life into the periods between merges. The first period begins with the site's first start, which does not count as a
    restart."""
    progress, at = site.first_reached()
    ends = np.interp(np.arange(1, int(site.progress // work) + 1) * work, progress, at)
    begins = np.concatenate([[0.0], ends])[: len(ends)]
    starts = np.array(site.starts[1:])
    before = np.searchsorted(starts, ends) - 1
    return [
        _Period(float(end - begin), float(starts[i] - begin) if i >= 0 and starts[i] > begin else None)
        for begin, end, i in zip(begins, ends, before, strict=True)
    ]


def _used(member: _Member, site: Site, work: float, horizon: float) -> dict[TimeUse, float]:
    """Return a site's seconds by use: its life so far, its waits for other sites, and (as lost time) work that no merge included."""
    if not member.periods:  # the site never got as far as a merge
        spent = site.seconds
        return spent | {TimeUse.USEFUL: 0.0, TimeUse.LOST: spent[TimeUse.LOST] + spent[TimeUse.USEFUL]}
    other = {what: seconds for what, seconds in site.seconds.items() if what is not TimeUse.USEFUL}
    scale = max(0.0, member.lived - (member.merged + member.lost) * work) / (sum(other.values()) or 1.0)
    shares = {what: scale * seconds for what, seconds in other.items()} | {TimeUse.USEFUL: member.merged * work}
    shares[TimeUse.LOST] += member.lost * work
    return shares | {TimeUse.SYNC: shares[TimeUse.SYNC] + max(0.0, horizon - sum(shares.values()))}
