"""Shape of a model, read from a Hugging Face `config.json`; what is not implemented is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moerl.errors import ConfigError

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_PLAIN = {
    "hidden_act": ("silu", "silu"),
    "use_sliding_window": (False, False),
}
_ONLY: dict[str, dict[str, tuple[Any, Any]]] = {
    "qwen3_moe": {
        **_PLAIN,
        "attention_bias": (False, False),
        "partial_rotary_factor": (1.0, 1.0),
        "qkv_bias": (False, False),
        "shared_expert_intermediate_size": (0, 0),
        "use_qk_norm": (True, True),
    },
    "qwen2_moe": {**_PLAIN, "partial_rotary_factor": (1.0, 1.0)},
    "glm4_moe": {**_PLAIN, "scoring_func": ("sigmoid", "sigmoid"), "topk_method": ("noaux_tc", "noaux_tc")},
    "qwen3": {**_PLAIN, "attention_bias": (False, False), "partial_rotary_factor": (1.0, 1.0)},
    "llama": {**_PLAIN, **dict.fromkeys(("attention_bias", "mlp_bias"), (False, False))},
    "olmoe": {
        **_PLAIN,
        "attention_bias": (False, False),
        "clip_qkv": (None, None),
        "partial_rotary_factor": (1.0, 1.0),
    },
    "minimax_m2": {
        **_PLAIN,
        "scoring_func": ("sigmoid", "sigmoid"),
        "sliding_window": (None, None),
        "use_qk_norm": (True, True),
        "shared_intermediate_size": (0, 0),
    },
    "mixtral": {**_PLAIN, "sliding_window": (None, None), "partial_rotary_factor": (1.0, 1.0)},
}
"""model_type -> key -> (the one value that is implemented, what Hugging Face assumes where the key is absent)."""
_ROUTED = ("num_experts_per_tok", "moe_intermediate_size")
_ALSO = {
    "qwen3_moe": _ROUTED,
    "qwen2_moe": (*_ROUTED, "shared_expert_intermediate_size"),
    "mixtral": ("num_experts_per_tok", "intermediate_size"),
    "olmoe": ("num_experts_per_tok", "intermediate_size"),
    "minimax_m2": ("num_experts_per_tok", "intermediate_size", "head_dim"),
    "qwen3": ("intermediate_size",),
    "llama": ("intermediate_size",),
    "glm4_moe": (
        *_ROUTED,
        "n_group",
        "topk_group",
        "n_shared_experts",
        "first_k_dense_replace",
        "routed_scaling_factor",
        "use_qk_norm",
        "attention_bias",
        "intermediate_size",
    ),
}
"""model_type -> keys that must be there beside the sizes; the second is the inner width of an expert."""
_PARTIAL = ("glm4_moe", "minimax_m2")
"""Those that may rotate a part of each head."""
_DENSE = ("qwen3", "llama")
"""Without experts."""
_SCALED = {"llama": ("llama3",), **dict.fromkeys(("qwen3", "qwen3_moe", "qwen2_moe"), ("yarn",))}
"""model_type -> kinds of stretched rotary embeddings."""
_EPS = {"glm4_moe": 1e-5, "mixtral": 1e-5, "olmoe": 1e-5}
"""model_type -> what Hugging Face takes for `rms_norm_eps` where it is absent; 1e-6 in the others."""


PARTS = ("gate_proj", "up_proj", "down_proj")
"""The three matrices of most feed-forward parts."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How Hugging Face names what a layer with experts has, below `model.layers.<n>`."""

    home: str = "mlp"
    """Holds the router `gate`, and `experts`."""
    parts: tuple[str, str, str] = PARTS
    """The three matrices of an expert."""
    bias: str = "gate.e_score_correction_bias"
    """Of sigmoid routers."""


