"""One training step of a Qwen3-30B-A3B-shaped policy cut to a few layers, by experts path. Not a test.

    python tests/bench_training.py                           # one GPU: transformers' own paths, ours
    torchrun --nproc-per-node 2 tests/bench_training.py      # expert parallelism over all ranks

With `--paths` only those named, with `--steps` so many each. "deepep" needs DeepEP; over several ranks the
exchange of one layer's tokens is timed alone as well, forward and backward.

Prints per path: milliseconds a step (median), tokens/s a GPU, model FLOP/s utilisation against 989 TFLOP/s
(the card's bf16 rate), peak memory. Each rank trains its own 8 x 2,048 tokens; parameters bf16, fused AdamW,
log-probs of the 151,936-token vocabulary in recomputed chunks. What follows a + is done by fused kernels
("all": log-probs, experts, norms and rotary embedding; "adamw": the optimizer; "keep": logits kept for
backward); "rows" has prompts, a quarter of each sequence, which its head does not read. Also checks that the
paths agree. With `--profile` each path ends with the kernels of its step.
"""

import argparse
import functools
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from moe_kernels.logprob import selective_logprob_entropy
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tasks.deepep_config import DeepEPConfig
from tasks.nvlink_config import NVLinkConfig
from tasks.policy.dispatch.deepep import make_deepep
from tasks.policy.dispatch.dispatcher import Dispatcher, ExchangeShape, LocalDispatcher, make_dispatcher
from tasks.policy.dispatch.nvlink import make_nvlink
from tasks.policy.models.norms import use_fused_norms
from tasks.policy.models.rotary import use_fused_rotary
from tasks.policy.parallel.experts import attach_dispatcher
from tasks.policy.parallel.mesh import make_mesh, reduce_gradients
from tasks.policy.step.adamw import OnePassAdamW
from tasks.policy.step.head_rows import take_rows

PEAK_FLOPS = 989e12
FUSED = ["logprob", "logprob+experts", "logprob+experts+norms", "all", "all+adamw", "all+adamw+keep"]
FUSED += ["all+adamw+keep+rows"]
ALONE = ["grouped_mm", "local", *(f"local+{fused}" for fused in FUSED), "eager"]
BEST = "+all+adamw+keep"
DISPATCHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "all_to_all": ("all_to_all", {}),
    "deepep": ("deepep", {}),
    "deepep_expanded": ("deepep", {"layout": "expanded"}),
    "nvlink": ("nvlink", {}),
    "nvlink_fixed": ("nvlink", {"capacity": 1.5}),
}
"""With several ranks. The last has room for 1.5 even shares of rows, and its host never waits."""
EXCHANGES = [f"{name}{fused}" for name in DISPATCHERS for fused in ("", "+all+adamw", BEST)]
KEEP_BYTES = 5 * 2**30
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if CUDA else torch.device("cpu")
SHAPE = {
    "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
    "vocab_size": 151_936,
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 64, "vocab_size": 512,
}  # fmt: skip
LAYERS, ROWS, LENGTH = (4, 8, 2048) if CUDA else (2, 2, 64)


