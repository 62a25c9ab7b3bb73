"""The rollout engine for machines without a GPU: the trainer's own model code with a key-value cache.

Shape key: P prompts, B sequences still being decoded, L prompt positions (left-padded), V vocabulary.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from tasks.engine.protocol import Completion, Request, SamplingParams
from tasks.engine.sampling import sample, uniforms
from tasks.policy.dispatch.dispatcher import LocalDispatcher
from tasks.policy.models.model import load_policy
from tasks.policy.models.replay import RoutingRecorder


class EmbeddedEngine:
    """Batched sampling; prompts are prefetched once for all their samples, finished rows leave the batch."""

    def __init__(self, *, batch_size: int, dtype: torch.dtype = torch.float32):
        # One thread repeats bit for bit, and matrices this small gain nothing from a second; add workers
        # instead.
        torch.set_num_threads(1)
        self.batch_size, self.dtype = batch_size, dtype
        self.model: torch.nn.Module | None = None
        self.version: int | None = None
        self.recorder: RoutingRecorder | None = None
        self._is_aborted = threading.Event()
        self._loading, self._running = threading.Lock(), threading.Lock()

    def load(self, folder: Path, version: int) -> None:
        with self._loading:  # whoever wants to generate waits here
            self._is_aborted.set()
            with self._running:
                self.model, self.version = None, None
                self.model = load_policy(folder, dispatcher=LocalDispatcher(), dtype=self.dtype).eval()
                self.recorder = None
                self.version = version

    def describe(self) -> str:
        return f"embedded (transformers, key-value cache, {self.dtype}, batches of {self.batch_size})"

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Completion]]:
        with self._loading:
            self._running.acquire()
            self._is_aborted.clear()
        try:
            if self.model is None or self.version is None:
                raise RuntimeError(
                    "the engine must load a policy version before it generates; call load first."
                )
            recorder, version = self._recorder(params), self.version
            completions: list[list[Completion]] = []
            for batch in _batches(requests, self.batch_size):
                completions += _generate_batch(self.model, recorder, batch, params, self._is_aborted)
        finally:
            self._running.release()
        return [
            [replace(one, version_spans=((version, len(one.response_ids)),)) for one in group]
            for group in completions
        ]

    def _recorder(self, params: SamplingParams) -> RoutingRecorder | None:
        is_on = params.record_routing != "none"
        if self.recorder is None and is_on and self.model is not None:
            self.recorder = RoutingRecorder(self.model)
        if self.recorder is not None:
            self.recorder.is_on = is_on
        return self.recorder if is_on else None

    def abort(self) -> None:
        self._is_aborted.set()


def _batches(requests: Sequence[Request], batch_size: int) -> list[list[Request]]:
    """Consecutive requests whose samples fill at most ``batch_size`` rows; at least one request each."""
    batches: list[list[Request]] = [[]]
    rows = 0
    for request in requests:
        if batches[-1] and rows + len(request.seeds) > batch_size:
            batches.append([])
            rows = 0
        batches[-1].append(request)
        rows += len(request.seeds)
    return [batch for batch in batches if batch]


def _generate_batch(
    model: torch.nn.Module,
    recorder: RoutingRecorder | None,
    requests: Sequence[Request],
    params: SamplingParams,
    is_aborted: threading.Event,
) -> list[list[Completion]]:
    copies = [len(request.seeds) for request in requests]
    if is_aborted.is_set():
        empty = Completion(response_ids=[], logprobs=[], finish_reason="abort")
        return [[empty] * count for count in copies]
    seeds = np.array([seed for request in requests for seed in request.seeds], dtype=np.uint64)
    begun = np.repeat([request.num_sampled for request in requests], copies)
    state = _Decoding(model, requests, copies)
    routing = _Routing(recorder, requests, copies)
    tokens: list[list[int]] = [[] for _ in seeds]
    logprobs: list[list[float]] = [[] for _ in seeds]
    stop = torch.tensor(sorted(params.stop_ids))
    alive = torch.arange(len(seeds))  # the row of the batch -> the sample it belongs to
    for step in range(params.max_new_tokens):
        place_B = begun[alive.numpy()] + step
        token_B, logprob_B = sample(
            state.logits_BV,
            uniforms(seeds[alive.numpy()], place_B),
            temperature=params.temperature,
            top_p=params.top_p,
        )
        for row, token, logprob in zip(alive.tolist(), token_B.tolist(), logprob_B.tolist(), strict=True):
            tokens[row].append(token)
            logprobs[row].append(min(logprob, 0.0))
        goes_on = ~torch.isin(token_B, stop) & torch.from_numpy(place_B + 1 < params.max_new_tokens)
        if not goes_on.any():
            break
        kept = goes_on.nonzero().squeeze(1)
        alive = alive[kept]
        if is_aborted.is_set():
            break
        state.advance(token_B, kept)
        routing.add(alive.tolist())
    budgets = (params.max_new_tokens - begun).tolist()
    rows = (
        _completion(tokens[sample], logprobs[sample], params, budget, *routing.of(sample, params))
        for sample, budget in enumerate(budgets)
    )
    return [[next(rows) for _ in range(count)] for count in copies]


def _completion(
    ids: list[int],
    logprobs: list[float],
    params: SamplingParams,
    budget: int,
    experts: np.ndarray | None,
    weights: np.ndarray | None,
) -> Completion:
    is_stopped = ids[-1] in params.stop_ids
    is_full = len(ids) == budget
    return Completion(
        response_ids=ids,
        logprobs=logprobs,
        finish_reason="stop" if is_stopped else "length" if is_full else "abort",
        routed_experts=experts,
        routed_weights=weights,
    )


class _Routing:
    """The routing record of every sample of a batch; empty where none is asked for."""

    def __init__(self, recorder: RoutingRecorder | None, requests: Sequence[Request], copies: list[int]):
        self.recorder = recorder
        self.parts: list[list[tuple[np.ndarray, np.ndarray]]] = []
        if recorder is None:
            return
        expert_PLNK, weight_PLNK = recorder.take(len(requests))
        for row, (request, count) in enumerate(zip(requests, copies, strict=True)):
            length = len(request.prompt_ids)  # prompts are padded on the left
            prompt = expert_PLNK[row, -length:], weight_PLNK[row, -length:]
            self.parts += [[prompt] for _ in range(count)]

    def add(self, alive: list[int]) -> None:
        """The decoding step of the samples in ``alive``, in the order of the batch."""
        if self.recorder is not None:
            expert_B1NK, weight_B1NK = self.recorder.take(len(alive))
            for row, sample in enumerate(alive):
                self.parts[sample].append((expert_B1NK[row], weight_B1NK[row]))

    def of(self, sample: int, params: SamplingParams) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Experts and weights, as far as asked for: a row for each token that was read, all but the last."""
        if self.recorder is None:
            return None, None
        experts, weights = (np.concatenate(parts) for parts in zip(*self.parts[sample], strict=True))
        return experts, weights if params.record_routing == "experts_and_weights" else None


