"""Tiny folders with layers of multi-token prediction, as the hub's have them: copies of a decoder layer, and more."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from quantised_folders import (
    SETTINGS,
    blocks_of,
    edit_config,
    is_linear,
    plain_of,
    read_files,
    save_bfloat16,
    write_files,
)
from safetensors.torch import load_file, save_file
from tiny_models import save_model
from torch import Tensor

from moerl.models.hf_folder import read_config

FIELDS: dict[str, dict[str, Any]] = {
    "sigmoid": {"num_nextn_predict_layers": 2},
    "latent": {"num_nextn_predict_layers": 2},
    "latent_listed": {"num_nextn_predict_layers": 2},
    "wide_sigmoid": {"use_mtp": True, "num_mtp_modules": 2, "mtp_transformer_layers": 1},
}
"""Kinds of `tiny_models` that have such layers -> what config.json says of two of them."""
_OTHER_SIZES: dict[str, dict[str, Any]] = {
    "latent": {"head_dim": None},
    "wide_sigmoid": {"moe_intermediate_size": None},
}
"""Of folders in bfloat16, beside those of `quantised_folders`."""


def prediction_tensors(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two layers after the last one of the decoder, of which no tensor is like any other."""
    config = read_config(folder)
    layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
    generator = torch.Generator().manual_seed(5)
    last = {name: tensor for name, tensor in tensors.items() if f".layers.{layers - 1}." in name}
    like = next(tensor.dtype for name, tensor in last.items() if name.endswith("input_layernorm.weight"))
    more = {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden), "shared_head.norm": (hidden,)}
    more |= dict.fromkeys(("shared_head.head", "embed_tokens"), (int(config["vocab_size"]), hidden))
    made: dict[str, Tensor] = {}
    for layer in (layers, layers + 1):
        for name, tensor in last.items():
            noise = torch.randn(tensor.shape, generator=generator)
            renamed = re.sub(r"\.layers\.\d+\.", f".layers.{layer}.", name)
            made[renamed] = (tensor.float() + 0.1 * noise).to(tensor.dtype)
        for name, shape in more.items():
            made[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape, generator=generator).to(like)
    return made


def save_with_prediction(
    folder: Path, kind: str, *, is_bfloat16: bool = False, **sizes: Any
) -> tuple[Path, dict[str, Tensor]]:
    """(a plain folder, its tensors of multi-token prediction)."""
    if is_bfloat16:
        save_bfloat16(folder, kind, **_OTHER_SIZES.get(kind, {}), **sizes)
    else:
        save_model(folder, kind, **sizes)
    edit_config(folder, **FIELDS[kind])
    tensors = load_file(folder / "model.safetensors")
    extra = prediction_tensors(folder, tensors)
    save_file({**tensors, **extra}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, extra


def save_fp8_with_prediction(folder: Path, kind: str) -> tuple[Path, dict[str, Tensor]]:
    """(a folder with FP8 blocks, every plain tensor that it stands for); scales lie in a file of their own."""
    save_with_prediction(folder, kind, is_bfloat16=True)
    stored, scales, plain = {}, {}, {}
    for name, tensor in read_files(folder).items():
        stored[name] = plain[name] = tensor
        if is_linear(name, tensor.shape):
            stored[name], scales[f"{name}_scale_inv"] = blocks_of(tensor)
            plain[name] = plain_of(stored[name], scales[f"{name}_scale_inv"])
    (folder / "model.safetensors").unlink()
    write_files(folder, {"a.safetensors": stored, "b.safetensors": scales})
    edit_config(folder, quantization_config=SETTINGS)
    return folder, plain
