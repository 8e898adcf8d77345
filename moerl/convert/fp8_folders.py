"""What a folder with FP8 blocks holds, as DeepSeek and Qwen publish them: which weights, and what config.json says.

The linear layers of attention, dense MLP, shared and routed experts are FP8; embeddings, head, norms, routers, gates of
shared experts and everything of one dimension stay as they are. A scale stands in the file of its weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moerl.errors import CheckpointError, ConfigError
from moerl.models.fp8 import BLOCK, quantise_fp8_block, scale_shape
from moerl.models.rules import Rule
from moerl.tensor_file import Described

SCALE = "_scale_inv"
"""What the name of a weight ends with in its scale's name."""
_LINEAR = re.compile(r"\.linear_\w+\.weight$")
_IN_LAYER = re.compile(r"\.layers\.\d+\.")


def fp8_names(rules: Sequence[Rule]) -> frozenset[str]:
    """Hugging Face names of the weights that are written as FP8.

    Raises:
        ConfigError: experts that no published layout has in FP8 blocks.
    """
    linear = [rule for rule in rules if _LINEAR.search(rule.megatron_name)]
    found: set[str] = set()
    for rule in linear:
        own = zip(rule.hf_names, rule.hf_shapes, strict=True)
        named = [name for name, shape in own if len(shape) == 2 and name.endswith(".weight")]
        if rule.is_expert and not named:
            raise ConfigError(
                f"FP8: {rule.hf_names[0]} holds an expert in a form that no published FP8 folder has; "
                "export them with --dtype bf16"
            )
        found.update(named)
    return frozenset(found)


def with_scales(tensors: Sequence[Described], quantised: frozenset[str]) -> tuple[list[Described], frozenset[str]]:
    """(`tensors` as they are stored, each scale right after its weight; the names of the scales)."""
    stored: list[Described] = []
    scales: list[Described] = []
    for tensor in tensors:
        if tensor.name not in quantised:
            stored.append(tensor)
            continue
        rows, columns = tensor.shape
        scales.append(Described(tensor.name + SCALE, torch.float32, scale_shape(rows, columns)))
        stored += [Described(tensor.name, torch.float8_e4m3fn, tensor.shape), scales[-1]]
    return stored, frozenset(scale.name for scale in scales)


def fp8_blocks(name: str, tensor: Tensor) -> Iterator[Tensor]:
    """The weight, then its scale.

    Raises:
        CheckpointError: a value that is not finite; names the tensor.
    """
    try:
        yield from quantise_fp8_block(tensor)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}; export it with --dtype bf16, or an earlier checkpoint") from error


def plain_modules(tensors: Sequence[Described], quantised: frozenset[str]) -> list[str]:
    """Modules of those of `tensors` that are not FP8; of attention matrices alone, as in `quantization_config`."""
    return [
        tensor.name.removesuffix(".weight")
        for tensor in tensors
        if tensor.name.endswith(".weight")
        and tensor.name not in quantised
        and tensor.dtype is not torch.float8_e4m3fn
        and (".self_attn." not in tensor.name or len(tensor.shape) == 2)
    ]


def quantization_config(
    rules: Sequence[Rule], quantised: frozenset[str], carried: Sequence[Described] = ()
) -> dict[str, Any]:
    """What config.json says of such a folder, under the names that readers on the hub know.

    `carried`: other tensors of the folder, of which those in float8 have their scales.
    """
    left: dict[str, None] = {"lm_head": None}
    for name in (name for rule in rules for name in rule.hf_names):
        # readers skip what begins like an entry, so only whole modules; those of attention have no linear layer left
        if name.endswith(".weight") and name not in quantised and _IN_LAYER.search(name) and ".self_attn." not in name:
            left[name.removesuffix(".weight")] = None
    left |= dict.fromkeys(plain_modules(carried, quantised))
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": list(left),
        "quant_method": "fp8",
        "weight_block_size": list(BLOCK),
    }
