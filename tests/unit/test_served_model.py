"""What servers are told of a model is what its family says, also of a family that the built-in sampler lacks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tiny_models import KINDS, save_model

from moerl.build_rollout import served_model
from moerl.models.hf_folder import read_config
from moerl.reference.config import ReferenceConfig

KNOWN_TO_THE_SAMPLER = ("qwen3_moe", "qwen2_moe", "glm4_moe", "mixtral", "olmoe", "minimax_m2", "qwen3", "llama")


def of(folder):
    cfg = SimpleNamespace(
        model=SimpleNamespace(path=str(folder), family="auto"),
        run=SimpleNamespace(name="x", output_dir=str(folder)),
        algorithm=SimpleNamespace(routing="R3"),
        data=SimpleNamespace(max_prompt_tokens=40),
        rollout=SimpleNamespace(max_new_tokens=24),
    )
    return served_model(cfg)


@pytest.mark.parametrize("name", KINDS)
def test_layers_experts_and_vocabulary_are_those_of_config_json(name, tmp_path):
    folder = save_model(tmp_path / "model", name)
    hf, served = read_config(folder), of(folder)
    assert served.vocab_size == hf["vocab_size"]
    assert served.wants_routes
    assert served.longest_tokens == 64
    if hf["model_type"] in KNOWN_TO_THE_SAMPLER:
        model = ReferenceConfig.from_folder(folder)
        if not model.moe_layers:
            assert served.layout is None
            return
        seen = (served.layout.moe_layers, served.layout.experts_per_token, served.layout.num_experts)
        assert seen == (model.moe_layers, model.experts_per_token, model.num_experts)
    assert served.layout.num_layers == hf["num_hidden_layers"]
    assert served.layout.experts_per_token == hf["num_experts_per_tok"]
    experts = {hf[key] for key in ("n_routed_experts", "num_experts", "num_local_experts") if hf.get(key) is not None}
    assert {served.layout.num_experts} == experts
    if "first_k_dense_replace" in hf and hf["first_k_dense_replace"] is not None:
        assert served.layout.moe_layers == tuple(range(hf["first_k_dense_replace"], hf["num_hidden_layers"]))
