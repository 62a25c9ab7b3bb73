"""Versions that land while responses run: spans, log-probabilities, ages, late joiners, loads that fail.

What these tests cannot see: a policy so large that its load takes longer than what it interrupts.
"""

import json
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from engines import start_sglang
from policies import save_tiny_policy
from test_rl import config
from test_worker import GROUP_SIZE, buffer, member, published, put

from tasks.engine.embedded import EmbeddedEngine
from tasks.engine.notices import Departure
from tasks.engine.protocol import Request, SamplingParams
from tasks.experience.buffer import ExperienceBuffer
from tasks.policy.dispatch.dispatcher import LocalDispatcher
from tasks.policy.models.model import load_policy
from tasks.policy.step.trainer import token_logprobs_and_entropy
from tasks.rl.assembly import assemble_frame, newest_version
from tasks.schema import ScoredFrame, make_frame

__all__ = ["buffer"]  # a fixture
PARAMS = SamplingParams(max_new_tokens=12, temperature=1.0, top_p=1.0, stop_ids=frozenset({1}))
EXACT = 16 * torch.finfo(torch.float32).eps
"""Four units of a value of about 4, as in test_engine_claims.py."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Versions 5, 6 and 7."""
    root = tmp_path_factory.mktemp("policies")
    return {version: save_tiny_policy(root / str(version), seed=version) for version in (5, 6, 7)}


class Lands:
    """Sampling parameters under which versions land: at the n-th look at ``temperature``, which is taken once
    a decoding step, the load of the n-th entry begins in another thread, as the worker's own would."""

    record_routing = "none"
    max_new_tokens, top_p, stop_ids = 12, 1.0, frozenset({1})

    def __init__(self, engine: EmbeddedEngine, loads: dict[int, tuple[Path, int]]) -> None:
        self.engine, self.loads, self.looks = engine, loads, 0
        self.threads: list[threading.Thread] = []

    @property
    def temperature(self) -> float:
        self.looks += 1
        if load := self.loads.get(self.looks):
            self.threads.append(threading.Thread(target=self.engine.load, args=load))
            self.threads[-1].start()
            assert self.engine._is_aborted.wait(5)
        return 1.0


def landed(
    buffer: ExperienceBuffer, folders: dict[int, Path], loads: dict[int, int], **changes: Any
) -> pl.DataFrame:
    """The samples of a portion that requires version 5; ``loads``: decoding step -> version that lands in
    it."""
    put(buffer, 1)
    engine = EmbeddedEngine(batch_size=16)
    engine.load(folders[5], 5)
    worker = member(
        buffer, "w", engine=engine, chunk_samples=99, is_deterministic=False, required_version=5, **changes
    )
    worker.params = Lands(engine, {step: (folders[version], version) for step, version in loads.items()})
    done = worker.drain(2)
    assert (done.num_portions, done.num_returned) == (1, 0) and buffer.outstanding(2) == 0
    frame = published(buffer)
    assert done.num_tokens == frame["response_ids"].list.len().sum(), "no token is sampled twice"
    return frame


def spans(frame: pl.DataFrame) -> list[list[tuple[int, int]]]:
    """(version, tokens) of each sample, in order."""
    return [
        [(s["policy_version"], s["num_tokens"]) for s in row["version_spans"] or ()]
        or [(row["policy_version"], len(row["response_ids"]))]
        for row in frame.rows(named=True)
    ]


def check_logprobs(frame: pl.DataFrame, folders: dict[int, Path], *, atol: float) -> None:
    """Each token has the log-probability that the trainer's model gives it with the version that chose it,
    reading all tokens before it with that version."""
    models = {v: load_policy(folder, dispatcher=LocalDispatcher()) for v, folder in folders.items()}
    differences = []
    for row, parts in zip(frame.rows(named=True), spans(frame), strict=True):
        ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
        first = 0
        for version, count in parts:
            expected = {
                v: token_logprobs_and_entropy(model, ids, torch.ones_like(ids), 1.0)[0].detach()
                for v, model in models.items()
            }
            here = slice(first, first + count)
            found = torch.tensor(row["behavior_logprob"])[here]
            by_version = {v: e[0, len(row["prompt_ids"]) :][here] for v, e in expected.items()}
            torch.testing.assert_close(found, by_version.pop(version), rtol=0, atol=atol)
            differences += [float((found - other).abs().max()) for other in by_version.values()]
            first += count
        assert first == len(row["response_ids"]) == len(row["behavior_logprob"])
    assert max(differences) > 10 * atol, "the versions must differ for this to say anything"


