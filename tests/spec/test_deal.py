"""The samples that sites read: none is lost or read twice, whichever sites join and leave."""

import json
import random
from collections import Counter
from collections.abc import Iterable
from math import gcd

import pytest

from megalith.spec.phases import Phases
from megalith.spec.run import RunSpec
from megalith.spec.sites import SitesSpec, part_of_batch, sent_after
from megalith.spec.sites.deal import Deal, Portion, Share
from megalith.spec.sites.late import Backlog, Taken
from tests.specs import tiny_run


def _run(count: int, steps: int, **parts: object) -> RunSpec:
    train = {"steps": steps, "global_batch": 12} | parts
    return tiny_run(sites={"count": count}, train=train)


def _samples(shares: Iterable[Share]) -> Counter[int]:
    return Counter(number for share in shares for number in range(share.first, share.first + share.size))


def _portion(*shares: tuple[int, int]) -> Portion:
    return Portion(tuple(Share(*share) for share in shares))


def _deal(deal: Deal, step: int, phases: Phases, total: int) -> None:
    """Deal the samples of a step. Each site reads its whole part, unless no sample of the same phase is left."""
    for site, portion in deal.deal(step, phases, total).items():
        phase = phases.at(portion.first)
        assert all(phases.at(number) is phase for number in portion.numbers)
        most = part_of_batch(phase.global_batch, site, deal.count, deal.shares)
        end = min([total, *(each.first for each in phases.all if each.number > phase.number)])
        left = deal.next < end or any(share.first < end for share in deal.returned)
        assert portion.size == most if left else 0 < portion.size <= most


def _walk(deal: Deal, run: RunSpec, sites: SitesSpec, draw: random.Random) -> list[Share]:
    """Deal the samples of a whole run under a drawn membership, and return the shares that merges included. The run is resumed at times,
    also with another number of sites and other shares, which count from the next merge on."""
    phases, total = Phases.of(run), Phases.of(run).after(0, run.train.steps)
    flying, step, taken = dict[int, int](), 0, list[Share]()
    away, count, shares = set[int](), deal.count, deal.shares

    def merge(number: int) -> None:
        sent = flying.pop(number)
        due = deal.due(sent)
        gone = {site for site in deal.members if site >= count}  # the run was resumed without them
        left = gone | {site for site in deal.members if draw.random() < 0.15}
        left = left if left < deal.members.keys() else gone
        may_join = {site for site in away - deal.members.keys() if site < count}
        joined = may_join if left == deal.members.keys() else {site for site in may_join if draw.random() < 0.3}
        merged = sorted(due - gone - (left if draw.random() < 0.5 else set()))  # a site may leave with its last difference
        newest = dict.fromkeys(merged, sent)
        if sites.staleness:
            waiting = {site: steps for site, steps in deal.waiting(number).items() if site in merged}
            least = {site: len(steps) - (sites.staleness if deal.left(total) else 0) for site, steps in waiting.items()}
            came = {site: draw.randint(max(0, least[site]), len(steps)) for site, steps in waiting.items()}
            newest = {site: waiting[site][count - 1] for site, count in came.items() if count}
            late = deal.taken(number, [(site, at) for site, last in newest.items() for at in waiting[site] if at <= last])
            assert all(0 <= one.age <= sites.staleness and one.weight > 0 for one in late) and gcd(
                *(one.weight for one in late)
            ) in (0, 1)
        taken.extend(share for site, last in newest.items() for after, share in deal.open.get(site, []) if after <= last)
        steps = list(newest.values())
        deal.merge(sent=sent, step=step, merged=[*newest], left=left, joined=joined, fragment=number, steps=steps)
        away.difference_update(joined)
        away.update(left)
        deal.count, deal.shares = count, shares

    while deal.left(total):
        _deal(deal, step, phases, total)
        step += 1
        assert step < 1000, "a run ends"
        for number in [one for one, sent in flying.items() if sent + sites.overlap == step]:
            merge(number)
        for number in sent_after(step, sites):
            flying[number] = step
            deal.send(number, step)
            if not sites.overlap:
                merge(number)
        if not deal.left(total):
            for number in sorted(flying, key=lambda one: (flying[one], one)):
                merge(number)
            for number in range(sites.fragments):
                flying[number] = step
                deal.send(number, step)
                merge(number)
        everything = _samples([*deal.returned, *taken, *(share for shares in deal.open.values() for _, share in shares)])
        assert everything == Counter(range(deal.next)), "each sample that was dealt out is in one place"
        assert deal.merged == sum(share.size for share in taken)
        again = Deal.of(json.loads(json.dumps(deal.record())))
        assert again.record() == deal.record()
        if draw.random() < 0.2:
            deal, other = again, draw.choice((count, 1, 2, 3, 4))
            if other != count:
                away.update(set(range(other)) - deal.members.keys())
                count, shares = other, _shares(draw, other)
    return taken


def _shares(draw: random.Random, count: int) -> tuple[int, ...]:
    return draw.choice(((), tuple(draw.choice((1, 2, 3)) for _ in range(count))))


