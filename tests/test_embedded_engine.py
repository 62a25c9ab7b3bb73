"""What the embedded engine promises beyond the contract: bits that depend on a sample's identity alone, and
the sampler. Blind spot: tiny policies."""

import json
import math

import numpy as np
import pytest
import torch
from policies import save_tiny_policy

from tasks.engine.embedded import EmbeddedEngine
from tasks.engine.make import make_engine, sampling_params
from tasks.engine.protocol import Request, SamplingParams
from tasks.engine.sampling import sample, uniforms
from tasks.policy.models.tokenizer import stop_ids
from tasks.rollout_config import RolloutConfig


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def folder(request, tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp(request.param), family=request.param)


@pytest.fixture(scope="module")
def engine(folder):
    engine = EmbeddedEngine(batch_size=16)
    engine.load(folder, 7)
    return engine


def params(**changes):
    defaults = {"max_new_tokens": 12, "temperature": 1.0, "top_p": 1.0, "stop_ids": frozenset({1})}
    return SamplingParams(**(defaults | changes))


REQUESTS = [
    Request(prompt_ids=(2, 9, 10, 11, 3), seeds=(11, 12, 13)),
    Request(prompt_ids=(2, 9, 3), seeds=(21, 22)),
    Request(prompt_ids=(2, 5, 6, 7, 8, 9, 10, 3), seeds=(31,)),
]


def tokens(completions):
    return [[c.response_ids for c in group] for group in completions]


def test_same_identity_same_tokens_and_different_samples_differ(engine):
    first, second = engine.generate(REQUESTS, params()), engine.generate(REQUESTS, params())
    assert tokens(first) == tokens(second)
    samples = [tuple(ids) for group in tokens(first) for ids in group]
    assert len(set(samples)) == len(samples)


def test_a_sample_does_not_depend_on_its_neighbours(engine):
    together = tokens(engine.generate(REQUESTS, params()))
    alone = [tokens(engine.generate([request], params()))[0] for request in REQUESTS]
    assert together == alone


def test_batches_smaller_than_the_request_list_change_nothing(engine, folder):
    small = EmbeddedEngine(batch_size=2)
    small.load(folder, 7)
    assert tokens(small.generate(REQUESTS, params())) == tokens(engine.generate(REQUESTS, params()))


class AbortsAfter:
    """Sampling parameters that abort the engine at the n-th look at ``temperature``: once a decoding step."""

    record_routing = "none"

    def __init__(self, engine, step):
        self.engine, self.steps_left, self.max_new_tokens, self.top_p, self.stop_ids = (
            engine,
            step,
            12,
            1.0,
            frozenset({1}),
        )

    @property
    def temperature(self):
        self.steps_left -= 1
        if self.steps_left == 0:
            self.engine.abort()
        return 1.0


def test_abort_returns_between_steps_with_what_was_sampled_so_far(engine):
    whole = engine.generate(REQUESTS, params())
    cut = engine.generate(REQUESTS, AbortsAfter(engine, 3))
    reasons = set()
    for before, after in zip(whole, cut, strict=True):
        for long, short in zip(before, after, strict=True):
            assert short.response_ids == long.response_ids[:3] and short.logprobs == long.logprobs[:3]
            assert short.finish_reason == ("abort" if len(long.response_ids) > 3 else long.finish_reason)
            reasons.add(short.finish_reason)
    assert "abort" in reasons
    assert tokens(engine.generate(REQUESTS, params())) == tokens(whole), "an abort ends with its call"


def test_a_continuation_samples_what_an_undisturbed_response_would_have(engine):
    """Same tokens from the same seed; log-probabilities within what another batch shape may change."""
    whole = engine.generate(REQUESTS, params())
    cuts = iter([1, 4, 2, 3, 5, 1])
    requests, rest = [], []
    for request, group in zip(REQUESTS, whole, strict=True):
        for seed, full in zip(request.seeds, group, strict=True):
            if (cut := next(cuts)) < len(full.response_ids):
                prompt = (*request.prompt_ids, *full.response_ids[:cut])
                requests.append(Request(prompt_ids=prompt, seeds=(seed,), num_sampled=cut))
                rest.append((full, cut))
    assert len(rest) > 3
    for (full, cut), (found,) in zip(rest, engine.generate(requests, params()), strict=True):
        assert found.response_ids == full.response_ids[cut:] and found.finish_reason == full.finish_reason
        assert found.logprobs == pytest.approx(full.logprobs[cut:], abs=1e-4)


def test_batches_behind_an_abort_are_not_begun(folder):
    engine = EmbeddedEngine(batch_size=2)
    engine.load(folder, 7)
    first, *_, last = engine.generate(REQUESTS, AbortsAfter(engine, 1))
    assert len(first[0].response_ids) == 1 and last[0].response_ids == []
    assert last[0].finish_reason == "abort"


def test_an_engine_without_a_policy_refuses_to_generate(tmp_path):
    engine = EmbeddedEngine(batch_size=4)
    with pytest.raises(RuntimeError, match="load a policy version"):
        engine.generate(REQUESTS, params())


def test_the_configured_engine_takes_all_end_ids_of_the_policy(folder, tmp_path):
    assert make_engine(RolloutConfig(), dtype="float32").describe().startswith("embedded")
    assert sampling_params(RolloutConfig(), folder).stop_ids == {1}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    assert stop_ids(tmp_path) == {1, 5}
    (tmp_path / "generation_config.json").write_text("{}")
    with pytest.raises(ValueError, match="must name an eos_token_id"):
        stop_ids(tmp_path)


def test_sampling_follows_the_distribution():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(40_000, 4)
    token, logprob = sample(logits, uniforms(np.arange(40_000), 3), temperature=1.0, top_p=1.0)
    share = torch.bincount(token, minlength=4) / len(token)
    # standard error of a share near 0.5 with 40,000 draws is 0.0025; four of them
    torch.testing.assert_close(share, torch.tensor([0.5, 0.25, 0.125, 0.125]), rtol=0, atol=0.01)
    torch.testing.assert_close(logprob.exp(), torch.tensor([0.5, 0.25, 0.125, 0.125])[token])


def test_temperature_and_top_p_give_the_logprob_of_what_was_sampled():
    logits = torch.tensor([[4.0, 3.0, 2.0, 0.0]]).expand(5_000, 4)
    token, logprob = sample(logits, uniforms(np.arange(5_000), 0), temperature=2.0, top_p=0.8)
    # softmax of (2, 1.5, 1, 0) = .455 .276 .167 .102 -> the first three reach 0.8 and are renormalised
    weights = [math.exp(2.0), math.exp(1.5), math.exp(1.0)]
    assert set(token.tolist()) == {0, 1, 2}
    expected = torch.tensor([w / sum(weights) for w in weights]).log()[token]
    torch.testing.assert_close(logprob, expected)


def test_uniforms_depend_on_seed_and_step_alone():
    seeds = np.array([3, 4, 3])
    first = uniforms(seeds, 0)
    assert first[0] == first[2] and first[0] != first[1] and (uniforms(seeds, 1) != first).all()
    many = uniforms(np.arange(10_000), 5)
    assert many.min() >= 0 and many.max() < 1 and abs(many.mean() - 0.5) < 0.02
