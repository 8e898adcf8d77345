"""The stages of an uneven pipeline are those that megatron builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stage_splits import splits, stages

from moerl.mcore.model import stage_layers


@pytest.mark.parametrize("layers", [3, 5, 8, 12])
def test_the_learner_builds_the_same_layers(layers):
    """Megatron's own count and offset of every stage and chunk."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    for split in splits(layers):
        ends: dict[str, Any] = stage_layers(split, layers)
        chunks = split.virtual if split.virtual > 1 else None
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_dtype=torch.float32,
            pipeline_model_parallel_size=split.pipeline,
            virtual_pipeline_model_parallel_size=chunks,
            overlap_p2p_comm=True,
            batch_p2p_comm=False,
            **ends,
        )
        for rank, held in enumerate(stages(split, layers)):
            built = []
            for chunk in range(split.virtual):
                stage = chunk if chunks else None
                start = get_transformer_layer_offset(config, stage, rank)
                built += range(start, start + get_num_layers_to_build(config, stage, rank))
            assert built == held, (split, rank)
