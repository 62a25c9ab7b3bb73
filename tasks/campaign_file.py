"""A campaign's YAML as it is meant: a key that is there twice is an error, where YAML takes the last one."""

from typing import Any

import yaml
from yaml.nodes import MappingNode, ScalarNode

MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, ScalarNode) and key.tag != MERGE:
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"key {key.value!r} must be there once, got it again. Join the two",
                        problem_mark=key.start_mark,
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_campaign(text: str) -> Any:
    """What a YAML says, of plain types."""
    return yaml.load(text, _Loader)
