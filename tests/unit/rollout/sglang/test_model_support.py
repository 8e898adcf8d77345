"""Models that SGLang computes otherwise than their config.json says are refused, before a server is asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fake_servers import LAYOUT

from moerl.configure import load
from moerl.errors import ConfigError
from moerl.rollout.engine import ServedModel
from moerl.rollout.engines.sglang_engine import SglangEngine, SglangEngineConfig
from moerl.rollout.sglang.model_support import refuse_other_arithmetic
from moerl.weight_sync.servers import SenderPlace
from moerl.weight_sync.transports.disk import DiskConfig, DiskSender

DEMO = Path(__file__).resolve().parents[4] / "configs" / "demo" / "gspo.yaml"
POLICY = DEMO.parent / "policy"
OLMOE = {
    "model_type": "olmoe",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-5,
}
"""As allenai/OLMoE-1B-7B-0924 is published."""
MIXTRAL = {"model_type": "mixtral", "hidden_size": 4096, "num_attention_heads": 32, "head_dim": None}
QWEN3 = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "head_dim": 128}


def written(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("config", [OLMOE, MIXTRAL, {**MIXTRAL, "head_dim": 128}, QWEN3, {**QWEN3, "rms_norm_eps": 1}])
def test_published_shapes_pass(tmp_path, config):
    refuse_other_arithmetic(written(tmp_path, config), 1)


def test_fields_that_transformers_would_fill_in_pass(tmp_path):
    bare = {name: value for name, value in OLMOE.items() if name not in ("rms_norm_eps", "num_key_value_heads")}
    refuse_other_arithmetic(written(tmp_path, bare), 1)
    refuse_other_arithmetic(written(tmp_path, {**QWEN3, "mlp_only_layers": None, "tie_word_embeddings": False}), 1)
    refuse_other_arithmetic(tmp_path / "nothing here", 2)
    (tmp_path / "config.json").write_text("{ no JSON")
    refuse_other_arithmetic(tmp_path, 2)


@pytest.mark.parametrize(
    ("config", "tensor", "words"),
    [
        ({**OLMOE, "rms_norm_eps": 1e-6}, 1, "rms_norm_eps is 1e-06, but SGLang serves olmoe as if it were 1e-05"),
        ({**OLMOE, "norm_topk_prob": True}, 1, "norm_topk_prob is True, but SGLang serves olmoe as if it were False"),
        ({**QWEN3, "mlp_only_layers": [0]}, 1, r"mlp_only_layers is \[0\], but SGLang serves qwen3_moe as if .* \[\]"),
        ({**QWEN3, "decoder_sparse_step": 2}, 1, "decoder_sparse_step is 2, but SGLang .* as if it were 1"),
        (
            {**QWEN3, "tie_word_embeddings": True},
            1,
            "tie_word_embeddings is True, but .*; sample with rollout",
        ),
        ({"model_type": "minimax_m2", "partial_rotary_factor": 0.5}, 1, "SGLang reads rotary_dim alone; set that"),
        (
            {"model_type": "minimax_m2", "rope_parameters": {"partial_rotary_factor": 0.5}},
            1,
            "partial_rotary_factor is 0.5, but SGLang reads rotary_dim alone",
        ),
        ({**OLMOE, "num_key_value_heads": 4}, 1, "num_key_value_heads is 4, but .* as num_attention_heads, 16"),
        (OLMOE, 2, "which none of 2 processes has: set rollout.engine.servers.tensor to 1"),
        ({**MIXTRAL, "head_dim": 64}, 1, "head_dim is 64, but SGLang serves mixtral with heads of 128; sample with"),
        ({**OLMOE, "head_dim": 64}, 1, "head_dim is 64, but SGLang serves olmoe with"),
    ],
)
def test_another_shape_is_refused_with_what_to_do(tmp_path, config, tensor, words):
    with pytest.raises(ConfigError, match=f"config.json: .*{words}"):
        refuse_other_arithmetic(written(tmp_path, config), tensor)


@pytest.mark.parametrize("servers", [{"urls": ["http://127.0.0.1:1"]}, {"servers": {"tensor": 2, "python": "python3"}}])
def test_the_engine_refuses_before_it_looks_for_a_server(tmp_path, servers):
    model = ServedModel(written(tmp_path, {**OLMOE, "rms_norm_eps": 1e-6}), tmp_path, 320, LAYOUT, wants_routes=False)
    sender = DiskSender(DiskConfig(), SenderPlace(tmp_path / "engine_weights", tmp_path))
    with pytest.raises(ConfigError) as refused:
        SglangEngine(SglangEngineConfig(**servers), served_model=model, sender=sender)
    assert ("none of 2 processes" in str(refused.value)) == ("servers" in servers)


@pytest.mark.parametrize("engine", [{"name": "sglang", "servers": {}}, {"name": "local"}])
def test_a_configuration_is_refused_before_a_model_is_built(tmp_path, engine):
    folder = tmp_path / "tied"
    shutil.copytree(POLICY, folder)
    model = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**model, "tie_word_embeddings": True}))
    transport = "disk" if engine["name"] == "sglang" else "in_process"
    overrides = [f"model.path={folder}", f"rollout.engine={json.dumps(engine)}", f"weight_sync.transport={transport}"]
    if engine["name"] == "local":
        load(DEMO, overrides)
        return
    with pytest.raises(ConfigError, match=r"tied/config.json: tie_word_embeddings is True, but SGLang"):
        load(DEMO, overrides)
