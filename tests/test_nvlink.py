"""The NVLink dispatcher without GPUs: ranks share files as memory, and the formulas stand for the kernels.

Whether the kernels are the formulas is for ``test_exchange_gpu.py``, and for the last tests here, which need
Triton and have the marker ``interpreter``. What no test here can see is a missing fence between two GPUs.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exchange import CASES, Setting, run_case
from families import FAMILIES, tiny_policy, token_ids
from interpreter import interpret
from moe_kernels import nvlink
from ranks import run_ranks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tasks.nvlink_config import NVLinkConfig
from tasks.policy.dispatch.dispatcher import AllToAllDispatcher, ExchangeShape
from tasks.policy.dispatch.nvlink import NVLinkDispatcher, check_peers, make_nvlink, shapes_of
from tasks.policy.parallel.experts import attach_dispatcher

BFLOAT16 = Setting(dtype=torch.bfloat16, hidden=24, num_experts=12, num_selected=3, num_roundings=3)
FLOAT32 = replace(BFLOAT16, dtype=torch.float32)
MAX_TOKENS = 40


class FileMemory:
    """Bytes of every rank in a file that all map; what a barrier must order is in memory at once here."""

    def __init__(self, folder: Path, num_bytes: int):
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        own = torch.from_file(str(folder / str(rank)), shared=True, size=num_bytes, dtype=torch.uint8)
        own.fill_(0x7F)  # what nobody staged or delivered must not look like zeros
        dist.barrier()
        self.parts = [
            torch.from_file(str(folder / str(r)), shared=True, size=num_bytes, dtype=torch.uint8)
            for r in range(num_ranks)
        ]
        self.num_barriers, self.is_closed = 0, False

    def barrier(self) -> None:
        self.num_barriers += 1
        dist.barrier()

    def close(self) -> None:
        self.is_closed = True


def open_dispatcher(folder: Path, setting: Setting, capacity: float = 0.0) -> NVLinkDispatcher:
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    settings = NVLinkConfig(max_tokens=MAX_TOKENS, capacity=capacity)
    shape = ExchangeShape(
        hidden=setting.hidden, num_topk=setting.num_selected, deterministic=True, timeout_seconds=60,
        dtype=setting.dtype,
    )  # fmt: skip
    size = nvlink.num_bytes(shapes_of(dist.get_world_size(), settings, shape))
    return NVLinkDispatcher(dist.group.WORLD, FileMemory(folder, size), settings, shape, "files")


def poison_empty_tensors() -> None:
    """Rows that nobody wrote hold NaN, as they may on a GPU."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def check_contract(rank: int, world_size: int, folder: Path, setting: Setting, capacity: float) -> None:
    poison_empty_tensors()
    dispatcher = open_dispatcher(folder, setting, capacity)
    for case in CASES:
        first = run_case(dispatcher, case, setting)
        assert all(torch.equal(a, b) for a, b in zip(first, run_case(dispatcher, case, setting), strict=True))
    dispatcher.close()


