"""Every kernel against its plain-torch reference, on each ``device`` of ``conftest.py``.

On CPU these see the algorithms and their gradients; interpreted, the Triton code too, where Triton is
installed; what needs a CUDA device is marked ``gpu``.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_kernels import device as devices
from moe_kernels import reference
from moe_kernels.logprob import selective_logprob_entropy
from moe_kernels.norm import rms_norm
from moe_kernels.rows import moe_permute, moe_unpermute, permute_weights
from moe_kernels.swiglu import swiglu_weighted
from ranks import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tasks.policy.parallel.vocabulary import vocabulary_block

CHUNK_BYTES = 1  # the fewest entries a chunk may have: 256


def draw(*shape: int, seed: int, device: str, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """NaN if either holds one, and NaN is below no bound."""
    size = expected.double().norm().item()
    difference = (got.double() - expected.double()).norm().item()
    return difference / size if size else difference


def logprob_case(
    function, num_tokens: int, vocab: int, dtype: torch.dtype, device: str, temperature: float, *,
    is_double: bool = False, **options,
) -> list[Tensor]:  # fmt: skip
    """Both outputs, then the gradients of a loss that weighs each log-probability and entropy differently."""
    hidden_TD = draw(num_tokens, 32, seed=0, device=device, dtype=dtype)
    weight_VD = draw(vocab, 32, seed=1, device=device, dtype=dtype).mul(0.5)
    if is_double:  # the same numbers, computed with in more digits
        hidden_TD, weight_VD = hidden_TD.double(), weight_VD.double()
    hidden_TD.requires_grad_(), weight_VD.requires_grad_()
    ids_T = torch.randint(0, vocab, (num_tokens,), generator=torch.Generator().manual_seed(2)).to(device)
    ids_T[1::5] = -1
    logprob_T, entropy_T = function(hidden_TD, weight_VD, ids_T, temperature=temperature, **options)
    by_logprob_T = draw(num_tokens, seed=3, device=device, dtype=logprob_T.dtype)
    by_entropy_T = draw(num_tokens, seed=4, device=device, dtype=logprob_T.dtype)
    ((logprob_T * by_logprob_T).sum() + (entropy_T * by_entropy_T).sum()).backward()
    assert hidden_TD.grad is not None and weight_VD.grad is not None
    return [logprob_T.detach(), entropy_T.detach(), hidden_TD.grad, weight_VD.grad]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
@pytest.mark.parametrize(("num_tokens", "vocab"), [(1, 37), (7, 256), (13, 600), (67, 1000), (5, 9000)])
@pytest.mark.parametrize(
    ("dtype", "bound"),
    # bf16: logits up to 10 are rounded by up to 2^-6, as a model's head rounds them; measured up to 1.0e-2
    [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)],
)
def test_logprob_and_entropy_equal_the_formula_in_value_and_gradient(
    dtype, bound, num_tokens, vocab, temperature, device
):
    expected = logprob_case(
        reference.selective_logprob_entropy, num_tokens, vocab, dtype, device, temperature, is_double=True
    )
    # many chunks, or one of many blocks
    chunk_bytes = CHUNK_BYTES if vocab < 9000 else 2**28
    got = logprob_case(
        selective_logprob_entropy, num_tokens, vocab, dtype, device, temperature, chunk_bytes=chunk_bytes
    )
    for name, g, e in zip(("logprob", "entropy", "d hidden", "d weight"), got, expected, strict=True):
        assert relative_error(g, e) < bound, (name, relative_error(g, e))


def test_one_chunk_or_many_change_nothing_in_double_precision():
    args = (selective_logprob_entropy, 13, 600, torch.float64, "cpu", 0.7)
    for one, many in zip(logprob_case(*args), logprob_case(*args, chunk_bytes=CHUNK_BYTES), strict=True):
        torch.testing.assert_close(one, many, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("keep_bytes", [13 * 256 * 4, 10**9])
def test_kept_logits_change_nothing_and_a_second_backward_pass_finds_them_gone(keep_bytes, device):
    args = (selective_logprob_entropy, 13, 600, torch.float32, device, 0.7)
    kept = logprob_case(*args, chunk_bytes=CHUNK_BYTES, keep_bytes=keep_bytes)
    for one, many in zip(logprob_case(*args, chunk_bytes=CHUNK_BYTES), kept, strict=True):
        torch.testing.assert_close(one, many, rtol=0, atol=0)
    hidden_TD = draw(13, 32, seed=0, device=device).requires_grad_()
    weight_VD, ids_T = draw(600, 32, seed=1, device=device), torch.arange(13, device=device)
    loss = selective_logprob_entropy(hidden_TD, weight_VD, ids_T, temperature=1.0, keep_bytes=keep_bytes)[
        0
    ].sum()
    (first,) = torch.autograd.grad(loss, hidden_TD, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, hidden_TD)[0], first, rtol=0, atol=0)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made inside, and of all that are handed to ``mm`` to write."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.written = 0, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.mm and kwargs and "out" in kwargs:
            self.written.append(kwargs["out"].numel())
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
        return result


@pytest.mark.parametrize(("keep", "made_again"), [(0, 4), (1, 3), (2, 2), (10, 0)])
def test_no_tensor_of_tokens_by_vocabulary_is_ever_made(keep, made_again):
    """Complaint 32: logits of a long sequence did not fit. Four chunks here, of which some may be kept."""
    num_tokens, vocab, width = 512, 4 * 1024, 1024
    kind = {"device": "cpu", "dtype": torch.float32}
    weight_VD, ids_T = draw(vocab, 8, seed=1, **kind).requires_grad_(), torch.arange(num_tokens)
    hidden_TD = draw(num_tokens, 8, seed=0, **kind).requires_grad_()
    chunk = num_tokens * width * 4
    with Largest() as forward:
        logprob_T, entropy_T = selective_logprob_entropy(
            hidden_TD, weight_VD, ids_T, temperature=1.0, chunk_bytes=chunk, keep_bytes=keep * chunk
        )
    with Largest() as backward:
        (logprob_T.sum() + entropy_T.sum()).backward()
    assert forward.elements == backward.elements == num_tokens * width, "a chunk of logits"
    logits = [count for count in backward.written if count == num_tokens * width]
    assert len(logits) == made_again, "chunks that were not kept are computed again"


def test_golden_logprob_and_entropy_by_hand():
    # logits (0, ln 3) at temperature 1: p = 1/4, 3/4; H = 1/4 ln 4 + 3/4 ln 4/3 = 0.5623
    hidden_TD, weight_VD = torch.tensor([[1.0], [1.0]]), torch.tensor([[0.0], [1.0986123]])
    logprob_T, entropy_T = selective_logprob_entropy(
        hidden_TD, weight_VD, torch.tensor([0, -1]), temperature=1.0
    )
    torch.testing.assert_close(logprob_T, torch.tensor([-1.3862944, 0.0]))
    torch.testing.assert_close(entropy_T, torch.tensor([0.5623351, 0.0]))


def test_large_logits_keep_a_finite_logprob():
    hidden_TD, weight_VD = torch.full((1, 1), 1e4), torch.tensor([[1.0], [-1.0], [0.5]])
    logprob_T, entropy_T = selective_logprob_entropy(hidden_TD, weight_VD, torch.tensor([2]), temperature=1.0)
    assert logprob_T.item() == -5e3 and entropy_T.item() == 0.0


def check_blocks(rank: int, world_size: int, expected: dict[torch.dtype, list[Tensor]]) -> None:
    """What ``vocabulary_block`` makes of a head that tensor parallelism has split."""
    for dtype, wanted in expected.items():
        head = torch.nn.Linear(1, 1)
        head.vocabulary_group = dist.group.WORLD
        hidden_TD, weight_VD, ids_T, slope_T = block_inputs(dtype)
        head.weight = torch.nn.Parameter(weight_VD.detach().chunk(world_size)[rank].clone())
        got = block_results(hidden_TD, head.weight, ids_T, slope_T, block=vocabulary_block(head))
        parts = [*got[:3], torch.cat(all_ranks(got[3]))]
        bound = 1e-12 if dtype == torch.float64 else 2e-2
        for one, value in zip(parts, wanted, strict=True):
            assert relative_error(one, value) <= bound


def all_ranks(value: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, value.contiguous())
    return parts


def block_inputs(dtype: torch.dtype) -> list[Tensor]:
    ids_T = torch.tensor([0, 299, 300, 599, 899, -1, 450, 10, -1, 600, 899])
    tensors = [
        draw(11, 16, seed=0, device="cpu", dtype=dtype),
        draw(900, 16, seed=1, device="cpu", dtype=dtype),
    ]
    return [*(t.requires_grad_() for t in tensors), ids_T, draw(11, seed=2, device="cpu")]


def block_results(
    hidden_TD: Tensor, weight_VD: Tensor, ids_T: Tensor, slope_T: Tensor, **options: Any
) -> list[Tensor]:
    logprob_T, entropy_T = selective_logprob_entropy(
        hidden_TD, weight_VD, ids_T, temperature=0.7, chunk_bytes=CHUNK_BYTES, keep_bytes=9000, **options
    )
    loss = (logprob_T * slope_T).sum() + (entropy_T * slope_T.flip(0)).sum()
    gradients = torch.autograd.grad(loss, [hidden_TD, weight_VD])
    return [logprob_T.detach(), entropy_T.detach(), *gradients]


@pytest.mark.parametrize("world_size", [2, 3])
def test_blocks_of_the_vocabulary_on_several_ranks_are_the_whole_on_one(world_size):
    dtypes = torch.float64, torch.bfloat16
    run_ranks(check_blocks, world_size, {dtype: block_results(*block_inputs(dtype)) for dtype in dtypes})


def test_inputs_that_do_not_fit_are_refused():
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"must be \[T, D\], \[V, D\] and \[T\]"):
        selective_logprob_entropy(x, torch.ones(4, 5), torch.zeros(2, dtype=torch.int64), temperature=1.0)
    with pytest.raises(ValueError, match="one floating-point dtype"):
        selective_logprob_entropy(x, x.double(), torch.zeros(2, dtype=torch.int64), temperature=1.0)
    with pytest.raises(ValueError, match="temperature must be positive"):
        selective_logprob_entropy(x, x, torch.zeros(2, dtype=torch.int64), temperature=0.0)
    with pytest.raises(RuntimeError, match="below the vocabulary size"):
        selective_logprob_entropy(x, x, torch.full((2,), 2), temperature=1.0)


ROUTINGS = ["random", "one row takes all", "none", "holes"]


def slots(routing: str, num_rows: int, num_places: int, device: str) -> tuple[Tensor, int]:
    """Copy numbers in random order; with holes a third of the cells has none and dead copies stay over."""
    cells = num_rows * num_places
    generator = torch.Generator().manual_seed(cells)
    slot = torch.randperm(cells, generator=generator)
    if routing == "none":
        slot = torch.full_like(slot, -1)
    elif routing == "holes":
        slot = torch.where(torch.rand(cells, generator=generator) < 0.33, -1, slot)
    elif routing == "one row takes all":
        slot = torch.where(torch.arange(cells) < num_places, slot, -1)
    return slot.view(num_rows, num_places).to(device), cells


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", [(1, 1, 8), (5, 2, 24), (33, 8, 2048), (17, 8, 2100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_permute_and_unpermute_are_the_reference_and_never_read_dead_copies(dtype, shape, routing, device):
    num_rows, num_places, width = shape
    slot_TK, num_copies = slots(routing, num_rows, num_places, device)
    x_TD = draw(num_rows, width, seed=0, device=device, dtype=dtype).requires_grad_()
    live = slot_TK[slot_TK >= 0]
    got_PD = moe_permute(x_TD, slot_TK, num_copies)
    expected_PD = reference.gather_rows(x_TD, slot_TK, num_copies)
    torch.testing.assert_close(got_PD[live], expected_PD[live], rtol=0, atol=0)
    y_PD = torch.full_like(got_PD, torch.nan)
    y_PD[live] = draw(num_copies, width, seed=1, device=device, dtype=dtype)[live]
    y_PD.requires_grad_()
    got_TD = moe_unpermute(y_PD, slot_TK)
    expected_TD = reference.sum_rows(y_PD, slot_TK)
    # one rounding to bf16 is 4e-3; on CPU autograd adds the gradient of copies in bf16
    bound = 1e-6 if dtype == torch.float32 else 8e-3
    assert relative_error(got_TD, expected_TD) <= bound
    (dy_PD,) = torch.autograd.grad(got_TD, y_PD, x_TD.detach())
    torch.testing.assert_close(dy_PD[live], expected_PD[live].detach(), rtol=0, atol=0)
    (dx_TD,) = torch.autograd.grad(got_PD, x_TD, y_PD.detach())
    assert relative_error(dx_TD, expected_TD) <= bound


@pytest.mark.parametrize("shape", [(1, 8), (9, 24), (130, 768), (64, 1000)])
@pytest.mark.parametrize("live_share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_swiglu_weighted_is_the_reference_and_never_reads_dead_rows(dtype, bound, live_share, shape, device):
    num_rows, width = shape
    live = int(num_rows * live_share)
    gate_up_PJ = draw(num_rows, 2 * width, seed=0, device=device, dtype=dtype)
    weight_P = draw(num_rows, seed=1, device=device, dtype=dtype)
    slope_PH = draw(num_rows, width, seed=2, device=device, dtype=dtype)
    double = [t[:live].detach().double().requires_grad_() for t in (gate_up_PJ, weight_P)]
    expected_PH = reference.swiglu_weighted(double[0], double[1])
    expected = [expected_PH, *torch.autograd.grad(expected_PH, double, slope_PH[:live].double())]
    for tensor in (gate_up_PJ, weight_P, slope_PH):
        tensor[live:] = torch.nan
    inputs = [gate_up_PJ.requires_grad_(), weight_P.requires_grad_()]
    got_PH = swiglu_weighted(*inputs, torch.tensor(live, device=device))
    got = [got_PH, *torch.autograd.grad(got_PH, inputs, slope_PH)]
    for name, g, e in zip(("h", "d gate_up", "d weight"), got, expected, strict=True):
        assert relative_error(g[:live], e) <= bound, name
        if not devices.takes_triton(gate_up_PJ):  # which leaves dead rows unwritten
            assert (g[live:] == 0).all(), f"{name}: a formula that meets NaN spreads it"


def test_copies_in_half_precision_are_added_in_float32_and_rounded_once(device):
    # 256 + 1 is no bfloat16 and rounds to 256, twice; in float32 the sum is 258, which is one
    y_PD = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16, device=device)[:, None].expand(3, 16)
    got_TD = moe_unpermute(y_PD.contiguous(), torch.tensor([[0, 1, 2]], device=device))
    assert got_TD.dtype == torch.bfloat16 and (got_TD == 258).all()


@pytest.mark.parametrize(
    "shape", [(1, 1, 8), (3, 5, 128), (2, 700, 128), (2, 9, 2048), (1, 3, 7168), (7, 2, 100)]
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_rms_norm_is_the_reference(dtype, bound, shape, device):
    x = draw(*shape, seed=0, device=device, dtype=dtype)
    weight_D = draw(shape[-1], seed=1, device=device, dtype=dtype)
    slope = draw(*shape, seed=2, device=device, dtype=dtype)
    double = [t.double().requires_grad_() for t in (x, weight_D)]
    expected_y = reference.rms_norm(double[0], double[1], 1e-6)
    expected = [expected_y, *torch.autograd.grad(expected_y, double, slope.double())]
    inputs = [x.requires_grad_(), weight_D.requires_grad_()]
    got_y = rms_norm(*inputs, 1e-6)
    got = [got_y, *torch.autograd.grad(got_y, inputs, slope)]
    for name, g, e in zip(("y", "d x", "d weight"), got, expected, strict=True):
        assert relative_error(g, e) <= bound, name


def test_weights_of_cells_without_a_copy_get_no_gradient():
    slot_TK = torch.tensor([[1, -1], [-1, 0]])
    weight_TK = torch.tensor([[0.25, torch.nan], [torch.nan, 0.75]], requires_grad=True)
    weight_P = permute_weights(weight_TK, torch.tensor([3, 0, 1]), slot_TK)
    torch.testing.assert_close(weight_P[:2], torch.tensor([0.75, 0.25]))
    weight_P.backward(torch.tensor([3.0, 5.0, torch.nan]))
    torch.testing.assert_close(weight_TK.grad, torch.tensor([[5.0, 0.0], [0.0, 3.0]]))


def test_the_package_imports_without_triton():
    code = "import sys; sys.modules['triton'] = None; import moe_kernels.logprob, moe_kernels.rows, "
    code += "moe_kernels.swiglu, moe_kernels.norm, moe_kernels.rotary, moe_kernels.adamw"
    subprocess.run([sys.executable, "-c", code], check=True)
