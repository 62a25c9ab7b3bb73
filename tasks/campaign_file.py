"""A campaign's file as it is meant: a key that is there twice is an error, where YAML and JSON take the last
one, and so is a file without any, which would be all defaults."""

import json
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, ScalarNode

MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        """As it is written: what ``<<`` brings is no key of it yet."""
        node, seen = super().compose_mapping_node(anchor), set[str]()
        for key, _ in node.value:
            if isinstance(key, ScalarNode) and key.tag != MERGE:
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"key {key.value!r} must be there once, got it again. Join the two",
                        problem_mark=key.start_mark,
                    )
                seen.add(key.value)
        return node


def read_campaign(path: Path) -> Any:
    """What a YAML or JSON file says, of plain types."""
    text = path.read_text(encoding="utf-8")
    load = load_json if path.suffix == ".json" else load_campaign
    data = load(text) if text.strip() else None
    if data is None:
        raise ValueError(
            "it must hold the keys of a configuration, got an empty file, or nothing but comments. Write some"
            " into it (configs/campaigns/ has examples), or {} for all defaults."
        )
    return data


def load_json(text: str) -> Any:
    """What a JSON says. The reader of YAML, of which JSON is a part but for its tabs, knows a key's place."""
    data = json.loads(text)
    yaml.compose(text.replace("\t", " "), _Loader)
    return data


def load_campaign(text: str) -> Any:
    """What a YAML says, of plain types."""
    return yaml.load(text, _Loader)
