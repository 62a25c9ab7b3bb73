"""Make a Hugging Face folder, or a snapshot directory of the hub's cache, version 0 of a new lineage.

    python -m tasks.adopt --config configs/campaigns/qwen3_30b_a3b.yaml --folder ./Qwen3-30B-A3B

The campaign then goes on from it: ``pyflyte run`` with the same file, ``model.folder`` set to the folder.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from tasks.checkpoint import initialize, open_campaign
from tasks.config import CampaignConfig, with_overrides
from tasks.records import PolicyVersion


def adopt(config: CampaignConfig, *, store: str | None, name: str | None) -> PolicyVersion:
    """Version 0 of a new lineage, from ``config.model.folder``."""
    run = open_campaign(
        config=config, name=name, iterations=None, learning_rate=None, store=store, fresh=True
    )
    version = initialize(run=run)
    assert isinstance(version, PolicyVersion)  # not a promise: this is no workflow
    return version


def main(arguments: Sequence[str] | None = None) -> None:
    import yaml

    parser = argparse.ArgumentParser(description="Adopt a Hugging Face folder as version 0.")
    parser.add_argument("--config", required=True, type=Path, help="the campaign's YAML")
    parser.add_argument("--folder", required=True, type=Path, help="with config.json and safetensors")
    parser.add_argument("--store", help="replaces checkpoint.store")
    parser.add_argument("--campaign", help="replaces name")
    options = parser.parse_args(arguments)
    folder = options.folder.expanduser().resolve()
    try:
        experts = num_experts(folder)
        config = CampaignConfig.model_validate_json(json.dumps(yaml.safe_load(options.config.read_text())))
        config = with_overrides(config, model__folder=str(folder), model__num_experts=experts)
        version = adopt(config, store=options.store, name=options.campaign)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(f"{version.campaign} version {version.version}: {version.manifest_uri}")


def num_experts(folder: Path) -> int:
    """Routed experts a layer, by the name that the family gives them."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"--folder must be a Hugging Face checkpoint with a config.json, got {folder}.")
    shape = json.loads(path.read_text())
    for name in ("num_experts", "n_routed_experts", "num_local_experts"):
        if name in shape:
            return int(shape[name])
    raise ValueError(f"--folder must be a mixture-of-experts policy, got {shape.get('model_type')!r}.")


if __name__ == "__main__":
    main()
