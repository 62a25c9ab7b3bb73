"""Sample rollouts of a report: what the policy was asked, what it answered, what that earned."""

from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING

from tasks.artifacts.manifest import Manifest

if TYPE_CHECKING:
    import polars as pl

    from tasks.artifacts.store import PolicyStore

MAX_TEXT = 600
NUM_GROUPS, NUM_RESPONSES = 2, 6
"""Sample groups at each end of the ranking, and distinct responses shown of each."""


def rollouts_body(newest: Manifest, store: "PolicyStore") -> tuple[str, str]:
    """A note and the samples of an iteration's sealed batch, spelled by its tokenizer; both HTML."""
    payload = store.find_object(newest.batch)
    if payload is None:  # a lifecycle rule may remove batches; the rest of the report stands
        return f"Batch {escape(newest.batch)} is no longer in the store.", ""
    from tasks.schema import TrainFrame, from_bytes

    frame = from_bytes(payload, schema=TrainFrame)
    try:
        decode, note = _decoder(store, newest.version), ""
    except (ImportError, OSError, ValueError) as error:  # shown, for a report without it is still a report
        reason = escape(str(error).splitlines()[0][:200] if str(error) else type(error).__name__)
        note = f" Token ids are shown, the tokenizer of version {newest.version} did not load: {reason}"
        decode = _spell_ids
    return group_columns(frame, decode, iteration=newest.iteration - 1, note=note)


def group_columns(
    frame: "pl.DataFrame", decode: Callable[[list[int]], str], *, iteration: int, note: str = ""
) -> tuple[str, str]:
    """Groups of a ``TrainFrame`` where few samples beat their group's mean, and where few fell below it."""
    groups: dict[str, list[dict]] = {}
    for row in frame.iter_rows(named=True):
        groups.setdefault(row["prompt_id"], []).append(row)
    ranked = sorted(groups.values(), key=lambda rows: (_num_better(rows) / len(rows), rows[0]["prompt_id"]))
    ends = min(NUM_GROUPS, -(-len(ranked) // 2))
    hard, easy = ranked[:ends], ranked[max(len(ranked) - ends, ends) :]
    columns = "".join(
        f"<div><h3>{title}</h3>{''.join(_group(rows, decode) for rows in chosen)}</div>"
        for title, chosen in (("Worst: few beat their group", hard), ("Best: few fell behind", easy))
        if chosen
    )
    text = (
        f"From the sealed batch of iteration {iteration}: reward, advantage (above 0 = better than the "
        f"prompt's group), response. Groups with equal rewards teach nothing and are not in it.{note}"
    )
    return text, f'<div class="rollouts">{columns}</div>'


def _decoder(store: "PolicyStore", version: int) -> Callable[[list[int]], str]:
    from tasks.policy.models.tokenizer import load_tokenizer
    from tasks.session import WEIGHTS

    with store.reading(version, without=WEIGHTS) as folder:
        tokenizer = load_tokenizer(folder)
    return lambda ids: str(tokenizer.decode(ids))


def _spell_ids(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def _num_better(rows: list[dict]) -> int:
    return sum(row["advantage"] > 0 for row in rows)


def _group(rows: list[dict], decode: Callable[[list[int]], str]) -> str:
    """One prompt and its responses, best first; equal responses with equal advantages share a line."""
    counts: dict[tuple[float, float, tuple[int, ...]], int] = {}
    for row in rows:
        key = (row["advantage"], row["reward"], tuple(row["response_ids"]))
        counts[key] = counts.get(key, 0) + 1
    ordered = sorted(counts, key=lambda key: -key[0])
    half = NUM_RESPONSES // 2
    shown = ordered if len(ordered) <= NUM_RESPONSES else ordered[:half] + ordered[-half:]
    lines = "".join(
        f'<tr><td>{reward:.2f}</td><td class="{"up" if advantage > 0 else "down"}">{advantage:+.2f}</td>'
        f"<td>{f'&times;{count}' if (count := counts[advantage, reward, ids]) > 1 else ''}</td>"
        f"<td><code>{_text(decode(list(ids)))}</code></td></tr>"
        for advantage, reward, ids in shown
    )
    hidden = f", {len(ordered) - len(shown)} responses between not shown" if len(shown) < len(ordered) else ""
    versions = sorted({row["policy_version"] for row in rows})
    label = f"sampled by version {', '.join(map(str, versions))}"
    return (
        f'<article><p class="prompt"><code>{_text(decode(rows[0]["prompt_ids"]))}</code></p><p class="facts">'
        f"{label}; {_num_better(rows)} of {len(rows)} above the mean{hidden}</p>"
        f"<table>{lines}</table></article>"
    )


def _text(text: str) -> str:
    more = f" [{len(text) - MAX_TEXT} characters more]" if len(text) > MAX_TEXT else ""
    return escape(text[:MAX_TEXT]) + more
