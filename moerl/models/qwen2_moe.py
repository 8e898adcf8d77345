"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): biases on q, k, v; softmax router; a gated shared expert.

The released models do not renormalise their top-k weights (`norm_topk_prob` false).
"""

from __future__ import annotations

from typing import Any

from moerl.models.family import EXACT, HFConfig, NoArguments, families
from moerl.models.hf_config import positive, required
from moerl.models.qwen_moe import QWEN_FIELDS, QwenMoe


@families.register(
    "qwen2_moe",
    NoArguments,
    architectures=("Qwen2MoeForCausalLM",),
    covers=(
        "tied",
        "YaRN",
        "dense layers",
        "attention biases",
        "shared experts",
    ),
    verified=EXACT,
)
class Qwen2Moe(QwenMoe):
    """The family."""

    known = QWEN_FIELDS | {"qkv_bias", "shared_expert_intermediate_size"}

    def own_shape(self, hf: HFConfig) -> dict[str, Any]:
        """Biases, which the first released files do not name (the class had them before it had the field); shared."""
        return {
            "has_qkv_bias": True if hf.get("qkv_bias") is None else required(hf, bool, "qkv_bias"),
            "shared_width": positive(hf, "shared_expert_intermediate_size"),
            "shared_name": "shared_expert",
            "shared_gate": "shared_expert_gate",
        }
