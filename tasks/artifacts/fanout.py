"""How many readers of one version get it: from S3 alone, through cache nodes, or from one another. Pure.

A version of 470 GB for 32 nodes is 15 TB: through one cache node of 12.5 GB/s (100 Gbit/s) that takes 20
minutes, and every reader waits for the last. From S3, which is how versions are read here, each node's own
network is the bound: keys begin with a hash, which spreads the requests. Where S3 or the link to it is the
bound, nodes that have a part could hand it on in a tree, each to ``fan_out`` others, part by part, so that
the depth costs only a part's time a level. Whether that is worth building is what this says.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Source = Literal["s3", "cache", "tree"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Measured or granted rates, bytes a second; see the notes in ``configs/cluster/s3-fanout.yaml``."""

    node: float
    """Of one reader, each way."""
    s3: float
    """Of the bucket, all readers together."""
    cache_node: float
    """Of one cache node, outgoing."""
    cache_nodes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FanOut:
    """One way to get a version to every reader."""

    source: Source
    seconds: float
    """Until the last reader has it."""
    busiest: str
    """What bounds it."""
    busiest_bytes: float
    """That it moves."""


def fan_outs(
    num_bytes: float, num_nodes: int, network: Network, *, fan_out: int = 2, part_bytes: float = 256e6
) -> list[FanOut]:
    """Every way that the network has, the fastest first; of equals, the one that needs less."""
    if num_bytes <= 0 or num_nodes < 1 or fan_out < 1 or part_bytes <= 0:
        raise ValueError(
            "num_bytes and part_bytes must be positive, num_nodes and fan_out at least 1, got "
            f"{num_bytes}, {part_bytes}, {num_nodes}, {fan_out}."
        )
    total = num_bytes * num_nodes
    ways = [_way("s3", {"a reader": (num_bytes, network.node), "S3": (total, network.s3)})]
    if network.cache_nodes:
        share = total / network.cache_nodes
        ways.append(
            _way(
                "cache",
                {
                    "a reader": (num_bytes, network.node),
                    "a cache node": (share, network.cache_node),
                    "S3": (num_bytes * min(network.cache_nodes, num_nodes), network.s3),
                },
            )
        )
    if num_nodes > 1:
        depth = tree_depth(num_nodes, fan_out)
        part = min(part_bytes, num_bytes)
        loads = {
            "an inner node": (num_bytes * min(fan_out, num_nodes - 1), network.node),
            "S3": (num_bytes, network.s3),
        }
        ways.append(_way("tree", loads, extra=depth * part / network.node))
    order: dict[Source, int] = {"s3": 0, "cache": 1, "tree": 2}
    return sorted(ways, key=lambda way: (way.seconds, order[way.source]))


def tree_depth(num_nodes: int, fan_out: int) -> int:
    """Levels below the first node when each hands on to ``fan_out`` others."""
    held, depth, level = 1, 0, 1
    while held < num_nodes:
        level *= fan_out
        held, depth = held + level, depth + 1
    return depth


def _way(source: Source, loads: Mapping[str, tuple[float, float]], *, extra: float = 0.0) -> FanOut:
    seconds = {name: moved / rate if rate else math.inf for name, (moved, rate) in loads.items()}
    busiest = max(seconds, key=lambda name: seconds[name])
    return FanOut(
        source=source,
        seconds=seconds[busiest] + extra,
        busiest=busiest,
        busiest_bytes=loads[busiest][0],
    )
