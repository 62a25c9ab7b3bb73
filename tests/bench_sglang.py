"""SGLang's own benchmark client beside this project's, on one server, in turns.

    MOE_RL_SGLANG_PYTHON=... python tests/bench_sglang.py [--small]      (that python needs `datasets` too)

The same policy, and prompts of 128 random tokens with 256 new ones each, log-probabilities returned:
SGLang's client at several numbers of requests on their way (``--at-once``); the engine, one call; and the
worker loop on a real queue, from the first lease to the last settled portion, with rewards that cost nothing,
at the number that it chooses and at those of ``--loop-at-once``. A round runs each once; the ratio is the
median over rounds of the ratio within a round. The last column is the CPU time of a client's process a
sample. ``--canned`` measures the clients without a server that takes time, with ``--step-ms`` on one whose
scheduler takes the time of a GPU but none of its cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from canned_sglang import tokens_per_s
from engines import sglang_config
from served import (
    LARGE,
    SMALL,
    await_gate,
    await_server,
    dtype_of,
    large_config,
    open_buffer,
    put_prompts,
    random_prompts,
    save_policy,
    start_server,
    worker_loop,
)

from tasks.embedded.ports import HOST
from tasks.embedded.valkey import ensure_valkey
from tasks.engine.collector import old_objects_apart
from tasks.engine.protocol import Request, SamplingParams
from tasks.engine.sglang import Fleet, SglangEngine
from tasks.engine.sglang_server import LaunchedServer
from tasks.sglang_config import SglangConfig

PROMPT = 128


class TheirClient:
    """SGLang's benchmark client in a process of its own."""

    def __init__(self, config: SglangConfig, url: str, policy: Path, scratch: Path):
        self.url, self.policy, self.scratch = url, policy, scratch
        environment = LaunchedServer(config, scratch, dtype=dtype_of(config), routing=False).environment()
        script = Path(__file__).with_name("sglang_serving_client.py")
        self.process = subprocess.Popen(
            [config.python, str(script)], cwd=scratch, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(scratch / "client.log").open("w"),
        )  # fmt: skip

    def await_done(self) -> None:
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            if line == "done\n":
                return
            said.append(line)
        raise RuntimeError("".join(said[-20:]) + (self.scratch / "client.log").read_text()[-3000:])

    def run(self, num_prompts: int, new: int, *, concurrency: int) -> float:
        """Tokens/s that it reports."""
        report = self.scratch / f"report-{time.time_ns()}.jsonl"
        arguments = [
            "--backend", "sglang", "--base-url", self.url, "--model", str(self.policy), "--tokenizer",
            str(self.policy), "--dataset-name", "random-ids", "--tokenize-prompt", "--random-input-len",
            str(PROMPT), "--random-output-len", str(new), "--random-range-ratio", "1.0", "--num-prompts",
            str(num_prompts), "--max-concurrency", str(concurrency), "--return-logprob",
            "--logprob-start-len", "-1", "--disable-stream", "--disable-tqdm", "--temperature", "1.0",
            "--seed", str(time.time_ns() % 2**31), "--output-file", str(report),
            "--ready-check-timeout-sec", "0",
        ]  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()
        self.await_done()
        result = json.loads(report.read_text().splitlines()[-1])
        assert result["completed"] == num_prompts and result["total_output_tokens"] == num_prompts * new
        return float(result["output_throughput"])


def engine_call(engine: SglangEngine, num_prompts: int, params: SamplingParams) -> float:
    """Tokens/s of one call."""
    prompts = random_prompts(num_prompts, PROMPT, seed=time.time_ns() % 2**31)
    requests = [Request(prompt_ids=tuple(ids), seeds=(i,)) for i, ids in enumerate(prompts)]
    start = time.perf_counter()
    with old_objects_apart():  # as a worker and an evaluation do
        groups = engine.generate(requests, params)
    seconds = time.perf_counter() - start
    return sum(len(c.response_ids) for group in groups for c in group) / seconds


