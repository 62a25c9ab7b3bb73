"""The sample ledger: every sample is exactly once trained, rejected with a reason, or pending.

    produced = trained + sum(rejected by reason) + pending

Pure bookkeeping: no server, no clock. Identity and seed of a sample derive from where it stands, so a portion
that is rolled out again after a lost lease makes the same ids from the same seeds.
"""

from hashlib import blake2b
from itertools import pairwise
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class LedgerImbalance(RuntimeError):
    """Samples vanished (produced is larger) or were counted twice (produced is smaller)."""


class IterationLedger(BaseModel):
    """What became of one iteration's samples.

    produced=16, trained=12, rejected={"stale": 2, "verifier crashed": 1}, pending=1  ->  balance() == 0

    Where leftovers are kept, samples move on from one iteration to the next: ``carried_out`` there is
    ``carried_in`` here, and over a campaign both cancel.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    iteration: int = Field(ge=0)
    produced: int = Field(ge=0)
    trained: int = Field(ge=0)
    rejected: dict[str, int] = {}
    pending: int = Field(ge=0)
    carried_in: int = Field(default=0, ge=0)
    carried_out: int = Field(default=0, ge=0)
    oldest_policy_version: int = Field(ge=0)
    newest_policy_version: int = Field(ge=0)
    unsampled: int = Field(default=0, ge=0)
    """Samples that were offered and never finished: the iteration's quota was met first. Not part of the
    law."""

    @field_validator("rejected")
    @classmethod
    def _reasons_are_named_and_sorted(cls, rejected: dict[str, int]) -> dict[str, int]:
        for reason, number in rejected.items():
            if not reason or number < 0:
                raise ValueError(
                    f"rejected must map a reason to a count >= 0, got {reason!r}: {number}. Name the reason."
                )
        return dict(sorted(rejected.items()))  # equal ledgers have equal JSON, hence equal digests

    @model_validator(mode="after")
    def _versions_are_ordered(self) -> Self:
        if self.oldest_policy_version > self.newest_policy_version:
            raise ValueError(
                f"oldest_policy_version must not exceed newest_policy_version, got "
                f"{self.oldest_policy_version} > {self.newest_policy_version} in iteration "
                f"{self.iteration}. Swap them."
            )
        return self

    @property
    def num_rejected(self) -> int:
        return sum(self.rejected.values())

    def reasons(self) -> str:
        """Rejections by reason, and what was never sampled."""
        moved = {
            "not sampled": self.unsampled, "inherited": self.carried_in, "kept": self.carried_out
        }  # fmt: skip
        return _reasons(self.rejected | moved)

    def balance(self) -> int:
        """Samples unaccounted for: 0 when law holds, positive when lost, negative when counted twice."""
        held = self.produced + self.carried_in
        return held - self.trained - self.num_rejected - self.pending - self.carried_out

    def require_balanced(self) -> Self:
        if (difference := self.balance()) != 0:
            fault = "unaccounted for" if difference > 0 else "counted twice"
            moved = f" (inherited {self.carried_in}, kept {self.carried_out})" if self.carried_out else ""
            raise LedgerImbalance(
                f"iteration {self.iteration}: produced must equal trained + rejected + pending, got "
                f"{self.produced} != {self.trained} + {self.num_rejected} {self.rejected} + {self.pending}"
                f"{moved}: "
                f"{abs(difference)} {fault}. Do not commit this version; run the iteration's scoring and "
                "assembly again."
            )
        return self


class LedgerTotals(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    produced: int
    trained: int
    rejected: dict[str, int]
    pending: int


class CampaignLedger(BaseModel):
    """Iterations in ascending order. JSON: ``model_dump_json`` and ``model_validate_json``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    iterations: tuple[IterationLedger, ...] = ()

    @model_validator(mode="after")
    def _iterations_ascend(self) -> Self:
        numbers = [entry.iteration for entry in self.iterations]
        if any(left >= right for left, right in pairwise(numbers)):
            raise ValueError(
                f"iterations must ascend without repetition, got {numbers}. Sort and merge them."
            )
        return self

    def append(self, entry: IterationLedger) -> "CampaignLedger":
        """With ``entry`` at the end; the last entry again changes nothing, a resumed campaign repeats it."""
        if self.iterations and self.iterations[-1] == entry:
            return self
        return CampaignLedger(iterations=(*self.iterations, entry))

    def totals(self) -> LedgerTotals:
        rejected: dict[str, int] = {}
        for entry in self.iterations:
            for reason, number in entry.rejected.items():
                rejected[reason] = rejected.get(reason, 0) + number
        return LedgerTotals(
            produced=sum(entry.produced for entry in self.iterations),
            trained=sum(entry.trained for entry in self.iterations),
            rejected=dict(sorted(rejected.items())),
            pending=sum(entry.pending for entry in self.iterations),
        )

    def require_balanced(self) -> Self:
        for entry in self.iterations:
            entry.require_balanced()
        for before, after in zip((None, *self.iterations), (*self.iterations, None), strict=True):
            kept, inherited = before.carried_out if before else 0, after.carried_in if after else 0
            if kept != inherited:
                raise LedgerImbalance(
                    f"what an iteration keeps must be what the next one inherits, got {kept} kept by "
                    f"iteration {before.iteration if before else None} and {inherited} inherited by "
                    f"{after.iteration if after else None}. Run the scoring and assembly of the later again."
                )
        return self

    def settled(self) -> "CampaignLedger":
        """What the newest iteration keeps for one that is not sealed yet is pending; what the next one did
        not inherit, since the configuration changed between them, is rejected for that."""
        entries = []
        for entry, after in zip(self.iterations, (*self.iterations, None)[1:], strict=True):
            missing = entry.carried_out - (after.carried_in if after else 0)
            update: dict[str, object] = {"carried_out": entry.carried_out - missing}
            if missing and (after is None or after.trained == 0):
                update["pending"] = entry.pending + missing
            elif missing:
                reason = "configuration_changed"
                update["rejected"] = entry.rejected | {reason: entry.rejected.get(reason, 0) + missing}
            entries.append(entry.model_copy(update=update))
        return CampaignLedger(iterations=tuple(entries))

    def format(self) -> str:
        """A fixed-width table: one line an iteration, a total; reasons last, for their width varies."""
        total = self.totals()
        lines = [_line("iteration", "versions", "produced", "trained", "rejected", "pending", "reasons")]
        for entry in self.iterations:
            versions = f"{entry.oldest_policy_version}-{entry.newest_policy_version}"
            counts = (entry.produced, entry.trained, entry.num_rejected, entry.pending)
            lines.append(_line(entry.iteration, versions, *counts, entry.reasons()))
        counts = (total.produced, total.trained, sum(total.rejected.values()), total.pending)
        lines.append(_line("total", "", *counts, _reasons(total.rejected)))
        return "\n".join(lines)


def sample_id(iteration: int, prompt_id: str, index: int) -> str:
    """Unique within a campaign. ``prompt_id`` may contain slashes: both numbers beside it cannot."""
    return f"{iteration}/{prompt_id}/{index}"


def seed_of(base_seed: int, iteration: int, prompt_id: str, index: int) -> int:
    """63 bits from where the sample stands: the same on every worker and attempt, distinct for every sample.

    63 because samplers take a signed 64-bit seed.
    """
    identity = f"{base_seed}/{sample_id(iteration, prompt_id, index)}"
    return int.from_bytes(blake2b(identity.encode(), digest_size=8).digest(), "big") >> 1


def _line(*cells: object) -> str:
    *fixed, reasons = (str(cell) for cell in cells)
    return ("".join(cell.rjust(11) for cell in fixed) + "  " + reasons).rstrip()


def _reasons(rejected: dict[str, int]) -> str:
    return ", ".join(f"{reason}: {number}" for reason, number in rejected.items() if number)