_NAMES = {
    "mixtral": ExpertNames("block_sparse_moe", ("w1", "w3", "w2")),
    "minimax_m2": ExpertNames("block_sparse_moe", ("w1", "w3", "w2"), "e_score_correction_bias"),
}
"""model_type -> other names."""


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """What runs for every token beside the routed experts."""

    name: str
    """Under which `mlp.<name>` holds it."""
    size: int
    """Inner width."""
    gate: str = ""
    """Under which `mlp.<name>.weight` holds a gate on it; empty for none."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How scores become a choice of experts and their weights."""

    is_sigmoid: bool = False
    """Scores are sigmoids of the logits, with a bias added for the choice alone; else a softmax."""
    is_normalised: bool = True
    """A token's weights are divided by their sum."""
    factor: float = 1.0
    """And multiplied by this."""
    num_groups: int = 1
    groups_per_token: int = 1
    """Experts come from so many groups, those with the largest sum of their two best scores."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's: long waves are stretched by the factor, short ones are not, those between in part."""

    factor: float
    low_freq_factor: float
    """Waves longer than the original length over this are stretched in full."""
    high_freq_factor: float
    """And those shorter than it over this not at all."""
    original_length: float


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN's (arXiv 2309.00071): of the channels of a head, the slow ones are stretched by the factor."""

    factor: float
    original_length: float
    beta_fast: float
    """Channels that turn more often than so many times within the original length are left as they are."""
    beta_slow: float
    """And those that turn less often than so many times are stretched in full."""
    is_rounded: bool
    """The channels where these bounds lie are whole numbers, rounded outwards."""
    attention_factor: float
    """Cosines and sines are multiplied by it."""


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
    router: RouterConfig
    rope_theta: float
    rotary_dim: int
    """Leading part of each head that is rotated."""
    rms_norm_eps: float
    tied_embeddings: bool
    qk_norm: bool
    wide_qk_norm: bool
    """Each spans all heads."""
    qkv_bias: bool
    shared: SharedExpert | None
    names: ExpertNames = ExpertNames()
    rope_scaling: RopeScaling | Yarn | None = None

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
        kind = raw.get("model_type", "qwen3_moe")
        _refuse_unimplemented(raw, kind, where)
        layers = int(raw["num_hidden_layers"])
        moe_layers = _moe_layers(raw, kind, layers)
        if len(moe_layers) < layers and "intermediate_size" not in raw:
            raise ConfigError(f"{where}: intermediate_size is missing, and layers without experts need it")
        heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        if heads % int(raw["num_key_value_heads"]):
            raise ConfigError(
                f"{where}: num_attention_heads={heads} is no multiple of "
                f"num_key_value_heads={raw['num_key_value_heads']}"
            )
        head_dim = int(raw.get("head_dim") or hidden // heads)
        share = {"glm4_moe": 0.5, "minimax_m2": int(raw.get("rotary_dim") or head_dim) / head_dim}.get(kind, 1.0)
        return cls(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(raw["num_key_value_heads"]),
            head_dim=head_dim,
            num_experts=0 if kind in _DENSE else _num_experts(raw, where),
            experts_per_token=0 if kind in _DENSE else int(raw["num_experts_per_tok"]),
            expert_size=0 if kind in _DENSE else int(raw[_ALSO[kind][1]]),
            dense_size=int(raw["intermediate_size"]) if len(moe_layers) < layers else 0,
            moe_layers=moe_layers,
            router=_router(raw, kind),
            rope_theta=_rope(raw, "rope_theta", None, where),
            rotary_dim=int(head_dim * _rope(raw, "partial_rotary_factor", share, where)),
            rms_norm_eps=float(raw.get("rms_norm_eps", _EPS.get(kind, 1e-6))),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            wide_qk_norm=kind in ("olmoe", "minimax_m2"),
            qk_norm=kind in ("qwen3_moe", "qwen3", "olmoe", "minimax_m2") or bool(raw.get("use_qk_norm", False)),
            qkv_bias=bool(raw.get("qkv_bias", True)) if kind == "qwen2_moe" else bool(raw.get("attention_bias", False)),
            shared=_shared(raw, kind),
            names=_NAMES.get(kind, ExpertNames()),
            rope_scaling=_rope_scaling(raw, where),
        )


def _refuse_unimplemented(raw: Mapping[str, Any], kind: Any, where: str) -> None:
    if kind not in _ONLY:
        raise ConfigError(
            f"{where}: model_type={kind!r} is not implemented by the reference model, only {', '.join(_ONLY)} are; "
            "use a folder of one of these, or an engine that knows this model"
        )
    for key, (implemented, absent) in _ONLY[kind].items():
        value = absent if raw.get(key) is None else raw[key]
        if value != implemented:
            raise ConfigError(
                f"{where}: {key}={value!r} is not implemented by the reference model, only {implemented!r} is; "
                "use a folder without it, or an engine that knows this model"
            )
    missing = [key for key in (*_SIZES, *_ALSO[kind]) if key not in raw]
    if missing:
        raise ConfigError(f"{where}: {', '.join(missing)} missing; copy config.json anew from the model's source")


def _moe_layers(raw: Mapping[str, Any], kind: str, layers: int) -> tuple[int, ...]:
    if kind in _DENSE:
        return ()
    if kind == "glm4_moe":
        return tuple(range(int(raw["first_k_dense_replace"]), layers))
    sparse_step = int(raw.get("decoder_sparse_step", 1))
    dense = {int(i) for i in raw.get("mlp_only_layers") or ()}
    return tuple(i for i in range(layers) if i not in dense and (i + 1) % sparse_step == 0)


def _router(raw: Mapping[str, Any], kind: str) -> RouterConfig:
    if kind == "minimax_m2":
        return RouterConfig(is_sigmoid=True)
    if kind != "glm4_moe":
        return RouterConfig(is_normalised=kind == "mixtral" or bool(raw.get("norm_topk_prob", False)))
    return RouterConfig(
        is_sigmoid=True,
        is_normalised=bool(raw.get("norm_topk_prob", True)),
        factor=float(raw["routed_scaling_factor"]),
        num_groups=int(raw["n_group"]),
        groups_per_token=int(raw["topk_group"]),
    )


def _shared(raw: Mapping[str, Any], kind: str) -> SharedExpert | None:
    if kind == "qwen2_moe":
        return SharedExpert("shared_expert", int(raw["shared_expert_intermediate_size"]), "shared_expert_gate")
    if kind == "glm4_moe":
        return SharedExpert("shared_experts", int(raw["moe_intermediate_size"]) * int(raw["n_shared_experts"]))
    return None


def _num_experts(raw: Mapping[str, Any], where: str) -> int:
    """transformers 5 writes `num_local_experts` for some families, older ones `num_experts`."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((raw[name] for name in names if raw.get(name) is not None), None)
    if experts is None:
        raise ConfigError(f"{where}: none of {', '.join(names)} is there; one of them must be")
    if not 0 < int(raw["num_experts_per_tok"]) <= int(experts):
        raise ConfigError(
            f"{where}: num_experts_per_tok={raw['num_experts_per_tok']} must be between 1 and num_experts={experts}"
        )
    return int(experts)


def _rope_table(raw: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The rotary embedding's own table, and its type."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    return rope, rope.get("rope_type", rope.get("type", "default"))


def _rope_scaling(raw: Mapping[str, Any], where: str) -> RopeScaling | Yarn | None:
    rope, kind = _rope_table(raw)
    if kind == "default":
        return None
    names = ("factor", "original_max_position_embeddings")
    names += ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ()
    missing = [name for name in names if name not in rope]
    if missing:
        raise ConfigError(f"{where}: rotary embedding {rope} lacks {', '.join(missing)}; they must be written down")
    factor, length, *bounds = (float(rope[name]) for name in names)
    return _yarn(rope, factor, length, where) if not bounds else RopeScaling(factor, bounds[0], bounds[1], length)


_YARN_FIELDS = frozenset(
    {
        "attention_factor",
        "attn_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
        "rope_type",
        "truncate",
        "type",
    }
)


def _yarn(rope: Mapping[str, Any], factor: float, length: float, where: str) -> Yarn:
    usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    attention = float(usual if rope.get("attention_factor") is None else rope["attention_factor"])
    of_engines = usual * float(1.0 if rope.get("attn_factor") is None else rope["attn_factor"])
    unknown = sorted(name for name in rope.keys() - _YARN_FIELDS if rope[name] is not None)
    if unknown or not math.isclose(attention, of_engines, rel_tol=1e-6):
        raise ConfigError(
            f"{where}: rotary embedding {rope} is not implemented by the reference model: it has "
            f"{', '.join(unknown) or 'factors of attention that contradict each other'}; use a folder without them"
        )
    fast, slow = (float(rope.get(name) or absent) for name, absent in (("beta_fast", 32), ("beta_slow", 1)))
    return Yarn(factor, length, fast, slow, bool(rope.get("truncate", True)), attention)


def _rope(raw: Mapping[str, Any], name: str, absent: float | None, where: str) -> float:
    """A value of the rotary embedding, from its own table or from the top level."""
    rope, kind = _rope_table(raw)
    allowed = ("default", *_SCALED.get(raw.get("model_type", "qwen3_moe"), ()))
    if kind not in allowed or (raw.get("model_type") not in _PARTIAL and rope.get("partial_rotary_factor", 1.0) != 1.0):
        raise ConfigError(f"{where}: rotary embedding {rope} is not implemented by the reference model, only {allowed}")
    value = rope.get(name, raw.get(name, absent))
    if value is None:
        raise ConfigError(f"{where}: {name} is missing (also under rope_parameters); it must be written down")
    return float(value)