@pytest.mark.parametrize("setting", [BFLOAT16, FLOAT32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("capacity", [0.0, 9.0], ids=["exact", "fixed"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_nvlink_equals_dense_experts_in_output_and_gradient(world_size, capacity, setting, tmp_path):
    run_ranks(check_contract, world_size, tmp_path, setting, capacity)


def check_order(rank: int, world_size: int, folder: Path) -> None:
    dispatcher = open_dispatcher(folder, replace(FLOAT32, hidden=1, num_selected=2), capacity=0.2)
    # token 0 selects experts 1 and 0, token 1 experts 1 and 4, token 2 nothing; rank 1's are 10 to 12
    number_TK = torch.tensor([[1, 0], [1, 4], [-1, -1]])
    weight_TK = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]) + 10 * rank
    sent = dispatcher.dispatch(torch.arange(3.0)[:, None] + 10 * rank, number_TK, weight_TK, 6)
    assert sent.groups is not None and sent.x_RD.shape[0] == 16  # 0.2 even shares of 40 tokens, 2 selections
    num_rows = int(sent.groups.end_e[-1])
    if rank == 0:
        assert sent.groups.end_e.tolist() == [2, 6, 6] and sent.groups.count_e.tolist() == [2, 4, 0]
        assert sent.x_RD[:num_rows].flatten().tolist() == [0, 10, 0, 1, 10, 11]
        assert sent.expert_RK.flatten().tolist() == [0, 0, 1, 1, 1, 1, *[-1] * 10]
        assert sent.weight_RK.flatten().tolist() == [2, 12, 1, 3, 11, 13, *[0] * 10]
    else:
        assert sent.groups.end_e.tolist() == [0, 2, 2] and sent.x_RD[:num_rows].flatten().tolist() == [1, 11]
    assert dispatcher.describe() == (
        "nvlink over 2 ranks: torch.float32 rows, room for 0.2 even shares, at most 40 tokens; files, 0 MiB"
    )


def test_rows_lie_by_expert_then_by_source_then_by_token(tmp_path):
    run_ranks(check_order, 2, tmp_path)


def check_barriers(rank: int, world_size: int, folder: Path) -> None:
    """A rank that is late to read must not find the next exchange's rows, in whatever order they follow."""
    dispatcher = open_dispatcher(folder, replace(FLOAT32, hidden=1, num_selected=1))
    memory, one = dispatcher.memory, torch.ones(1, 1)
    assert isinstance(memory, FileMemory)
    number = torch.tensor([[0]])
    counts = []
    sent: Any = None
    for call in ("dispatch", "combine", "dispatch", "dispatch", "combine", "combine"):
        before = memory.num_barriers
        if call == "dispatch":
            sent = dispatcher.dispatch(one, number, one, 2)
        else:
            dispatcher.combine(sent.x_RD, sent.handle)
        counts.append(memory.num_barriers - before)
    # a dispatch has two of its own where the host reads a count; one more between two of a direction
    assert counts == [2, 1, 2, 3, 1, 2]


def test_exchanges_of_one_direction_are_kept_apart_by_a_barrier(tmp_path):
    run_ranks(check_barriers, 2, tmp_path)


def check_refusals(rank: int, world_size: int, folder: Path) -> None:
    small = replace(FLOAT32, hidden=2, num_selected=2)
    dispatcher = open_dispatcher(folder, small)
    x, number, weight = torch.ones(2, 2), torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"must be torch.float32 of 2 features with 2 selections, got"):
        dispatcher.dispatch(x.bfloat16(), number, weight, 4)
    with pytest.raises(ValueError, match=r"got torch.float32, 2 and 1"):
        dispatcher.dispatch(x, number[:, :1], weight[:, :1], 4)
    with pytest.raises(ValueError, match=r"at most nvlink.max_tokens \(40\) tokens, got 42"):
        dispatcher.dispatch(x.repeat(21, 1), number.repeat(21, 1), weight.repeat(21, 1), 4)
    with pytest.raises(ValueError, match=r"num_experts must be at most 1024"):
        dispatcher.dispatch(x, number, weight, 2048)
    with pytest.raises(ValueError, match=r"got 1 selections at or above it"):  # on both ranks
        dispatcher.dispatch(x, number + rank, weight, 4)
    sent = dispatcher.dispatch(x, number, weight, 4)
    with pytest.raises(ValueError, match=r"combine must be torch.float32, got torch.float64"):
        dispatcher.combine(sent.x_RD.double(), sent.handle)

    def layer(x_TD: torch.Tensor) -> torch.Tensor:
        sent = dispatcher.dispatch(x_TD, number, weight, 4)
        return dispatcher.combine(sent.x_RD.sin(), sent.handle)

    y: Any = checkpoint(layer, x.requires_grad_(), use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"must run once a pass, got one inside a backward pass"):
        y.sum().backward()


def test_what_the_memory_has_no_place_for_is_refused(tmp_path):
    run_ranks(check_refusals, 2, tmp_path)


def check_overflow(rank: int, world_size: int, folder: Path) -> None:
    dispatcher = open_dispatcher(folder, replace(FLOAT32, hidden=1, num_selected=1), capacity=0.1)
    number, weight = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    sent = dispatcher.dispatch(torch.ones(2, 1), number, weight, 2)  # 4 rows on rank 0: exactly the room
    assert sent.x_RD.shape[0] == 4 and int(sent.handle.rows.status[3]) == 1
    dispatcher.combine(sent.x_RD, sent.handle)
    x_TD = torch.ones(3 - rank, 1)  # one more
    number, weight = torch.zeros(3 - rank, 1, dtype=torch.int64), torch.ones(3 - rank, 1)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"must fit nvlink.capacity"):
            dispatcher.dispatch(x_TD, number, weight, 2)
    else:
        dispatcher.dispatch(x_TD, number, weight, 2)


