"""Which samples, prompts, policy versions and rewards made a checkpoint.

    python -m tasks.experience.query --store ./runs --campaign laptop --version 7

Reads the version's manifest and the archive of its iteration, nothing else.
"""

import argparse
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from tasks.artifacts.errors import StoreError
from tasks.artifacts.lineage import open_lineage
from tasks.artifacts.store import PolicyStore
from tasks.experience.archive import archive_key
from tasks.experience.ledger import sample_id
from tasks.session import require_existing

if TYPE_CHECKING:
    from tasks.artifacts.manifest import Manifest

COLUMNS = ("sample", "policy_version", "reward", "advantage", "fate", "response_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What a version was made of."""

    manifest: "Manifest"
    samples: pl.DataFrame
    """A row a produced sample: ``COLUMNS`` and the columns of the archive."""

    @property
    def trained(self) -> pl.DataFrame:
        return self.samples.filter(pl.col("fate") == "trained")


def made_of(store: PolicyStore, version: int) -> Made:
    """The samples behind a version."""
    manifest = store.manifest(version)
    if manifest.kind != "iteration":
        raise ValueError(
            f"version {version} of {store.campaign} must come from an iteration to have samples, got kind "
            f"{manifest.kind}. Ask for a later version."
        )
    key = archive_key(manifest.batch)
    frame = pl.read_parquet(io.BytesIO(store.get_object(key)))
    names = [
        sample_id(iteration, prompt, index)
        for iteration, prompt, index in frame.select("iteration", "prompt_id", "sample_index").iter_rows()
    ]
    frame = frame.with_columns(
        sample=pl.Series(names, dtype=pl.String), response_tokens=pl.col("response_ids").list.len()
    )
    return Made(manifest=manifest, samples=frame)


def text_of(made: Made, *, limit: int) -> str:
    """The answer as text; ``limit`` sample rows, 0 = all."""
    manifest, trained = made.manifest, made.trained
    fates = made.samples.group_by("fate").len().sort("fate").iter_rows()
    versions = trained.group_by("policy_version").len().sort("policy_version").iter_rows()
    rewards = trained["reward"]
    spread = (
        ""
        if trained.is_empty()
        else f", reward mean {rewards.mean():.4f}, from {rewards.min():.4f} to {rewards.max():.4f}"
    )
    rows = trained.sort("sample").select(COLUMNS)
    shown = rows if limit == 0 else rows.head(limit)
    lines = [
        f"version {manifest.version} of {manifest.campaign}: iteration {manifest.iteration - 1}, trained "
        "from "
        f"version {manifest.parent}, tensors {manifest.tensor_digest[:12]}",
        f"produced {len(made.samples)} = " + " + ".join(f"{count} {fate}" for fate, count in fates),
        "sampled by " + ", ".join(f"version {version}: {count}" for version, count in versions),
        f"trained: prompts {trained['prompt_id'].n_unique()}{spread}",
    ]
    with pl.Config(
        tbl_rows=-1, tbl_cols=-1, fmt_str_lengths=80, tbl_hide_dataframe_shape=True, tbl_formatting="NOTHING"
    ):
        lines.append(str(shown))
    if len(shown) < len(rows):
        lines.append(
            f"... {len(rows) - len(shown)} more; --limit 0 shows all, --json writes them as JSON lines"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Which samples made a checkpoint.")
    parser.add_argument(
        "--store", required=True, help="s3://bucket/prefix, or the folder of an embedded store"
    )
    parser.add_argument("--campaign", required=True, help="name, with or without lineage")
    parser.add_argument("--version", required=True, type=int)
    parser.add_argument("--endpoint-url", default="", help="of an S3 service other than Amazon's")
    parser.add_argument("--limit", type=int, default=10, help="sample rows shown; 0 = all")
    parser.add_argument(
        "--json", action="store_true", help="every produced sample as a JSON line, with tokens"
    )
    options = parser.parse_args(arguments)
    require_existing(options.store)
    try:
        store = open_lineage(options.store, options.campaign, endpoint_url=options.endpoint_url)
        made = made_of(store, options.version)
    except (ValueError, LookupError, StoreError) as error:
        raise SystemExit(str(error)) from None
    spelled = made.samples.drop("routed_experts", "routed_weights", strict=False)  # bytes, not for JSON
    sys.stdout.write(spelled.write_ndjson() if options.json else text_of(made, limit=options.limit) + "\n")


if __name__ == "__main__":
    main()
