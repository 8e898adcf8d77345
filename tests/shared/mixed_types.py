"""Folders in bfloat16 whose routers are float32, as MiniMax-M2's are."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_model
from torch import Tensor

ROUTERS = (".gate.weight", ".mlp.router.", ".e_score_correction_bias")
"""Parts of the names of routers and of their biases."""


def is_router(name: str) -> bool:
    """In a Hugging Face folder."""
    return any(part in name for part in ROUTERS)


def save_mixed(folder: Path, kind: str, *, routers: torch.dtype = torch.float32, seed: int = 3) -> dict[str, Tensor]:
    """A tiny model of `kind` in bfloat16, its routers in `routers` (biases of the choice float32); its tensors."""
    save_model(folder, kind, seed=seed)
    path = folder / "model.safetensors"
    tensors = {
        name: tensor if "correction_bias" in name else tensor.to(routers if is_router(name) else torch.bfloat16)
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    assert any(is_router(name) for name in tensors)
    return tensors
