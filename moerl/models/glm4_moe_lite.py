"""GLM-4.7-Flash: DeepSeek-V3's layers under another name, with a list that says which of them are dense."""

from __future__ import annotations

from typing import ClassVar

from moerl.errors import CheckpointError
from moerl.models.deepseek_v3 import COVERS, DeepseekV3Layers
from moerl.models.family import EXACT, HFConfig, NoArguments, families
from moerl.models.hf_config import refuse_active, required

_DENSE, _SPARSE = "dense", "sparse"


@families.register(
    "glm4_moe_lite", NoArguments, architectures=("Glm4MoeLiteForCausalLM",), covers=COVERS, verified=EXACT
)
class Glm4MoeLite(DeepseekV3Layers):
    """The family."""

    known: ClassVar[frozenset[str]] = DeepseekV3Layers.known | {"mlp_layer_types"}

    def num_dense(self, hf: HFConfig, layers: int) -> int:
        """Said by a list, a number, or both."""
        kinds = hf.get("mlp_layer_types")
        if kinds is None:
            return required(hf, int, "first_k_dense_replace")
        dense = kinds.count(_DENSE) if isinstance(kinds, list) else -1
        if kinds != [_DENSE] * dense + [_SPARSE] * (layers - dense):
            raise CheckpointError(
                f"config.json: mlp_layer_types is {kinds!r}; {layers} layers are needed, first {_DENSE!r} ones, then "
                f"{_SPARSE!r} ones"
            )
        refuse_active(hf, "first_k_dense_replace", (None, dense))
        return dense
