"""SGLang servers that die, refuse, lie or lag: what a fleet does. Driven by a server that answers as SGLang
was recorded to; what SGLang itself does is tested in ``test_sglang_real.py``.
"""

import os
import shutil
import threading
import time
from collections import Counter

import pytest
from recorded_sglang import RecordedRouter, attached, recorded

from tasks.engine.protocol import Request, SamplingParams
from tasks.engine.sglang_client import SglangError

PARAMS = SamplingParams(max_new_tokens=12, temperature=1.0, top_p=1.0, stop_ids=frozenset({1}))
REQUESTS = [Request(prompt_ids=(2, 9, 10, 11, 3), seeds=tuple(range(4)))] * 4


def test_no_traffic_before_the_engine_reports_exactly_the_required_version(untied):
    """A recovered engine that serves base weights under any name is out of service (complaint 7)."""
    with recorded(claims="base") as server:
        engine = attached(server)
        with pytest.raises(SglangError, match=r"must hold weight version 3, got 'base'"):
            engine.load(untied[0], 3)
        assert engine.version is None
        with pytest.raises(RuntimeError, match="load a policy version"):
            engine.generate(REQUESTS, PARAMS)


def test_a_torn_update_takes_the_engine_out_of_service(untied):
    """Complaint 12: an update that fails never leaves old weights under a new name."""
    with recorded() as server:
        engine = attached(server)
        engine.load(untied[0], 3)
        server.state["refuses_updates"] = True
        with pytest.raises(SglangError, match="torn"):
            engine.load(untied[1], 4)
        assert engine.version is None


def test_weights_that_did_not_change_with_their_files_are_noticed(untied):
    with recorded() as server:
        engine = attached(server)
        engine.load(untied[0], 3)
        server.state["keeps_weights"] = True
        with pytest.raises(SglangError, match="reports the same weights than before"):
            engine.load(untied[1], 4)


def test_the_same_weights_in_other_files_are_no_fault_of_the_server(untied, tmp_path):
    """A step may move no weight by a whole unit: then the next version has the files of the one before, or
    copies of them, and weights that did not change are right."""
    shutil.copytree(untied[0], tmp_path / "copied")
    (tmp_path / "linked").mkdir()
    for path in untied[0].iterdir():
        os.link(path, tmp_path / "linked" / path.name)
    with recorded() as server:
        engine = attached(server)
        for version, folder in enumerate((untied[0], tmp_path / "copied", untied[0], tmp_path / "linked")):
            engine.load(folder, version)
        server.state["drift"] = 1
        with pytest.raises(SglangError, match="reports other weights than before"):
            engine.load(untied[0], 9)


def test_tokens_of_another_version_are_refused(untied):
    """Each answer names the version that sampled it; a mismatch is an error, not data (complaint 11)."""
    with recorded(lies="2") as server:
        engine = attached(server)
        engine.load(untied[0], 3)
        with pytest.raises(SglangError, match=r"must be sampled by version 3, the server reports '2'"):
            engine.generate(REQUESTS, PARAMS)


def test_an_abort_that_nobody_asked_for_is_an_error(untied):
    with recorded(reason={"type": "abort", "message": "out of memory"}) as server:
        engine = attached(server)
        engine.load(untied[0], 3)
        with pytest.raises(SglangError, match="out of memory"):
            engine.generate(REQUESTS, PARAMS)


@pytest.mark.parametrize("num_groups", [1, 2, 64])
def test_requests_that_a_server_aborts_as_it_ends_go_to_the_others(untied, num_groups):
    """They ended the worker, though another server was there: the one that ends had the fewest on its way."""
    with recorded(aborts_until=10**6) as ending, recorded() as other:
        engine = attached(ending, other)
        engine.load(untied[0], 3)
        groups = engine.generate(REQUESTS[:1] * num_groups, PARAMS)
        assert {completion.finish_reason for group in groups for completion in group} == {"stop"}
        assert ending.state["generated"] >= 1 and other.state["generated"] == num_groups
        if num_groups == 64:
            assert "aborted by the server" in engine.describe() and ending.state["generated"] >= 3


