"""Requests to SGLang servers: order, deadlines, connections, those that break off and are asked again."""

import asyncio
import gc
import itertools
import threading
import time

import pytest
from recorded_sglang import RecordedRouter, attached, recorded

from tasks.engine import sglang, sglang_client
from tasks.engine.protocol import Request, SamplingParams
from tasks.engine.sglang import SglangEngine
from tasks.engine.sglang_client import Budget, SglangError

PARAMS = SamplingParams(max_new_tokens=12, temperature=1.0, top_p=1.0, stop_ids=frozenset({1}))
REQUESTS = [Request(prompt_ids=(2, 9, 10, 11, 3), seeds=tuple(range(4)))] * 4


def test_a_request_that_broke_off_is_asked_again_while_its_server_holds_the_first(untied):
    """Under the name of the first it was refused: `Duplicate request ID`."""
    with recorded(stumbles={1}) as server:
        engine = attached(server)
        engine.load(untied[0], 3)
        groups = engine.generate(REQUESTS[:1], PARAMS)
        assert [completion.finish_reason for completion in groups[0]] == ["stop"] * 4


def test_requests_that_break_off_together_are_one_failure_of_their_server(untied):
    """Each counted, and eight took the only server out of service, though it answered all that came."""
    with recorded(stumbles=set(range(1, 9)), seconds=0.05) as server:
        engine = attached(server, max_running_requests=32)
        engine.load(untied[0], 3)
        groups = engine.generate(REQUESTS * 2, PARAMS)
        assert [len(group) for group in groups] == [4] * 8
        assert "out of service" not in engine.describe()


def test_failures_one_after_another_take_a_server_out(untied):
    with recorded(stumbles=set(range(1, 9))) as server:
        engine = attached(server)
        engine.load(untied[0], 3)
        with pytest.raises(SglangError, match="broke off"):
            engine.generate(REQUESTS[:1], PARAMS)
        assert "3 failures in a row" in engine.describe()


def test_a_stuck_server_gets_one_deadline_and_no_more(untied):
    """Its requests pass their deadlines together. As one failure they left it in service for two more."""
    with recorded(seconds=4.0) as stuck, recorded(seconds=0.05) as other:
        engine = attached(stuck, other, max_running_requests=16, request_seconds=0.8)
        engine.load(untied[0], 3)
        groups = engine.generate(REQUESTS * 25, PARAMS)
        assert [len(group) for group in groups] == [4] * 100
        assert "1 of 2 attached" in engine.describe() and "must end within" in engine.describe()
        assert 5 <= stuck.state["generated"] < 10  # half of the budget of 40 samples, once


def test_a_sample_that_breaks_off_behind_a_router_leaves_none_of_its_group_behind(untied):
    """The others went on unheard, beside those that were asked again."""
    with (
        recorded() as server,
        recorded(RecordedRouter, workers={}, stumbles={4}, seconds=0.3) as router,
    ):
        engine = attached(server, router_url=f"http://127.0.0.1:{router.server_address[1]}")
        engine.load(untied[0], 7)
        groups = engine.generate(REQUESTS[:1], PARAMS)
        assert [completion.finish_reason for completion in groups[0]] == ["stop"] * 4
        assert router.state["generated"] == 8 and router.state["given_up"] == 3


def test_a_connection_that_a_server_may_be_closing_is_not_used(untied, monkeypatch):
    """SGLang closes one that was idle for 5 s, and a worker that went on in that moment lost all it sent."""
    assert sglang_client.IDLE_SECONDS < 5
    monkeypatch.setattr(sglang_client, "IDLE_SECONDS", 1.0)
    with recorded() as server:
        engine = attached(server)
        engine.load(untied[0], 3)
        engine.generate(REQUESTS[:1], PARAMS)
        before = server.state["connections"]
        engine.generate(REQUESTS[:1], PARAMS)
        assert server.state["connections"] == before, "one in use goes on"
        time.sleep(1.5)
        engine.generate(REQUESTS[:1], PARAMS)
        assert server.state["connections"] == before + 1


