"""Folders with quantised weights, made by arithmetic of their own: one scale at a time, in float64 where it matters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_model
from torch import Tensor

BLOCK = 128
SETTINGS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
SIZES: dict[str, Any] = dict(
    hidden_size=200,  # one block and a part of one
    moe_intermediate_size=136,
    intermediate_size=264,
    num_hidden_layers=2,
    head_dim=24,  # query 144 rows, key and value 48
)
LINEAR = ("self_attn.", "mlp.", "block_sparse_moe.")


def is_linear(name: str, shape: Any) -> bool:
    """What the hub's FP8 folders have in FP8."""
    in_layer = any(part in name for part in LINEAR)
    return (
        in_layer and len(shape) == 2 and not name.endswith(("mlp.gate.weight", "moe.gate.weight", "expert_gate.weight"))
    )


def blocks_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(float8 weight, float32 scale) of a bfloat16 matrix."""
    rows, columns = weight.shape
    quantised = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            block = weight[at].float()
            scale[i, j] = block.abs().max() / 448
            quantised[at] = (block / scale[i, j]).to(torch.float8_e4m3fn)
    return quantised, scale


def plain_of(weight: Tensor, scale: Tensor) -> Tensor:
    """The bfloat16 matrix that `blocks_of` stands for."""
    per_element = scale.repeat_interleave(BLOCK, 0)[: weight.shape[0]].repeat_interleave(BLOCK, 1)
    return (weight.float() * per_element[:, : weight.shape[1]]).to(torch.bfloat16)


def save_bfloat16(folder: Path, kind: str, **sizes: Any) -> Path:
    """A tiny model of awkward sizes in bfloat16; the biases of its routers stay float32."""
    save_model(folder, kind, **{**SIZES, **sizes})
    tensors = load_file(folder / "model.safetensors")
    kept = {name: t if "correction_bias" in name else t.to(torch.bfloat16) for name, t in tensors.items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, dtype="bfloat16")
    return folder


def save_fp8(folder: Path, kind: str, **sizes: Any) -> tuple[Path, dict[str, Tensor]]:
    """(folder with FP8 blocks, the plain tensors that it stands for); scales lie in a file of their own."""
    save_bfloat16(folder, kind, **sizes)
    stored, scales, plain = {}, {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = plain[name] = tensor
        if is_linear(name, tensor.shape):
            stored[name], scales[f"{name}_scale_inv"] = blocks_of(tensor)
            plain[name] = plain_of(stored[name], scales[f"{name}_scale_inv"])
    (folder / "model.safetensors").unlink()
    write_files(folder, {"a.safetensors": stored, "b.safetensors": scales})
    edit_config(folder, quantization_config=SETTINGS)
    return folder, plain


def write_files(folder: Path, files: dict[str, dict[str, Tensor]]) -> None:
    """Safetensors files and their index."""
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def read_files(folder: Path) -> dict[str, Tensor]:
    """Every tensor as it is stored."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def edit_config(folder: Path, **fields: Any) -> None:
    """Set fields of config.json; None takes one away."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
