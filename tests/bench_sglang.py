"""SGLang through this project's client beside SGLang's own benchmark client, and what a weight update costs.

    MOE_RL_SGLANG_PYTHON=... python tests/bench_sglang.py [--small] [--updates 1 4 8]

Both clients talk to the same server (with its tokenizer, which the benchmark client wants), in turns: 512
prompts of 128 random tokens, 256 new tokens each, log-probabilities returned, up to 1.25 times the running
requests on their way. The updates are of random policies of so many gigabytes, read from this machine's disk
with a warm page cache; the seconds are those of ``Engine.load``: update, flush, checks.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tasks.embedded.process import HOST
from tasks.engine.protocol import Request, SamplingParams
from tasks.engine.sglang import OVERCOMMIT, Fleet
from tasks.engine.sglang_server import LaunchedServer, answers, server_arguments
from tasks.policy.tokenizer import character_tokenizer
from tasks.sglang_config import SglangConfig

NUM_PROMPTS, PROMPT, NEW = 512, 128, 256
GB_A_LAYER = 0.62
"""64 experts of width 768 at hidden 2,048, and attention."""


def save_policy(folder: Path, shape: dict[str, int], *, seed: int = 0) -> float:
    """A random Qwen3-MoE in bfloat16 with 32,768 tokens; returns its gigabytes."""
    torch.manual_seed(seed)
    hidden, width = shape["hidden"], shape["width"]
    config = Qwen3MoeConfig(
        vocab_size=32_768, hidden_size=hidden, num_hidden_layers=shape["num_layers"],
        num_attention_heads=hidden // 64, num_key_value_heads=max(hidden // 512, 1), head_dim=128,
        num_experts=shape["experts"], num_experts_per_tok=8,
        moe_intermediate_size=width, intermediate_size=width * 8, norm_topk_prob=True, eos_token_id=1,
        bos_token_id=None, pad_token_id=0, tie_word_embeddings=False, max_position_embeddings=4096,
    )  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e9


def start_server(config: SglangConfig, folder: Path, scratch: Path) -> tuple[subprocess.Popen, str]:
    port = 20_000 + os.getpid() % 10_000
    dtype = "bfloat16" if config.device == "cuda" else "float32"
    arguments = server_arguments(config, model=folder, version=0, dtype=dtype, port=port, routing=False)
    arguments.remove("--skip-tokenizer-init")
    environment = LaunchedServer(config, scratch, dtype=dtype, routing=False).environment()
    with (scratch / "server.log").open("wb") as log:
        command = [config.python, "-m", "sglang.launch_server", *arguments]
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=scratch, env=environment)
    url = f"http://{HOST}:{port}"
    while not answers(url):
        if server.poll() is not None:
            sys.exit((scratch / "server.log").read_text()[-3000:])
        time.sleep(1)
    return server, url


def ours(engine, num_prompts: int, new: int) -> float:
    """Tokens/s of one call."""
    generator = torch.Generator().manual_seed(time.time_ns() % 2**31)
    prompts = torch.randint(60, 32_000, (num_prompts, PROMPT), generator=generator).tolist()
    requests = [Request(prompt_ids=tuple(ids), seeds=(i,)) for i, ids in enumerate(prompts)]
    start = time.perf_counter()
    params = SamplingParams(max_new_tokens=new, temperature=1.0, top_p=1.0, stop_ids=frozenset())
    groups = engine.generate(requests, params)
    seconds = time.perf_counter() - start
    return sum(len(c.response_ids) for group in groups for c in group) / seconds


def theirs(config: SglangConfig, url: str, folder: Path, scratch: Path, num_prompts: int, new: int) -> float:
    """Tokens/s that SGLang's benchmark client reports."""
    report = scratch / f"bench-{time.time_ns()}.jsonl"
    command = [
        config.python, "-m", "sglang.benchmark.serving", "--backend", "sglang", "--base-url", url, "--model",
        str(folder), "--dataset-name", "random-ids", "--tokenize-prompt", "--random-input-len", str(PROMPT),
        "--random-output-len", str(new), "--random-range-ratio", "1.0", "--num-prompts", str(num_prompts),
        "--max-concurrency", str(int(config.max_running_requests * OVERCOMMIT)), "--return-logprob",
        "--logprob-start-len", "-1", "--disable-stream", "--disable-tqdm", "--temperature", "1.0", "--seed",
        str(time.time_ns() % 2**31), "--output-file", str(report),
    ]  # fmt: skip
    environment = LaunchedServer(config, scratch, dtype="bfloat16", routing=False).environment()
    done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-3000:])
    return float(json.loads(report.read_text().splitlines()[-1])["output_throughput"])


