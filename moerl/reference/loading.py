"""Hugging Face weights from a folder, one tensor at a time, and the check that none is missing or left over."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moerl.errors import CheckpointError
from moerl.reference.config import PARTS, ReferenceConfig


def read_weights(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Every (name, tensor) of `folder`: sharded (`model.safetensors.index.json`) or single `*.safetensors` files.

    Raises:
        CheckpointError: no weights there, a shard that the index names is missing, a file that cannot be read, or
            quantised weights.
    """
    folder = Path(folder)
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    tensor = file.get_tensor(name)
                    _refuse_quantised(path, name, tensor)
                    yield name, tensor
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path}: cannot be read as safetensors ({error}); download or export it anew"
            ) from error


def _refuse_quantised(path: Path, name: str, tensor: Tensor) -> None:
    if tensor.element_size() == 1:
        raise CheckpointError(
            f"{path}: {name} is {tensor.dtype}, and the reference model reads plain weights only; "
            "make a plain folder of it with `moerl convert export`"
        )


def expected_shapes(cfg: ReferenceConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor that a model of this shape has; a tied head has none of its own."""
    hidden = cfg.hidden_size
    query, key = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (cfg.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not cfg.tied_embeddings:
        shapes["lm_head.weight"] = (cfg.vocab_size, hidden)
    for layer in range(cfg.num_layers):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (query, hidden),
            f"{at}self_attn.k_proj.weight": (key, hidden),
            f"{at}self_attn.v_proj.weight": (key, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, query),
        }
        if cfg.qk_norm:
            shapes |= {
                f"{at}self_attn.{part}_norm.weight": (width if cfg.wide_qk_norm else cfg.head_dim,)
                for part, width in (("q", query), ("k", key))
            }
        if cfg.qkv_bias:
            shapes |= {f"{at}self_attn.{part}_proj.bias": (query if part == "q" else key,) for part in "qkv"}
        if layer not in cfg.moe_layers:
            shapes |= _mlp_shapes(f"{at}mlp.", hidden, cfg.dense_size)
            continue
        home = f"{at}{cfg.names.home}."
        shapes[f"{home}gate.weight"] = (cfg.num_experts, hidden)
        if cfg.router.is_sigmoid:
            shapes[f"{home}{cfg.names.bias}"] = (cfg.num_experts,)
        shapes |= _shared_shapes(home, cfg)
        for expert in range(cfg.num_experts):
            shapes |= _mlp_shapes(f"{home}experts.{expert}.", hidden, cfg.expert_size, cfg.names.parts)
    return shapes


def check_weights(cfg: ReferenceConfig, weights: Mapping[str, Tensor]) -> None:
    """Hold `weights` against the shapes of `cfg`: every name once, none unknown, none of another shape, all floating.

    Raises:
        CheckpointError: names the first few offenders.
    """
    expected = expected_shapes(cfg)
    missing = sorted(expected.keys() - weights.keys())
    if missing:
        raise CheckpointError(f"weights are incomplete: {len(missing)} parameters unfilled, first {_few(missing)}")
    tied = {"lm_head.weight"} if cfg.tied_embeddings else set()
    unknown = sorted(weights.keys() - expected.keys() - tied)
    if unknown:
        raise CheckpointError(f"weights hold {len(unknown)} names that this model has not, first {_few(unknown)}")
    for name, shape in expected.items():
        tensor = weights[name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{name}: shape {tuple(tensor.shape)} found, config.json asks for {shape}")
        if not torch.is_floating_point(tensor) or tensor.element_size() == 1:
            raise CheckpointError(f"{name}: dtype {tensor.dtype} found; export plain fp32, bf16 or fp16 weights")


def _shared_shapes(at: str, cfg: ReferenceConfig) -> dict[str, tuple[int, ...]]:
    if cfg.shared is None:
        return {}
    shapes = _mlp_shapes(f"{at}{cfg.shared.name}.", cfg.hidden_size, cfg.shared.size)
    return shapes | ({f"{at}{cfg.shared.gate}.weight": (1, cfg.hidden_size)} if cfg.shared.gate else {})


def _mlp_shapes(at: str, hidden: int, inner: int, parts: tuple[str, str, str] = PARTS) -> dict[str, tuple[int, ...]]:
    sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
    return {f"{at}{part}.weight": size for part, size in zip(parts, sizes, strict=True)}


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        paths = [folder / name for name in names]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"{folder}: no *.safetensors file; set model.init=random, or download the weights")
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise CheckpointError(f"{folder}: {_few(absent)} named in {index.name} but not there; download the shards anew")
    return paths


def _few(names: list[str]) -> str:
    return ", ".join(names[:3])
