"""Tiny random models of every kind of router, as transformers saves them; awkward sizes, scores far from uniform."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

COMMON: dict[str, Any] = dict(
    vocab_size=54,  # two ranks do not divide it evenly when padded
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=12,
    moe_intermediate_size=24,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    max_position_embeddings=256,
)
FULL_ROPE = {"rope_type": "default", "rope_theta": 1e4}
QWEN3 = dict(num_experts=8, num_experts_per_tok=3, norm_topk_prob=True, rope_parameters=FULL_ROPE)
GLM = dict(
    n_routed_experts=12,
    num_experts_per_tok=4,
    n_shared_experts=2,
    n_group=3,
    topk_group=2,
    first_k_dense_replace=1,
    routed_scaling_factor=1.5,
    attention_bias=True,
    use_qk_norm=True,
    rope_parameters={**FULL_ROPE, "partial_rotary_factor": 0.5},
)
QWEN2 = dict(
    num_experts=8,
    num_experts_per_tok=3,
    norm_topk_prob=False,
    shared_expert_intermediate_size=28,
    head_dim=None,
    hidden_size=48,
    rope_parameters=FULL_ROPE,
)
YARN_ROPE = dict(
    rope_type="yarn",
    rope_theta=1e4,
    factor=4.0,
    original_max_position_embeddings=64,
    beta_fast=16.0,
    beta_slow=0.5,
    mscale=0.8,
    mscale_all_dim=0.6,
)
LATENT = dict(
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=2,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    routed_scaling_factor=1.5,
    norm_topk_prob=True,
    num_key_value_heads=6,
    head_dim=None,
    rms_norm_eps=1e-3,  # of the norms of latents it is 1e-6 whatever this says
    q_lora_rank=22,
    kv_lora_rank=18,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=14,
    rope_parameters=YARN_ROPE,
)

MIXTRAL = dict(num_local_experts=6, num_experts_per_tok=3, moe_intermediate_size=None, rope_parameters=FULL_ROPE)
LATENT_SOFTMAX = {
    **LATENT,
    "n_group": None,
    "topk_group": None,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "hidden_size": 42,  # a multiple of the heads, which transformers asks for
}
LATENT_LISTED = {**LATENT, "first_k_dense_replace": None, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
GPT_OSS = dict(
    num_local_experts=6,
    num_experts_per_tok=3,
    intermediate_size=28,
    moe_intermediate_size=None,
    sliding_window=5,
    rope_parameters={**YARN_ROPE, "mscale": None, "mscale_all_dim": None, "truncate": False},
)

OLMOE = dict(
    num_experts=6,
    num_experts_per_tok=3,
    norm_topk_prob=False,
    moe_intermediate_size=None,
    head_dim=None,
    hidden_size=48,
    eos_token_id=1,
    rope_parameters=FULL_ROPE,
)
MINIMAX = dict(
    bos_token_id=0,
    eos_token_id=1,
    num_local_experts=6,
    num_experts_per_tok=3,
    moe_intermediate_size=None,
    rope_parameters={**FULL_ROPE, "partial_rotary_factor": 0.5},
)
DENSE = dict(moe_intermediate_size=None, rope_parameters=FULL_ROPE)
LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA = {**DENSE, "hidden_size": 48, "max_position_embeddings": 16384, "rope_parameters": LLAMA_ROPE}


@dataclass(frozen=True)
class Kind:
    """One kind of router, or none."""

    architecture: str
    sizes: dict[str, Any]
    layers: int
    """MoE layers."""

    @property
    def experts(self) -> int:
        """Of a layer; 0 without any."""
        names = ("num_experts", "n_routed_experts", "num_local_experts")
        return int(next((self.sizes[name] for name in names if name in self.sizes), 0))

    @property
    def topk(self) -> int:
        """Experts of a token."""
        return int(self.sizes.get("num_experts_per_tok", 0))


SCALES = {"mlp.gate.weight": 0.6, "mlp.router.weight": 0.6, "correction": 0.3, "mlp.router.bias": 0.3, "sinks": 0.8}
"""Part of a name -> standard deviation; 0.12 for all others."""
NULLABLE = frozenset({"q_lora_rank"})
"""Sizes that may be None, which says something; of others it takes the key away."""
KINDS = {
    "softmax": Kind("Qwen3MoeForCausalLM", QWEN3, 4),
    "dense_first": Kind("Qwen3MoeForCausalLM", {**QWEN3, "mlp_only_layers": [0]}, 3),
    "sigmoid": Kind("Glm4MoeForCausalLM", GLM, 3),
    "mixtral": Kind("MixtralForCausalLM", MIXTRAL, 4),
    "shared": Kind("Qwen2MoeForCausalLM", QWEN2, 4),
    "latent": Kind("DeepseekV3ForCausalLM", LATENT, 3),
    "fused": Kind("GptOssForCausalLM", GPT_OSS, 4),
    "latent_softmax": Kind("DeepseekV2ForCausalLM", LATENT_SOFTMAX, 3),
    "latent_listed": Kind("Glm4MoeLiteForCausalLM", LATENT_LISTED, 3),
    "wide": Kind("OlmoeForCausalLM", OLMOE, 4),
    "wide_sigmoid": Kind("MiniMaxM2ForCausalLM", MINIMAX, 4),
    "dense": Kind("Qwen3ForCausalLM", DENSE, 0),
    "llama": Kind("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}, 0),
}
SAME_MAPPING = frozenset({"latent_softmax", "latent_listed"})
"""Kinds whose rules are those of another one."""


def make_model(name: str, *, seed: int = 3, **overrides: Any) -> Any:
    """transformers' model of a kind, float32, its norms off 1 and every bias off 0."""
    import transformers

    kind = KINDS[name]
    model_class = getattr(transformers, kind.architecture)
    sizes = {key: value for key, value in {**COMMON, **kind.sizes, **overrides}.items() if value is not None}
    sizes |= {key: value for key, value in overrides.items() if key in NULLABLE}
    torch.manual_seed(seed)
    model = model_class._from_config(model_class.config_class(**sizes), attn_implementation="eager").float().eval()
    if kind.layers:
        model.set_experts_implementation("eager")  # the default, grouped_mm, refuses odd widths
    model.get_input_embeddings().padding_idx = None  # a padding token has a gradient like any other
    with torch.no_grad():
        for at, tensor in model.state_dict().items():
            noise = torch.randn_like(tensor)
            if "norm" in at:
                tensor.copy_(1 + 0.1 * noise)
            else:
                tensor.copy_(noise * next((scale for part, scale in SCALES.items() if part in at), 0.12))
    return model


