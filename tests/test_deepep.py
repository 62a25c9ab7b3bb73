"""The DeepEP adapter's tensor logic and refusals, without a GPU: ``deepep_reference`` stands in for it.

Whether the library does what that reference does is for ``test_exchange_gpu.py``.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar

import deepep_reference
import pytest
import torch
import torch.distributed as dist
from exchange import CASES, Setting, run_case
from families import tiny_policy, token_ids
from moe_kernels.fp8 import dequant_fp8_1x128, quant_fp8_1x128
from ranks import run_ranks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tasks.deepep_config import DeepEPConfig
from tasks.policy.dispatch import deepep
from tasks.policy.dispatch.deepep import (
    EXPERT_ALIGNMENT,
    DeepEPDispatcher,
    ExchangeShape,
    expanded_experts,
    load_library,
    make_deepep,
)
from tasks.policy.dispatch.dispatcher import AllToAllDispatcher
from tasks.policy.parallel.experts import attach_dispatcher, take_expert_load

BFLOAT16 = Setting(dtype=torch.bfloat16, hidden=128, num_experts=8, num_selected=3)
SHAPE = ExchangeShape(hidden=128, num_topk=3, deterministic=False, timeout_seconds=600)


def install(monkeypatch: pytest.MonkeyPatch, **names: Any) -> ModuleType:
    module = ModuleType("deep_ep")
    module.__file__ = "/somewhere/deep_ep/__init__.py"
    for name, value in names.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    return module


def open_dispatcher(**settings: Any) -> DeepEPDispatcher:
    sys.modules["deep_ep"] = ModuleType("deep_ep")
    sys.modules["deep_ep"].__dict__.update(
        ElasticBuffer=deepep_reference.ElasticBuffer, Buffer=deepep_reference.Buffer, __version__="2.1.0",
        __file__="/somewhere/deep_ep/__init__.py",
    )  # fmt: skip
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    return make_deepep(dist.group.WORLD, DeepEPConfig(**settings), SHAPE)


def check_contract(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    if settings.get("api") == "legacy":
        deepep._legacy_buffer = lambda module, group, *_: module.Buffer(group)
    dispatcher = open_dispatcher(max_tokens=64, num_sms=20, **settings)
    assert (dispatcher.rank, dispatcher.num_ranks) == (rank, world_size)
    for case in CASES:
        run_case(dispatcher, case, BFLOAT16)
    if settings.get("api") != "legacy":
        calls = dispatcher.transport.buffer.calls  # type: ignore[attr-defined]
        # forward, then backward: a gradient of combine is sent out again, one of dispatch combined
        assert calls[:4] == [
            ("dispatch", 20, 17), ("combine", 20, 17), ("resend", 20, 17), ("combine", 20, 17),
        ]  # fmt: skip
        dispatcher.close()
        assert dispatcher.transport.buffer.is_destroyed  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "settings", [{}, {"layout": "expanded"}, {"api": "legacy"}], ids=["compact", "expanded", "legacy"]
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_deepep_equals_dense_experts_in_output_and_gradient(world_size, settings, monkeypatch):
    if world_size == 4:
        monkeypatch.setitem(CASES, "random", ([5, 3, 0, 4], "random"))
        for name, (tokens, kind) in list(CASES.items()):
            monkeypatch.setitem(CASES, name, ([*tokens, 6][:4], kind))
    run_ranks(check_contract, world_size, settings)


def check_8_bit(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    dispatcher = open_dispatcher(max_tokens=64, fp8=True, **settings)
    setting = replace(BFLOAT16, is_8_bit=True, hidden=256)
    for case in CASES:
        run_case(dispatcher, case, setting)  # exact on the wire, so the bound of bfloat16 holds
    assert "8-bit rows" in dispatcher.describe()


@pytest.mark.parametrize("layout", ["compact", "expanded"])
def test_8_bit_rows_arrive_with_the_scale_of_their_block(layout):
    run_ranks(check_8_bit, 2, {"layout": layout})


def test_8_bit_rows_round_to_four_significant_bits():
    x_TD = torch.randn(31, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    x_TD[3] = 0
    x_TD[4, 5] = 1e4
    rows_TD, scale_TB = quant_fp8_1x128(x_TD)
    assert rows_TD.dtype == torch.float8_e4m3fn and scale_TB.shape == (31, 3)
    assert scale_TB[4, 0] * 448 == x_TD[4, 5].float()
    error_TD = (dequant_fp8_1x128(rows_TD, scale_TB).float() - x_TD.float()).abs()
    # half a step: 2^-4 of the value, or of the scale 2^-10 near zero; and 2^-9 for bfloat16 on the way back
    bound_TD = x_TD.float().abs() * (2**-4 + 2**-8) + scale_TB.repeat_interleave(128, dim=1) * 2**-10
    assert (error_TD <= bound_TD).all() and error_TD.max() > 0
    none = quant_fp8_1x128(x_TD[:0])
    assert dequant_fp8_1x128(*none).shape == (0, 384)


def test_rows_that_pad_an_experts_group_have_no_expert():
    # 3 rows of expert 0, none of expert 1, 128 of expert 2: groups begin at 0, 128, 128 and end at 256
    expert_R1 = expanded_experts(torch.tensor([3, 128, 256], dtype=torch.int32), 256)
    assert expert_R1.shape == (256, 1)
    assert expert_R1[:3].flatten().tolist() == [0, 0, 0]
    assert (expert_R1[3:128] == -1).all() and (expert_R1[128:] == 2).all()
    assert expanded_experts(torch.zeros(4, dtype=torch.int32), 0).shape == (0, 1)


def test_groups_of_the_expanded_layout_take_in_their_padding_and_do_not_count_it():
    groups = deepep.expanded_groups(torch.tensor([3, 128, 256], dtype=torch.int32))
    assert groups.end_e.tolist() == [128, 128, 256] and groups.count_e.tolist() == [3, 0, 128]


def gradients(model: PreTrainedModel, rank: int) -> dict[str, torch.Tensor]:
    model(input_ids=token_ids(rank)).logits.float().square().mean().backward()
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def check_policy(rank: int, world_size: int, settings: dict[str, Any], model: PreTrainedModel) -> None:
    other = copy.deepcopy(model)
    attach_dispatcher(other, AllToAllDispatcher(dist.group.WORLD))
    attach_dispatcher(model, open_dispatcher(max_tokens=64, **settings))
    expected, got = gradients(other, rank), gradients(model, rank)
    assert got.keys() == expected.keys()
    for name, value in got.items():  # some roundings to bfloat16 of 2^-9, in other places
        error = (value - expected[name]).norm() / expected[name].norm().clamp(min=1e-6)
        assert error < 2e-2, f"{name}: {error}"
    loads = zip(take_expert_load(model).values(), take_expert_load(other).values(), strict=True)
    assert all(torch.equal(ours.long(), theirs.long()) for ours, theirs in loads)


@pytest.mark.parametrize("layout", ["compact", "expanded"])
def test_a_policy_has_the_gradients_and_the_load_of_all_to_all(layout):
    run_ranks(check_policy, 2, {"layout": layout}, tiny_policy("qwen3_moe").bfloat16())


def check_padding(rank: int, world_size: int) -> None:
    dispatcher = open_dispatcher(max_tokens=4, layout="expanded")
    number, weight = torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)
    sent = dispatcher.dispatch(torch.ones(2, 128, dtype=torch.bfloat16), number, weight, 4)
    is_padding_R = sent.expert_RK[:, 0] < 0
    assert sent.x_RD.shape[0] == 2 * EXPERT_ALIGNMENT and is_padding_R.sum() == 2 * EXPERT_ALIGNMENT - 4
    assert (sent.x_RD[is_padding_R] == 0).all() and (sent.x_RD[~is_padding_R] == 1).all()


def test_rows_that_pad_hold_zeros():
    run_ranks(check_padding, 2)


def check_refusals(rank: int, world_size: int) -> None:
    dispatcher = open_dispatcher(max_tokens=4)
    number, weight = torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)
    rows = torch.ones(2, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"must be bfloat16, got torch.float32"):
        dispatcher.dispatch(rows.float(), number, weight, 4)
    with pytest.raises(ValueError, match=r"at most deepep.max_tokens \(4\) tokens, got 6"):
        dispatcher.dispatch(rows.repeat(3, 1), number.repeat(3, 1), weight.repeat(3, 1), 4)
    with pytest.raises(ValueError, match=r"multiple of 8, got 12"):
        dispatcher.dispatch(rows[:, :12], number, weight, 4)
    with pytest.raises(RuntimeError, match=r"expert_TK must be below num_experts"):
        dispatcher.dispatch(rows, number + 1, weight, 4)
    sent = dispatcher.dispatch(rows, number, weight, 4)
    with pytest.raises(ValueError, match=r"combine must be bfloat16, got torch.float32"):
        dispatcher.combine(sent.x_RD.float(), sent.handle)


def test_types_and_sizes_that_the_library_would_misread_are_refused():
    run_ranks(check_refusals, 2)


def check_replay(rank: int, world_size: int) -> None:
    dispatcher = open_dispatcher(max_tokens=4)
    number, weight = torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)

    def layer(x_TD: torch.Tensor) -> torch.Tensor:
        sent = dispatcher.dispatch(x_TD, number, weight, 4)
        return dispatcher.combine(sent.x_RD.sin(), sent.handle)  # sin keeps its input, which is replayed

    x = torch.ones(2, 128, dtype=torch.bfloat16, requires_grad=True)
    y: Any = checkpoint(layer, x, use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"must run once a pass, got one inside a backward pass"):
        y.sum().backward()


def test_activation_checkpointing_over_an_exchange_is_refused():
    run_ranks(check_replay, 2)


def check_options(rank: int, world_size: int) -> None:
    torch.use_deterministic_algorithms(True)
    dispatcher = open_dispatcher(max_tokens=64, num_sms=8, num_qps=9, hybrid=True)
    options = dispatcher.transport.buffer.options  # type: ignore[attr-defined]
    assert options == {
        "num_max_tokens_per_rank": 64, "hidden": 128, "num_topk": 3, "use_fp8_dispatch": False,
        "deterministic": False, "allow_hybrid_mode": True, "num_allocated_qps": 9,
        "num_cpu_timeout_secs": 600, "num_gpu_timeout_secs": 600, "explicitly_destroy": True,
    }  # fmt: skip
    assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    text = dispatcher.describe()
    assert text.startswith(
        "deepep over 2 ranks: compact layout, bfloat16 rows, at most 64 tokens, 8 SMs, 9 q"
    )
    assert text.endswith("deep_ep 2.1.0 elastic at /somewhere/deep_ep/__init__.py, buffer 2 MiB")


def test_the_buffer_is_sized_by_the_settings_and_the_report_names_version_path_and_layout():
    run_ranks(check_options, 2)


def test_another_library_than_the_settings_ask_for_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(RuntimeError, match=r"must find the package deep_ep, got: .*set train.dispatcher"):
        load_library(DeepEPConfig())
    install(monkeypatch, __version__="1.0.0")
    with pytest.raises(RuntimeError, match=r"'legacy' must find Buffer, got deep_ep 1.0.0 at /somewhere"):
        load_library(DeepEPConfig(api="legacy"))
    install(monkeypatch, Buffer=deepep_reference.Buffer)
    with pytest.raises(RuntimeError, match=r"'elastic' must find ElasticBuffer.*set deepep.api to 'legacy'"):
        load_library(DeepEPConfig())

    class Elastic20:
        def dispatch(self, x: Any, do_expand: bool = False) -> None: ...

    install(monkeypatch, ElasticBuffer=Elastic20, __version__="2.0.0")
    with pytest.raises(RuntimeError, match=r"'expanded' must find .*2.1 or newer\), got deep_ep 2.0.0"):
        load_library(DeepEPConfig(layout="expanded"))
    assert load_library(DeepEPConfig()).__version__ == "2.0.0"


class Legacy:
    """Version 1's calls that size a buffer, and what they were given."""

    calls: ClassVar[list[Any]] = []

    class Config:
        def __init__(self, factor: int):
            self.factor = factor

        def get_nvl_buffer_size_hint(self, row_bytes: int, num_ranks: int) -> int:
            return self.factor * row_bytes * num_ranks

        def get_rdma_buffer_size_hint(self, row_bytes: int, num_ranks: int) -> int:
            return 10 * self.factor * row_bytes * num_ranks

    @staticmethod
    def set_num_sms(count: int) -> None:
        Legacy.calls.append(("sms", count))

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Legacy.Config(2)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Legacy.Config(3)

    def __init__(self, group: dist.ProcessGroup, **options: Any):
        Legacy.calls.append(options)


