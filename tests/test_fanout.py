"""How a version gets to many nodes: golden times by hand, and no way that hides a bottleneck."""

import math

import pytest

from tasks.artifacts.fanout import Network, fan_outs, jitter_seconds, start_order, tree_depth, tree_parents

GB = 1e9


def test_470_gb_for_32_nodes_do_not_go_through_one_cache_node():
    network = Network(node=12.5 * GB, s3=200 * GB, cache_node=12.5 * GB, cache_nodes=1)
    ways = {way.source: way for way in fan_outs(470 * GB, 32, network)}
    # one node sends 32 x 470 GB at 12.5 GB/s; S3 sends them at 200 GB/s; an inner node sends two copies
    assert ways["cache"].seconds == pytest.approx(32 * 470 / 12.5)
    assert (ways["cache"].busiest, ways["cache"].busiest_bytes) == ("a cache node", 32 * 470 * GB)
    assert ways["s3"].seconds == pytest.approx(32 * 470 / 200)
    assert ways["tree"].seconds == pytest.approx(2 * 470 / 12.5 + 5 * 0.256 / 12.5)
    assert fan_outs(470 * GB, 32, network)[0].source == "s3"


def test_a_tree_wins_where_s3_is_the_bound_and_s3_where_the_node_is():
    slow = Network(node=12.5 * GB, s3=12.5 * GB, cache_node=12.5 * GB)
    assert fan_outs(470 * GB, 32, slow)[0].source == "tree"
    wide = Network(node=12.5 * GB, s3=10_000 * GB, cache_node=12.5 * GB, cache_nodes=4)
    best = fan_outs(470 * GB, 32, wide)[0]
    assert (best.source, best.busiest) == ("s3", "a reader")
    assert fan_outs(470 * GB, 1, slow)[0].source == "s3"


def test_every_node_of_a_tree_has_a_path_to_s3_and_at_most_so_many_children():
    for nodes in (1, 2, 7, 8, 32, 100):
        for fan_out in (1, 2, 4):
            parents = tree_parents(nodes, fan_out)
            assert parents[0] is None and len(parents) == nodes
            assert all(parent is None or parents.count(parent) <= fan_out for parent in parents)
            depths = [0] * nodes
            for node in range(1, nodes):
                depths[node] = depths[parents[node]] + 1
            assert max(depths) == tree_depth(nodes, fan_out)


def test_nodes_begin_at_different_files_and_moments_the_same_each_time():
    names = [f"model-{i:05d}" for i in range(16)]
    orders = [start_order(names, f"node-{i}") for i in range(200)]
    assert all(sorted(order) == names for order in orders)
    assert {order[0] for order in orders} == set(names)
    assert start_order(names, "a") == start_order(reversed(names), "a")
    waits = [jitter_seconds(f"node-{i}", 7, spread=2.0) for i in range(400)]
    assert waits == [jitter_seconds(f"node-{i}", 7, spread=2.0) for i in range(400)]
    # mean of 400 uniform draws on [0, 2): 1 +- 5 standard errors of 0.58 / 20
    assert min(waits) >= 0 and max(waits) < 2 and math.isclose(sum(waits) / 400, 1.0, abs_tol=0.15)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="num_nodes and fan_out at least 1"):
        fan_outs(1, 0, Network(node=1, s3=1, cache_node=1))
