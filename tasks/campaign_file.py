"""A campaign's YAML as it is meant: a key that is there twice is an error, where YAML takes the last one."""

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


def load_campaign(text: str) -> Any:
    """What a YAML says, of plain types."""
    return yaml.load(text, _Loader)