def test_a_server_spares_its_old_objects_from_the_first_version_on(untied):
    with recorded() as server:
        engine = attached(server)
        for version in (3, 4):
            engine.load(untied[version % 2], version)
        assert server.state["told"].count("freeze_gc") == 1


def generate_and_abort(engine, server, requests):
    """Abort once the server has something of the call."""
    call = threading.Thread(target=engine.generate, args=(requests, PARAMS))
    call.start()
    while not server.state.get("running"):
        assert call.is_alive()
        time.sleep(0.01)
    engine.abort()
    call.join()


def test_an_abort_finds_a_request_that_was_asked_again(untied):
    pair = Request(prompt_ids=(2, 9, 3), seeds=(0, 1))
    with recorded(stumbles={1}, seconds=1.0) as server:
        engine = attached(server)
        engine.load(untied[0], 3)
        generate_and_abort(engine, server, [pair])
        names = set(server.state["aborted"])
        assert sorted(name.endswith(".1") for name in names) == [False, False, True, True]


def test_an_abort_is_repeated_until_nothing_of_it_is_left(untied):
    """A request that is on its way when an abort arrives escapes it (sgl-project/sglang#13338)."""
    with recorded(seconds=1.0) as server:
        engine = attached(server)
        engine.load(untied[0], 3)
        generate_and_abort(engine, server, REQUESTS[:1])
        assert min(Counter(server.state["aborted"]).values()) >= 2


def test_prompts_that_begin_alike_go_one_after_another_and_answers_keep_their_order(untied):
    prompts = [(2, 9, 3), (2, 5, 6), (2, 9), (4, 8), (2, 5)]
    requests = [Request(prompt_ids=ids, seeds=(0, 1)) for ids in prompts]
    with recorded(tells_prompts=True) as server:
        engine = attached(server, max_running_requests=1)  # one group at a time
        engine.load(untied[0], 3)
        server.state["asked"].clear()
        groups = engine.generate(requests, PARAMS)
        places = [int(name.split("-")[-2]) for name in server.state["asked"][::2]]
        assert [prompts[place] for place in places] == sorted(prompts)
        answers = [[completion.response_ids for completion in group] for group in groups]
        assert answers == [[[ids[-1], 1]] * 2 for ids in prompts]


def test_a_request_that_no_server_takes_leaves_all_in_service(untied):
    """A prompt behind the context counted as a failure of each server that refused it; none was left."""
    with recorded(context=8) as first, recorded(context=8) as second:
        engine = attached(first, second)
        engine.load(untied[0], 3)
        long = Request(prompt_ids=(2, *[9] * 8), seeds=(0,))
        for _ in range(2):
            with pytest.raises(SglangError, match=r"answered 400: .*context length"):
                engine.generate([long], PARAMS)
        assert len(engine.fleet.serving) == 2
        assert first.state.get("generated", 0) + second.state.get("generated", 0) == 2, "asked once each time"
        assert len(engine.generate(REQUESTS, PARAMS)) == 4


def test_a_server_that_dies_hands_its_requests_to_the_others(untied):
    with recorded() as first, recorded(dies_at=2) as second:
        engine = attached(first, second)
        engine.load(untied[0], 3)
        groups = engine.generate(REQUESTS * 4, PARAMS)
        assert [len(group) for group in groups] == [4] * 16
        assert [address.is_out for address in engine.fleet.addresses] == [False, True]
        assert engine.fleet.budget.size == 10, "no more on its way than the one that is left takes"


def test_the_last_server_that_dies_ends_the_call_and_is_named(untied):
    with recorded(dies_at=1) as server:
        engine = attached(server)
        engine.load(untied[0], 3)
        with pytest.raises(SglangError, match=r"broke off on http://127.0.0.1|no SGLang server is left"):
            engine.generate(REQUESTS, PARAMS)


