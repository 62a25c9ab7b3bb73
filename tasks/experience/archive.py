"""Every sample of an iteration with its fate, kept in the store as Parquet when the buffer forgets it.

A row is a sample: its identity, tokens, behaviour log-probabilities and outcome, ``fate`` (``trained``, or
why not), and advantage and mini-batch where trained. What was rejected as late or refused was never stored.
"""

import io
from collections.abc import Sequence

import polars as pl

from tasks.experience.records import Unscored
from tasks.schema import RolloutFrame, from_bytes


def archive_bytes(samples: pl.DataFrame, unscored: Sequence[Unscored]) -> bytes:
    """Parquet of samples with their fates, and of groups that no scorer survived."""
    if unscored:
        lost = from_bytes(*(record.group.payload for record in unscored), schema=RolloutFrame)
        samples = pl.concat([samples, lost.with_columns(fate=pl.lit("unscored"))], how="diagonal")
    sink = io.BytesIO()
    samples.write_parquet(sink, compression="zstd")
    return sink.getvalue()


def archive_key(batch_key: str) -> str:
    """Key of the archive beside a sealed batch's key."""
    return batch_key.replace("batches/", "samples/").replace(".arrow", ".parquet")
