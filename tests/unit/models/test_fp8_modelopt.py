"""FP8 blocks held to nvidia-modelopt's own quantiser, where that is installed (`pip install moerl[modelopt]`)."""

from __future__ import annotations

import itertools

import pytest
import torch

from moerl.models.fp8 import BLOCK, dequantise_fp8, quantise_fp8_block

SHAPES = [(1, 1), (1, 300), (300, 1), (127, 129), (128, 128), (576, 40), (3, 300), (512, 384)]


@pytest.fixture(scope="module")
def theirs():
    reason = "nvidia-modelopt is not installed; it comes with the extra `modelopt`"
    return pytest.importorskip("modelopt.torch.quantization.qtensor", reason=reason).FP8QTensor


def test_codes_scales_and_values_are_modelopts(theirs):
    for shape, exponent in itertools.product(SHAPES, (-20, 0, 10)):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(7)) * 2.0**exponent
        weight, scale = quantise_fp8_block(values)
        blocks = {-2: BLOCK[0], -1: BLOCK[1]}
        expected, expected_scale = theirs.quantize(values, block_sizes=blocks)
        assert torch.equal(scale, expected_scale), (shape, exponent)
        assert torch.equal(weight.view(torch.uint8), expected._quantized_data.view(torch.uint8)), (shape, exponent)
        plain = expected.dequantize(torch.float32, scale=expected_scale, block_sizes=blocks)
        assert torch.equal(dequantise_fp8(weight, scale, BLOCK, dtype=torch.float32), plain), (shape, exponent)
