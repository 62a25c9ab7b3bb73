"""What publishing a version costs. Each part prints a table; none asserts.

    python tests/bench_artifacts.py                            the first three, small, in two or three minutes
    python tests/bench_artifacts.py steps                      bytes a step ships, 1-GiB models, lr 1e-6
    python tests/bench_artifacts.py stall --gb 10              standstill of the trainer a snapshot
    python tests/bench_artifacts.py server                     the store against the client it uses
    python tests/bench_artifacts.py fetch                      a version by patches, whole, and as chosen
    python tests/bench_artifacts.py nodes                      two training nodes, all of a version or theirs
    python tests/bench_artifacts.py campaign --store ./runs    bytes that a finished campaign shipped

``steps`` and ``stall`` take ``--device cuda``. Models are random; a step is a forward and a backward pass
over random tokens with random advantages, and AdamW on float32 masters. The first step is the largest there
is: Adam moves every weight by the learning rate. After some, moments average and moves shrink.
"""

import argparse
import itertools
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_nodes import bench_nodes
from bench_transfers import bench_fetch, bench_server
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

COMMON = {"vocab_size": 32_000, "head_dim": 64, "tie_word_embeddings": True, "max_position_embeddings": 4096}
DENSE = {"hidden_size": 1536, "num_hidden_layers": 14, "intermediate_size": 6144, "num_attention_heads": 24}
MOE = {
    "hidden_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 16, "moe_intermediate_size": 512,
    "num_experts": 64, "num_experts_per_tok": 4, "norm_topk_prob": True,
}  # fmt: skip


