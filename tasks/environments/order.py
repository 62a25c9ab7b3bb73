"""The order of prompts: a cursor is nothing but a position, so resuming needs no state."""

import functools
import hashlib
import random
from collections.abc import Iterable, Sequence


class PromptOrder:
    """Position -> (epoch, index): each epoch is a permutation of its own, keyed by the data's fingerprint."""

    def __init__(self, size: int, *, key: str) -> None:
        if size < 1:
            raise ValueError(
                f"an environment must have prompts to train on, got {size}. Lower environment.held_out or "
                "give it more data."
            )
        self.size, self.key = size, key
        self._epoch = functools.lru_cache(maxsize=4)(self._permutation)

    def at(self, position: int) -> tuple[int, int]:
        epoch, place = divmod(position, self.size)
        return epoch, self._epoch(epoch)[place]

    def _permutation(self, epoch: int) -> Sequence[int]:
        order = list(range(self.size))
        random.Random(f"{self.key}/{epoch}").shuffle(order)
        return order


def split(num: int, *, held_out: int, key: str) -> tuple[list[int], list[int]]:
    """(train, held out) indices: the same split for every seed, so that scores stay comparable."""
    if held_out >= num:
        less = (
            f"Lower environment.held_out to {num // 4}, or give it more data" if num >= 4 else "Give it more"
        )
        raise ValueError(f"held_out must be below the {num} distinct prompts, got {held_out}. {less}.")
    order = list(range(num))
    random.Random(key).shuffle(order)
    return order[held_out:], order[:held_out]


def content_digest(parts: Iterable[str]) -> str:
    """Of texts in order; what they are cut into matters."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:16]
