"""One layer's exchange of tokens between two GPUs, by dispatcher, at the sizes of real models. Not a test.

    PYTHONPATH=.:kernels torchrun --nproc-per-node 2 tests/bench_exchange.py

Each rank has 4,096 tokens. In microseconds (medians, of the slower rank): what it takes to have the rows in
expert order, as a grouped product needs them; to bring them back and sum them; and the backward pass of both.
In brackets how much of the first two is the dispatcher's own; the rest is this rank's permutation. The floor
is one copy of each token over the link, at the rate that a plain copy to the other GPU reaches first. With
`--graph` a dispatcher whose host never waits is replayed from a CUDA graph too; `--profile` lists kernels.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from moe_kernels.rows import moe_permute, moe_unpermute
from torch import Tensor

from tasks.deepep_config import DeepEPConfig
from tasks.nvlink_config import NVLinkConfig
from tasks.policy.dispatch.deepep import make_deepep
from tasks.policy.dispatch.dispatcher import Dispatcher, ExchangeShape, make_dispatcher
from tasks.policy.dispatch.nvlink import make_nvlink
from tasks.policy.parallel.experts import ExpertShard, local_experts

SIZES = {2048: 128, 7168: 256}
"""Features -> experts of the models that have them."""
TOKENS, TOPK, ROUNDS, ROTATION = 4096, 8, 40, 3
VARIANTS: dict[str, dict[str, Any]] = {
    "all_to_all": {},
    "deepep": {},
    "deepep expanded": {"layout": "expanded"},
    "deepep fp8": {"fp8": True},
    "nvlink": {},
    "nvlink fixed": {"capacity": 1.5},
}
STAGES = ["dispatch", "permute", "unpermute", "combine", "backward"]
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def open_dispatcher(variant: str, hidden: int) -> Dispatcher:
    name = variant.split()[0]

    def build(group: dist.ProcessGroup) -> Dispatcher:
        shape = ExchangeShape(hidden=hidden, num_topk=TOPK, deterministic=False, timeout_seconds=60)
        options = {"max_tokens": TOKENS, **VARIANTS[variant]}
        if name == "nvlink":
            return make_nvlink(group, NVLinkConfig.model_validate(options), shape)
        return make_deepep(group, DeepEPConfig.model_validate(options), shape)

    return make_dispatcher(name, dist.group.WORLD, build)  # type: ignore[arg-type]


def draw(hidden: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device=DEVICE).manual_seed(2 * seed + dist.get_rank())
    score_TE = torch.rand(TOKENS, SIZES[hidden], generator=generator, device=DEVICE)
    weight_TK, expert_TK = (t.contiguous() for t in score_TE.topk(TOPK, dim=1))
    x_TD = torch.randn(TOKENS, hidden, generator=generator, device=DEVICE).bfloat16().requires_grad_()
    return x_TD, expert_TK, weight_TK


def to_expert_order(sent: Any, num_experts: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Rows by expert, and their way back to the rows as they arrived; nothing to do where they came so."""
    if sent.groups is not None:
        return sent.x_RD, lambda y_PD: y_PD
    kept: list[Any] = []

    def permute(x_RD: Tensor, _weight_RK: Tensor, pairs: Any) -> Tensor:
        kept.append(pairs.placement.slot_TK)
        return moe_permute(x_RD, pairs.placement.slot_TK, pairs.cell_P.numel())

    num_local = num_experts // dist.get_world_size()
    experts = SimpleNamespace(
        expert_shard=ExpertShard(start=0, count=num_local, num_experts=num_experts),
        expert_load_e=torch.zeros(num_local, dtype=torch.int64),
        compute_rows=permute,
    )
    x_PD = local_experts(experts, sent.x_RD, sent.expert_RK, sent.weight_RK, num_pairs=sent.num_pairs)
    return x_PD, lambda y_PD: moe_unpermute(y_PD, kept[0])


