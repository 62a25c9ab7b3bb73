"""An SGLang server for the tests, where the environment has one."""

import os
from pathlib import Path

import pytest

from tasks.sglang_config import SglangConfig

PYTHON = "MOE_RL_SGLANG_PYTHON"
"""Environment variable: an interpreter that has sglang."""
CPU_PATH = Path(__file__).with_name("sglang_cpu")


def sglang_config(**changes):
    """A small server on this machine's device."""
    python = os.environ.get(PYTHON, "")
    if not python:
        pytest.skip(f"{PYTHON} names no interpreter with sglang")
    import torch

    # a share of what is free at the start: a server must not run out of it because another process started
    limits = {
        "python": python, "max_running_requests": 16, "max_total_tokens": 16384, "context_length": 1024,
        "memory_share": 0.5,
    }  # fmt: skip
    if torch.cuda.is_available():
        return SglangConfig(**(limits | {"moe_runner": "triton"} | changes))
    cpu = {
        "device": "cpu", "attention": "torch_native", "cuda_graphs": False,
        "environment": {"PYTHONPATH": str(CPU_PATH), "OMP_NUM_THREADS": "1"},
    }  # fmt: skip
    return SglangConfig(**(limits | cpu | changes))


def start_sglang(folder, *, dtype="float32", **changes):
    """An engine that launches its server with the first version it loads. On a GPU SGLang computes in float32
    in its deterministic mode only."""
    import torch

    from tasks.engine.sglang import Fleet

    if torch.cuda.is_available():
        changes = {"deterministic": dtype == "float32"} | changes
    elif dtype != "float32":
        pytest.skip("half precision is for a GPU")
    routing = changes.pop("routing", False)
    return Fleet(sglang_config(**changes), dtype=dtype, folder=folder, routing=routing).view()
