"""All kernels on one card: us | TFLOP/s or GB/s | % of floor | x each peer. Needs a CUDA device.

    PYTHONPATH=.:kernels python kernels/bench.py                      # everything
    PYTHONPATH=.:kernels python kernels/bench.py --only rows fp8      # parts of it
    PYTHONPATH=.:kernels python kernels/bench.py --only profile       # where the time of the largest goes

The floor is the least work over the ceilings measured first: a large bf16 matrix product and a large copy.
Medians over rounds, with their spread; inputs rotate so that none is found in the 60 MB cache. Kernels of
milliseconds are measured twice: in a row, where the card's power limit slows every product down, and each
after a rest, as in a training step, which mixes them with work bound by memory. ``peers.py`` names what ours
are set beside. Shapes are those of Qwen3-30B-A3B with 16,384 tokens: hidden 2,048, 128 experts of width 768,
8 a token.

Shape key: T tokens, D features, V vocabulary, K experts a token, P = T K copies, H expert width, J = 2 H.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import peers
import torch
from experts_paths import experts_steps
from moe_kernels import reference
from moe_kernels.fp8 import dequant_fp8_1x128, quant_fp8_1x128, quant_fp8_128x128
from moe_kernels.logprob import selective_logprob_entropy
from moe_kernels.norm import rms_norm
from moe_kernels.rows import moe_permute, moe_unpermute
from moe_kernels.swiglu import swiglu_weighted
from torch import Tensor

T, V, K, H, E = 16_384, 151_936, 8, 768, 128
ROTATION = 3
REST_SECONDS = 0.1
HEAD_START_CYCLES = 50_000_000
Step = Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class Card:
    """Ceilings, a second."""

    flops: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Work:
    """The least that a kernel must do, and how often it is run."""

    amount: float
    unit: str
    rounds: int = 30
    is_long: bool = False
    """Milliseconds, so that the power limit counts: measured after rests too."""

    def rate(self, us: float) -> float:
        return self.amount / us * (1e-6 if self.unit == "TFLOP/s" else 1e-3)

    def share(self, us: float, card: Card) -> float:
        ceiling = card.flops if self.unit == "TFLOP/s" else card.bandwidth
        return 100 * self.amount / ceiling * 1e6 / us


def microseconds(step: Step, rounds: int, rest: float = 0.0) -> tuple[float, float]:
    """Median and spread (90th less 10th percentile, % of the median)."""
    for index in range(ROTATION):
        step(index)
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)
    ]
    if not rest:  # the host gets ahead, so that what is short is not measured by its launches
        torch.cuda._sleep(HEAD_START_CYCLES)
    for index, (begin, end) in enumerate(marks):
        if rest:
            torch.cuda.synchronize()
            time.sleep(rest)
        begin.record()
        step(index % ROTATION)
        end.record()
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) * 1e3 for begin, end in marks)
    middle = statistics.median(times)
    return middle, 100 * (times[int(0.9 * (len(times) - 1))] - times[int(0.1 * (len(times) - 1))]) / middle


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale


def measured(step: Step, work: Work, rounds: int) -> tuple[float, float, float]:
    """Median, spread, and GiB of memory beyond what was there."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    us, spread = microseconds(step, rounds)
    return us, spread, (torch.cuda.max_memory_allocated() - before) / 2**30


