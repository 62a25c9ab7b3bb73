"""What a preflight check is: a named, pure function of recorded facts, and what must hold on a node.

``facts`` is what ``tasks/planning/facts.py`` read, plain JSON: facts of one machine are judged the
same on another. A reader that failed leaves ``{"error": ...}``, and the checks that need it fail with that:
what could not be read is never taken for right.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Facts = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a node of a role must be; ``tasks/preflight.py`` takes it from placement and the configuration."""

    role: str
    gpus: int = 0
    gpu_name: str = ""
    gpu_mib: int = 0
    efa: int = 0
    hugepages: int = 0
    """Pages of 2 MiB that the pod asks for."""
    shared_memory_gib: float = 0.0
    memory_gib: float = 0.0
    cpus: int = 1
    scratch_gib: float = 1.0
    needs_nvme: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package -> version of the role's image."""
    dispatcher: str = "all_to_all"
    asks_metadata: bool = False
    needs_tls: bool = False
    model_folder: str = ""
    images: tuple[str, ...] = ()
    queue: str = ""
    max_time_skew_seconds: float = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    name: str
    problem: str = ""
    """Empty: passed."""

    @property
    def is_passed(self) -> bool:
        return not self.problem


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    roles: frozenset[str]
    function: Callable[[Facts, Wanted], str]


CHECKS: list[Check] = []
GPU, NODE = ("trainer", "rollout"), ("laptop", "cpu", "trainer", "rollout")
SHARED = ("laptop", "cpu")
"""Checked once: they see what all nodes use."""


def check(*roles: str) -> Callable[[Callable[[Facts, Wanted], str]], Callable[[Facts, Wanted], str]]:
    def register(function: Callable[[Facts, Wanted], str]) -> Callable[[Facts, Wanted], str]:
        CHECKS.append(Check(function.__name__.replace("_", "-"), frozenset(roles), function))
        return function

    return register


class Unread(Exception):
    """A fact that a check needs and nobody could read."""


def get(facts: Facts, name: str) -> Any:
    if name not in facts:
        raise Unread(f"{name} must be read, got nothing. Record the facts again on a node of this role.")
    if isinstance(facts[name], Mapping) and "error" in facts[name]:
        raise Unread(f"{name} must be readable, got {facts[name]['error']}.")
    return facts[name]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0]))


def unless(holds: object, problem: str) -> str:
    return "" if holds else problem
