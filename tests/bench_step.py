"""The trainer's own step: bench_training's with routers' statistics, policy loss, norm, clipping and metrics.

    PYTHONPATH=.:kernels:tests python tests/bench_step.py
    PYTHONPATH=.:kernels:tests torchrun --nproc-per-node 2 tests/bench_step.py    # all_to_all, nvlink

8 x 2,048 tokens a rank of bench_training's model through ``train_minibatch``, by loss kernel, each profiled:
device idle is what the host's questions and launches cost. Without CUDA a small model, to see it run.
"""

import math
import os
import statistics
import time
from collections.abc import Callable

import bench_training as bench
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from tasks.algorithm_config import AlgorithmConfig
from tasks.policy.parallel.mesh import ParallelMesh, make_mesh
from tasks.policy.step.adamw import OnePassAdamW
from tasks.policy.step.fused_loss import fused_policy_objective
from tasks.policy.step.trainer import Learner, policy_reader, train_minibatch
from tasks.rl.objective import policy_objective

WORLD, CUDA = int(os.environ.get("WORLD_SIZE", 1)), torch.cuda.is_available()
STEPS = 12 if CUDA else 2
LOSSES = {"torch": policy_objective} | ({"fused": fused_policy_objective} if CUDA else {})


def paths() -> list[str]:
    if not CUDA:
        return ["all_to_all" if WORLD > 1 else "local"]
    return ["all_to_all+all", "nvlink+all", "nvlink_fixed+all"] if WORLD > 1 else ["local+all"]


def make_batch(vocab_size: int, rank: int) -> dict[str, Tensor]:
    """Whole rows, an eighth of each a prompt."""
    draw = torch.Generator().manual_seed(rank)
    shape = (bench.ROWS, bench.LENGTH)
    ids = torch.randint(2, vocab_size, shape, generator=draw)
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mask": torch.arange(shape[1]).expand(shape) >= shape[1] // 8,
        "behavior_logprob": -math.log(vocab_size) + torch.rand(shape, generator=draw),
        "advantage": torch.randn(shape[0], 1, generator=draw).expand(shape).contiguous(),
        "segment": torch.arange(shape[0])[:, None].expand(shape).contiguous(),
        "length": torch.full(shape, shape[1] - shape[1] // 8),
    }
    return {name: value.to(bench.DEVICE) for name, value in batch.items()}


def make_step(model: PreTrainedModel, mesh: ParallelMesh, kernel: str) -> Callable[[], dict[str, float]]:
    batch = make_batch(model.config.vocab_size, mesh.rank)
    num_tokens = WORLD * int(batch["mask"].sum())
    optimizer = OnePassAdamW(model.parameters(), lr=1e-6)
    read = policy_reader(kernel="fused" if CUDA else "torch", keep_gb=5.0 if CUDA else 0.0)
    loss = LOSSES[kernel](
        AlgorithmConfig(),
        num_global_tokens=num_tokens,
        num_global_sequences=WORLD * bench.ROWS,
        fixed_length=1,
    )
    return lambda: train_minibatch(
        Learner(model, optimizer, mesh),
        [batch],
        loss,
        num_global_tokens=num_tokens,
        max_grad_norm=1.0,
        read=read,
    )


def measure(path: str, kernel: str, model: PreTrainedModel, mesh: ParallelMesh) -> None:
    step = make_step(model, mesh, kernel)
    seconds, metrics = [], {}
    for _ in range(STEPS):
        bench.synchronize()
        begin = time.perf_counter()
        metrics = step()
        bench.synchronize()
        seconds.append(time.perf_counter() - begin)
    if mesh.rank == 0:
        ms = statistics.median(seconds[STEPS // 3 :]) * 1e3
        numbers = f"loss {metrics['loss']:.5f} norm {metrics['grad_norm']:.4f}"
        print(f"{path:18} loss_kernel {kernel:6} x{WORLD} {ms:8.1f} ms a step  {numbers}", flush=True)
    if CUDA:
        bench.profile(f"{path}, loss_kernel {kernel}", step, mesh.rank)


def main() -> None:
    if WORLD > 1:
        if CUDA:
            torch.cuda.set_device(bench.DEVICE)
        dist.init_process_group("nccl" if CUDA else "gloo", device_id=bench.DEVICE if CUDA else None)
    mesh = make_mesh(WORLD, WORLD)
    for path in paths():
        model = bench.build(path, mesh)
        for kernel in LOSSES:
            measure(path, kernel, model, mesh)
        del model
        if CUDA:
            torch.cuda.empty_cache()
    if WORLD > 1:
        if CUDA:
            for path in paths():
                bench.open_dispatcher(path.partition("+")[0], mesh.ep_group).close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
