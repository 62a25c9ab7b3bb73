"""How a version gets to many nodes: golden times by hand, and no way that hides a bottleneck."""

import pytest

from tasks.artifacts.fanout import Network, fan_outs, tree_depth

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


def test_a_tree_is_as_deep_as_its_levels_hold_all_nodes():
    # 1 + 2 + 4 = 7 nodes in two levels below the first, the eighth begins a third; a chain has one a level
    assert [tree_depth(nodes, 2) for nodes in (1, 2, 3, 4, 7, 8)] == [0, 1, 1, 2, 2, 3]
    assert tree_depth(100, 1) == 99


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="num_nodes and fan_out at least 1"):
        fan_outs(1, 0, Network(node=1, s3=1, cache_node=1))