def one_round(dispatcher: Dispatcher, inputs: tuple[Tensor, Tensor, Tensor], grad_TD: Tensor) -> list[Any]:
    x_TD, expert_TK, weight_TK = inputs
    num_experts = SIZES[x_TD.shape[1]]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
    marks[0].record()
    sent = dispatcher.dispatch(x_TD, expert_TK, weight_TK, num_experts)
    marks[1].record()
    x_PD, back = to_expert_order(sent, num_experts)
    marks[2].record()
    y_RD = back(x_PD)
    marks[3].record()
    y_TD = dispatcher.combine(y_RD, sent.handle)
    marks[4].record()
    y_TD.backward(grad_TD)
    marks[5].record()
    x_TD.grad = None
    return marks


def measure(dispatcher: Dispatcher, hidden: int) -> dict[str, float]:
    inputs = [draw(hidden, seed) for seed in range(ROTATION)]
    grad_TD = torch.randn(TOKENS, hidden, device=DEVICE).bfloat16()
    for index in range(ROTATION):
        one_round(dispatcher, inputs[index], grad_TD)
    torch.cuda.synchronize()
    dist.barrier()
    rounds = [one_round(dispatcher, inputs[index % ROTATION], grad_TD) for index in range(ROUNDS)]
    torch.cuda.synchronize()
    times = [[a.elapsed_time(b) * 1e3 for a, b in pairwise(m)] for m in rounds]
    medians = torch.tensor([statistics.median(column) for column in zip(*times, strict=True)], device=DEVICE)
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return dict(zip(STAGES, medians.tolist(), strict=True))


def replay(dispatcher: Dispatcher, hidden: int) -> float:
    """Microseconds of a dispatch and a combine, launched as one graph."""
    x_TD, expert_TK, weight_TK = draw(hidden, 0)

    def both() -> Tensor:
        sent = dispatcher.dispatch(x_TD.detach(), expert_TK, weight_TK, SIZES[hidden])
        return dispatcher.combine(sent.x_RD, sent.handle)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(ROUNDS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / ROUNDS


def profile(dispatcher: Dispatcher, hidden: int) -> str:
    inputs, grad_TD = draw(hidden, 0), torch.ones(TOKENS, hidden, device=DEVICE).bfloat16()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(10):
            one_round(dispatcher, inputs, grad_TD)
        torch.cuda.synchronize()
    events = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
    return "\n".join(
        f"    {e.self_device_time_total / 10:8.1f} us a round, {e.count / 10:4.1f} x {e.key[:90]}"
        for e in events[:20]
    )


def link_rate() -> float:
    """Bytes a second of a plain copy to the other GPU while it copies here."""
    rank = dist.get_rank()
    source = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    rates = []
    for _ in range(6):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work = [dist.P2POp(dist.isend, source, 1 - rank), dist.P2POp(dist.irecv, target, 1 - rank)]
        for request in dist.batch_isend_irecv(work):
            request.wait()
        end.record()
        torch.cuda.synchronize()
        rates.append(source.numel() / begin.elapsed_time(end) * 1e3)
    return statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--hidden", nargs="*", type=int, default=list(SIZES))
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", device_id=DEVICE)
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    rate = link_rate()
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: link {rate / 1e9:.0f} GB/s a direction")
    for hidden in options.hidden:
        floor = TOKENS * hidden * 2 / rate * 1e6
        say(
            f"hidden {hidden}, {SIZES[hidden]} experts, {TOKENS} tokens a rank: floor {floor:.0f} us each way"
        )
        for variant in options.variants:
            dispatcher = open_dispatcher(variant, hidden)
            us = measure(dispatcher, hidden)
            out, back = us["dispatch"] + us["permute"], us["unpermute"] + us["combine"]
            text = f"  {variant:16} out {out:6.0f} ({us['dispatch']:5.0f})"
            text += f"  back {back:6.0f} ({us['combine']:5.0f})"
            text += f"  backward {us['backward']:6.0f}  all {sum(us.values()):6.0f}"
            if options.graph and VARIANTS[variant].get("capacity"):
                text += f"  out and back in a graph {replay(dispatcher, hidden):.0f}"
            say(f"{text}  {dispatcher.describe()}", flush=True)
            if options.profile and variant.startswith("nvlink"):
                say(profile(dispatcher, hidden), flush=True)
            dispatcher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
