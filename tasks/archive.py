"""Spill: what an iteration's samples were and became, written to the store beside the policy update."""

from flytekit import task

from tasks import placement
from tasks.records import CampaignRun, PolicyVersion, SampleArchive, TrainBatch
from tasks.say import say
from tasks.session import run_buffer, run_store


@task(**placement.MEMORY.task_arguments())
def archive(run: CampaignRun, batch: TrainBatch, policy: PolicyVersion) -> SampleArchive:
    """Store every sample of the iteration, trained or rejected, before ``publish`` frees the buffer. Safe to
    repeat.

    Runs while the policy trains: nothing but ``publish`` waits for it.
    """
    import polars as pl

    from tasks.experience.archive import archive_bytes, archive_key
    from tasks.experience.frames import scored_samples
    from tasks.experience.leftovers import with_inherited
    from tasks.rl.assembly import sample_fates
    from tasks.schema import TrainFrame, from_bytes

    store, buffer, iteration = run_store(run), run_buffer(run), batch.iteration
    key = archive_key(batch.key)
    payload = store.find_object(key)
    if payload is None:
        train = from_bytes(store.get_object(batch.key), schema=TrainFrame)
        frame = scored_samples(buffer, iteration)
        everything = with_inherited(run, iteration, frame)
        samples = sample_fates(everything, train, run.config, policy_version=policy.version)
        if not len(frame):  # the buffer was lost after sealing: what was trained is still known
            samples = train.with_columns(fate=pl.lit("trained"))
            say(
                "archive",
                "the buffer holds none of the sealed samples; archived those of the batch",
                iteration=iteration,
            )
        payload = archive_bytes(samples, buffer.unscored(iteration))
        store.put_object(key, payload)
    rows = pl.read_parquet(payload, columns=["fate"]).height
    return SampleArchive(iteration=iteration, key=key, num_samples=rows, num_bytes=len(payload))