def test_a_server_that_cannot_adopt_a_version_is_left_out_and_named_until_it_can(untied):
    """Its requests go to the other; the next version asks it again (complaints 7 and 12)."""
    with recorded() as first, recorded() as second:
        engine = attached(first, second)
        engine.load(untied[0], 3)
        assert "2 of 2 attached" in engine.describe() and "started by others" in engine.describe()
        second.state["refuses_updates"] = True
        engine.load(untied[1], 4)
        second.state["generated"] = 0
        assert [len(group) for group in engine.generate(REQUESTS, PARAMS)] == [4] * 4
        assert second.state["generated"] == 0
        url = f"http://127.0.0.1:{second.server_address[1]}"
        assert "1 of 2 attached" in engine.describe()
        assert f"out of service: {url}/update_weights_from_disk answered 400" in engine.describe()
        second.state["refuses_updates"] = False
        engine.load(untied[0], 5)
        assert engine.generate(REQUESTS, PARAMS) and second.state["generated"] > 0
        assert "out of service" not in engine.describe()


def test_the_router_has_exactly_the_servers_that_adopted_the_version(untied):
    """It answers 202 to who joins. A dead worker it would notice after a minute only."""
    with recorded() as first, recorded() as second, recorded(RecordedRouter, workers={}) as router:
        urls = [f"http://127.0.0.1:{server.server_address[1]}" for server in (first, second)]
        router.state["workers"]["w9"] = urls[0]
        engine = attached(first, second, router_url=f"http://127.0.0.1:{router.server_address[1]}")
        for version, refuses in ((3, False), (4, True), (5, False)):
            second.state["refuses_updates"] = refuses
            engine.load(untied[version % 2], version)
            expected = urls[:1] if refuses else urls
            assert sorted(router.state["workers"].values()) == sorted(expected)
            assert len(engine.fleet.serving) == len(expected), engine.describe()


def test_a_version_is_refused_when_no_server_is_left_to_adopt_it(untied):
    with recorded(is_dead=True) as first, recorded(refuses_updates=True) as second:
        engine = attached(first, second)
        with pytest.raises(SglangError, match="could adopt version 3") as caught:
            engine.load(untied[0], 3)
        assert all(f":{server.server_address[1]}/" in str(caught.value) for server in (first, second))
        assert engine.version is None


def test_a_server_left_out_takes_its_share_of_requests_on_their_way_with_it(untied):
    with recorded() as first, recorded() as second:
        engine = attached(first, second, max_running_requests=16)
        engine.load(untied[0], 3)
        assert engine.fleet.budget.size == 40
        second.state["is_dead"] = True
        engine.load(untied[1], 4)
        assert engine.fleet.budget.size == 20


def test_a_server_that_cannot_swap_under_requests_is_refused_with_the_version_that_can(untied):
    with recorded() as server:
        engine = attached(server, in_flight="pause")
        with pytest.raises(ValueError, match=r"must have SGLang 0\.5\.21 or newer, got 0\.5\.17"):
            engine.load(untied[0], 3)
        assert engine.version is None


def test_a_swap_under_requests_is_paused_and_continued_and_a_torn_one_aborts_them(untied):
    """Complaint 12: requests must not go on with a part of the old weights and a part of the new."""
    with recorded(build="0.5.21") as server:
        engine = attached(server, in_flight="pause")
        for version, folder in enumerate(untied):
            engine.load(folder, version)
        swapped = ["pause_generation", "update_weights_from_disk", "continue_generation", "generate"]
        server.state["told"].remove("freeze_gc")  # once, after the first
        assert server.state["told"] == 2 * swapped, "and a score, by which the new weights are known"
        server.state |= {"refuses_updates": True, "told": []}
        with pytest.raises(SglangError, match="torn"):
            engine.load(untied[0], 2)
        torn = [*swapped[:2], "abort_request", "continue_generation"]
        assert server.state["told"] == torn and server.state["aborted"] == ["all"]
        assert engine.version is None


@pytest.mark.parametrize("in_flight", ["finish", "abort"])
def test_a_call_that_comes_during_a_load_waits_for_its_version(untied, in_flight):
    """Before, it could find no version loaded, and its portion was charged with that."""
    with recorded(update_seconds=0.5) as server:
        engine = attached(server, in_flight=in_flight)
        engine.load(untied[0], 3)
        loader = threading.Thread(target=engine.load, args=(untied[1], 4))
        loader.start()
        while len(server.state["updates"]) < 2:
            time.sleep(0.01)
        assert engine.version is None
        groups = engine.generate(REQUESTS, PARAMS)
        loader.join()
        assert {done.version_spans for group in groups for done in group} == {((4, 2),)}
