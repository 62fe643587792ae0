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


def test_a_token_for_two_experts_of_one_rank_travels_once():
    assert all_to_all(SIZE, Line(8), WIRES, copies=8) < all_to_all(SIZE, Line(8), WIRES)
    assert all_to_all(SIZE, Line(8), WIRES, copies=1) == pytest.approx(SIZE * 7 / 8 / WIRES.fast)


def test_a_token_crosses_the_network_to_no_more_domains_than_its_router_lets_it():
    free, bound = (all_to_all(SIZE, Line(64), WIRES, copies=8, reach=reach) for reach in (None, 2))
    assert bound == pytest.approx(SIZE / 8 * 2 * 7 / 8 / WIRES.slow)
    assert bound < free