class _Decoding:
    """The cache, mask and last logits of the rows that are still being decoded."""

    def __init__(self, model: torch.nn.Module, requests: Sequence[Request], copies: list[int]):
        length = max(len(request.prompt_ids) for request in requests)
        input_PL = torch.zeros(len(requests), length, dtype=torch.long)
        mask_PL = torch.zeros(len(requests), length, dtype=torch.long)
        for row, request in enumerate(requests):
            input_PL[row, length - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask_PL[row, length - len(request.prompt_ids) :] = 1
        self.model, self.cache = model, DynamicCache()
        position_PL = (mask_PL.cumsum(dim=1) - 1).clamp_(min=0)
        logits_PV = self._forward(input_PL, mask_PL, position_PL)
        owner_B = torch.repeat_interleave(torch.arange(len(requests)), torch.tensor(copies))
        self.cache.batch_select_indices(owner_B)
        self.logits_BV, self.mask_BL = logits_PV[owner_B], mask_PL[owner_B]

    def advance(self, token_B: Tensor, kept: Tensor) -> None:
        """Append a token to each row of ``kept``; the others leave the batch."""
        if len(kept) < len(token_B):
            self.cache.batch_select_indices(kept)
        mask_BL = self.mask_BL[kept]
        self.mask_BL = torch.cat([mask_BL, mask_BL.new_ones(len(kept), 1)], dim=1)
        position_B1 = self.mask_BL.sum(dim=1, keepdim=True) - 1
        self.logits_BV = self._forward(token_B[kept, None], self.mask_BL, position_B1)

    def _forward(self, input_BL: Tensor, mask_BL: Tensor, position_BL: Tensor) -> Tensor:
        output = self.model(
            input_ids=input_BL, attention_mask=mask_BL, position_ids=position_BL,
            past_key_values=self.cache, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        return output.logits[:, -1]
