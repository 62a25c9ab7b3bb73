"""The report's section about what one version changed, as ``tasks.artifacts.versions diff`` says it."""

from html import escape
from typing import Any

from tasks.reporting import charts

SHOWN = 40
"""Characters of a value."""


def difference_section(differences: list[dict[str, Any]]) -> str:
    """A table a pair of versions."""
    if not differences:
        return ""
    head = ("", "before", "after")
    tables = [
        f"<h3>Version {old} to {new}</h3>{charts.table(head, _rows(found), text_columns=(0, 1, 2))}"
        for found in differences
        for old, new in (found["versions"],)
    ]
    text = "Only what differs. Files are what a reader of the first fetches for the second."
    return f'<section><h2>Differences</h2><p class="note">{text}</p>{"".join(tables)}</section>'


def _rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (f"<code>{escape(name)}</code>", _shown(old), _shown(new))
        for name, (old, new) in found["configuration"].items()
    ]
    for name in ("code", "tensors"):
        if found[name] != "equal":
            rows.append((name, *map(_shown, found[name])))
    if found["data"] != "equal":
        rows += _data_rows(*found["data"])
    rows += [(f"files {kind}", "", f"{len(names):,}") for kind, names in found["files"].items()]
    rows.append(("bytes to fetch", "", f"{found['bytes_to_fetch']:,}"))
    if found["evaluations"] != "equal":
        before, after = found["evaluations"]
        for name in ("exact_sampled", "exact_greedy", "reward_sampled"):
            rows.append((name, *(f"{side[-1][name]:.4f}" if side else "" for side in (before, after))))
    return rows


def _data_rows(before: dict[str, Any] | None, after: dict[str, Any] | None) -> list[tuple[str, ...]]:
    sides = [side or {} for side in (before, after)]
    names = [name for name in ("dataset", "position") if sides[0].get(name) != sides[1].get(name)]
    return [(f"data {name}", *(_shown(side.get(name, "")) for side in sides)) for name in names]


def _shown(value: object) -> str:
    text = str(value)
    return escape(text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}...")
