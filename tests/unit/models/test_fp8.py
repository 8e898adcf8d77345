"""Laws of FP8 blocks and of the four-bit formats."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.errors import CheckpointError
from moerl.models.fp8 import dequantise_fp8, e4m3_to_float, quantise_fp8_block, scale_shape
from moerl.models.packed_formats import dequantise_int4, dequantise_mxfp4

SHAPES = [(1, 1), (127, 129), (576, 40), (128, 128), (3, 300)]
FORMATS = ["fp32", "ue8m0"]
BLOCK = (128, 128)


def random(shape, seed, exponent=0.0, dtype=torch.float32):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    return values.to(dtype)


def per_element(scale, shape, block=BLOCK):
    """The scale of each element, written out index by index."""
    rows, columns = torch.arange(shape[0]) // block[0], torch.arange(shape[1]) // block[1]
    return scale[rows][:, columns]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(0, 99), st.floats(-60, 60), st.sampled_from(FORMATS))
def test_error_is_at_most_half_a_step(shape, seed, exponent, scale_format):
    values = random(shape, seed, exponent)
    weight, scale = quantise_fp8_block(values, scale_format=scale_format)
    assert weight.dtype == torch.float8_e4m3fn
    assert scale.dtype == torch.float32
    assert tuple(scale.shape) == scale_shape(*shape)
    back = dequantise_fp8(weight, scale, BLOCK, dtype=torch.float32)
    own = per_element(scale, shape).double()
    exact = values.double() / own
    step = 2.0 ** (torch.floor(torch.log2(exact.abs().clamp(min=2.0**-6))) - 3)
    assert bool(((back.double() / own - exact).abs() <= step / 2 * (1 + 1e-5)).all())


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(0, 99), st.sampled_from(FORMATS))
def test_quantising_again_changes_nothing(shape, seed, scale_format):
    weight, scale = quantise_fp8_block(random(shape, seed), scale_format=scale_format)
    once = dequantise_fp8(weight, scale, BLOCK, dtype=torch.float32)
    weight, scale = quantise_fp8_block(once, scale_format=scale_format)
    again = dequantise_fp8(weight, scale, BLOCK, dtype=torch.float32)
    # 448 s / 448 may miss s by one unit in the last place; powers of two never do
    torch.testing.assert_close(again, once, rtol=0 if scale_format == "ue8m0" else 3e-7, atol=0)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_representable_values_come_back_exactly(shape, scale_format):
    codes = torch.randint(0, 127, shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    tall, wide = scale_shape(*shape)
    for i in range(tall):
        for j in range(wide):
            values[i * 128, j * 128] = -448.0  # makes the block's scale 1 before it is multiplied
    scale = 2.0 ** torch.arange(tall * wide).float().view(tall, wide)
    values *= per_element(scale, shape)
    weight, found = quantise_fp8_block(values, scale_format=scale_format)
    assert torch.equal(found, scale)
    assert torch.equal(dequantise_fp8(weight, found, BLOCK, dtype=torch.float32), values)


def test_powers_of_two_never_clip_and_are_the_smallest_that_do_not():
    values = random((300, 260), 3)
    _, scale = quantise_fp8_block(values, scale_format="ue8m0")
    _, plain = quantise_fp8_block(values)
    assert torch.equal(torch.frexp(scale)[0], torch.full_like(scale, 0.5))
    assert bool((scale >= plain).all())
    assert bool((scale < 2 * plain).all())


@pytest.mark.parametrize("scale_format", FORMATS)
def test_zero_and_tiny_blocks(scale_format):
    values = torch.zeros(130, 130)
    values[129, 129] = 1e-44
    weight, scale = quantise_fp8_block(values, scale_format=scale_format)
    assert scale[0, 0] == scale[0, 1] == scale[1, 0] == 1
    assert bool(torch.isfinite(weight.float()).all())
    assert torch.equal(weight.float()[:129, :129], torch.zeros(129, 129))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(bad):
    values = torch.ones(129, 3)
    values[128, 2] = bad
    with pytest.raises(CheckpointError, match="not finite"):
        quantise_fp8_block(values)


@pytest.mark.parametrize("bad", [torch.ones(3), torch.ones(2, 2, dtype=torch.int32), torch.ones(2, 2, 2)])
def test_only_matrices_of_floats(bad):
    with pytest.raises(CheckpointError, match="only matrices"):
        quantise_fp8_block(bad)


def test_every_code_has_torchs_value():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    expected = codes.float()
    found, numbers = e4m3_to_float(codes), ~expected.isnan()
    assert torch.equal(found.isnan(), ~numbers)
    assert int(numbers.sum()) == 254
    assert torch.equal(found[numbers].view(torch.int32), expected[numbers].view(torch.int32))
    across = codes.view(16, 16)[:7, :9].T  # not contiguous, and without NaN
    assert torch.equal(e4m3_to_float(across), across.float())


def test_rows_of_a_part_know_their_blocks():
    weight, scale = quantise_fp8_block(random((576, 200), 4))
    whole = dequantise_fp8(weight, scale, BLOCK)
    assert whole.dtype == torch.bfloat16
    assert scale.shape == (5, 2)
    assert torch.equal(dequantise_fp8(weight[100:300], scale, BLOCK, first_row=100), whole[100:300])


def test_rows_may_move_only_after_dequantising():
    values = random((256, 64), 5) * torch.cat([torch.ones(128, 1), torch.full((128, 1), 64.0)])
    weight, scale = quantise_fp8_block(values)
    order = torch.arange(256).view(2, 128).T.reshape(-1)
    right = dequantise_fp8(weight, scale, BLOCK)[order]
    assert torch.allclose(right.float(), values[order], rtol=0.07, atol=0.1)
    assert not torch.allclose(dequantise_fp8(weight[order], scale, BLOCK), right, rtol=0.5)


def test_mxfp4_by_hand():
    blocks = torch.zeros(1, 2, 16, dtype=torch.uint8)
    blocks[0, 0, 0] = 0x2F  # low half first: 15 is -6, 2 is 1
    blocks[0, 1, 15] = 0x91  # 1 is 0.5, 9 is -0.5
    scales = torch.tensor([[128, 126]], dtype=torch.uint8)
    row = dequantise_mxfp4(blocks, scales)[0]
    assert row[:2].tolist() == [-12.0, 2.0]
    assert row[62:].tolist() == [0.25, -0.25]
    assert row[2:62].abs().sum() == 0


def test_int4_by_hand():
    words = torch.tensor([[-0x0FEDCBA9 - 1, 0x87654321]], dtype=torch.int64).to(torch.int32)
    scale = torch.tensor([[2.0, 0.5]], dtype=torch.bfloat16)
    row = dequantise_int4(words, scale, 16)[0]
    codes = [(int(word) >> 4 * i) & 15 for word in words[0] for i in range(8)]
    assert row.tolist() == [(c - 8) * (2.0 if i < 8 else 0.5) for i, c in enumerate(codes)]
    assert codes[8:] == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_of_every_byte_and_exponent(dtype):
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 1, 16).expand(16, 256, 16)
    scales = torch.arange(256, dtype=torch.uint8).expand(16, 256)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] * 2).double() * torch.tensor([1.0] * 8 + [-1.0] * 8)
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(2).long()
    exact = table[codes] * torch.exp2(scales.double() - 127)[..., None]
    exact[:, 255] = torch.nan
    found = dequantise_mxfp4(blocks, scales, dtype=dtype).view(16, 256, 32)
    assert found.dtype == dtype
    assert torch.equal(found.isnan(), exact.isnan())
    assert torch.equal(found.double().nan_to_num(0, 9, -9), exact.to(dtype).double().nan_to_num(0, 9, -9))
