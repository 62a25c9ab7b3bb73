"""8-bit quantisation: by hand, against the formulas of the libraries that read it, on every ``device``."""

from __future__ import annotations

import pytest
import torch
from moe_kernels import fp8, reference
from torch import Tensor

SHAPES = [(0, 128), (1, 128), (31, 384), (17, 2048), (3, 7168)]


def values(*shape: int, seed: int = 0) -> Tensor:
    """Over many orders of magnitude, with a group of zeros and one below the smallest scale."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.randn(shape[0], 1, generator=generator).mul(6).exp()
    if len(x) > 2:
        x[1, :128], x[2, :128] = 0, 1e-6
    return x


def same_bits(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    assert torch.equal(got.cpu().contiguous().view(kind), expected.cpu().contiguous().view(kind))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_rows_and_scales_are_the_references_to_the_bit(power_of_two, dtype, shape, device):
    x_TD = values(*shape).to(device, dtype)
    rows_TD, scale_TB = fp8.quant_fp8_1x128(x_TD, power_of_two=power_of_two)
    expected = reference.quant_fp8_1x128(x_TD.cpu(), power_of_two=power_of_two)
    same_bits(rows_TD, expected[0])
    same_bits(scale_TB, expected[1])
    same_bits(fp8.dequant_fp8_1x128(rows_TD, scale_TB), reference.dequant_fp8_1x128(*expected))


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (130, 257), (384, 2048), (768, 100)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_and_scales_are_the_references_to_the_bit(dtype, shape, device):
    weight_OI = values(*shape).to(device, dtype)
    bytes_OI, scale_oi = fp8.quant_fp8_128x128(weight_OI)
    expected = reference.quant_fp8_128x128(weight_OI.cpu())
    same_bits(bytes_OI, expected[0])
    same_bits(scale_oi, expected[1])


def test_a_group_by_hand(device):
    # largest 7: scale 7 / 448 = 1 / 64, so 7 -> 448, 1.1 -> 70.4 -> 72 (steps of 8), 0.01 -> 0.64 -> 0.625
    x_TD = torch.zeros(1, 128, device=device)
    x_TD[0, :4] = torch.tensor([7.0, -1.1, 0.01, 0.0])
    rows_TD, scale_TB = fp8.quant_fp8_1x128(x_TD)
    assert scale_TB.item() == 1 / 64
    assert rows_TD[0, :4].float().tolist() == [448.0, -72.0, 0.625, 0.0]
    assert fp8.dequant_fp8_1x128(rows_TD, scale_TB)[0, :2].tolist() == [7.0, -1.125]
    # largest 5: 5 / 448 lies between 2^-7 and 2^-6, so the scale is 2^-6 and 5 -> 320
    x_TD[0, 0] = 5
    rows_TD, scale_TB = fp8.quant_fp8_1x128(x_TD, power_of_two=True)
    assert scale_TB.item() == 2**-6 and rows_TD[0, 0].item() == 320


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_what_is_not_finite_never_comes_back_as_a_number(power_of_two, bad, device):
    x_TD = values(3, 256).to(device)
    x_TD[1, 130] = bad
    back_TD = fp8.dequant_fp8_1x128(*fp8.quant_fp8_1x128(x_TD, power_of_two=power_of_two)).float()
    assert back_TD[1, 130].isnan()
    beside_F = back_TD[1, 128:]
    assert (beside_F.isnan() | (beside_F == 0)).all()
    assert back_TD[0].isfinite().all() and back_TD[1, :128].isfinite().all()


@pytest.mark.parametrize("num_rows", [1, 4, 5, 31])
def test_column_scales_have_deep_gemms_layout(num_rows):
    """[T, B] whose columns begin at multiples of 16 bytes, as its TMA copies want it."""
    scale_TB = torch.rand(num_rows, 6)
    out_TB = fp8.column_scales(scale_TB)
    assert out_TB.shape == scale_TB.shape and torch.equal(out_TB, scale_TB)
    assert out_TB.stride() == (1, (num_rows + 3) // 4 * 4)


def test_packed_scales_are_four_exponents_to_an_integer():
    # 2^0 2^1 2^-1 2^-6 2^3: exponents 127 128 126 121 130, the first in the lowest byte
    scale_TB = torch.tensor([[1.0, 2.0, 0.5, 2**-6, 8.0]] * 5)
    out_TB = fp8.packed_scales(scale_TB)
    assert out_TB.dtype == torch.int32 and out_TB.shape == (5, 2) and out_TB.stride() == (1, 8)
    assert out_TB[0].tolist() == [127 | 128 << 8 | 126 << 16 | 121 << 24, 130]
    back = (out_TB.contiguous().view(torch.uint8).int() << 23).view(torch.float32)  # as DeepGEMM unpacks it
    assert torch.equal(back[:, :5], scale_TB)
    assert fp8.packed_scales(scale_TB[:, :4]).shape == (5, 1)


def test_shapes_without_whole_groups_are_refused():
    with pytest.raises(ValueError, match=r"D a multiple of 128, got \[2, 130\]"):
        fp8.quant_fp8_1x128(torch.ones(2, 130))
    with pytest.raises(ValueError, match=r"must be \[O, I\], got \[4\]"):
        fp8.quant_fp8_128x128(torch.ones(4))