def test_more_rows_than_fit_end_the_run_and_as_many_as_fit_do_not(tmp_path):
    run_ranks(check_overflow, 2, tmp_path)


def test_nodes_devices_and_backends_that_cannot_share_memory_are_refused():
    def anything(device: int, other: int) -> bool:
        return True

    check_peers([("a", 0), ("a", 1)], 0, anything)
    with pytest.raises(RuntimeError, match=r"all 3 ranks .* on one node, got 2 nodes\. Set ep"):
        check_peers([("a", 0), ("a", 1), ("b", 0)], 0, anything)
    with pytest.raises(RuntimeError, match=r"got device 0 without access to \[2\]"):
        check_peers([("a", 0), ("a", 1), ("a", 2)], 0, lambda device, other: other != 2)


def check_backend(rank: int, world_size: int) -> None:
    shape = ExchangeShape(hidden=2, num_topk=1, deterministic=True, timeout_seconds=60)
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    with pytest.raises(RuntimeError, match=r"must have CUDA devices and backend 'nccl', got 0 devices"):
        make_nvlink(dist.group.WORLD, NVLinkConfig(), shape)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_gloo_ranks_are_refused():
    run_ranks(check_backend, 2)


def gradients(model: PreTrainedModel, rank: int) -> dict[str, torch.Tensor]:
    logits = model(input_ids=token_ids(rank)).logits
    logits.square().mean().backward()
    return {
        "logits": logits.detach(),
        **{n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    }


def check_models(rank: int, world_size: int, folder: Path, models: dict[str, PreTrainedModel]) -> None:
    for family, model in models.items():
        expected: dict[str, torch.Tensor] = {}
        for number, (capacity, kernel) in enumerate([(0.0, "torch"), (2.0, "torch"), (2.0, "fused")]):
            mine = copy.deepcopy(model)
            if not expected:
                theirs = copy.deepcopy(model)
                attach_dispatcher(theirs, AllToAllDispatcher(dist.group.WORLD))
                expected = gradients(theirs, rank)
            if kernel == "fused" and family == "gpt_oss":
                continue  # biases: no fused kernel
            setting = replace(FLOAT32, hidden=model.config.hidden_size, num_selected=2)
            place = folder / f"{family}.{number}"
            place.mkdir(exist_ok=True)
            dispatcher = open_dispatcher(place, setting, capacity)
            attach_dispatcher(mine, dispatcher, kernel=kernel)  # type: ignore[arg-type]
            poison_empty_tensors()
            got = gradients(mine, rank)
            torch.use_deterministic_algorithms(False)
            assert got.keys() == expected.keys()
            for name, value in got.items():
                torch.testing.assert_close(
                    value,
                    expected[name],
                    rtol=1e-4,
                    atol=1e-6,
                    msg=lambda m, n=f"{family} {name}": f"{n}: {m}",
                )


def test_policies_have_the_gradients_of_all_to_all_also_where_dead_rows_hold_nan(tmp_path):
    run_ranks(check_models, 2, tmp_path, {family: tiny_policy(family) for family in FAMILIES})


def one_process_exchange(kernels: Any, tokens: list[int], num_rows: int, dtype: torch.dtype) -> list[Any]:
    """All ranks of an exchange in turn, by the formulas or by the kernels: everything that they leave."""
    num_ranks, num_experts, num_topk, width = len(tokens), 6, 2, 40
    generator = torch.Generator().manual_seed(0)
    shapes = nvlink.arrays(
        num_ranks=num_ranks, max_tokens=MAX_TOKENS, hidden=width, num_topk=num_topk, dtype=dtype
    )
    size = nvlink.num_bytes(shapes)
    memory = [torch.full((size,), 0x7F, dtype=torch.uint8) for _ in tokens]
    buffers = [nvlink.carve(memory, rank, shapes) for rank in range(num_ranks)]
    selected, results = [], []
    for rank, num_tokens in enumerate(tokens):
        x_TD = torch.randn(num_tokens, width, generator=generator).to(dtype)
        expert_TK = torch.rand(num_tokens, num_experts, generator=generator).topk(num_topk, dim=1).indices
        expert_TK[torch.rand(expert_TK.shape, generator=generator) < 0.3] = -1
        expert_TK[1:2, 0] = num_experts  # no such expert: counted, and sent nowhere
        selected.append(expert_TK)
        weight_TK = torch.rand(expert_TK.shape, generator=generator)
        stage: Callable[..., None] = nvlink.stage_all if kernels is nvlink else kernels.stage
        stage(x_TD, expert_TK, weight_TK, num_experts, buffers[rank])
    placed = [kernels.place(num_experts, num_rows, b) for b in buffers]
    for b, (rows, expert_P, weight_P) in zip(buffers, placed, strict=True):
        x_PD, live = kernels.expand(rows, num_rows, b), int(rows.end_e[-1])
        results += [x_PD[:live], expert_P, weight_P, *(getattr(rows, name) for name in nvlink.Rows.__slots__)]
        y_PD = torch.full_like(x_PD, torch.nan)
        y_PD[:live] = x_PD[:live] * 2  # exact, so that the order of a sum of two shows nothing
        kernels.contract(y_PD, None, rows, b)
        kernels.contract(y_PD, weight_P + 1, rows, b)
    for rank, b in enumerate(buffers):
        for has_gradient in (True, False):
            out, gradient = kernels.collect(selected[rank], num_experts, b, has_gradient=has_gradient)
            results += [out] if gradient is None else [out, gradient]
    return results


TOKENS = [[5, 3], [0, 7, 2], [0, 0], [MAX_TOKENS, 1]]


@pytest.mark.interpreter
def test_interpreted_kernels_are_the_formulas(monkeypatch):
    cases = [
        (tokens, num_rows) for tokens in TOKENS for num_rows in (3, 150)
    ]  # no place for all, and for more
    expected = [one_process_exchange(nvlink, *case, torch.float32) for case in cases]
    interpret(monkeypatch)
    from moe_kernels import nvlink_triton

    for name, size in {
        "NUM_SMS": 1,
        "CHUNK": 16,
        "CELLS": 32,
        "COPY": 64,
    }.items():  # so that there are several
        monkeypatch.setattr(nvlink_triton, name, size)
    for name in ("EXPAND", "CONTRACT"):
        monkeypatch.setattr(nvlink_triton, name, nvlink_triton.Tile(block=16, num_warps=4, programs=3))
    for case, formulas in zip(cases, expected, strict=True):
        got = one_process_exchange(nvlink_triton, *case, torch.float32)
        for index, (g, e) in enumerate(zip(got, formulas, strict=True)):
            assert torch.equal(g, e), (case, index)


def compile_kernels() -> None:
    """For a Hopper GPU, without one: the interpreter takes what the compiler refuses."""
    from moe_kernels import nvlink_triton as kernels
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"x": "*bf16", "y": "*bf16", "out": "*bf16", "out_tokens": "*bf16", "experts": "*i64"}
    types |= dict.fromkeys(("weights", "out_weights", "row_weights", "gradients"), "*fp32")
    types |= dict.fromkeys(("slots", "status", "bounds", "out_experts", "out_ordinals", "out_counts"), "*i32")
    types |= dict.fromkeys(("ordinals", "counts", "tokens", "row_experts"), "*i64")
    of_kernel = {
        "place": {"weights": "*i64"}, "contract": {"sums": "*i64", "out_gradients": "*i64"},
        "collect": {"sums": "*bf16", "out_gradients": "*fp32"},
    }  # fmt: skip
    values = {"CELLS": 1024, "CHUNK": 4096, "COPY": 4096, "W": 2, "K": 8, "LOCAL": 128, "PLACES": 8}
    values |= {"BLOCK": 1024, "HAS_GRADIENT": True}
    for name in ("stage", "place", "expand", "contract", "collect"):
        kernel, known = getattr(kernels, f"_{name}_kernel"), types | of_kernel.get(name, {})
        names = kernel.arg_names
        signature = {n: "constexpr" if n in values else known.get(n, "i32") for n in names}
        constants = {(names.index(n),): value for n, value in values.items() if n in names}
        aligned = {
            (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in values and n != "rank"
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
        code = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
        if name != "place":  # its tables are small, and read cell by cell
            assert "ld.global.v4.b32" in code and "st.global.v4.b32" in code, f"{name}: no 16-byte accesses"


@pytest.mark.interpreter
def test_kernels_compile_for_a_hopper_gpu():
    pytest.importorskip("triton", reason="needs triton (pip install 'moe-rl[triton]')")
    run = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]


if __name__ == "__main__":
    compile_kernels()
