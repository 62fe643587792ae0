"""The simulated run: conservation, agreement with the closed form and with published runs."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.events import Checkpoint, Incident, Recovery
from megalith.rehearse import closed_form, merges
from megalith.rehearse.latencies import PROFILES, Latencies, calibrated, of_cluster
from megalith.rehearse.merges import _Period
from megalith.rehearse.scenario import DAY, HOUR, Scenario, TimeUse, scenario
from megalith.rehearse.simulate import SimulationResult, simulate, try_intervals, try_spares
from megalith.rehearse.site import Site
from megalith.spec import cluster as clusters
from megalith.spec.faults import FaultCause, Reliability, Repair, Shows, tables
from megalith.spec.fleet import FleetSpec
from tests.processor import cost

BUG = FaultCause(name="bug", count=1, shows="bug", repair="none")
PATIENT = FleetSpec(memory_every=0, same_failure=99, fruitless=10**6, backoff=0.0)
NOTHING: dict[str, float] = dict.fromkeys(("memory", "buddy", "disk", "store"), 0.0)


def _plain(mtbf: float, **rest: Any) -> Scenario:
    """The scenario of the closed form: one tier, faults without memory, a constant restart."""
    latencies = Latencies(restart=300.0, restore=NOTHING, stall={**NOTHING, "store": 30.0}, crash=0.0)
    fields: dict[str, Any] = {"days": 50.0, "causes": (BUG,), "latencies": latencies, "fleet": PATIENT, "step_seconds": 1.0}
    return Scenario(**{"name": "plain", "nodes": 64, "devices_per_node": 8, "faults": HOUR / mtbf / 64} | fields | rest)


def _llama(restart: float = 600.0, **rest: Any) -> Scenario:
    """Return 16,384 H100 for 54 days with the published faults and planned stops, and published figures of the state and the
    store.

    Not published: `restart`, the seconds from a decision to the next step, and the minute within which a hang is noticed.
    """
    cluster = clusters.load("h100:16384")
    # 405e9 parameters with 16 bytes of state each; storage of 2 TB/s sustained (arXiv:2407.21783, section 3.3.1)
    latencies = of_cluster(cluster, "cold", state_bytes=405e9 * 16, storage=2e12)
    latencies = replace(latencies, restart=restart, replace=0.0, hang=60.0)
    interval = closed_form.young(HOUR / (cluster.interruptions * cluster.count), latencies.stall["store"])
    fleet = FleetSpec(memory_every=0, spares=24)
    return scenario(
        cluster, **{"days": 54, "latencies": latencies, "fleet": fleet, "store_every": interval, "planned": True} | rest
    )


@pytest.mark.slow
@pytest.mark.parametrize("mtbf", [3 * HOUR, HOUR, 1400.0])
@pytest.mark.parametrize("interval", [300.0, 1800.0])
def test_agrees_with_the_closed_form(mtbf: float, interval: float) -> None:
    """This holds even if half of the time is lost, where the usual first-order formula is far off."""
    result = simulate(_plain(mtbf, store_every=interval), seeds=6, first=100)
    expected = closed_form.goodput(mtbf, interval=interval, stall=30.0, restart=300.0)
    assert result.goodput == pytest.approx(expected, abs=0.005 + 3 * result.error)


@pytest.mark.slow
def test_the_best_interval_is_where_the_closed_form_has_it() -> None:
    mtbf = 3 * HOUR
    best = closed_form.daly(mtbf, 30.0)
    tried = try_intervals(_plain(mtbf), [best / 4, best, best * 4], seeds=3)
    assert max(tried, key=lambda one: one.goodput).value == best


def test_first_order_and_whole_formula_agree_while_losses_are_small() -> None:
    terms = {"interval": 600.0, "stall": 1.0, "restart": 60.0}
    assert closed_form.goodput(1e6, **terms) == pytest.approx(closed_form.goodput_to_first_order(1e6, **terms), abs=1e-4)


def test_daly_refines_young() -> None:
    assert closed_form.daly(1e6, 1.0) == pytest.approx(closed_form.young(1e6, 1.0), rel=1e-2)
    intervals = [closed_form.daly(3600, 60) * factor for factor in (0.8, 1.0, 1.25)]
    shares = [closed_form.goodput(3600, interval=interval, stall=60, restart=0) for interval in intervals]
    assert max(shares) == shares[1]


@pytest.mark.slow
def test_reproduces_more_than_90_percent_effective_time() -> None:
    """More than 90 % was published. The published rates and sizes give this for any restart of up to about twelve minutes."""
    result = simulate(_llama(restart=600.0), seeds=4)
    assert result.goodput > 0.90
    assert result.band[0] > 0.90
    assert simulate(_llama(restart=900.0), seeds=4).goodput < 0.90
    assert result.mean(lambda life: sum(life.faults.values())) == pytest.approx(419, rel=0.1)


@pytest.mark.slow
def test_a_saved_half_hour_of_work_at_each_fault_shows() -> None:
    """A control: with checkpoints as rare and slow as in the past, the same faults cost far more than a tenth."""
    assert simulate(_llama(latencies=PROFILES["cold"], store_every=1800.0), seeds=2).goodput < 0.86


@pytest.mark.slow
def test_54_days_of_16384_devices_take_seconds() -> None:
    """Two of twenty seeds take as long as fifty million additions: three seconds on a machine of 2020."""
    plan = _llama(fleet=FleetSpec(spares=24))
    assert cost(lambda: simulate(plan, seeds=2), than=lambda: sum(i + 1 for i in range(5_000_000)), tries=1) < 10


SHOWS: list[Shows] = [
    "crash", "bug", "hang", "node lost", "preemption", "straggler", "corrupt state", "not finite", "wrong gradient", "full disk"
]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(SHOWS), min_size=1, unique=True),
    st.integers(0, 3),
    st.sampled_from(["wait", "shrink", "stop"]),
    st.booleans(),
    st.integers(0, 3),
    st.integers(0, 99),
)
def test_time_is_neither_lost_nor_made(
    shows: list[Shows], spares: int, no_spare: str, outages: bool, keep: int, seed: int
) -> None:
    """Whatever fails and whatever the policy decides, all causes add up to the wall time, and none is negative."""
    fleet = FleetSpec.model_validate(
        {
            "spares": spares, "no_spare": no_spare, "memory_every": keep, "disk_every": 7 * (keep % 2), "verify_every": 20 * keep,
            "fallback": {"data": 2} if keep else None, "wait_limit": 600.0,
        }
    )  # fmt: skip
    own = Reliability(
        rack_outages=20.0 * outages, switch_outages=20.0 * outages, switch_racks=2, lemon_share=0.2, lemon_factor=5.0
    )
    causes = tuple(
        FaultCause(name=what, count=1, shows=what, repair=("none", "reboot", "part")[i % 3]) for i, what in enumerate(shows)
    )
    plan = _plain(1800.0, days=3.0, nodes=8, causes=causes, fleet=fleet, reliability=own, planned=1.0, latencies=PROFILES["warm"])
    result = simulate(replace(plan, faults=0.25), seeds=2, first=seed)
    for life in result.lives:
        assert sum(life.seconds.values()) == pytest.approx(3 * DAY)
        assert all(seconds >= -1e-6 for seconds in life.seconds.values())
        assert 0 <= life.goodput <= 1
        assert sum(life.faults.values()) == sum(life.fates.values())
        assert life.restarts.get("for a fault", 0) == life.fates.get("restarted the ranks", 0)


def test_the_same_seed_lives_the_same_life() -> None:
    assert simulate(_llama(days=5), seeds=2).lives == simulate(_llama(days=5), seeds=2).lives


def test_nothing_breaks_and_nothing_is_lost() -> None:
    result = simulate(_plain(HOUR, faults=0.0, latencies=Latencies(restart=1.0, restore=NOTHING, stall=NOTHING)), seeds=1)
    assert result.goodput == 1.0


@pytest.mark.slow
def test_copies_in_memory_beat_checkpoints_alone() -> None:
    warm = PROFILES["warm"]
    without = simulate(_llama(latencies=warm, store_every=1800.0, days=20), seeds=2)
    with_memory = simulate(_llama(latencies=warm, store_every=1800.0, days=20, fleet=FleetSpec(spares=24)), seeds=2)
    assert with_memory.goodput > without.goodput + 0.03
    assert with_memory.seconds[TimeUse.LOST] < without.seconds[TimeUse.LOST] / 20


def _broken(repair: Repair, spares: int = 0, **own: Any) -> Scenario:
    """There is a crash every six hours, and each removes its node for a repair."""
    crash = FaultCause(name="crash", count=1, shows="crash", repair=repair)
    fleet = FleetSpec(spares=spares, memory_every=1)
    return _plain(6 * HOUR, causes=(crash,), fleet=fleet, reliability=Reliability(**own), days=200.0)


@pytest.mark.slow
def test_what_a_reboot_cures_is_back_sooner_than_what_needs_a_part() -> None:
    rebooted, mended, replaced = (simulate(_broken(repair), seeds=1) for repair in ("reboot", "part", "node"))
    assert rebooted.goodput > 0.8
    assert 0.1 < mended.goodput < 0.3  # six hours of work, then a day of waiting or more
    assert replaced.goodput < mended.goodput / 2


def test_idle_nodes_fail_at_their_own_rate() -> None:
    """Without a spare everything waits for most of the time, and further faults prolong the wait."""
    never, seldom, always = (simulate(_broken("part", idle_factor=factor), seeds=1) for factor in (0.0, 0.25, 1.0))
    assert never.goodput > seldom.goodput > always.goodput
    assert never.means(lambda life: life.fates).get("broke an idle node", 0) == 0
    # 6 hours of work to 24 of waiting, a few minutes for a start from nothing
    assert never.goodput == pytest.approx(6 / 30, abs=0.03)


@pytest.mark.slow
def test_idle_spares_fail_too_and_that_stops_nobody() -> None:
    result = simulate(_broken("reboot", spares=64, idle_factor=1.0), seeds=1)
    fates = result.lives[0].fates
    assert fates["broke an idle node"] == pytest.approx(
        fates["restarted the ranks"], rel=0.15
    )  # as many spares as nodes that train
    assert set(fates) == {"broke an idle node", "restarted the ranks"}


def test_waiting_for_nodes_calls_nobody() -> None:
    """The command ends with status 71 after an hour without a node, and is started again once there is one."""
    result = simulate(_broken("part"), seeds=1)
    life = result.lives[0]
    assert life.stops == 0
    assert life.ended > 50
    assert result.seconds[TimeUse.WAITING] > 0.5 * 200 * DAY
    assert result.seconds[TimeUse.PERSON] == 0


def test_a_run_that_fails_at_one_step_for_the_third_time_waits_for_a_person() -> None:
    plan = _plain(60.0, fleet=FleetSpec(memory_every=0), step_seconds=3000.0, days=3.0)  # a minute between bugs, an hour per step
    result = simulate(plan, seeds=1)
    assert result.lives[0].stops > 10
    assert result.lives[0].ended == 0
    assert result.seconds[TimeUse.PERSON] > 0


def test_a_lost_rack_of_spares_stops_nobody() -> None:
    own = Reliability(rack_nodes=8, rack_outages=500.0, rack_hours=0.1)
    plan = _plain(HOUR, faults=0.0, nodes=8, days=50.0, reliability=own, fleet=FleetSpec(spares=8))
    life = simulate(plan, seeds=1).lives[0]
    assert life.fates["broke an idle node"] > 20
    assert life.goodput > 0.5


def test_the_mean_time_between_faults_counts_racks_and_switches() -> None:
    own = Reliability(rack_nodes=2, rack_outages=1.0, switch_racks=4, switch_outages=2.0)
    plan = _plain(HOUR, faults=0.0, nodes=16, reliability=own)
    assert plan.mtbf == pytest.approx(365.25 * DAY / (8 * 1.0 + 2 * 2.0))


@pytest.mark.slow
def test_spares_pay_until_there_are_enough() -> None:
    few, enough, many = try_spares(_llama(days=20), [4, 20, 200], seeds=2)
    assert few.goodput < enough.goodput - 0.1
    assert many.goodput == pytest.approx(enough.goodput, abs=0.02)
    assert many.per_device < enough.per_device


@pytest.mark.slow
def test_a_lost_rack_takes_the_next_nodes_buddy_along() -> None:
    own = Reliability(rack_nodes=4, rack_outages=200.0, rack_hours=1.0)
    plan = _plain(HOUR, faults=0.0, days=50.0, reliability=own, store_every=3600.0)
    lost = {}
    for buddy in ("next", "far"):
        fleet = FleetSpec.model_validate({"spares": 8, "buddy": buddy})
        lost[buddy] = simulate(replace(plan, fleet=fleet), seeds=2).seconds[TimeUse.LOST]
    assert lost["far"] < lost["next"] / 10


def test_quarantine_keeps_lemons_from_costing_much() -> None:
    own = Reliability(lemon_share=0.02, lemon_factor=200.0)
    crash = FaultCause(name="crash", count=1, shows="crash", repair="none")  # no machine reports these: only the count does
    plan = _plain(2 * HOUR, causes=(crash,), reliability=own, days=30.0)
    patient = PATIENT.model_copy(update={"spares": 8, "lemon_faults": 10**6})
    strict = patient.model_copy(update={"lemon_faults": 3})
    replaced = {name: simulate(replace(plan, fleet=fleet), seeds=2) for name, fleet in {"no": patient, "yes": strict}.items()}
    assert replaced["yes"].lives[0].least_spares < replaced["no"].lives[0].least_spares == 8


def test_unverified_corruption_is_counted_as_undetected() -> None:
    wrong = FaultCause(name="SDC", count=1, shows="wrong gradient", repair="part")
    plan = _plain(6 * HOUR, causes=(wrong,), fleet=PATIENT.model_copy(update={"spares": 8, "memory_every": 1}))
    blind = simulate(plan, seeds=1).lives[0]
    seeing = simulate(replace(plan, fleet=plan.fleet.model_copy(update={"verify_every": 100})), seeds=1).lives[0]
    assert blind.fates["were never noticed"] > 100
    assert set(blind.fates) <= {"were never noticed", "broke an idle node"}
    assert blind.restarts == {}
    assert seeing.fates.get("were never noticed", 0) <= 1
    assert seeing.restarts["for a fault"] > 100


def _four(mtbf: float = HOUR, **rest: Any) -> SimulationResult:
    return simulate(_plain(mtbf, **({"days": 20.0, "sites": 4, "grace": 5.0} | rest)), seeds=2)


@pytest.mark.slow
def test_sites_without_faults_merge_all_that_they_do() -> None:
    found = _four(faults=0.0, merge_seconds=30.0, latencies=Latencies(restart=300.0, restore=NOTHING, stall=NOTHING))
    assert found.goodput == pytest.approx(300 / 330, abs=0.002)
    assert _four(faults=0.0, staleness=2).goodput == _four(faults=0.0).goodput
    life = found.lives[0]
    assert (life.left, life.anew) == (0, 0) and life.merges == pytest.approx(20 * DAY / 330, abs=2)
    assert found.seconds[TimeUse.SYNC] == pytest.approx(20 * DAY * 30 / 330, rel=0.01)


def test_work_that_is_done_again_reaches_nothing_new() -> None:
    """A site's progress as a path: at work for 100 s, back to 60 after 200 s of absence, then at work again."""
    site = Site(_plain(HOUR), np.random.default_rng(0))
    site.reached = [(0.0, 0.0), (100.0, 100.0), (300.0, 60.0), (740.0, 500.0)]
    progress, at = site.first_reached()
    assert np.all(np.diff(progress) > 0) and np.all(np.diff(at) >= 0)
    assert np.interp([50.0, 100.0, 120.0, 500.0], progress, at) == pytest.approx([50.0, 100.0, 360.0, 740.0])