def logits_of(model: Any, micro: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [t, v], row j after token j; chosen experts [t, l, k]) of transformers' model, one sequence of a
    micro-batch at a time.
    """
    chosen: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    routes: list[torch.Tensor] = []
    gates = [module for name, module in model.named_modules() if name.endswith(("mlp.gate", "mlp.router"))]
    handles = [gate.register_forward_hook(lambda _m, _i, out: chosen.append(out[2])) for gate in gates]
    for start, stop in pairwise(micro.cu_seqlens.tolist()):
        ids = micro.token_ids[start:stop][None]
        logits.append(model(ids).logits[0])
        routes.append(torch.stack(chosen, 1) if chosen else ids.new_zeros(ids.shape[1], 0, 0))
        chosen.clear()
    for handle in handles:
        handle.remove()
    return torch.cat(logits), torch.cat(routes)


def logprobs_of(logits: torch.Tensor, micro: Any) -> torch.Tensor:
    """[t] of every token after those before it, from logits [t, v]; 0 at the first of each sequence."""
    logq = torch.log_softmax(logits, -1)
    after = logq[:-1].gather(-1, micro.token_ids[1:, None])[:, 0]
    is_first = torch.zeros_like(micro.token_ids, dtype=torch.bool)
    is_first[micro.cu_seqlens[:-1].long()] = True
    return torch.cat([logq.new_zeros(1), after]).masked_fill(is_first, 0.0)


def forward_of(model: Any, micro: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs [t], chosen experts [t, l, k]) of transformers' model."""
    logits, routes = logits_of(model, micro)
    return logprobs_of(logits, micro), routes


def save_model(folder: Path, name: str, *, seed: int = 3, **overrides: Any) -> Path:
    """`make_model`, saved in `folder`."""
    make_model(name, seed=seed, **overrides).save_pretrained(folder)
    return folder
