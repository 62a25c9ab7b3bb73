"""All checks of a role over recorded facts, and what they say."""

from collections.abc import Sequence
from typing import Any

from tasks.planning import node_checks, service_checks
from tasks.planning.check import CHECKS, Facts, Outcome, Unread, Wanted
from tasks.policy import libraries

__all__ = ["PreflightFailed", "in_use", "judge", "node_checks", "require", "service_checks", "table"]


class PreflightFailed(RuntimeError):
    """A node or what it reaches is not what the campaign needs; nothing was started."""


def judge(facts: Facts, wanted: Wanted) -> list[Outcome]:
    """Every check of the role, in order."""
    outcomes = []
    for one in CHECKS:
        if wanted.role in one.roles:
            try:
                problem = one.function(facts, wanted)
            except Unread as error:
                problem = str(error)
            outcomes.append(Outcome(name=one.name, problem=problem))
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """One line a check: passed, or what must hold, what was found and what to do."""
    return "\n".join(f"{'ok    ' if o.is_passed else 'REFUSE'} {o.name:<34} {o.problem}" for o in outcomes)


def in_use(facts: Facts) -> str:
    """The network that NCCL chose, devices, versions, and where each library was loaded from: in one line,
    as a training says it of itself, so that what is foreign shows also where every check passes."""

    def known(name: str, default: Any) -> Any:
        value = facts.get(name, default)
        return default if isinstance(value, dict) and "error" in value else value

    found, deep_ep = dict(known("versions", {})), known("deep_ep", {})
    if deep_ep:
        found["deep_ep"] = f"{deep_ep['version']} at {deep_ep['path']}"
    return libraries.report(
        libraries.Facts(
            maps=known("maps", ""),
            versions=found,
            nccl_log=known("two_ranks", {}).get("nccl_log", ""),
            num_gpus=len(known("gpus", [])),
            fabric_devices=dict.fromkeys(known("efa_devices", []), libraries.EFA_VENDOR),
        )
    ).text()


def require(outcomes: Sequence[Outcome], *, role: str) -> None:
    if refused := [f"{o.name}: {o.problem}" for o in outcomes if not o.is_passed]:
        counts = f"{len(refused)} of {len(outcomes)} checks refuse"
        raise PreflightFailed(f"preflight of {role}: {counts}. {' '.join(refused)}")