def loop(
    fleet: Fleet, valkey: str, plan: "Plan", params: SamplingParams, group_size: int, *, at_once: int
) -> float:
    """Tokens/s of the worker loop."""
    buffer = open_buffer(valkey)
    prompts = random_prompts(plan.num_prompts // group_size, PROMPT, seed=time.time_ns() % 2**31)
    per_portion = max(1, fleet.config.max_running_requests // 4 // group_size)
    put_prompts(buffer, prompts, groups_per_portion=per_portion, group_size=group_size, version=1)
    usual, fleet.budget.size = fleet.budget.size, at_once
    start = time.perf_counter()
    done = worker_loop(
        fleet, buffer, params=params, group_size=group_size, groups_per_portion=per_portion,
        portions_at_once=8,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    fleet.budget.size = usual
    assert done.num_samples == plan.num_prompts, done
    return done.num_tokens / seconds


def throughput(
    config: SglangConfig, url: str, policy: Path, scratch: Path, plan: "Plan", *, gate: Path | None
) -> None:
    valkey = ensure_valkey(scratch / "valkey")
    client = TheirClient(config, url, policy, scratch)
    fleet = Fleet(config.model_copy(update={"urls": [url]}), dtype=dtype_of(config), folder=scratch)
    fleet.load(policy, 1)
    client.await_done()
    await_gate(gate)
    compare(fleet, client, valkey, plan)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    rounds: int
    num_prompts: int
    new: int
    """Tokens of each response."""
    at_once: tuple[int, ...]
    """Requests of SGLang's client on their way, besides as many as the engine has; none: twice the limit."""
    loop_at_once: tuple[int, ...]
    """Sequences of the worker loop on their way, besides as many as the engine has."""


def compare(fleet: Fleet, client: TheirClient, valkey: str, plan: Plan) -> None:
    num_prompts, new = plan.num_prompts, plan.new
    params = SamplingParams(max_new_tokens=new, temperature=1.0, top_p=1.0, stop_ids=frozenset())
    limit, engine = fleet.config.max_running_requests, fleet.view()
    ours = fleet.budget.size
    theirs = sorted({ours, *(plan.at_once or (2 * limit,))})
    ways: dict[str, Callable[[], float]] = {}
    for n in theirs:
        ways[f"SGLang's client, {n} at once"] = partial(client.run, num_prompts, new, concurrency=n)
    ways["engine, one call"] = lambda: engine_call(engine, num_prompts, params)
    for n in (ours, *plan.loop_at_once):
        for group_size, what in ((1, "single samples"), (8, "groups of 8")):
            name = f"worker loop, {what}" + ("" if n == ours else f", {n} at once")
            ways[name] = partial(loop, fleet, valkey, plan, params, group_size, at_once=n)
    engine_call(engine, limit, params)  # graphs, caches and connections
    client.run(limit, new, concurrency=ours)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    costs: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(plan.rounds):
        names = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
        for name in names:
            before = cpu_seconds(os.getpid()) + cpu_seconds(client.process.pid)
            rates[name].append(ways[name]())
            after = cpu_seconds(os.getpid()) + cpu_seconds(client.process.pid)
            costs[name].append((after - before) / num_prompts * 1e3)
        last = {name: round(values[-1]) for name, values in rates.items()}
        print(time.strftime("%H:%M:%S"), last, flush=True)
    same = f"SGLang's client, {ours} at once"
    best = max(list(ways)[: len(theirs)], key=lambda name: statistics.median(rates[name]))
    print(f"{num_prompts} prompts, {new} new tokens, {plan.rounds} rounds; SGLang's best: {best}")
    print("| way | tokens/s | of SGLang's client, same concurrency | of its best | CPU ms a sample |")
    for name, values in rates.items():
        of_same, of_best = (
            statistics.median(a / b for a, b in zip(values, rates[of], strict=True)) for of in (same, best)
        )
        rate, cost = statistics.median(values), statistics.median(costs[name])
        print(f"| {name} | {rate:,.0f} | {of_same:.3f} | {of_best:.3f} | {cost:.2f} |", flush=True)


def cpu_seconds(pid: int) -> float:
    """Of a process and its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start_canned(step_ms: float) -> tuple[subprocess.Popen, str]:
    port = 20_000 + os.getpid() % 10_000
    command = [sys.executable, str(Path(__file__).with_name("canned_sglang.py")), "--port", str(port)]
    command += ["--tokens", "256", "--step-ms", str(step_ms)]
    return subprocess.Popen(command), f"http://{HOST}:{port}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny policy, few tokens: for a CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--at-once", type=int, nargs="*", default=[], help="of SGLang's client")
    parser.add_argument("--loop-at-once", type=int, nargs="*", default=[], help="of the worker loop")
    parser.add_argument("--gate", type=Path, help="measure once this file exists")
    parser.add_argument(
        "--canned", action="store_true", help="the clients alone: no model, 256 tokens a sample"
    )
    parser.add_argument("--step-ms", type=float, default=0.0, help="a decoding step of the canned server")
    parser.add_argument("--url", help="a server that serves --policy already")
    parser.add_argument("--policy", type=Path)
    options = parser.parse_args()
    config = sglang_config() if options.small else large_config()
    if options.canned:
        config = config.model_copy(update={"max_running_requests": 256})
    plan = Plan(
        rounds=options.rounds,
        num_prompts=64 if options.small and not options.canned else options.prompts,
        new=32 if options.small and not options.canned else 256,
        at_once=tuple(options.at_once),
        loop_at_once=tuple(options.loop_at_once),
    )
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        if options.url:
            throughput(config, options.url, options.policy, scratch, plan, gate=options.gate)
            return
        size = save_policy(scratch / "policy", SMALL if options.small or options.canned else LARGE)
        start = time.perf_counter()
        server, url = (
            start_canned(options.step_ms)
            if options.canned
            else start_server(config, scratch / "policy", scratch)
        )
        try:
            await_server(server, url, scratch)
            print(f"{size:.1f} GB, server started in {time.perf_counter() - start:.0f} s", flush=True)
            if options.canned and options.step_ms:
                limit = tokens_per_s(options.step_ms / 1e3, plan.new)
                print(f"its scheduler gives {limit:,.0f} tokens/s to a client that takes no time", flush=True)
            throughput(config, url, scratch / "policy", scratch, plan, gate=options.gate)
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    main()
