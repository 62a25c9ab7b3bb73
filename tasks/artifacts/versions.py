"""The versions of a campaign from the command line.

    python -m tasks.artifacts.versions list     --store ./runs --campaign laptop
    python -m tasks.artifacts.versions describe --store ./runs --campaign laptop 7
    python -m tasks.artifacts.versions diff     --store ./runs --campaign laptop 6 7
    python -m tasks.artifacts.versions export   --store ./runs --campaign laptop 7 --to ./policy
    python -m tasks.artifacts.versions hold     --store ./runs --campaign laptop 7 --by me --hours 48
    python -m tasks.artifacts.versions release  --store ./runs --campaign laptop 7 --by me
    python -m tasks.artifacts.versions prune    --store ./runs --campaign laptop --last 3 --every 10 --best 1

``prune`` shows what it would remove; ``--yes`` removes it. ``python -m tasks.adopt`` makes a version 0.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tasks.artifacts import lineage, retention
from tasks.artifacts.errors import CacheFull, CorruptArtifact, StoreError
from tasks.artifacts.lineage import open_lineage
from tasks.artifacts.store import PolicyStore
from tasks.session import require_existing


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    require_existing(options.store)
    try:
        store = open_lineage(options.store, options.campaign, endpoint_url=options.endpoint_url)
        sys.stdout.write(_COMMANDS[options.command](store, options))
    except (ValueError, LookupError, StoreError, CorruptArtifact, CacheFull) as error:
        raise SystemExit(str(error)) from None


def list_versions(store: PolicyStore, options: argparse.Namespace) -> str:
    """A line a version: what made it, when, and the bytes that it added to the store."""
    lines, before = [], None
    for manifest in store.history():
        added = lineage.added_bytes(manifest, before)
        state = "  retired" if store.is_retired(manifest.version) else ""
        lines.append(
            f"v{manifest.version:<6} {manifest.kind:<10} iterations {manifest.iteration:<6} "
            f"tensors {manifest.tensor_digest[:12]}  added {added:>15,} bytes  "
            f"{manifest.created:%Y-%m-%d %H:%M:%S}{state}\n"
        )
        before = manifest
    return "".join(lines)


def describe(store: PolicyStore, options: argparse.Namespace) -> str:
    """All that a version's manifest and ledger say of it, as YAML."""
    return _yaml(lineage.describe(store, options.version))


def diff(store: PolicyStore, options: argparse.Namespace) -> str:
    """What differs between two versions: configuration, code, data, files, metrics, scores."""
    return _yaml(lineage.diff(store, options.version, options.other))


def export(store: PolicyStore, options: argparse.Namespace) -> str:
    """A Hugging Face folder of one version, for transformers, SGLang or `python -m tasks.adopt`."""
    names = lineage.export(store, options.version, options.to)
    return f"{options.to}: {', '.join(names)}\n"


def hold(store: PolicyStore, options: argparse.Namespace) -> str:
    """Keep a version from being pruned, in the name of a reader of another campaign or a server."""
    retention.hold(store, options.version, options.by, hours=options.hours)
    return f"v{options.version} is held by {options.by}\n"


def release(store: PolicyStore, options: argparse.Namespace) -> str:
    """End a hold."""
    retention.release(store, options.version, options.by)
    return f"v{options.version} is not held by {options.by}\n"


def prune(store: PolicyStore, options: argparse.Namespace) -> str:
    """Show which versions would be removed, and why the others stay; with --yes remove them."""
    keep = retention.Keep(
        last=options.last,
        every=options.every,
        best=options.best,
        metric=options.metric,
        min_age_hours=options.min_age_hours,
    )
    plan = retention.plan_retention(store, keep)
    if not options.yes:
        return f"{plan.text()}\nnothing was changed; --yes removes\n"
    return f"{plan.text()}\n{retention.carry_out(store, plan)} objects removed\n"


_COMMANDS = {
    "list": list_versions,
    "describe": describe,
    "diff": diff,
    "export": export,
    "hold": hold,
    "release": release,
    "prune": prune,
}


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--store", required=True, help="s3://bucket/prefix, or an embedded store's folder")
    common.add_argument("--campaign", required=True, help="name, with or without lineage")
    common.add_argument("--endpoint-url", default="", help="of an S3 service other than Amazon's")
    parser = argparse.ArgumentParser(description="The versions of a campaign.")
    commands = parser.add_subparsers(dest="command", required=True)
    made = {
        name: commands.add_parser(name, parents=[common], help=act.__doc__, description=act.__doc__)
        for name, act in _COMMANDS.items()
    }
    for name in ("describe", "diff", "export", "hold", "release"):
        made[name].add_argument("version", type=int)
    made["diff"].add_argument("other", type=int)
    made["export"].add_argument("--to", required=True, type=Path, help="folder to make")
    for name in ("hold", "release"):
        made[name].add_argument("--by", required=True, help="name of the reader")
    made["hold"].add_argument("--hours", type=float, help="default: until it is released")
    made["prune"].add_argument("--last", type=int, default=3, help="newest versions to keep; default: 3")
    made["prune"].add_argument("--every", type=int, default=0, help="keep each n-th; 0 = none for that")
    made["prune"].add_argument("--best", type=int, default=1, help="best by --metric to keep; default: 1")
    made["prune"].add_argument(
        "--metric", default="exact_sampled", help="an evaluation's; default: exact_sampled"
    )
    made["prune"].add_argument("--min-age-hours", type=float, default=24.0, help="of what goes; default: 24")
    made["prune"].add_argument("--yes", action="store_true", help="remove; without it, only show")
    return parser


def _yaml(value: dict[str, Any]) -> str:
    return yaml.safe_dump(value, sort_keys=False, default_flow_style=None, width=110)


if __name__ == "__main__":
    main()
