"""All kernels on one card: us | TFLOP/s or GB/s | % of floor | x the eager peer. Needs a CUDA device.

    PYTHONPATH=.:kernels python kernels/bench.py

The floor is the least work over the ceilings measured first: a large bf16 matrix product and a large copy.
Medians over rounds, with their spread; inputs rotate so that none is found in the 60 MB cache. Shapes are
those of Qwen3-30B-A3B with 16,384 tokens: hidden 2,048, 128 experts of width 768, 8 a token.

Shape key: T tokens, D features, V vocabulary, K experts a token, P = T K copies, H expert width, J = 2 H.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from moe_kernels import reference
from moe_kernels.logprob import selective_logprob_entropy
from moe_kernels.rows import moe_permute, moe_unpermute
from moe_kernels.swiglu import swiglu_weighted
from torch import Tensor

T, V, K, H = 16_384, 151_936, 8, 768
ROTATION = 3
Step = Callable[[int], Any]


def microseconds(step: Step, rounds: int) -> tuple[float, float]:
    """Median and spread (90th less 10th percentile, % of the median)."""
    for index in range(ROTATION):
        step(index)
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)
    ]
    for index, (begin, end) in enumerate(marks):
        begin.record()
        step(index % ROTATION)
        end.record()
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) * 1e3 for begin, end in marks)
    middle = statistics.median(times)
    return middle, 100 * (times[int(0.9 * (len(times) - 1))] - times[int(0.1 * (len(times) - 1))]) / middle


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale


def line(
    name: str, ours: Step, eager: Step | None, *, work: float, unit: str, ceiling: float, rounds: int
) -> None:
    """``work`` in operations (unit TFLOP/s) or bytes (unit GB/s); ``ceiling`` in the same a second."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    us, spread = microseconds(ours, rounds)
    gib = (torch.cuda.max_memory_allocated() - before) / 2**30
    factor = 1e-6 if unit == "TFLOP/s" else 1e-3
    text = f"{name:30} | {us:9,.0f} us +- {spread:3.1f} % | {work / us * factor:7,.0f} {unit:7} "
    text += f"| {100 * work / ceiling * 1e6 / us:5.1f} % of floor | +{gib:5.2f} GiB"
    if eager is not None:
        torch.cuda.reset_peak_memory_stats()
        peer, _ = microseconds(eager, max(rounds // 4, 3))
        peer_gib = (torch.cuda.max_memory_allocated() - before) / 2**30
        text += f" | {peer / us:4.2f} x eager ({peer:,.0f} us, +{peer_gib:.2f} GiB)"
    print(text, flush=True)
    gc.collect()
    torch.cuda.empty_cache()


def backward_of(function: Callable[..., Any], inputs: list[list[Tensor]], slopes: list[Tensor]) -> Step:
    """Forward and backward with gradients for every floating-point input."""

    def step(index: int) -> None:
        args = inputs[index]
        wanted = [a for a in args if a.requires_grad]
        out = function(*args)
        out = out if isinstance(out, tuple) else (out,)
        torch.autograd.grad(out, wanted, [slopes[index]] * len(out))

    return step


def bench_logprob(width: int, flops: float) -> None:
    weight_VD = random(V, width, scale=0.02).requires_grad_()
    inputs = [
        [random(T, width).requires_grad_(), weight_VD, torch.randint(0, V, (T,), device="cuda")]
        for _ in range(ROTATION)
    ]
    slopes = [torch.randn(T, device="cuda") for _ in range(ROTATION)]

    ours = partial(selective_logprob_entropy, temperature=1.0)

    eager = partial(reference.selective_logprob_entropy, temperature=1.0)

    product = 2.0 * T * V * width
    with torch.no_grad():
        line(
            f"logprob+entropy fwd, D {width}", lambda i: ours(*inputs[i]), lambda i: eager(*inputs[i]),
            work=product, unit="TFLOP/s", ceiling=flops, rounds=8,
        )  # fmt: skip
    line(
        f"logprob+entropy fwd+bwd, D {width}", backward_of(ours, inputs, slopes),
        backward_of(eager, inputs, slopes),
        work=4 * product, unit="TFLOP/s", ceiling=flops, rounds=8,
    )  # fmt: skip
    line(
        f"  the same, logits kept, D {width}",
        backward_of(partial(ours, keep_bytes=2**33), inputs, slopes), None,
        work=3 * product, unit="TFLOP/s", ceiling=flops, rounds=8,
    )  # fmt: skip
    bench_products(inputs[0][0].detach(), weight_VD.detach(), flops)


def bench_products(hidden_TD: Tensor, weight_VD: Tensor, flops: float) -> None:
    """The logits' matrix product alone, in one piece: what the library reaches under the same power limit."""
    out_TV = random(T, V)
    line(
        f"  bare product, D {hidden_TD.shape[1]}",
        lambda i: torch.mm(hidden_TD, weight_VD.T, out=out_TV), None,
        work=2.0 * T * V * hidden_TD.shape[1], unit="TFLOP/s", ceiling=flops, rounds=16,
    )  # fmt: skip


def bench_rows(width: int, bandwidth: float) -> None:
    slots = [torch.randperm(T * K, device="cuda").view(T, K) for _ in range(ROTATION)]
    rows, copies = [random(T, width) for _ in slots], [random(T * K, width) for _ in slots]
    moved = 2.0 * width * T * (K + 1)
    options = {"work": moved, "unit": "GB/s", "ceiling": bandwidth, "rounds": 30}
    order = [s.flatten().argsort() // K for s in slots]
    line(
        "moe_permute", lambda i: moe_permute(rows[i], slots[i], T * K), lambda i: rows[i][order[i]], **options
    )
    line(
        "moe_unpermute", lambda i: moe_unpermute(copies[i], slots[i]),
        lambda i: torch.zeros_like(rows[i]).index_add_(0, order[i], copies[i]), **options,
    )  # fmt: skip


def bench_swiglu(bandwidth: float) -> None:
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
            "swiglu_weighted fwd", lambda i: ours(*inputs[i]), lambda i: eager(*inputs[i]),
            work=forward, unit="GB/s", ceiling=bandwidth, rounds=30,
        )  # fmt: skip
    line(
        "swiglu_weighted fwd+bwd", backward_of(ours, inputs, slopes), backward_of(eager, inputs, slopes),
        work=forward + 2.0 * T * K * 5 * H, unit="GB/s", ceiling=bandwidth, rounds=30,
    )  # fmt: skip


def main() -> None:
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
    source.clear()
    bench_rows(2048, bandwidth)
    bench_swiglu(bandwidth)
    for width in (2048, 7168):
        bench_logprob(width, flops)


if __name__ == "__main__":
    main()
