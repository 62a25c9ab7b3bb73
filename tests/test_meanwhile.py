"""Work beside a block: it goes on after a failure, and the block hears of the last one."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tasks.experience.meanwhile import meanwhile


def failing(calls: list[float], *, number: int) -> Callable[[], None]:
    """Fails that many times."""

    def act() -> None:
        calls.append(time.monotonic())
        if len(calls) <= number:
            raise ConnectionError(f"call {len(calls)}")

    return act


def wait_for(calls: list[float], number: int) -> None:
    end = time.monotonic() + 10
    while len(calls) < number and time.monotonic() < end:
        time.sleep(0.01)


def test_one_failure_ends_neither_the_work_nor_the_block() -> None:
    """After a renewal that failed there was none any more, and no abort at the deadline."""
    calls: list[float] = []
    with meanwhile(failing(calls, number=1), every=0.01, name="test"):
        wait_for(calls, 3)
    assert len(calls) >= 3


def test_the_error_of_the_last_call_is_the_blocks_unless_it_has_its_own() -> None:
    calls: list[float] = []
    with (
        pytest.raises(ConnectionError, match="call"),
        meanwhile(failing(calls, number=10**6), every=0.01, name="test"),
    ):
        wait_for(calls, 1)
    calls.clear()
    with (
        pytest.raises(KeyError, match="of the block"),
        meanwhile(failing(calls, number=10**6), every=0.01, name="test"),
    ):
        wait_for(calls, 1)
        raise KeyError("of the block")
    assert calls


def test_what_is_not_retried_ends_with_its_first_error_whatever_the_block_raised() -> None:
    calls: list[float] = []
    with (
        pytest.raises(ConnectionError, match=r"call 1$"),
        meanwhile(failing(calls, number=10**6), every=0.01, name="test", is_retried=False),
    ):
        wait_for(calls, 1)
        time.sleep(0.1)
        raise KeyError("of the block")
    assert len(calls) == 1