def throughput(config: SglangConfig, shape: dict[str, int], rounds: int, num_prompts: int, new: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        size = save_policy(scratch / "policy", shape)
        start = time.perf_counter()
        server, url = start_server(config, scratch / "policy", scratch)
        print(f"policy of {size:.1f} GB, server started in {time.perf_counter() - start:.0f} s", flush=True)
        try:
            dtype = "bfloat16" if config.device == "cuda" else "float32"
            fleet = Fleet(config.model_copy(update={"urls": (url,)}), dtype=dtype, folder=scratch)
            engine = fleet.view()
            engine.load(scratch / "policy", 1)
            ours(engine, num_prompts, 8)  # warm
            pairs = []
            for _ in range(rounds):
                theirs_now = theirs(config, url, scratch / "policy", scratch, num_prompts, new)
                pairs.append((ours(engine, num_prompts, new), theirs_now))
                print("ours {:,.0f} tokens/s, benchmark client {:,.0f}".format(*pairs[-1]), flush=True)
            ratio = statistics.median(a / b for a, b in pairs)
            print(f"| {num_prompts} x {new} tokens | {statistics.median(a for a, _ in pairs):,.0f} | "
                  f"{statistics.median(b for _, b in pairs):,.0f} | {ratio:.2f} |", flush=True)  # fmt: skip
        finally:
            server.terminate()
            server.wait(60)


def updates(config: SglangConfig, sizes: list[int]) -> None:
    for gigabytes in sizes:
        with tempfile.TemporaryDirectory() as name:
            scratch = Path(name)
            layers = max(1, round(gigabytes / GB_A_LAYER))
            shape = {"num_layers": layers, "hidden": 2048, "experts": 64, "width": 768}
            size = save_policy(scratch / "v0", shape, seed=0)
            save_policy(scratch / "v1", shape, seed=1)
            engine = Fleet(config, dtype="bfloat16", folder=scratch).view()
            engine.load(scratch / "v0", 0)
            seconds = []
            for version in range(1, 5):
                start = time.perf_counter()
                engine.load(scratch / f"v{version % 2}", version)
                seconds.append(time.perf_counter() - start)
            print(f"| update of {size:.1f} GB from disk | {statistics.median(seconds):.2f} s | "
                  f"{size / statistics.median(seconds):.1f} GB/s |", flush=True)  # fmt: skip
            assert engine.fleet.launched is not None
            engine.fleet.launched.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny policy, few tokens: for a CPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, nargs="*", default=[], help="gigabytes")
    options = parser.parse_args()
    from engines import sglang_config

    if options.small:
        config = sglang_config(context_length=0)
        shape = {"num_layers": 2, "hidden": 128, "experts": 8, "width": 64}
        throughput(config, shape, options.rounds, 48, 32)
        return
    config = sglang_config(
        max_running_requests=256, memory_share=0.5, context_length=0, max_total_tokens=0, moe_runner="triton"
    )
    shape = {"num_layers": 8, "hidden": 2048, "experts": 64, "width": 768}
    throughput(config, shape, options.rounds, NUM_PROMPTS, NEW)
    updates(config.model_copy(update={"memory_share": 0.3}), options.updates)


if __name__ == "__main__":
    main()
