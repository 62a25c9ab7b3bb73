"""Dynamic sampling (DAPO, arXiv 2503.14476 section 3.2): how many prompts to offer in place of groups whose
samples all earned the same. Pure.
"""

import math
from collections.abc import Sequence

import polars as pl


def telling_prompts(frame: pl.DataFrame) -> set[str]:
    """Prompts of a ``ScoredFrame`` whose samples earned different rewards."""
    scored = frame.filter(pl.col("outcome") == "score")
    counts = scored.group_by("prompt_id").agg(num_rewards=pl.col("reward").n_unique())
    return set(counts.filter(pl.col("num_rewards") > 1)["prompt_id"])


def refill_sizes(is_telling: Sequence[bool], *, first: int, wanted: int, rounds: int) -> list[int]:
    """How many prompts are offered first, and by each of up to ``rounds`` refills.

    A refill offers what, at the rate seen so far, makes ``wanted`` groups differ; never more than the first
    offer had, and that while no group differs at all. ``is_telling`` goes by position. Each decision looks at
    the positions offered before it only: it is the same when a killed run makes it again.
    """
    sizes = [first]
    for _ in range(rounds):
        seen = is_telling[: sum(sizes)]
        missing = wanted - sum(seen)
        if missing <= 0:
            break
        sizes.append(min(first, math.ceil(missing * len(seen) / sum(seen))) if any(seen) else first)
    return sizes