def check_first_collective(rank: int, world_size: int, api: str) -> None:
    """The library takes the group's communicator as it finds it, and before a collective there is none."""
    order: list[str] = []
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, **named: Any) -> None:
        order.append("collective")
        real(tensor, **named)

    class Elastic(deepep_reference.ElasticBuffer):
        def __init__(self, group: dist.ProcessGroup, **options: Any):
            order.append("buffer")
            super().__init__(group, **options)

    class Old(Legacy):
        def __init__(self, group: dist.ProcessGroup, **options: Any):
            order.append("buffer")
            super().__init__(group, **options)

    dist.all_reduce = all_reduce
    sys.modules["deep_ep"] = ModuleType("deep_ep")
    sys.modules["deep_ep"].__dict__.update(ElasticBuffer=Elastic, Buffer=Old, __file__="/somewhere")
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    make_deepep(dist.group.WORLD, DeepEPConfig(api=api, num_sms=10, num_qps=6), SHAPE)
    assert order == ["collective", "buffer"]
    if api == "legacy":  # 128 features of 2 bytes to 2 ranks, and the larger of both directions
        row = 128 * 2 * 2
        sizes = {"num_nvl_bytes": 3 * row, "num_rdma_bytes": 30 * row}
        assert Legacy.calls == [("sms", 10), {**sizes, "num_qps_per_rank": 6, "explicitly_destroy": True}]


@pytest.mark.parametrize("api", ["elastic", "legacy"])
def test_a_buffer_is_built_behind_a_collective_with_the_resources_that_are_configured(api):
    run_ranks(check_first_collective, 2, api)