def build(path: str, mesh) -> Qwen3MoeForCausalLM:
    """The same random policy for every path; experts are sharded if there are several ranks."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **(SHAPE if CUDA else SMALL), num_hidden_layers=LAYERS, norm_topk_prob=True,
        tie_word_embeddings=False, attn_implementation="sdpa",
        experts_implementation=path if path in ("eager", "grouped_mm") else None,
    )  # fmt: skip
    with DEVICE:
        model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16 if CUDA else torch.float32)
    if path not in ("eager", "grouped_mm"):
        name, _, fused = path.partition("+")
        dispatcher = LocalDispatcher() if name == "local" else open_dispatcher(name, mesh.ep_group)
        attach_dispatcher(
            model, dispatcher, kernel="fused" if "experts" in fused or "all" in fused else "torch"
        )
        if "norms" in fused or "all" in fused:
            use_fused_norms(model)
        if "all" in fused:
            use_fused_rotary(model)
    return model.train()


@functools.cache  # a model's buffer serves the next one as well
def open_dispatcher(path: str, group: dist.ProcessGroup) -> Dispatcher:
    name, options = DISPATCHERS[path]
    settings = {"max_tokens": ROWS * LENGTH, **options}

    def build(group: dist.ProcessGroup) -> Dispatcher:
        shape = ExchangeShape(
            hidden=SHAPE["hidden_size"], num_topk=SHAPE["num_experts_per_tok"], deterministic=False,
            timeout_seconds=120,
        )  # fmt: skip
        if name == "nvlink":
            return make_nvlink(group, NVLinkConfig.model_validate(settings), shape)
        return make_deepep(group, DeepEPConfig.model_validate(settings), shape)

    return make_dispatcher(name, group, build)  # type: ignore[arg-type]


def exchange_ms(dispatcher: Dispatcher, repeats: int = 20) -> dict[str, float]:
    """Median time of one layer's exchange of 16,384 random tokens a rank, experts left out."""
    generator = torch.Generator().manual_seed(dispatcher.rank)
    score_TE = torch.rand(ROWS * LENGTH, SHAPE["num_experts"], generator=generator).to(DEVICE)
    weight_TK, expert_TK = (t.contiguous() for t in score_TE.topk(SHAPE["num_experts_per_tok"], dim=1))
    x_TD = torch.randn(ROWS * LENGTH, SHAPE["hidden_size"], device=DEVICE).bfloat16().requires_grad_()
    grad_TD = torch.randn_like(x_TD)
    parts: dict[str, list[float]] = {"dispatch": [], "combine": [], "backward": []}
    for _ in range(repeats):
        dist.barrier()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        marks[0].record()
        sent = dispatcher.dispatch(x_TD, expert_TK, weight_TK, SHAPE["num_experts"])
        marks[1].record()
        y_TD = dispatcher.combine(sent.x_RD, sent.handle)
        marks[2].record()
        y_TD.backward(grad_TD)
        marks[3].record()
        torch.cuda.synchronize()
        for name, begin, end in zip(parts, marks, marks[1:], strict=False):
            parts[name].append(begin.elapsed_time(end))
    medians = {name: statistics.median(times[repeats // 4 :]) for name, times in parts.items()}
    return {**medians, "all": sum(medians.values())}


@functools.cache
def trained_rows(device: str) -> Tensor:
    """Places of the last three quarters of each sequence among all that are predicted."""
    return torch.arange(ROWS * (LENGTH - 1)).view(ROWS, -1)[:, LENGTH // 4 - 1 :].flatten().to(device)


def chunk_loss(hidden_TD: Tensor, weight_VD: Tensor, ids_T: Tensor) -> Tensor:
    logits_TV = (hidden_TD @ weight_VD.T).float()
    return torch.nn.functional.cross_entropy(logits_TV, ids_T, reduction="sum")


def loss_of(model: Qwen3MoeForCausalLM, ids_BL: Tensor, path: str) -> Tensor:
    hidden_BLD = model.model(input_ids=ids_BL, use_cache=False).last_hidden_state[:, :-1]
    hidden_TD, target_T = hidden_BLD.flatten(0, 1), ids_BL[:, 1:].flatten()
    if path.endswith("rows"):
        hidden_TD, target_T = take_rows(hidden_TD, row_N := trained_rows(str(DEVICE))), target_T[row_N]
    if "+" in path:
        logprob_T, _ = selective_logprob_entropy(
            hidden_TD,
            model.lm_head.weight,
            target_T,
            temperature=1.0,
            keep_bytes=KEEP_BYTES * ("keep" in path),
        )
        return -logprob_T.mean()
    chunks = zip(hidden_TD.split(2048), target_T.split(2048), strict=True)
    parts = [checkpoint(chunk_loss, h, model.lm_head.weight, t, use_reentrant=False) for h, t in chunks]
    return torch.stack(parts).sum() / target_T.numel()


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def profile(path: str, step: Callable[[], None], rank: int) -> None:
    """Print where the device time of two steps goes, by kernel, and how long the device had nothing to do."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        for _ in range(2):
            step()
        synchronize()
    if rank:
        return
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    )
    by_name: dict[str, list[float]] = {}
    busy, end = 0.0, spans[0][0] if spans else 0.0
    for begin, finish, name in spans:
        by_name.setdefault(name, []).append(finish - begin)
        busy += max(finish - max(begin, end), 0.0)
        end = max(end, finish)
    whole = (spans[-1][1] - spans[0][0]) / 2e3 if spans else 0.0
    print(
        f"profile of {path}: {whole:.1f} ms a step, device idle {whole - busy / 2e3:.1f} ms of it", flush=True
    )
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:40]:
        print(f"  {sum(times) / 2e3:8.2f} ms {len(times) // 2:5} x {name[:110]}", flush=True)


def measure(path: str, mesh, steps: int, is_profiled: bool = False) -> tuple[dict[str, float], float, Tensor]:
    model = build(path, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=CUDA)
    if "adamw" in path:
        optimizer = OnePassAdamW(model.parameters(), lr=1e-5)
    generator = torch.Generator().manual_seed(dist.get_rank() if mesh.world else 0)
    ids_BL = torch.randint(0, model.config.vocab_size, (ROWS, LENGTH), generator=generator).to(DEVICE)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    seconds, first = [], {}

    def one_step() -> None:
        loss = loss_of(model, ids_BL, path)
        loss.backward()
        reduce_gradients(model, mesh)
        if not first:
            probe = model.model.layers[0].mlp.gate.weight.grad.float().clone()
            first.update(loss=loss.item(), probe=probe)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(steps):
        synchronize()
        begin = time.perf_counter()
        one_step()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0
    if is_profiled:
        profile(path, one_step, mesh.rank)
    middle = statistics.median(seconds[len(seconds) // 3 :])
    tokens = ROWS * LENGTH
    return {
        "ms": middle * 1e3, "tokens/s": tokens / middle,
        "MFU %": 100 * flops(model, tokens) / middle / PEAK_FLOPS,
        "peak GiB": peak,
    }, first["loss"], first["probe"]  # fmt: skip


def flops(model: Qwen3MoeForCausalLM, tokens: int) -> float:
    """Forward and backward products of the active parameters and of causal attention; no recomputation."""
    c = model.config
    attention = c.hidden_size * c.head_dim * (2 * c.num_attention_heads + 2 * c.num_key_value_heads)
    experts = 3 * c.hidden_size * c.moe_intermediate_size * c.num_experts_per_tok
    active = c.num_hidden_layers * (attention + experts) + c.vocab_size * c.hidden_size
    scores = c.num_hidden_layers * c.num_attention_heads * c.head_dim * LENGTH  # half is masked
    return 6 * tokens * (active + scores)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--paths", nargs="*", default=[])
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    world_size, steps = int(os.environ.get("WORLD_SIZE", 1)), options.steps
    if world_size > 1:
        if CUDA:
            torch.cuda.set_device(DEVICE)
        dist.init_process_group("nccl" if CUDA else "gloo", device_id=DEVICE if CUDA else None)
    mesh = make_mesh(world_size, world_size)
    paths = options.paths or (EXCHANGES if world_size > 1 else ALONE)
    baseline = None
    for path in paths:
        result, loss, probe = measure(
            path, mesh, steps if path != "eager" else max(steps // 3, 2), options.profile
        )
        if not mesh.world or dist.get_rank() == 0:
            figures = "  ".join(f"{name} {value:,.1f}" for name, value in result.items())
            line = f"{path:21} x{world_size}  {figures}  loss {loss:.4f}"
            if baseline is not None:
                line += f"  router gradient off by {((probe - baseline).norm() / baseline.norm()).item():.1e}"
            print(line, flush=True)
        baseline = probe if baseline is None else baseline
        gc.collect()  # a model's hooks form cycles, and the next peak would hold this one
        if CUDA:
            torch.cuda.empty_cache()
    if mesh.world:
        for name in sorted({path.partition("+")[0] for path in paths} if CUDA else set()):
            dispatcher = open_dispatcher(name, mesh.ep_group)
            figures = "  ".join(f"{part} {ms:.3f}" for part, ms in exchange_ms(dispatcher).items())
            if dist.get_rank() == 0:
                print(f"exchange alone, ms: {figures}  {dispatcher.describe()}", flush=True)
            dispatcher.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
