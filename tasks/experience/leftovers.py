"""What an iteration with a quota leaves over, kept for the next one: groups that were finished but not
needed, and prompts that nobody finished, with the tokens they have so far where partial responses are kept.

Sealed in the store beside the iteration's batch, so that it outlives the buffer. It is kept once: what the
next iteration leaves of it again is rejected or dropped. Samples keep their identity, hence their seeds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from tasks.experience.frames import portions
from tasks.experience.records import Group
from tasks.records import CampaignRun
from tasks.rl.assembly import KEPT, SAMPLE, sample_fates
from tasks.schema import PromptFrame, RolloutFrame, ScoredFrame, from_bytes, to_bytes
from tasks.session import batch_name, run_buffer, run_store


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftovers:
    groups: pl.DataFrame
    """Finished and scored (``ScoredFrame``): trained next, unless too old."""
    prompts: pl.DataFrame
    """Not finished (``PromptFrame``): offered again, before new ones."""
    begun: pl.DataFrame
    """What their samples have so far (``RolloutFrame``)."""

    @property
    def num_groups(self) -> int:
        return self.groups["prompt_id"].n_unique()


def offered(run: CampaignRun, iteration: int, prompts: pl.DataFrame) -> None:
    """Remember the iteration's own prompts: what of them is not finished is left over."""
    run_store(run).put_object(f"{_name(run, iteration)}/offered.arrow", to_bytes(prompts))


def seal_leftovers(
    run: CampaignRun, iteration: int, *, groups: pl.DataFrame, finished: set[str], parked: Mapping[str, bytes]
) -> Leftovers:
    """Store what is left; the first seal stands, since responses may still be parked while it is repeated."""
    store, name = run_store(run), _name(run, iteration)
    prompts = from_bytes(store.get_object(f"{name}/offered.arrow"), schema=PromptFrame)
    prompts = prompts.filter(~pl.col("prompt_id").is_in(finished))
    names = prompts["prompt_id"].to_list()
    begun = from_bytes(*(parked[name] for name in names if name in parked), schema=RolloutFrame)
    for part, frame in (("groups", groups), ("begun", begun), ("prompts", prompts)):  # the last one seals
        if store.find_object(f"{name}/{part}.arrow") is None:
            store.put_object(f"{name}/{part}.arrow", to_bytes(frame))
    left = find_leftovers(run, iteration)
    assert left is not None
    return left


def find_leftovers(run: CampaignRun, iteration: int) -> Leftovers | None:
    """What an iteration left, if it was sealed and anything is kept."""
    store, name = run_store(run), _name(run, iteration)
    prompts = store.find_object(f"{name}/prompts.arrow")
    if prompts is None:
        return None
    return Leftovers(
        groups=from_bytes(store.get_object(f"{name}/groups.arrow"), schema=ScoredFrame),
        prompts=from_bytes(prompts, schema=PromptFrame),
        begun=from_bytes(store.get_object(f"{name}/begun.arrow"), schema=RolloutFrame),
    )


def with_inherited(run: CampaignRun, iteration: int, frame: pl.DataFrame) -> pl.DataFrame:
    """The iteration's scored samples and the groups that the one before left over."""
    if run.config.rollout.leftovers == "drop":
        return frame
    left = find_leftovers(run, iteration - 1)
    return frame if left is None else pl.concat([left.groups, frame])


def leave_over(
    run: CampaignRun, iteration: int, frame: pl.DataFrame, train: pl.DataFrame, *, policy_version: int
) -> dict[str, int]:
    """Seal what the iteration does not need and hand it on; what ``TrainBatch`` counts of it."""
    rollout, buffer = run.config.rollout, run_buffer(run)
    if rollout.leftovers == "drop":
        return {}
    inherited = find_leftovers(run, iteration - 1)
    again = 0 if inherited is None else len(inherited.prompts)
    counts = {"offered": (rollout.prompts_offered + again) * rollout.group_size}
    if iteration + 1 == run.config.schedule.iterations:
        return counts
    fates = sample_fates(frame, train, run.config, policy_version=policy_version)
    kept = frame.join(fates.filter(pl.col("fate") == KEPT), on=SAMPLE, how="semi")
    own = frame.filter(pl.col("iteration") == iteration)["prompt_id"].to_list()
    lost = [record.group.group_id for record in buffer.unscored(iteration)]
    left = seal_leftovers(
        run, iteration, groups=kept, finished={*own, *lost}, parked=buffer.all_parked(iteration)
    )
    version = buffer.open_iterations().get(iteration + 1)
    if version is not None:
        hand_on(run, iteration + 1, policy_version=version)
    return counts | {"handed_on": len(left.prompts) * rollout.group_size}


def hand_on(run: CampaignRun, iteration: int, *, policy_version: int) -> int:
    """Put on the iteration's queue what the one before left; returns its prompts. Safe to repeat.

    Called when prompts are offered, and again when the iteration before is sealed, whichever comes last: with
    stale policies generation runs ahead of assembly.
    """
    left = find_leftovers(run, iteration - 1)
    if left is None:
        return 0
    own = from_bytes(run_store(run).get_object(f"{_name(run, iteration)}/offered.arrow"), schema=PromptFrame)
    prompts = left.prompts.filter(~pl.col("prompt_id").is_in(own["prompt_id"].to_list()))
    rollout, buffer = run.config.rollout, run_buffer(run)
    items = portions(
        prompts, rollout, iteration=iteration, policy_version=policy_version, first=rollout.num_portions
    )
    for item, part in zip(items, prompts.iter_slices(rollout.groups_per_portion), strict=True):
        begun = left.begun.filter(pl.col("prompt_id").is_in(part["prompt_id"].to_list()))
        buffer.inherit(item, [_group(rows) for _, rows in begun.group_by("prompt_id")])
    buffer.put_work(items)
    buffer.credit(iteration, left.num_groups)
    return len(prompts)


def _group(rows: pl.DataFrame) -> Group:
    return Group(group_id=rows["prompt_id"][0], num_samples=len(rows), payload=to_bytes(rows))


def _name(run: CampaignRun, iteration: int) -> str:
    return batch_name(run, iteration).replace("batches/", "leftovers/")
