"""How ranks are laid out: a pure calculation that the launch checks and the trainer share; no torch.

Dense parts live on ``pp x dp_replicate x fsdp x cp x tp``, experts on ``pp x dp_replicate x efsdp x ep``, the
last axis innermost in both. A pipeline stage is a block of consecutive ranks, and inside it:

    tp   the same tokens, other columns and rows of each split weight
    cp   the same samples, other positions of each
    fsdp other samples; dense parameters are split over ``fsdp x cp``, experts over ``efsdp``
    ep   consecutive ranks, over any of the three above, that hold disjoint experts

With fsdp = 1 nothing is split by fully sharded data parallelism: a rank keeps its tp part of dense parameters
and its ep part of the experts whole, whatever cp is.
"""

import math
from dataclasses import dataclass
from typing import Self

from tasks.section import divisors


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    world_size: int
    ep: int
    fsdp: int = 1
    """Ranks with other samples over which, together with their cp ranks, dense parameters are split."""
    tp: int = 1
    cp: int = 1
    pp: int = 1

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world_size // self.pp

    @property
    def num_shares(self) -> int:
        """Parts that a batch is dealt out in: ranks of a stage that have other samples."""
        return self.stage_size // (self.cp * self.tp)

    @property
    def dense_shards(self) -> int:
        """Ranks over which ``fully_shard`` splits a dense parameter, or its tp part."""
        return self.fsdp * self.cp if self.fsdp > 1 else 1

    @property
    def efsdp(self) -> int:
        """Ranks over which the experts of one expert-parallel rank are split."""
        return self.fsdp * self.cp * self.tp // self.ep if self.fsdp > 1 else 1

    @property
    def expert_shards(self) -> int:
        """Blocks that the experts of a layer are cut into."""
        return self.efsdp * self.ep

    @property
    def holders(self) -> int:
        """Ranks of a stage that together hold one copy of its parameters."""
        return self.fsdp * self.cp * self.tp if self.fsdp > 1 else max(self.ep, self.tp)

    @property
    def copy_size(self) -> int:
        """Ranks of all stages that together hold one copy of the model."""
        return self.pp * self.holders

    def stage_of(self, rank: int) -> int:
        return rank // self.stage_size

    def holder_of(self, rank: int) -> int:
        """Which of the ``holders`` of its stage's parameters a rank is."""
        return rank % self.stage_size % self.holders

    def expert_block_of(self, rank: int) -> int:
        """Which of the ``expert_shards`` blocks of each layer's experts a rank keeps."""
        holder = self.holder_of(rank)
        return holder % self.ep * self.efsdp + holder // self.ep % self.efsdp

    def checked(self) -> Self:
        """Itself, unless the sizes make no grid; the refusal lists those that would."""
        axes = {"pp": self.pp, "cp": self.cp, "tp": self.tp}
        for name, size in axes.items():
            others = math.prod(axes.values()) // size
            rest = self.world_size // others if self.world_size % others == 0 else self.world_size
            if rest % size:
                raise ValueError(
                    f"{name} must divide the {rest} ranks that the other axes leave of {self.world_size}, "
                    f"got {name}={size}. Set {name} to one of {divisors(rest)}."
                )
        if self.world_size % math.prod(axes.values()):
            raise ValueError(
                f"pp * cp * tp must divide the {self.world_size} ranks, got pp={self.pp}, cp={self.cp}, "
                f"tp={self.tp}. Set each to one of {divisors(self.world_size)} so that their product does."
            )
        of_stage = " of a pipeline stage" if self.pp > 1 else ""
        if self.stage_size % self.ep:
            raise ValueError(
                f"ep must divide the {self.stage_size} ranks{of_stage}, got ep={self.ep}. "
                f"Set ep to one of {divisors(self.stage_size)}."
            )
        inner = self.cp * self.tp
        choices = [1, *(n for n in divisors(self.num_shares)[1:] if n * inner % self.ep == 0)]
        if self.fsdp not in choices:
            product = "be 1 or" if inner == 1 else f"be 1 or make fsdp * cp * tp (cp * tp is {inner})"
            ranks = f"{self.num_shares} ranks{of_stage}" + (" with other samples" if inner > 1 else "")
            raise ValueError(
                f"fsdp must divide the {ranks} and {product} a multiple of ep, got fsdp={self.fsdp}, "
                f"ep={self.ep}. Set fsdp to one of {choices}."
            )
        if self.fsdp == 1 and not _one_divides_the_other(self.ep, self.tp):
            choices = [n for n in divisors(self.stage_size) if _one_divides_the_other(n, self.tp)]
            raise ValueError(
                f"one of ep and tp must divide the other where fsdp is 1, got ep={self.ep}, tp={self.tp}. "
                f"Set ep to one of {choices}."
            )
        return self

    def check_model(self, where: str, *, num_heads: int, num_kv_heads: int, num_layers: int) -> None:
        """Refuse a model whose heads or layers cannot be dealt out; ``where`` names it."""
        for name, heads in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
            if heads % self.tp:
                raise ValueError(
                    f"train.tp must divide {name} of {where}, got tp={self.tp}, {name}={heads}. "
                    f"Set train.tp to one of {divisors(math.gcd(num_heads, num_kv_heads))}."
                )
        if self.pp > num_layers:
            raise ValueError(
                f"train.pp must be at most num_layers of {where}, got pp={self.pp}, num_layers={num_layers}. "
                f"Set train.pp to one of {[n for n in divisors(self.world_size) if n <= num_layers]}."
            )


def _one_divides_the_other(one: int, other: int) -> bool:
    return max(one, other) % min(one, other) == 0
