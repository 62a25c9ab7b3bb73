"""Policies, SGLang servers, their router and worker loops of the benchmarks on SGLang."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from engines import sglang_config

from tasks.embedded.ports import HOST
from tasks.engine.overlap import drain_together
from tasks.engine.protocol import SamplingParams
from tasks.engine.sglang import Fleet
from tasks.engine.sglang_server import LaunchedServer, answers, server_arguments
from tasks.engine.worker import RolloutWorker, WorkDone
from tasks.experience.buffer import ExperienceBuffer
from tasks.experience.records import WorkItem
from tasks.schema import PromptFrame, make_frame, to_bytes
from tasks.sglang_config import SglangConfig

VOCABULARY = 32_768
SMALL = {"num_layers": 2, "hidden": 128, "experts": 8, "width": 64}
"""A CPU's."""
LARGE = {"num_layers": 6, "hidden": 2048, "experts": 64, "width": 768}
"""4.0 GB."""
GB_A_LAYER = 0.62
"""64 experts of width 768 at hidden 2,048, and attention."""


def make_policy(shape: dict[str, int], *, seed: int = 0):
    """A random Qwen3-MoE in bfloat16, heads of 128, on the GPU if there is one."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    hidden, width = shape["hidden"], shape["width"]
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=shape["num_layers"],
        num_attention_heads=hidden // 64, num_key_value_heads=max(hidden // 512, 1), head_dim=128,
        num_experts=shape["experts"], num_experts_per_tok=min(8, shape["experts"]),
        moe_intermediate_size=width, intermediate_size=width * 8, norm_topk_prob=True, eos_token_id=1,
        bos_token_id=None, pad_token_id=0, tie_word_embeddings=False, max_position_embeddings=4096,
    )  # fmt: skip
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)


def save_policy(folder: Path, shape: dict[str, int], *, seed: int = 0) -> float:
    """A random policy with a tokenizer that has a word for each of its ids; returns its gigabytes."""
    make_policy(shape, seed=seed).save_pretrained(folder, max_shard_size="1GB")
    save_tokenizer(folder)
    return gigabytes(folder)


def save_tokenizer(folder: Path) -> None:
    """SGLang's benchmark client draws its token ids from the tokenizer's."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w0").save_pretrained(
        folder
    )


def gigabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e9


def large_config() -> SglangConfig:
    """One GPU's server of the large policy, as a rollout worker would use it."""
    return sglang_config(
        max_running_requests=256, memory_share=0.5, context_length=2048, max_total_tokens=262_144
    )


def dtype_of(config: SglangConfig) -> str:
    return "bfloat16" if config.device == "cuda" else "float32"


def start_server(
    config: SglangConfig, folder: Path, scratch: Path, *, number: int = 0, gpu: int = 0
) -> tuple[subprocess.Popen, str]:
    """A server as a worker would launch it; ``await_server`` waits until it answers."""
    scratch.mkdir(parents=True, exist_ok=True)
    port = 20_000 + (os.getpid() * 7 + number) % 10_000
    arguments = server_arguments(
        config, model=folder, version=0, dtype=dtype_of(config), port=port, routing=False
    )
    environment = LaunchedServer(config, scratch, dtype=dtype_of(config), routing=False).environment()
    environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    with (scratch / "server.log").open("wb") as log:
        command = [config.python, "-m", "sglang.launch_server", *arguments]
        server = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=scratch, env=environment, start_new_session=True
        )
    return server, f"http://{HOST}:{port}"


def await_server(server: subprocess.Popen, url: str, scratch: Path) -> None:
    while not answers(url):
        if server.poll() is not None:
            sys.exit((scratch / "server.log").read_text()[-3000:])
        time.sleep(0.5)


@contextmanager
def routed(config: SglangConfig, urls: Sequence[str], scratch: Path) -> Iterator[str]:
    """SGLang's router in front of the servers."""
    port = 29_000 + os.getpid() % 1_000
    command = [config.python, "-m", "sglang_router.launch_router", "--host", HOST, "--port", str(port)]
    environment = LaunchedServer(config, scratch, dtype=dtype_of(config), routing=False).environment()
    with (scratch / "router.log").open("wb") as log:
        router = subprocess.Popen(
            [*command, "--worker-urls", *urls], stdout=log, stderr=log, cwd=scratch, env=environment
        )
    try:
        yield f"http://{HOST}:{port}"
    finally:
        router.terminate()
        router.wait(20)


def await_gate(gate: Path | None) -> None:
    """Until the file exists: benchmarks prepare side by side, and measure one after the other."""
    if gate is not None:
        print("prepared", flush=True)
        while not gate.exists():
            time.sleep(0.2)


def put_prompts(
    buffer: ExperienceBuffer,
    prompts: Sequence[Sequence[int]],
    *,
    groups_per_portion: int,
    group_size: int,
    version: int,
) -> None:
    """One iteration's queue."""
    rows = [
        {"iteration": 0, "prompt_id": f"{index:06d}", "prompt_ids": list(ids)}
        for index, ids in enumerate(prompts)
    ]
    buffer.put_work(
        [
            WorkItem(
                iteration=0, portion=number, policy_version=version, num_groups=len(part),
                num_samples=len(part) * group_size, payload=to_bytes(make_frame(part, PromptFrame)),
            )
            for number, part in enumerate(
                rows[first : first + groups_per_portion] for first in range(0, len(rows), groups_per_portion)
            )
        ]
    )  # fmt: skip


def worker_loop(
    fleet: Fleet,
    buffer: ExperienceBuffer,
    *,
    params: SamplingParams,
    group_size: int,
    groups_per_portion: int,
    portions_at_once: int,
) -> WorkDone:
    """A worker as the rollout task runs it, until the queue is empty."""
    members = [
        RolloutWorker(
            engine=fleet.view(), buffer=buffer, name=f"bench+{number}", params=params, base_seed=0,
            group_size=group_size, chunk_samples=groups_per_portion * group_size, is_deterministic=False,
        )
        for number in range(portions_at_once)
    ]  # fmt: skip
    return drain_together(members, 0)


def open_buffer(url: str) -> ExperienceBuffer:
    """A campaign of its own."""
    return ExperienceBuffer(
        url, f"bench-{uuid.uuid4().hex[:8]}", lease_seconds=60, max_attempts=3, capacity_bytes=1 << 32
    )


def random_prompts(count: int, length: int, *, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(60, VOCABULARY - 60, (count, length), generator=generator).tolist()
