"""Shape of a Qwen3-MoE, read from a Hugging Face `config.json`; what is not implemented is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moerl.errors import ConfigError

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
_ONLY = {
    "model_type": ("qwen3_moe", None),
    "hidden_act": ("silu", "silu"),
    "attention_bias": (False, False),
    "use_sliding_window": (False, False),
    "partial_rotary_factor": (1.0, 1.0),
    "quantization_config": (None, None),
}
"""key -> (the one value that is implemented, what Hugging Face assumes where the key is absent)."""


@dataclass(frozen=True, slots=True)
class ReferenceConfig:
    """What the arithmetic needs to know; names as in the code, not as in config.json."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    expert_size: int
    """Inner width of one expert."""
    dense_size: int
    """Inner width of a layer without experts; 0 where there is none."""
    moe_layers: tuple[int, ...]
    """Which layers have experts; their order is the `l` axis of routes and router logits."""
    norm_topk_prob: bool
    rope_theta: float
    rms_norm_eps: float
    tied_embeddings: bool

    @classmethod
    def from_folder(cls, folder: str | Path) -> ReferenceConfig:
        """Read `folder/config.json`.

        Raises:
            ConfigError: no such file, not JSON, or a model that is not implemented here.
        """
        path = Path(folder) / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(
                f"{path}: no such file; model.path must be a Hugging Face folder with config.json"
            ) from error
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}: not JSON ({error}); copy config.json anew from the model's source") from error
        return cls.from_dict(raw, where=str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, where: str = "config.json") -> ReferenceConfig:
        """Read the contents of a config.json, of transformers 4 (`rope_theta`) or 5 (`rope_parameters`).

        Raises:
            ConfigError: a key that is missing, or has a value that is not implemented here; names it.
        """
        _refuse_unimplemented(raw, where)
        experts = _num_experts(raw, where)
        layers = int(raw["num_hidden_layers"])
        sparse_step = int(raw.get("decoder_sparse_step", 1))
        dense = {int(i) for i in raw.get("mlp_only_layers") or ()}
        moe_layers = tuple(i for i in range(layers) if i not in dense and (i + 1) % sparse_step == 0)
        if len(moe_layers) < layers and "intermediate_size" not in raw:
            raise ConfigError(f"{where}: intermediate_size is missing, and layers without experts need it")
        heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        if heads % int(raw["num_key_value_heads"]):
            raise ConfigError(
                f"{where}: num_attention_heads={heads} is no multiple of "
                f"num_key_value_heads={raw['num_key_value_heads']}"
            )
        return cls(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(raw["num_key_value_heads"]),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            num_experts=experts,
            experts_per_token=int(raw["num_experts_per_tok"]),
            expert_size=int(raw["moe_intermediate_size"]),
            dense_size=int(raw["intermediate_size"]) if len(moe_layers) < layers else 0,
            moe_layers=moe_layers,
            norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
            rope_theta=_rope_theta(raw, where),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        )


def _refuse_unimplemented(raw: Mapping[str, Any], where: str) -> None:
    for key, (implemented, absent) in _ONLY.items():
        value = raw.get(key, absent)
        if value != implemented:
            raise ConfigError(
                f"{where}: {key}={value!r} is not implemented by the reference model, only {implemented!r} is; "
                "use a Qwen3-MoE folder, or an engine that knows this model"
            )
    missing = [key for key in _REQUIRED if key not in raw]
    if missing:
        raise ConfigError(f"{where}: {', '.join(missing)} missing; copy config.json anew from the model's source")


def _num_experts(raw: Mapping[str, Any], where: str) -> int:
    """transformers 5 writes `num_local_experts`, older ones `num_experts`."""
    experts = raw.get("num_experts", raw.get("num_local_experts"))
    if experts is None:
        raise ConfigError(f"{where}: neither num_experts nor num_local_experts is there; one of them must be")
    if not 0 < int(raw["num_experts_per_tok"]) <= int(experts):
        raise ConfigError(
            f"{where}: num_experts_per_tok={raw['num_experts_per_tok']} must be between 1 and num_experts={experts}"
        )
    return int(experts)


def _rope_theta(raw: Mapping[str, Any], where: str) -> float:
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{where}: rotary embedding {rope} is not implemented by the reference model, only 'default'")
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ConfigError(f"{where}: rope_theta is missing (also under rope_parameters); the base must be written down")
    return float(theta)