def make_model(kind: str, scale: float) -> PreTrainedModel:
    """About ``scale`` GiB of bfloat16 weights."""
    shape = dict(DENSE if kind == "dense" else MOE)
    shape["num_hidden_layers"] = max(1, round(shape["num_hidden_layers"] * scale))
    if scale < 0.5:
        shape["hidden_size"] //= 2
    heads = {"num_key_value_heads": shape["num_attention_heads"] // 4}
    family = Qwen3Config if kind == "dense" else Qwen3MoeConfig
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(family(**COMMON, **shape, **heads), dtype=torch.float32)


def rounded(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a checkpoint of the model holds."""
    return {name: param.detach().to(torch.bfloat16).cpu() for name, param in model.named_parameters()}


def step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, seed: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    length = 512
    ids = torch.randint(3, 32_000, (tokens // length, length), generator=generator).to(model.device)
    advantage = torch.randn(tokens // length, 1, generator=generator).to(model.device)
    logits = model(input_ids=ids).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    ((advantage * loss).sum() / tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def bench_steps(options: argparse.Namespace) -> None:
    names = "model, GiB, step, changed, patch / full, make s/GB, apply s/GB, rebuilt equal, reloaded equal"
    print(f"| {names.replace(', ', ' | ')} |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        for kind in options.kinds:
            model = make_model(kind, options.scale).to(options.device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0)
            save_file(rounded(model), folder / "old")
            for number in range(1, options.steps + 1):
                step(model, optimizer, number, options.tokens)
                if number in (1, 2, 4, 8, 12, options.steps):
                    measure_patch(folder, kind, number, model, options.threads)
                save_file(rounded(model), folder / "old")
            del model, optimizer


def measure_patch(folder: Path, kind: str, number: int, model: PreTrainedModel, threads: int) -> None:
    from safetensors.torch import load_file

    from tasks.artifacts.content import FileContent
    from tasks.artifacts.patch import apply_patches, make_patch

    old, new = load_file(folder / "old"), rounded(model)
    changed = sum(int((old[n].view(torch.int16) != new[n].view(torch.int16)).sum()) for n in new)
    share = changed / sum(tensor.numel() for tensor in new.values())
    save_file(new, folder / "new")
    size = (folder / "new").stat().st_size
    with FileContent(folder / "new") as content, (folder / "old").open("rb") as base:
        makes, made = timed(
            lambda: make_patch(folder / "old", content, folder / "p", num_threads=threads, max_share=2.0)
        )
        assert made
        applies, _ = timed(
            lambda: apply_patches([folder / "p"], base, folder / "rebuilt", num_threads=threads)
        )
    patch = (folder / "p").stat().st_size
    is_equal = (folder / "rebuilt").read_bytes() == (folder / "new").read_bytes()
    reloaded, live = load_file(folder / "rebuilt"), dict(model.named_parameters())
    is_same = all(torch.equal(reloaded[n].to(p.device), p.detach().bfloat16()) for n, p in live.items())
    print(
        f"| {kind} | {size / 2**30:.2f} | {number} | {share:.2%} | {patch / size:.2%} | "
        f"{makes / size * 1e9:.2f} | {applies / size * 1e9:.2f} | {is_equal} | {is_same} |",
        flush=True,
    )


def bench_stall(options: argparse.Namespace) -> None:
    """Snapshots of a policy and its optimizer between steps; the last one's weights are loaded again."""
    from policies import write_shard

    from tasks.policy.checkpoint.upload import named_tensors, reserved_arena
    from tasks.policy.checkpoint.weights import CONFIG, write_index
    from tasks.policy.dispatch.dispatcher import LocalDispatcher
    from tasks.policy.models.model import load_policy
    from tasks.policy.step.trainer import make_optimizer

    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder, again = Path(name), Path(name) / "again"
        again.mkdir()
        with torch.device(options.device):  # 2 bytes of an element's weight, 12 of its master and moments
            make_model("moe", options.gb / 14 * 2).bfloat16().save_pretrained(folder)
        read = partial(load_policy, dispatcher=LocalDispatcher(), device=options.device)
        policy = read(folder)
        optimizer = make_optimizer(policy, lr=1e-6, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
        begin = time.monotonic()
        arena = reserved_arena(policy, torch.bfloat16)
        step_randomly(policy, optimizer)
        arena.wait()
        print(f"pinning beside a step: {time.monotonic() - begin:.2f} s for {arena.num_bytes / 1e9:.2f} GB")
        print("| snapshot | GB | tensors | stall s | GB/s | stall s per 10 GB | equal to the live tensors |")
        print("|---|---|---|---|---|---|---|")
        held = arena.num_bytes
        for number in range(3):
            step_randomly(policy, optimizer)
            snapshot = arena.take(named_tensors(policy, optimizer, torch.bfloat16))
            live = named_tensors(policy, optimizer, torch.bfloat16)
            is_equal = all(same_bits(tensor, snapshot.tensors[name]) for name, tensor in live)
            gigabytes, seconds = snapshot.num_bytes / 1e9, snapshot.seconds
            print(
                f"| {number} | {gigabytes:.2f} | {len(snapshot.tensors)} | {seconds:.3f} | "
                f"{gigabytes / seconds:.1f} | {seconds / gigabytes * 10:.3f} | {is_equal} |",
                flush=True,
            )
        print(f"pinned during a snapshot: {arena.num_bytes - held} bytes")
        items = ((n[6:], tensor) for n, tensor in snapshot.tensors.items() if n.startswith("model:"))
        write_index(again, [write_shard(again, items, 0, 1)])
        shutil.copyfile(folder / CONFIG, again / CONFIG)
        loaded = read(again, dtype=torch.bfloat16).state_dict()
        is_equal = all(same_bits(loaded[n], tensor.bfloat16()) for n, tensor in policy.state_dict().items())
        print(f"{len(loaded)} tensors of the reloaded model equal the live ones bit for bit: {is_equal}")


def step_randomly(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Bytes and not values: a negative zero equals zero."""
    pair = [
        tensor.detach().to(one.device).contiguous().flatten().view(torch.uint8) for tensor in (one, other)
    ]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*pair)


def bench_campaign(options: argparse.Namespace) -> None:
    """Bytes that each version of a finished campaign added, and would have added whole."""
    from tasks.artifacts.lineage import added_bytes, open_lineage

    store = open_lineage(options.store, options.campaign)
    manifests = store.history()
    print("| version | weights, full | weights, added | share | everything added |\n|---|---|---|---|---|")
    for before, manifest in itertools.pairwise(manifests):
        weights = {n: f for n, f in manifest.files.items() if n.startswith("model-")}
        old = {n: f for n, f in before.files.items() if n.startswith("model-")}
        full = sum(file.size for file in weights.values())
        added = added_bytes(
            manifest.model_copy(update={"files": weights}), before.model_copy(update={"files": old})
        )
        print(
            f"| {manifest.version} | {full:,} | {added:,} | {added / full:.1%} | "
            f"{added_bytes(manifest, before):,} |"
        )


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.monotonic()
    result = run()
    return time.monotonic() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["steps", "stall", "server", "fetch", "nodes", "campaign"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="GiB of the models of `steps`")
    parser.add_argument("--kinds", nargs="+", choices=["dense", "moe"], default=["dense", "moe"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192, help="a step")
    parser.add_argument("--gb", type=float, default=1.0, help="of the snapshot of `stall`")
    parser.add_argument("--mb", type=int, default=256, help="of the file of `server`, the version of `nodes`")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--reads", type=int, default=6, help="of each file of `server`")
    parser.add_argument("--links", type=int, nargs="*", default=[0, 100], help="MB/s, of `fetch`; 0: none")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--folder", help="for temporary files; default: the system's")
    parser.add_argument("--store", default="./runs")
    parser.add_argument("--campaign", default="laptop")
    options = parser.parse_args()
    where = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "CPU"
    print(f"{options.part or 'small'}: {where}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}\n")
    parts = {
        "steps": bench_steps, "stall": bench_stall, "server": bench_server, "fetch": bench_fetch,
        "nodes": bench_nodes, "campaign": bench_campaign,
    }  # fmt: skip
    if options.part:
        parts[options.part](options)
        return
    options.scale, options.steps, options.tokens, options.gb, options.mb = 0.25, 4, 1024, 1.0, 96
    options.rounds = options.reads = 3
    for run in (bench_server, bench_steps, bench_stall):
        run(options)
        print()


if __name__ == "__main__":
    main()
