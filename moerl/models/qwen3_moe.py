"""Qwen3-MoE (30B-A3B, 235B-A22B): grouped-query attention with per-head q/k norm, softmax router, no shared expert."""

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
        "dense layers",
    ),
    verified=EXACT,
)
class Qwen3Moe(QwenMoe):
    """The family."""

    known = QWEN_FIELDS | {"attention_bias"}

    def own_shape(self, hf: HFConfig) -> dict[str, Any]:
        """Norms of queries and keys."""
        refuse_active(hf, "attention_bias")
        return {"has_qk_norm": True}