def line(name: str, ours: Step, others: Mapping[str, Step], work: Work, card: Card) -> None:
    us, spread, gib = measured(ours, work, work.rounds)
    text = f"{name:32} | {us:9,.0f} us +- {spread:4.1f} % | {work.rate(us):7,.0f} {work.unit:7} "
    text += f"| {work.share(us, card):5.1f} % of floor | +{gib:5.2f} GiB"
    if work.is_long:
        rested, _ = microseconds(ours, 5, REST_SECONDS)
        text += f" | rested {rested:9,.0f} us, {work.share(rested, card):5.1f} %"
    print(text, flush=True)
    for other, step in others.items():
        try:
            peer, spread, gib = measured(step, work, max(work.rounds // 3, 3))
        except Exception as error:
            print(f"    {other}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        text = f"    {other:48} | {peer:9,.0f} us +- {spread:4.1f} % | +{gib:5.2f} GiB | x {peer / us:5.2f}"
        print(text, flush=True)


def backward_of(function: Callable[..., Any], inputs: list[list[Tensor]], slopes: list[Tensor]) -> Step:
    """Forward and backward with gradients for every floating-point input."""

    def step(index: int) -> None:
        args = inputs[index]
        wanted = [a for a in args if a.requires_grad]
        out = function(*args)
        out = out if isinstance(out, tuple) else (out,)
        torch.autograd.grad(out, wanted, [slopes[index]] * len(out))

    return step


def logprob_inputs(width: int) -> tuple[list[list[Tensor]], list[Tensor]]:
    weight_VD = random(V, width, scale=0.02).requires_grad_()
    inputs = [
        [random(T, width).requires_grad_(), weight_VD, torch.randint(0, V, (T,), device="cuda")]
        for _ in range(ROTATION)
    ]
    return inputs, [torch.randn(T, device="cuda") for _ in range(ROTATION)]


def bench_logprob(width: int, card: Card, others: Mapping[str, Callable[..., Any]]) -> None:
    inputs, slopes = logprob_inputs(width)
    ours = partial(selective_logprob_entropy, temperature=1.0)
    if others:
        others = {"eager float32": partial(reference.selective_logprob_entropy, temperature=1.0), **others}
    product = 2.0 * T * V * width
    with torch.no_grad():
        line(
            f"logprob+entropy fwd, D {width}", lambda i: ours(*inputs[i]),
            {n: lambda i, f=function: f(*inputs[i]) for n, function in others.items()},
            Work(product, "TFLOP/s", 12, is_long=True), card,
        )  # fmt: skip
    line(
        f"logprob+entropy fwd+bwd, D {width}", backward_of(ours, inputs, slopes),
        {n: backward_of(function, inputs, slopes) for n, function in others.items()},
        Work(4 * product, "TFLOP/s", 9, is_long=True), card,
    )  # fmt: skip
    line(
        "  logits kept", backward_of(partial(ours, keep_bytes=2**33), inputs, slopes), {},
        Work(3 * product, "TFLOP/s", 9, is_long=True), card,
    )  # fmt: skip
    hidden_TD, weight_VD, out_TV = inputs[0][0].detach(), inputs[0][1].detach(), random(T, V)
    line(
        "  the library's bare product", lambda i: torch.mm(hidden_TD, weight_VD.T, out=out_TV), {},
        Work(product, "TFLOP/s", 12, is_long=True), card,
    )  # fmt: skip


def bench_rows(width: int, card: Card) -> None:
    slots = [torch.randperm(T * K, device="cuda").view(T, K) for _ in range(ROTATION)]
    rows, copies = [random(T, width) for _ in slots], [random(T * K, width) for _ in slots]
    order = [s.flatten().argsort() // K for s in slots]
    work = Work(2.0 * width * T * (K + 1), "GB/s")
    line(
        "moe_permute", lambda i: moe_permute(rows[i], slots[i], T * K),
        {"transformers, torchtitan (index)": lambda i: rows[i][order[i]]}, work, card,
    )  # fmt: skip

    def index_and_sum(i: int) -> Tensor:
        return copies[i][slots[i].flatten()].view(T, K, width).sum(dim=1)

    def scatter_add(i: int) -> Tensor:
        return torch.zeros_like(rows[i]).index_add_(0, order[i], copies[i])

    line(
        "moe_unpermute", lambda i: moe_unpermute(copies[i], slots[i]),
        {"transformers (index and sum)": index_and_sum, "torchtitan (scatter_add)": scatter_add}, work, card,
    )  # fmt: skip


def bench_swiglu(card: Card) -> None:
    inputs = [
        [random(T * K, 2 * H).requires_grad_(), random(T * K).requires_grad_()] for _ in range(ROTATION)
    ]
    slopes = [random(T * K, H) for _ in inputs]
    live = torch.tensor(T * K, device="cuda")

    def ours(gate_up_PJ: Tensor, weight_P: Tensor) -> Tensor:
        return swiglu_weighted(gate_up_PJ, weight_P, live)

    def eager(gate_up_PJ: Tensor, weight_P: Tensor) -> Tensor:
        gate_PH, up_PH = gate_up_PJ.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate_PH) * up_PH * weight_P[:, None]

    forward = 2.0 * T * K * 3 * H
    with torch.no_grad():
        line(
            "swiglu_weighted fwd", lambda i: ours(*inputs[i]), {"eager": lambda i: eager(*inputs[i])},
            Work(forward, "GB/s"), card,
        )  # fmt: skip
    line(
        "swiglu_weighted fwd+bwd", backward_of(ours, inputs, slopes),
        {"eager": backward_of(eager, inputs, slopes)}, Work(forward + 2.0 * T * K * 5 * H, "GB/s"), card,
    )  # fmt: skip


def bench_norm(width: int, card: Card) -> None:
    norm = torch.nn.RMSNorm(width, eps=1e-6, device="cuda", dtype=torch.bfloat16)
    weight_D = norm.weight
    inputs = [[random(T, width).requires_grad_(), weight_D] for _ in range(ROTATION)]
    slopes = [random(T, width) for _ in inputs]
    others = {
        "as transformers": partial(reference.rms_norm, eps=1e-6),
        "torch.nn.functional.rms_norm": lambda x, w: torch.nn.functional.rms_norm(x, (width,), w, 1e-6),
    }
    line(
        f"rms_norm fwd+bwd, D {width}", backward_of(partial(rms_norm, eps=1e-6), inputs, slopes),
        {n: backward_of(f, inputs, slopes) for n, f in others.items()},
        Work(2.0 * T * width * 5, "GB/s"), card,
    )  # fmt: skip


def bench_fp8(width: int, card: Card) -> None:
    rows = [random(T * K // 2, width) for _ in range(ROTATION)]
    count = rows[0].numel()
    small = [quant_fp8_1x128(x) for x in rows]
    work = Work(count * (2 + 1 + 4 / 128), "GB/s")
    line(
        f"quant_fp8_1x128, D {width}", lambda i: quant_fp8_1x128(rows[i]),
        {"eager": lambda i: reference.quant_fp8_1x128(rows[i])}, work, card,
    )  # fmt: skip
    line(
        f"dequant_fp8_1x128, D {width}", lambda i: dequant_fp8_1x128(*small[i]),
        {"eager": lambda i: reference.dequant_fp8_1x128(*small[i])}, work, card,
    )  # fmt: skip
    line(
        f"quant_fp8_128x128, D {width}", lambda i: quant_fp8_128x128(rows[i]),
        {"eager": lambda i: reference.quant_fp8_128x128(rows[i])},
        Work(count * (2 + 1 + 4 / 128**2), "GB/s"), card,
    )  # fmt: skip


def bench_loss(card: Card) -> None:
    """All that the objective of a micro-batch does beside the model; bytes are its inputs and gradients."""
    from tasks.algorithm_config import AlgorithmConfig
    from tasks.policy.step.fused_loss import fused_policy_objective
    from tasks.rl.objective import policy_objective

    algorithm = AlgorithmConfig(kl="loss", kl_coefficient=0.05, dual_clip=3.0)
    counts = {"num_global_tokens": T, "num_global_sequences": 8, "fixed_length": T}
    names = ("behavior_logprob", "proximal_logprob", "reference_logprob", "advantage", "weight")
    micros = [
        {n: torch.randn(8, T // 8, device="cuda") for n in names}
        | {
            "mask": torch.rand(8, T // 8, device="cuda") < 0.9,
            "length": torch.full((8, T // 8), T // 8, device="cuda"),
            "segment": torch.arange(8, device="cuda")[:, None].expand(8, T // 8),
        }
        for _ in range(ROTATION)
    ]
    leaves = [[torch.randn(8, T // 8, device="cuda").requires_grad_() for _ in "le"] for _ in micros]

    def step_of(objective: Callable[..., Any]) -> Step:
        return lambda i: torch.autograd.grad(objective(*leaves[i], micros[i])[0], leaves[i])

    line(
        "policy loss fwd+bwd", step_of(fused_policy_objective(algorithm, **counts)),
        {"tasks/rl/objective.py": step_of(policy_objective(algorithm, **counts))},
        Work(T * (4.0 * 9 + 1 + 8), "GB/s"), card,
    )  # fmt: skip


def bench_experts(card: Card) -> None:
    steps = experts_steps(T, 2048, H, E, K, ROTATION)
    work = Work(18.0 * T * K * 2048 * H, "TFLOP/s", 12, is_long=True)
    line("experts fwd+bwd, one layer", steps.pop("fused"), steps, work, card)


def profile() -> None:
    """Time by kernel of what is largest, on a card that is warm."""
    inputs, slopes = logprob_inputs(2048)
    steps = {
        "logprob+entropy fwd+bwd": backward_of(
            partial(selective_logprob_entropy, temperature=1.0), inputs, slopes
        ),
        "experts fwd+bwd": experts_steps(T, 2048, H, E, K, ROTATION)["fused"],
    }
    for name, step in steps.items():
        for _ in range(3):
            step(0)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as result:
            for index in range(3):
                step(index)
            torch.cuda.synchronize()
        print(f"{name}, ms of each of 3:")
        events = sorted(result.key_averages(), key=lambda e: -e.self_device_time_total)
        for event in events[:12]:
            print(f"  {event.self_device_time_total / 3e3:8.2f}  {event.count // 3:4} x  {event.key[:110]}")


def ceilings() -> Card:
    a, b, out = random(8192, 8192), random(8192, 8192), random(8192, 8192)
    us, _ = microseconds(lambda i: torch.mm(a, b, out=out), 20)
    hot_us, _ = microseconds(lambda i: torch.mm(a, b, out=out), 1000)  # a second and more: power-limited
    flops = 2.0 * 8192**3 / us * 1e6
    source = [torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(ROTATION)]
    target = torch.empty_like(source[0])
    us, _ = microseconds(lambda i: target.copy_(source[i]), 20)
    bandwidth = 2.0 * 2**30 / us * 1e6
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: bf16 product {flops / 1e12:.0f} TFLOP/s "
        f"(sustained {2e-6 * 8192**3 / hot_us:.0f}), copy {bandwidth / 1e9:,.0f} GB/s",
        flush=True,
    )
    return Card(flops, bandwidth)


def main() -> None:
    parser = argparse.ArgumentParser()
    parts: dict[str, Callable[[Card], None]] = {
        "logprob": lambda card: bench_logprob(2048, card, {} if is_alone else peers.logprob_peers()),
        "experts": bench_experts,
        "rows": partial(bench_rows, 2048),
        "swiglu": bench_swiglu,
        "fp8": partial(bench_fp8, 2048),
        "norm": partial(bench_norm, 2048),
        "loss": bench_loss,
        "wide": lambda card: bench_logprob(7168, card, {} if is_alone else peers.logprob_peers()),
        "profile": lambda card: profile(),
    }
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--alone", action="store_true", help="without log-probabilities by others")
    options = parser.parse_args()
    names, is_alone = options.only, options.alone
    card = ceilings()
    for name in names:
        parts[name](card)


if __name__ == "__main__":
    main()
