from dataclasses import replace
from itertools import pairwise

import pytest

from megalith.cost import host
from megalith.cost.estimate import Time, estimate
from megalith.cost.software import TRAINER
from megalith.cost.workload import SoftwareProfile
from megalith.planner.candidates import offloaded
from megalith.spec import cluster as clusters
from megalith.spec.cluster import HostSpec
from megalith.spec.plan import Plan, StateSpec
from megalith.spec.sizes import model_parameters
from megalith.spec.state import Place
from tests.cost.models import dense, workload


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch):
    monkeypatch.setenv("MEGALITH_CACHE", "")


def _optimizer(share: float, **values) -> float:
    return estimate(workload(dense(), offloaded(Plan(), share), software_profile=SoftwareProfile(**values))).time.optimizer


def test_the_host_is_slower_the_more_it_updates():
    seconds = [_optimizer(share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    steps = [more - less for less, more in pairwise(seconds)]
    assert steps == pytest.approx([steps[0]] * 4)
    assert steps[0] > seconds[0]


def test_less_state_is_updated_faster():
    assert _optimizer(1.0, moment_bytes=4) < _optimizer(1.0)


def test_devices_share_a_host_with_as_many_as_there_are():
    """A cluster of two devices whose hosts usually have eight."""
    gib, spec = 2**30, HostSpec(memory=64 * 2**30, disk=800 * 2**30, memory_bandwidth=100e9, disk_bandwidth=4e9)
    two = clusters.load("h100:2").model_copy(update={"host": spec})
    assert (two.per_node, two.host_room, two.disk_room) == (8, 16 * gib, 400 * gib)
    full = clusters.load("h100:16").model_copy(update={"host": spec})
    assert (full.host_room, full.disk_room) == (4 * gib, 100 * gib)
    for state in (StateSpec(optimizer="host"), StateSpec(optimizer="disk")):
        made = workload(dense(), Plan(state=state))
        seconds = [host.seconds(replace(made, cluster=two.model_copy(update={"count": count})), 1e9) for count in (1, 2, 8, 16)]
        assert seconds[0] < seconds[1] < seconds[2] == seconds[3]


@pytest.mark.parametrize("place", ["host", "disk"])
def test_weights_elsewhere_are_read_for_each_forward_and_each_backward(place):
    """4 bytes of each parameter that a rank updates, for each microbatch."""
    numbers = sum(each.numel for each in model_parameters(dense()).values())
    for data in (1, 2):
        plan = Plan(data=data, zero=3, state=StateSpec(optimizer=place))
        kept = workload(dense(), plan, software_profile=SoftwareProfile(overlap_data=False))
        made = replace(kept, plan=plan.model_copy(update={"state": StateSpec(optimizer=place, weights=place)}))
        bandwidth = host.DISK if place == "disk" else host.LINK
        more = estimate(made).time.data - estimate(kept).time.data
        assert more == pytest.approx(2 * kept.microbatches * 4 * numbers / data / bandwidth, rel=1e-3)


@pytest.mark.parametrize("place", ["host", "disk"])
def test_only_reads_from_the_disk_run_beside_the_computation(place):
    """A thread reads weights from the disk ahead; those on the host are read by the thread that starts the computation."""
    plan = Plan(zero=3, state=StateSpec(optimizer=place))
    kept = workload(dense(), plan, software_profile=SoftwareProfile(overlap_data=True))
    made = replace(kept, plan=plan.model_copy(update={"state": StateSpec(optimizer=place, weights=place)}))
    added = estimate(made).time.data - estimate(kept).time.data
    numbers = sum(each.numel for each in model_parameters(dense()).values())
    alone = 2 * kept.microbatches * host.read_seconds(made, numbers)
    if place == "host":
        assert added == pytest.approx(alone, rel=1e-3)
    else:
        assert 0 < added < 0.99 * alone


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("sequences", [1, 1 << 14])
def test_the_next_forward_hides_the_update_except_for_two_parts(place: Place, sequences: int):
    """A short forward hides at most its own time. Other software, and an update before the norm is known, hide nothing."""
    plan = Plan(microbatch=sequences, state=StateSpec(optimizer=place))
    early, plain = plan.model_copy(update={"post_validation": True}), SoftwareProfile()

    def predicted(plan: Plan, software: SoftwareProfile = TRAINER, **how: bool) -> Time:
        return estimate(workload(dense(), plan, global_batch=sequences, software_profile=software, **how)).time

    exposed = predicted(early).optimizer
    assert predicted(plan, plain).optimizer == predicted(early, plain).optimizer
    assert (predicted(plan, copied=True).optimizer == exposed) == (place == "host")
    hidden = exposed - predicted(plan).optimizer
    if sequences > 1:  # of the embedding, four blocks and the head
        assert hidden == pytest.approx(exposed * 4 / 6)
    else:
        assert 0 < hidden < exposed * 4 / 6 and hidden < predicted(plan).compute / 2
