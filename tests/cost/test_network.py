from dataclasses import replace

import pytest

from megalith.cost.network import Line, Wires, all_to_all, gather, message, rate, reduce

WIRES = Wires(domain=8, fast=400e9, slow=40e9, latency=0.0, hop=0.0)
SIZE = 1e9


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_ring_moves_its_share_through_each_rank(ranks):
    assert gather(SIZE, Line(ranks), WIRES) == pytest.approx(SIZE * (ranks - 1) / ranks / WIRES.fast)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    assert reduce(SIZE, Line(64), WIRES) == pytest.approx(2 * gather(SIZE, Line(64), WIRES))


def test_one_rank_talks_to_nobody():
    assert gather(SIZE, Line(1), WIRES) == reduce(SIZE, Line(1), WIRES) == all_to_all(SIZE, Line(1), WIRES) == 0


def test_whole_nodes_use_all_their_network_cards():
    assert rate(Line(64), WIRES) == 8 * WIRES.slow
    assert rate(Line(64, stride=8), WIRES) == WIRES.slow
    assert rate(Line(64, stride=4), WIRES) == 2 * WIRES.slow


def test_a_token_for_two_experts_of_one_node_crosses_the_network_once():
    assert all_to_all(SIZE, Line(16), WIRES, copies=8) < all_to_all(SIZE, Line(16), WIRES)


def test_longer_lines_take_longer_to_start():
    slow = Wires(domain=8, fast=400e9, slow=40e9, latency=1e-5, hop=1e-5)
    assert gather(1, Line(1024), slow) > 10 * gather(1, Line(64), slow)
    assert reduce(1, Line(1024), slow) < gather(1, Line(1024), slow)  # trees


def test_neighbours_in_a_domain_use_the_fast_links():
    assert message(SIZE, Line(2, stride=4), WIRES) < message(SIZE, Line(2, stride=8), WIRES)


def test_a_token_for_two_experts_of_one_rank_is_sent_once():
    assert all_to_all(SIZE, Line(8), WIRES, copies=8) < all_to_all(SIZE, Line(8), WIRES)
    assert all_to_all(SIZE, Line(8), WIRES, copies=1) == pytest.approx(SIZE * 7 / 8 / WIRES.fast)


def test_a_token_crosses_the_network_to_no_more_domains_than_its_router_lets_it():
    free, bound = (all_to_all(SIZE, Line(64), WIRES, copies=8, reach=reach) for reach in (None, 2))
    assert bound == pytest.approx(SIZE / 8 * 2 * 7 / 8 / WIRES.slow)
    assert bound < free


# --- oversubscribed trees and tori ---

THIN = replace(WIRES, pod=16, thin=WIRES.slow / 4)
"""Pods of two nodes whose devices send at a quarter of their cards' rate to other pods, if all of them do."""


@pytest.mark.parametrize("line", [Line(8), Line(16), Line(2, stride=8), Line(16, stride=1), Line(4, stride=4)], ids=str)
def test_ranks_of_one_pod_do_not_notice_that_pods_are_oversubscribed(line):
    for seconds in (gather, reduce, all_to_all, message):
        assert seconds(SIZE, line, THIN) == seconds(SIZE, line, WIRES)


@pytest.mark.parametrize(
    "line", [Line(64), Line(32, stride=2), Line(8, stride=16), Line(4, stride=32), Line(24, stride=8)], ids=str
)
def test_no_pod_sends_more_than_leaves_it(line):
    """All lines that begin in a pod send at once, each through its border: together they take what its devices share."""
    inside = max(1, 16 // line.stride)
    lines = 16 / inside
    leaves = 16 * THIN.thin
    assert rate(line, THIN) * lines <= leaves * (1 + 1e-9)
    assert SIZE / message(SIZE, line, THIN) * lines <= leaves * (1 + 1e-9)
    beyond = 16 * SIZE * (1 - inside / line.size)  # from each of its devices to ranks of other pods
    assert beyond / all_to_all(SIZE, line, THIN) <= leaves * (1 + 1e-9)


def test_an_oversubscription_of_one_changes_nothing():
    flat = replace(WIRES, pod=16, thin=WIRES.slow)
    for line in (Line(64), Line(32, stride=2), Line(8, stride=16)):
        for seconds in (gather, reduce, all_to_all, message):
            assert seconds(SIZE, line, flat) == seconds(SIZE, line, WIRES)


def test_tokens_with_few_domains_cross_pods_as_often_at_most():
    free, bound = (all_to_all(SIZE, Line(64), THIN, copies=8, reach=reach) for reach in (None, 1))
    assert bound == pytest.approx(SIZE / 8 * 3 / 4 / THIN.thin)
    assert bound < free


TORUS = replace(WIRES, domain=4096, torus=3)


def test_on_a_torus_bytes_take_a_quarter_of_each_side():
    """Twice the side, twice the links of each byte that is dealt out; a ring only has neighbours."""
    small, large = (all_to_all(SIZE, Line(side**3), TORUS) / (1 - 1 / side**3) for side in (8, 16))
    assert large == pytest.approx(2 * small) == pytest.approx(12 * SIZE / TORUS.fast)
    assert gather(SIZE, Line(512), TORUS) == gather(SIZE, Line(512), replace(TORUS, torus=0))


def test_a_message_takes_one_link_of_a_torus():
    assert message(SIZE, Line(2), TORUS) == pytest.approx(6 * message(SIZE, Line(2), replace(TORUS, torus=0)))


def test_a_cluster_describes_its_pods():
    from megalith.cost.constants import calibration
    from megalith.spec import cluster as clusters

    whole = clusters.load("h100:4096")
    pods = clusters.changed(whole, {"pod": 1024, "oversubscription": 7})
    device = calibration().device_of(whole)
    flat, tree = Wires.of(whole, device), Wires.of(pods, device)
    assert rate(Line(128, stride=8), flat) == rate(Line(128, stride=8), tree) == flat.slow
    assert (
        rate(Line(512, stride=8), flat) == rate(Line(512, stride=8), tree) == flat.slow
    )  # 128 ranks of a pod have enough together
    assert rate(Line(4, stride=1024), tree) == pytest.approx(flat.slow / 7)
