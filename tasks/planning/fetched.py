"""What the training nodes fetch of a version that the same mesh stored; pure arithmetic."""

from tasks.grid import Grid


def fetched_by_nodes(grid: Grid, ranks: int, *, dense: float, experts: float) -> list[float]:
    """Of each node of so many ranks: the size of the files that hold what its ranks own.

    Args:
        dense: size of what several ranks have parts of, stored apart, stage by stage.
        experts: size of the tensors of one expert each, stored by the rank that keeps them.

    Files as ``by_file`` makes them in ``tasks/policy/checkpoint/weights.py``; ``test_owned.py`` compares the
    sizes. Stages are counted as equal, as in a rank's memory.
    """
    stages, blocks = range(grid.pp), range(grid.expert_shards)
    sizes = {_dense(stage): dense / grid.pp for stage in stages}
    sizes |= {_experts(s, b): experts / (grid.pp * grid.expert_shards) for s in stages for b in blocks}
    found = []
    for first in range(0, grid.world_size, ranks):
        places = {(grid.stage_of(rank), grid.expert_block_of(rank)) for rank in range(first, first + ranks)}
        owned = {_dense(stage) for stage, _ in places} | {_experts(*place) for place in places}
        found.append(sum(sizes[file] for file in owned))
    return found


def _dense(stage: int) -> str:
    return f"dense of stage {stage}"


def _experts(stage: int, block: int) -> str:
    return f"experts {block} of stage {stage}"
