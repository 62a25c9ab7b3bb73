"""Make a Hugging Face folder, or a snapshot directory of the hub's cache, version 0 of a new lineage.

    python -m tasks.adopt --config configs/campaigns/laptop.yaml --folder ./policy --write adopted.yaml
    pyflyte run workflows/campaign.py campaign --config adopted.yaml

The first command needs the folder, the second one does not: its nodes read version 0 from the store. A
campaign goes on only with the ``model`` that its version 0 was made from, and so the file that is written has
``model.folder`` and ``model.num_experts``; in place of it the two may be set in the campaign's own file.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from tasks.checkpoint import initialize, open_campaign
from tasks.config import CampaignConfig, with_overrides
from tasks.model_config import num_experts
from tasks.records import CampaignRun, PolicyVersion
from tasks.session import read_config


def adopt(
    config: CampaignConfig, folder: Path, *, store: str | None, name: str | None
) -> tuple[CampaignRun, PolicyVersion]:
    """Version 0 of a new lineage, and the run whose configuration goes on from it."""
    folder = folder.expanduser().resolve()
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"--folder must be a Hugging Face checkpoint with a config.json, got {folder}.")
    try:
        shape = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, got: {error}. Copy it again.") from error
    experts = num_experts(shape.get("text_config", shape))
    if not experts:
        raise ValueError(f"--folder must be a mixture-of-experts policy, got {shape.get('model_type')!r}.")
    config = with_overrides(config, model__folder=str(folder), model__num_experts=experts)
    run = open_campaign(
        config=config, name=name, iterations=None, learning_rate=None, store=store, fresh=True
    )
    version = initialize(run=run)
    assert isinstance(run, CampaignRun) and isinstance(version, PolicyVersion)  # no promises: no workflow
    return run, version


def main(arguments: Sequence[str] | None = None) -> None:
    import yaml

    parser = argparse.ArgumentParser(description="Adopt a Hugging Face folder as version 0.")
    parser.add_argument("--config", required=True, type=Path, help="the campaign's YAML")
    parser.add_argument("--folder", required=True, type=Path, help="with config.json and safetensors")
    parser.add_argument("--store", help="replaces checkpoint.store")
    parser.add_argument("--campaign", help="replaces name")
    parser.add_argument("--write", type=Path, help="YAML to make: the campaign that goes on from version 0")
    options = parser.parse_args(arguments)
    if options.write and options.write.exists():
        raise SystemExit(f"--write must name a file that does not exist, got {options.write}.")
    config = read_config(options.config)
    try:
        run, version = adopt(config, options.folder, store=options.store, name=options.campaign)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(f"{version.campaign} version {version.version}: {version.manifest_uri}")
    if options.write:
        effective = run.config.model_dump(mode="json")
        options.write.write_text(yaml.safe_dump(effective, sort_keys=False, default_flow_style=None))
        print(f"Go on: pyflyte run workflows/campaign.py campaign --config {options.write}")
    else:
        model = run.config.model
        print(
            f"Go on: set folder: {model.folder} and num_experts: {model.num_experts} under model in "
            f"{options.config}, and pyflyte run it with the same name and store."
        )


if __name__ == "__main__":
    main()