@pytest.mark.parametrize("seed", range(60))
def test_every_sample_is_merged_once_whoever_comes_and_goes(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.choice((1, 2, 3, 4))
    steps, fragments = draw.choice(((4, 1), (4, 2), (6, 3)))
    sites = SitesSpec(count=count, inner_steps=steps, fragments=fragments, overlap=draw.choice((0, 1, 3)))
    if late := draw.choice((0, 0, 1, 2)):
        sites = sites.model_copy(update={"staleness": late})
    grows = {"batch_ramp": [{"begin": 60, "global_batch": 24}]} if draw.random() < 0.5 else {}
    run = _run(count, draw.choice((9, 14, 20)), **grows)
    shares = _shares(draw, count)
    backlog = Backlog.of_fragments(fragments) if sites.staleness else None
    taken = _walk(Deal.first(count, shares, backlog), run, sites, draw)
    assert _samples(taken) == Counter(range(Phases.of(run).after(0, run.train.steps)))
    phases = Phases.of(run)
    assert all(phases.at(share.first) is phases.at(share.first + share.size - 1) for share in taken)


def test_samples_handed_back_are_dealt_out_first() -> None:
    deal, phases = Deal.first(2), Phases.of(_run(2, 20))
    for step in range(2):
        deal.deal(step, phases, 240)
    assert (
        deal.merge(sent=2, step=2, merged={0}, left={1}, joined=()) == {1: sum(share.size for share in deal.returned)} != {1: 0}
    )
    assert deal.returned == [Share(6, 6), Share(18, 6)]
    assert [deal.deal(step, phases, 240) for step in (2, 3, 4)] == [{0: _portion((at, 6))} for at in (6, 18, 24)]
    deal.merge(sent=5, step=5, merged={0}, left=(), joined={1})
    assert deal.deal(5, phases, 240) == {0: _portion((30, 6)), 1: _portion((36, 6))}
    assert deal.due(5) == {0} and deal.due(6) == {0, 1}


def test_a_step_has_as_many_returned_ranges_as_a_site_reads() -> None:
    """Three sites become one, which reads its whole part in every step from the next merge on: returned samples first, then new ones."""
    deal, phases = Deal.first(3), Phases.of(_run(3, 20))
    for step in range(2):
        deal.deal(step, phases, 240)
    deal.merge(sent=2, step=2, merged={0}, left={1, 2}, joined=())
    deal.count = 1
    assert deal.returned == [Share(4, 4), Share(8, 4), Share(16, 4), Share(20, 4)]
    assert deal.deal(2, phases, 240) == {0: _portion((4, 4), (8, 4), (16, 4))}
    assert deal.open[0] == [(3, Share(4, 4)), (3, Share(8, 4)), (3, Share(16, 4))]
    assert deal.deal(3, phases, 240) == {0: _portion((20, 4), (24, 8))}
    assert Deal.of(json.loads(json.dumps(deal.record()))) == deal
    assert _portion((20, 4), (24, 2)).numbers == [20, 21, 22, 23, 24, 25]


def test_returned_samples_beyond_the_end_of_a_shortened_run_are_read_too() -> None:
    """The run was resumed with 3 steps after 4 were assigned: the samples of the last two are returned, and no new ones are left."""
    deal, phases = Deal.first(2), Phases.of(_run(2, 20))
    for step in range(4):
        deal.deal(step, phases, 240)
    deal.returned, total = [Share(30, 6), Share(42, 6)], 36
    assert [deal.deal(step, phases, total) for step in (4, 5)] == [{0: _portion((30, 6)), 1: _portion((42, 6))}, {}]
    assert deal.next == 48 and deal.left(total) == 0


def test_a_returned_range_over_the_beginning_of_a_phase_is_read_in_two_steps() -> None:
    """The phase was added when the run was resumed."""
    run = tiny_run(sites={"count": 1}, train={"steps": 20, "global_batch": 12, "batch_ramp": [{"begin": 10, "global_batch": 8}]})
    deal, phases = Deal.first(1), Phases.of(run)
    deal.next, deal.returned = 24, [Share(8, 8)]
    assert [deal.deal(step, phases, 240) for step in (0, 1)] == [{0: _portion((8, 4))}, {0: _portion((12, 4), (24, 4))}]


def test_weights_are_samples_over_one_more_than_the_age() -> None:
    backlog = Backlog.of_fragments(2)
    for step, counts in enumerate(((6, 4), (6, 4), (6, 2)), 1):
        for site, samples in enumerate(counts):
            backlog.note(site, samples)
        backlog.send(0, step, (0, 1))
        backlog.send(0, step, (0, 1))  # after a stop
    assert backlog.waiting(0) == {0: (1, 2, 3), 1: (1, 2, 3)} and backlog.waiting(1) == {}
    backlog.merge(0, {0: 2}, left=())
    assert backlog.taken(0, [(0, 3), (1, 1), (1, 2)]) == (Taken(0, 3, 9), Taken(1, 1, 2, age=2), Taken(1, 2, 3, age=1))
    backlog.merge(0, {0: 3}, left=(1,))
    backlog.note(0, 5)
    backlog.send(1, 4, (0, 1))
    assert backlog.waiting(0) == {} and backlog.taken(1, [(0, 4)]) == (Taken(0, 4, 1),)
    assert Backlog.of(json.loads(json.dumps(backlog.record()))) == backlog


def test_a_site_gets_no_more_again_than_it_reads_in_a_step() -> None:
    deal, phases = Deal.first(2, (3, 1)), Phases.of(_run(2, 20))
    assert deal.deal(0, phases, 240) == {0: _portion((0, 9)), 1: _portion((9, 3))}
    deal.merge(sent=1, step=1, merged={1}, left={0}, joined=())
    assert [deal.deal(step, phases, 240) for step in (1, 2, 3, 4)] == [{1: _portion((3 * at, 3))} for at in (0, 1, 2, 4)]
    assert Deal.of(json.loads(json.dumps(deal.record()))) == deal


def test_undisturbed_sites_read_their_part_of_every_step() -> None:
    deal, phases = Deal.first(3), Phases.of(_run(3, 4))
    assert [deal.deal(step, phases, 48) for step in range(5)] == [
        *({site: _portion((12 * step + 4 * site, 4)) for site in range(3)} for step in range(4)),
        {},
    ]
