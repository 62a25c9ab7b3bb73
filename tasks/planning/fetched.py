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
    of_stage, of_block = dense / grid.pp, experts / (grid.pp * grid.expert_shards)
    found = []
    for first in range(0, grid.world_size, ranks):
        places = {(grid.stage_of(rank), grid.expert_block_of(rank)) for rank in range(first, first + ranks)}
        stages = {stage for stage, _ in places}
        found.append(len(stages) * of_stage + len(places) * of_block)
    return found