def test_a_version_that_lands_in_a_response_ends_one_span_and_begins_the_next(
    buffer: ExperienceBuffer, folders: dict[int, Path]
) -> None:
    """Golden: version 6 lands in the third step, so three tokens are of version 5 and the rest is of 6."""
    frame = landed(buffer, folders, {3: 6})
    lengths = frame["response_ids"].list.len().to_list()
    assert spans(frame) == [[(5, 3), (6, n - 3)] if n > 3 else [(5, n)] for n in lengths]
    assert sum(n > 3 for n in lengths) >= 3, "most were under way"
    assert set(frame["policy_version"]) == {5} and newest_version(frame) == 6
    assert set(frame["finish_reason"]) <= {"stop", "length"}


def test_each_span_has_exactly_its_versions_log_probabilities(
    buffer: ExperienceBuffer, folders: dict[int, Path]
) -> None:
    """Rows 10 and 11: no token behind the swap was chosen from keys and values of the weights before."""
    frame = landed(buffer, folders, {3: 6, 5: 7})
    assert [(5, 3), (6, 2), (7, 7)] in spans(frame)
    check_logprobs(frame, folders, atol=EXACT)


def test_a_version_that_lands_between_chunks_begins_the_next_samples(
    buffer: ExperienceBuffer, folders: dict[int, Path]
) -> None:
    put(buffer, 1)
    engine = EmbeddedEngine(batch_size=16)
    engine.load(folders[5], 5)
    worker = member(buffer, "w", engine=engine, is_deterministic=False, required_version=5)
    publish = buffer.publish

    def then_load(*arguments: Any, **named: Any) -> int:
        stored = publish(*arguments, **named)
        if engine.version == 5:
            engine.load(folders[6], 6)
        return stored

    buffer.publish = then_load  # type: ignore[method-assign]
    worker.drain(2)
    assert published(buffer)["policy_version"].to_list() == [5] * GROUP_SIZE + [6] * GROUP_SIZE


def test_a_mask_value_and_a_log_probability_a_token_and_the_age_of_the_oldest(
    buffer: ExperienceBuffer, folders: dict[int, Path]
) -> None:
    """Row 26, and admission: a sample with one token of version 5 is two versions old to version 7."""
    frame = landed(buffer, folders, {3: 6})
    judged = {"outcome": "score", "is_exact": False, "reason": "", "parts": None}
    rows = [row | judged | {"reward": float(index % 2)} for index, row in enumerate(frame.rows(named=True))]
    scored = make_frame(rows, ScoredFrame)
    admitted = {}
    for staleness in (1, 2):
        train, rejected, metrics = assemble_frame(
            scored, config(schedule={"max_staleness": staleness}), iteration=2, policy_version=7
        )
        assert len(train) + sum(rejected.values()) == len(frame), "the law of the ledger"
        admitted[staleness] = len(train)
        for row in train.rows(named=True):
            assert len(row["loss_mask"]) == len(row["response_ids"]) == len(row["behavior_logprob"])
            assert all(row["loss_mask"])
        if staleness == 1:
            assert rejected["stale"] == len(frame)
    assert admitted == {1: 0, 2: len(frame)} and "mixed_versions" not in metrics
    follows = config(**NEWEST | {"schedule": {"max_staleness": 2}})
    _, _, metrics = assemble_frame(scored, follows, iteration=2, policy_version=7)
    mixed = sum(len(parts) > 1 for parts in spans(frame))
    assert metrics["mixed_versions"] == pytest.approx(mixed / len(frame)) and metrics["age/2"] == len(frame)


def test_what_a_leaving_worker_parked_goes_on_under_the_newer_version_of_a_late_joiner(
    buffer: ExperienceBuffer, folders: dict[int, Path]
) -> None:
    put(buffer, 1)
    departure, engine = Departure(grace_seconds=0), EmbeddedEngine(batch_size=16)
    engine.load(folders[5], 5)

    class Leaves(Lands):
        @property
        def temperature(self) -> float:
            if self.looks == 5:
                departure.begin("SIGTERM")
                assert engine._is_aborted.wait(5)  # its attendant's
            return super().temperature

    first = member(
        buffer, "a", engine=engine, chunk_samples=99, is_deterministic=False, required_version=5,
        keeps_partial=True, departure=departure,
    )  # fmt: skip
    first.params = Leaves(engine, {3: (folders[6], 6)})  # type: ignore[assignment]
    done = first.drain(2)
    assert done.num_returned == 1 and done.num_parked > 0
    late = EmbeddedEngine(batch_size=16)
    late.load(folders[7], 7)
    second = member(
        buffer, "b", engine=late, chunk_samples=99, is_deterministic=False, required_version=5,
        keeps_partial=True,
    )  # fmt: skip
    second.params = PARAMS
    second.drain(2)
    frame = published(buffer)
    assert [(5, 3), (6, 3), (7, 6)] in spans(frame)
    check_logprobs(frame, folders, atol=EXACT)