@pytest.mark.slow
def test_seconds_of_sites_add_up_to_the_wall_time() -> None:
    for found in (_four(), _four(grace=1000.0), _four(decides=0), _four(mtbf=HOUR / 4), _four(staleness=2)):
        assert sum(found.seconds.values()) == pytest.approx(20 * DAY, rel=1e-3)
        assert found.goodput == pytest.approx(found.seconds[TimeUse.USEFUL] / (20 * DAY))


@pytest.mark.slow
def test_a_restarted_site_leaves_and_holds_nobody_up_beyond_the_grace() -> None:
    """The site takes no part in the merge of that period, however long the others wait."""
    quick, patient = _four(decides=0), _four(decides=0, grace=1000.0)
    assert min(life.left for life in quick.lives) > 1000 and min(life.left for life in patient.lives) > 500
    assert quick.lives[0].merges > patient.lives[0].merges


def test_a_late_site_loses_no_work() -> None:
    """Each site pauses in one of nine periods, another one than the others do. Synchronous merges wait for all three pauses. Asynchronous
    ones do not wait for the second site: a quorum of the two others goes on. The third one pauses while the second is still late, so that
    there is no quorum, and the first site decides."""
    pauses = [[_Period(300.0 if number % 9 == 3 * site else 100.0, None) for number in range(900)] for site in range(3)]
    plan = _plain(HOUR, sites=3, merge_every=100.0, grace=5000.0, days=1.0, faults=0.0)
    found = {}
    for staleness in (0, 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(merges, "_periods", lambda site, work: list(site.periods))
            sites: Any = [SimpleNamespace(periods=each, seconds=dict.fromkeys(TimeUse, 0.0)) for each in pauses]
            found[staleness] = merges.merged(replace(plan, staleness=staleness), sites)
    assert found[2].left == found[0].left == 0
    assert found[0].merges == pytest.approx(9 * DAY / 1500, abs=9)
    assert found[2].merges == pytest.approx(9 * DAY / 1300, abs=9)


@pytest.mark.slow
def test_another_site_decides_where_the_one_that_did_is_started_again() -> None:
    """No site returns to a checkpoint, so the interval of checkpoints costs nothing unless all sites are away at once."""
    often, rare = _four(store_every=300.0), _four(store_every=6000.0)
    assert often.lives[0].anew < 20 and often.lives[0].left > 1000
    assert rare.goodput > often.goodput, "saving takes time"
    alone = _four(sites=1, store_every=6000.0)
    assert alone.goodput < rare.goodput - 0.1


@pytest.mark.slow
def test_all_start_anew_where_no_site_stands() -> None:
    """Faults are so frequent that in some periods both sites are restarted."""
    assert _four(mtbf=HOUR / 8, sites=2).lives[0].anew > 20


@pytest.mark.slow
def test_longer_periods_lose_more_to_each_fault() -> None:
    short, long = _four(merge_every=60.0, store_every=300.0), _four(merge_every=1200.0, store_every=1200.0)
    assert short.goodput > long.goodput + 0.1


@pytest.mark.slow
def test_two_sites_need_each_other_unless_one_decides_alone() -> None:
    """A site that is away for long stops the other one, which is no quorum alone."""
    rest = {
        "sites": 2,
        "merge_every": 100.0,
        "grace": 5.0,
        "patience": 1e9,
        "latencies": Latencies(restart=1800.0, restore=NOTHING, stall=NOTHING, crash=0.0),
    }
    both, one = _four(mtbf=10 * HOUR, **rest), _four(mtbf=10 * HOUR, decides=0, **rest)
    assert one.lives[0].merges > both.lives[0].merges


def test_results_survive_json() -> None:
    result: SimulationResult = simulate(_llama(days=5), seeds=2)
    assert json.loads(json.dumps(result.as_json()))["goodput"] == result.goodput


def test_every_mistake_is_named() -> None:
    with pytest.raises(ValueError, match=r"days = 0(.|\n)*sites = 9999"):
        scenario(clusters.load("h100:64"), days=0, latencies=PROFILES["warm"], sites=9999)


def test_llamas_table_adds_up_as_published() -> None:
    table = tables()["llama3"]
    assert table.count == 419
    assert table.count + table.planned == 466
    assert table.rate == pytest.approx(419 / (54 * 24 * 16_384))


def test_a_log_calibrates_the_latencies() -> None:
    def incident(number: int, cause: str, began: float, seen: float) -> Incident:
        return Incident(number, began, 3, cause, "because", None, None, {}, [], time=seen)

    def recovery(number: int, restored: str, over: float) -> Recovery:
        return Recovery(number, 3, restored, 0, time=over)

    log = [
        incident(0, "rank_failed", 10.0, 10.1), recovery(0, "step 3 in memory", 10.5),
        incident(1, "hang", 20.0, 21.0), recovery(1, "step 3 in memory with pieces from buddy", 21.4),
        incident(2, "nodes_lost", 30.0, 33.0), recovery(2, "step 2 in store", 35.0),
        Checkpoint(step=2, path="", bytes=1, seconds=1.5, wait_seconds=0.25),
    ]  # fmt: skip
    found = calibrated(log, PROFILES["warm"])
    assert (found.crash, found.hang, found.node_lost) == pytest.approx((0.1, 1.0, 3.0))
    assert (found.restart, found.restore["memory"], found.restore["store"]) == pytest.approx((0.4, 0.0, 1.6))
    assert (found.stall["store"], found.write) == (0.25, 1.5)


def test_an_empty_log_changes_nothing() -> None:
    assert calibrated([], PROFILES["warm"]) == PROFILES["warm"]
