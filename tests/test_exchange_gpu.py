"""Every dispatcher under one contract on two GPUs, at the sizes of real models; each test is two processes.

    torchrun --nproc-per-node 2 tests/test_exchange_gpu.py deepep 2048

runs one of them by hand. Needs DeepEP 2.1, whose kernels are compiled at the first call: minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exchange import CASES, Setting, run_case

from tasks.deepep_config import DeepEPConfig
from tasks.nvlink_config import NVLinkConfig
from tasks.policy import libraries
from tasks.policy.dispatch.deepep import make_deepep
from tasks.policy.dispatch.dispatcher import Dispatcher, ExchangeShape, make_dispatcher
from tasks.policy.dispatch.nvlink import make_nvlink

ROOT = Path(__file__).resolve().parent.parent
SIZES = {
    2048: Setting(hidden=2048, num_experts=128, num_selected=8, dtype=torch.bfloat16, device="cuda"),
    7168: Setting(hidden=7168, num_experts=256, num_selected=8, dtype=torch.bfloat16, device="cuda"),
}
MAX_TOKENS = 4096
VARIANTS = {
    "all_to_all": {},
    "deepep": {"deterministic": False},
    "deepep deterministic": {"deterministic": True},
    "deepep expanded": {"layout": "expanded"},
    "deepep fp8": {"fp8": True},
    "deepep legacy": {"api": "legacy"},
    "nvlink": {},
    "nvlink fixed": {"capacity": 2.0},
}
has_two_gpus = torch.cuda.device_count() >= 2


def check_two_gpus(variant: str, hidden: int) -> None:
    """On each of two ranks."""
    setting, options = SIZES[hidden], dict(VARIANTS[variant])
    is_deterministic = bool(options.pop("deterministic", False))
    name = variant.split()[0]

    def build(group: dist.ProcessGroup) -> Dispatcher:
        shape = ExchangeShape(
            hidden=hidden, num_topk=setting.num_selected, deterministic=is_deterministic, timeout_seconds=120
        )
        if name == "nvlink":
            return make_nvlink(
                group, NVLinkConfig.model_validate({"max_tokens": MAX_TOKENS, **options}), shape
            )
        return make_deepep(group, DeepEPConfig.model_validate({"max_tokens": MAX_TOKENS, **options}), shape)

    dispatcher = make_dispatcher(name, dist.group.WORLD, build)  # type: ignore[arg-type]
    api = str(options.get("api", "elastic"))
    seen = libraries.require(libraries.read_facts(), dispatcher=name, api=api)
    if dist.get_rank() == 0:
        print(f"{dispatcher.describe()}; {seen.text()}", flush=True)
    # an expert's row is rounded too where it travels or waits by itself
    num_roundings = 3 if options.get("layout") == "expanded" or name == "nvlink" else 2
    setting = replace(setting, is_8_bit="fp8" in options, num_roundings=num_roundings)
    repeats = 2 if is_deterministic or name in ("all_to_all", "nvlink") else 1
    for scale in (1, 97):  # 97 is odd and makes 17 tokens 1,649
        for case in CASES:
            results = [run_case(dispatcher, case, replace(setting, scale=scale)) for _ in range(repeats)]
            for first, again in zip(results[0], results[-1], strict=True):
                assert torch.equal(first, again), f"{case}: not the same bits again"
    dispatcher.close()


@pytest.mark.timeout(600)
@pytest.mark.gpu
@pytest.mark.skipif(not has_two_gpus, reason="needs two GPUs")
@pytest.mark.parametrize("hidden", SIZES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_dispatchers_equal_dense_experts_on_two_gpus(variant, hidden):
    if variant.startswith("deepep"):
        pytest.importorskip("deep_ep", reason="needs DeepEP", exc_type=ImportError)
    run = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__,
            variant, str(hidden),
        ],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=540,
    )  # fmt: skip
    print(run.stdout)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-6000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("hidden", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_local_equals_dense_experts_on_a_gpu(case, hidden):
    run_case(make_dispatcher("local"), case, replace(SIZES[hidden], scale=97))


if __name__ == "__main__":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=120))
    check_two_gpus(sys.argv[1], int(sys.argv[2]))
    torch.cuda.synchronize()
    dist.destroy_process_group()
