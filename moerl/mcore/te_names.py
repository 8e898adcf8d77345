"""Names of TransformerEngine's parameters -> those of megatron's local layers, which the rules of a family speak.

TransformerEngine fuses a norm into the product that follows it, and all experts of a rank into one grouped product.
"""

from __future__ import annotations

import re

_FUSED_NORMS = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".self_attention.linear_q_up_proj.layer_norm_": ".self_attention.q_layernorm.",
    ".self_attention.linear_kv_up_proj.layer_norm_": ".self_attention.kv_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}
_GROUPED = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")


def local_name(name: str) -> str:
    """The local layers' name of a parameter; one of theirs is given back unchanged.

    Expert numbers are those of the rank in both: `...experts.linear_fc1.weight3` is
    `...experts.local_experts.3.linear_fc1.weight`.
    """
    for fused, alone in _FUSED_NORMS.items():
        name = name.replace(fused, alone, 1)
    return _GROUPED.sub(r".mlp.experts.local_experts.\3.\1.\2", name)
