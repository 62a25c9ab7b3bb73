"""Validates one document of ``configs/cluster`` against the public schema of its kind.

Rules that a custom resource states in CEL (``x-kubernetes-validations``) are not evaluated.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from kubernetes_validate import ValidationError, validate

SCHEMAS = Path(__file__).resolve().parent / "data/schemas"
KUBERNETES = ("1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
UNKNOWN = {"cert-manager.io/v1", "monitoring.coreos.com/v1"}
"""Kinds whose schema is not at hand: their fields are checked by name in the tests that read them."""


def _closed(schema: Any) -> Any:
    """A CRD's schema as JSON Schema: unknown fields refused, as the API server prunes or refuses them."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed(value) for key, value in schema.items()}
    if found.pop("x-kubernetes-int-or-string", False):
        found.pop("type", None)
        found["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if found.pop("nullable", False) and isinstance(found.get("type"), str):
        found["type"] = [found["type"], "null"]
    is_open = found.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in found
    if isinstance(found.get("properties"), dict) and found.get("type") == "object" and not is_open:
        found["additionalProperties"] = False
    return found


@cache
def custom_kinds() -> dict[str, Any]:
    """``group/version Kind`` -> validator."""
    found = {}
    for path in SCHEMAS.glob("*.json"):
        schema = json.loads(path.read_text())
        if name := schema.get("x-group-version-kind"):
            found[name] = jsonschema.Draft7Validator(_closed(schema))
    found["eksctl.io/v1alpha5 ClusterConfig"] = jsonschema.Draft7Validator(
        json.loads((SCHEMAS / "eksctl.json").read_text())
    )
    return found


def schema_problems(document: dict[str, Any], *, versions: tuple[str, ...] = KUBERNETES) -> list[str]:
    """What the schema says against a document; empty if nothing."""
    kind = f"{document.get('apiVersion')} {document.get('kind')}"
    if document.get("apiVersion") in UNKNOWN:
        return []
    if kind in custom_kinds():
        errors = custom_kinds()[kind].iter_errors(document)
        found = [f"{kind} {'.'.join(map(str, e.absolute_path))}: {e.message[:200]}" for e in errors]
        for job in (
            document.get("spec", {}).get("pytorchReplicaSpecs", {}).values()
        ):  # its schema is open there
            pod = {"apiVersion": "v1", "kind": "Pod", **job["template"]}
            found += schema_problems(pod, versions=versions)
        return found
    found = []
    for version in versions:
        try:
            validate(document, version, strict=True)
        except ValidationError as error:
            found.append(f"{kind} ({version}): {error.message[:200]}")
        except Exception as error:  # an unknown kind or version, in the library's own words
            found.append(f"{kind} ({version}): {error}")
    return found