def test_a_server_that_answers_no_question_holds_up_its_requests_for_seconds(untied, monkeypatch):
    """They waited ten minutes, the deadline of a weight update, before another server got them."""
    monkeypatch.setattr(sglang, "ASK_SECONDS", 0.3)
    with recorded() as stuck, recorded() as other:
        engine = attached(stuck, other)
        engine.load(untied[0], 3)
        stuck.state |= {"thinks_seconds": 20.0, "stumbles": set(range(1, 100))}
        start = time.monotonic()
        assert [len(group) for group in engine.generate(REQUESTS, PARAMS)] == [4] * 4
        assert time.monotonic() - start < 10.0
        assert "model_info failed: TimeoutError" in engine.describe()


def test_a_request_has_a_deadline_that_names_it(untied):
    with recorded(seconds=1.0) as server:
        engine = attached(server, request_seconds=0.2, max_failures=2)
        engine.load(untied[0], 3)
        with pytest.raises(
            SglangError, match=r"request \S+-v\d+-000000-000000-0000\S* must end within .*0.2 on"
        ):
            engine.generate(REQUESTS[:1], PARAMS)


def test_processes_that_share_servers_name_their_requests_apart(untied, monkeypatch):
    """Each counted from 0, and of two that asked at once the second was refused."""
    with recorded() as server:
        for _ in range(2):
            monkeypatch.setattr(SglangEngine, "_numbers", itertools.count())  # as in a process of its own
            engine = attached(server)
            engine.load(untied[0], 3)
            engine.generate(REQUESTS[:1], PARAMS)
        assert len(set(server.state["asked"])) == len(server.state["asked"]) >= 8


def on_their_way(size, counts):
    """The order in which requests of so many sequences go, and the most sequences at once."""

    async def main():
        budget, order, most = Budget(size), [], 0

        async def one(index, count):
            nonlocal most
            async with budget.share(count):
                order.append(index)
                most = max(most, budget.used)
                await asyncio.sleep(0.001)

        await asyncio.gather(*(one(index, count) for index, count in enumerate(counts)))
        assert budget.used == 0
        return order, most

    return asyncio.run(main())


def test_requests_go_in_the_order_they_came_and_never_more_than_fit():
    counts = [3, 5, 1, 8, 2, 2, 30, 1]  # 30 goes alone
    assert on_their_way(8, counts) == (list(range(len(counts))), 30)
    assert on_their_way(8, [4] * 7)[1] == 8


def test_a_request_that_gives_up_waiting_holds_nobody_up():
    async def main():
        budget = Budget(1)
        async with budget.share(1):
            waiting = asyncio.create_task(budget.share(1).__aenter__())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(1), budget.share(1):
            assert budget.used == 1
        assert budget.used == 0

    asyncio.run(main())


def test_a_call_that_fails_leaves_nothing_on_its_way(untied):
    """Otherwise a server would go on with samples of a lease that somebody else has by now."""
    with recorded(lies="2") as server:
        engine = attached(server)
        engine.load(untied[0], 3)
        with pytest.raises(SglangError, match="must be sampled by version 3"):
            engine.generate(REQUESTS * 50, PARAMS)
        time.sleep(0.2)
        sent = server.state["generated"]
        time.sleep(0.3)
        assert server.state["generated"] == sent < 50 * 4
        assert engine.fleet.budget.used == 0


def test_an_abort_keeps_what_waits_from_being_sent(untied):
    with recorded(seconds=0.05) as server:
        engine = attached(server)
        engine.load(untied[0], 3)
        threading.Timer(0.3, engine.abort).start()
        groups = engine.generate(REQUESTS * 50, PARAMS)
        reasons = [group[0].finish_reason for group in groups]
        assert reasons[0] == "stop" and reasons[-1] == "abort"
        assert server.state["generated"] == reasons.count("stop")


def test_a_fleet_that_nobody_holds_ends_its_connections_and_its_thread(untied):
    with recorded() as server:
        engine = attached(server)
        engine.load(untied[0], 3)
        loop, client = engine.fleet.loop, engine.fleet.client
        assert not client.session.closed and loop._thread.is_alive()
        session = client.session
        del engine
        gc.collect()
        loop._thread.join(5)
        assert session.closed and not loop._thread.is_alive()