def test_a_load_that_fails_leaves_the_engine_out_of_service_and_the_portion_uncharged(
    buffer: ExperienceBuffer, folders: dict[int, Path], tmp_path: Path
) -> None:
    """Rows 7 and 12: neither the old weights nor torn ones sample on under a name."""
    put(buffer, 1)
    for _ in range(2):  # a third would set the portion aside
        (lease,) = buffer.lease("before", iteration=2, policy_version=5)
        assert buffer.fail(lease, "its own fault")
    engine = EmbeddedEngine(batch_size=16)
    engine.load(folders[5], 5)
    worker = member(buffer, "w", engine=engine, chunk_samples=99, is_deterministic=False, required_version=5)

    class Tears(Lands):
        def load(self) -> None:
            with pytest.raises(Exception, match=r"config|model"):
                engine.load(tmp_path, 6)

        @property
        def temperature(self) -> float:
            self.looks += 1
            if self.looks == 3:
                self.threads.append(threading.Thread(target=self.load))
                self.threads[-1].start()
                assert engine._is_aborted.wait(5)
            return 1.0

    worker.params = Tears(engine, {})  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="must load a policy version"):
        worker.drain(2)
    assert engine.version is None
    assert buffer.produced(2).samples == 0, "nothing is published under either version's name"
    assert len(buffer.lease("next", iteration=2, policy_version=5)) == 1 and not buffer.poisoned(2)


def test_a_call_that_comes_during_a_load_waits_for_its_version(folders: dict[int, Path]) -> None:
    engine = EmbeddedEngine(batch_size=16)
    engine.load(folders[5], 5)
    is_loading, may_end = threading.Event(), threading.Event()

    class Slow(type(folders[6])):
        """A folder whose reader has to wait."""

        def __fspath__(self) -> str:
            is_loading.set()
            assert may_end.wait(5)
            return super().__fspath__()

    loader = threading.Thread(target=engine.load, args=(Slow(folders[6]), 6))
    loader.start()
    assert is_loading.wait(5)
    threading.Timer(0.2, may_end.set).start()
    ((one,),) = engine.generate([Request(prompt_ids=(2, 9, 3), seeds=(1,))], PARAMS)
    loader.join()
    assert one.version_spans == ((6, len(one.response_ids)),)


NEWEST = {
    "rollout": {"pool": "standing", "follow": "newest"}, "schedule": {"max_staleness": 1},
    "train": {"deterministic": False},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rollout": {"pool": "tasks", "follow": "newest"}}, "pool must be 'standing' with follow 'newest'"),
        ({"schedule": {"max_staleness": 0}}, "max_staleness must be at least 1 .* got 0.*Raise it"),
        ({"train": {"deterministic": True}}, "deterministic must be false .* bits do not repeat"),
        ({"environment": {"name": "calculator"}}, "must be 'required' with an environment that answers"),
    ],
)
def test_newer_versions_are_refused_where_they_make_no_sense(change: dict[str, Any], words: str) -> None:
    assert config(**NEWEST).rollout.follow == "newest" and config().rollout.follow == "required"
    with pytest.raises(ValueError, match=words):
        config(**NEWEST | change)


def num_running(url: str) -> int:
    """Requests that a server decodes."""
    with urllib.request.urlopen(f"{url}/v1/loads?include=core", timeout=5) as answer:
        return sum(load["num_running_reqs"] for load in json.load(answer)["loads"])


@pytest.mark.sglang
@pytest.mark.usefixtures("leave_servers")
def test_a_version_lands_in_the_responses_of_a_real_server(
    buffer: ExperienceBuffer, folders: dict[int, Path], tmp_path: Path
) -> None:
    """Aborted and resumed, as every SGLang can; ``test_sglang_real.py`` has the pause of newer ones."""
    is_cuda = torch.cuda.is_available()
    num_tokens = 1200 if is_cuda else 400  # enough that a load of milliseconds lands before the last one
    room = {"context_length": 4096, "max_total_tokens": 65536} if is_cuda else {}
    engine = start_sglang(tmp_path, in_flight="abort", **room)
    engine.load(folders[5], 5)
    put(buffer, 1)
    worker = member(buffer, "w", engine=engine, chunk_samples=99, is_deterministic=False, required_version=5)
    worker.params = replace(PARAMS, max_new_tokens=num_tokens, stop_ids=frozenset())

    def load_once_running() -> None:
        while num_running(engine.fleet.addresses[0].url) < 2 * GROUP_SIZE:
            time.sleep(0.01)
        engine.load(folders[6], 6)

    threading.Thread(target=load_once_running, daemon=True).start()
    done = worker.drain(2)
    frame = published(buffer)
    assert done.num_tokens == frame["response_ids"].list.len().sum() == num_tokens * len(frame)
    for (old, count), (new, rest) in spans(frame):
        assert (old, new, count + rest) == (5, 6, num_tokens) and count and rest
    atol = 1e-2 if is_cuda else 1e-4
    check_logprobs(frame, {v: folders[v] for v in (5, 6)}, atol=atol)
