"""The base of every configuration section and record; no torch."""

import difflib
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

TYPE_KEYS = {
    "$ref", "additionalProperties", "allOf", "anyOf", "const", "enum", "format", "items",
    "maxItems", "minItems", "prefixItems", "type",
}  # fmt: skip


class Section(BaseModel):
    """Values that refuse unknown keys and cannot change."""

    _json_schema: ClassVar[dict[str, Any]]
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)  # JSON has neither

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Made once a class: Flyte asks at every node of an unrolled graph, which took 0.15 s a node."""
        if "_json_schema" not in cls.__dict__:
            cls._json_schema = _without_words(super().model_json_schema(*args, **kwargs))
        return cls._json_schema

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for key in data.keys() - cls.model_fields.keys():
            close = difflib.get_close_matches(key, cls.model_fields, n=1)
            below = [name for name, field in cls.model_fields.items() if _has(field.annotation, key)]
            if below:
                raise ValueError(f"unknown key {key!r} here. Put it under {' or '.join(below)}.")
            hint = f"Did you mean {close[0]}?" if close else f"Known keys: {', '.join(cls.model_fields)}."
            raise ValueError(f"unknown key {key!r}. {hint}")
        return data


def _has(section: Any, key: str) -> bool:
    return isinstance(section, type) and issubclass(section, Section) and key in section.model_fields


def _without_words(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that says types alone: Flyte puts it into every task of a record, and records have a limit."""
    lean = {name: value for name, value in schema.items() if name != "description"}
    lean["properties"] = {
        name: {key: value for key, value in field.items() if key in TYPE_KEYS}
        for name, field in schema.get("properties", {}).items()
    }
    if "$defs" in schema:
        lean["$defs"] = {
            name: _without_words(definition) if "properties" in definition else definition
            for name, definition in schema["$defs"].items()
        }
    return lean


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
