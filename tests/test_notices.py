"""When a worker has to leave. What these tests cannot see: the real metadata service and its hop limit."""

import math
import os
import signal
import time
from collections.abc import Iterator

import pytest
from metadata import MetadataServer

from tasks.engine.notices import Departure, Metadata, departing


@pytest.fixture
def metadata() -> Iterator[MetadataServer]:
    server = MetadataServer()
    yield server
    server.close()


def until_due(departure: Departure) -> None:
    deadline = time.monotonic() + 5
    while not departure.is_due:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_sigterm_begins_a_departure_with_the_grace_period_and_ends_with_143() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with departing(grace_seconds=30) as departure:
        assert (departure.is_due, departure.seconds_left()) == (False, math.inf)
        departure.exit()
        os.kill(os.getpid(), signal.SIGTERM)
        until_due(departure)
    assert departure.reason == "SIGTERM" and 25 < departure.seconds_left() <= 30
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(SystemExit) as ended:
        departure.exit()
    assert ended.value.code == 143


def test_nothing_is_asked_unless_an_address_is_configured(metadata: MetadataServer) -> None:
    metadata.reclaim(in_seconds=120)
    with departing(grace_seconds=30, poll_seconds=0.02) as departure:
        time.sleep(0.1)
    assert not departure.is_due and metadata.requests == []


def test_a_reclaim_notice_is_polled_with_a_token_and_sets_the_shorter_deadline(
    metadata: MetadataServer,
) -> None:
    with departing(grace_seconds=60, metadata_url=metadata.url, poll_seconds=0.02) as departure:
        time.sleep(0.1)
        assert not departure.is_due and metadata.requests[0] == ("PUT", "/latest/api/token")
        metadata.reclaim(in_seconds=25)
        until_due(departure)
    assert departure.reason == "instance-action terminate"
    assert 16 < departure.seconds_left() <= 20, "25 s less the reserve of 5; the notice counts whole seconds"
    assert metadata.requests.count(("PUT", "/latest/api/token")) == 1


def test_a_rebalance_recommendation_has_no_deadline_until_the_reclaim_comes(metadata: MetadataServer) -> None:
    service, departure = Metadata(metadata.url), Departure(grace_seconds=60)
    metadata.recommend_rebalance()
    service.apply(departure)
    assert (departure.reason, departure.seconds_left()) == ("rebalance recommendation", math.inf)
    metadata.reclaim(in_seconds=600)
    service.apply(departure)
    assert 55 < departure.seconds_left() <= 60 and departure.reason == "rebalance recommendation"


def test_an_expired_token_is_fetched_anew(metadata: MetadataServer) -> None:
    service, departure = Metadata(metadata.url), Departure(grace_seconds=60)
    service.apply(departure)
    metadata.token = "token-2"
    metadata.reclaim(in_seconds=600)
    service.apply(departure)
    assert departure.is_due and metadata.requests.count(("PUT", "/latest/api/token")) == 2


def test_a_silent_metadata_service_is_said_once_and_harms_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with departing(grace_seconds=30, metadata_url="http://127.0.0.1:1", poll_seconds=0.02) as departure:
        time.sleep(0.2)
    assert not departure.is_due
    assert capsys.readouterr().out.count("must answer to give early notice") == 1
