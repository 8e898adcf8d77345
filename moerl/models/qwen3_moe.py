"""Qwen3-MoE (30B-A3B, 235B-A22B, Coder): grouped queries, norms of each head, softmax router, no shared expert."""

from __future__ import annotations

from typing import Any

from moerl.models.family import EXACT, HFConfig, NoArguments, families
from moerl.models.hf_config import refuse_active
from moerl.models.qwen_moe import QWEN_FIELDS, QwenMoe


@families.register(
    "qwen3_moe",
    NoArguments,
    architectures=("Qwen3MoeForCausalLM",),
    covers=(
        "tied",
        "YaRN",
        "dense layers",
    ),
    verified=EXACT,
)
class Qwen3Moe(QwenMoe):
    """The family."""

    known = QWEN_FIELDS | {"attention_bias", "qkv_bias", "shared_expert_intermediate_size", "use_qk_norm"}

    def own_shape(self, hf: HFConfig) -> dict[str, Any]:
        """Norms of queries and keys; Qwen3-Coder names them, and what the generation before it had."""
        refuse_active(hf, "attention_bias")
        refuse_active(hf, "qkv_bias")
        refuse_active(hf, "shared_expert_intermediate_size", (None, 0))
        refuse_active(hf, "use_qk_norm", (None, True))
        return {"has_qk_norm": True}
