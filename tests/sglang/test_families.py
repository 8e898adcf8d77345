"""Level 2: what `moerl convert` exports of a sharded checkpoint is what a real SGLang server serves, for every family
that SGLang served on a CPU here. With the others (Qwen2-MoE, latent attention, MiniMax-M2, gpt-oss) it ended in errors
of its own.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_models
import torch

from moerl.convert.exports import export_checkpoint
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.layouts import Layout
from moerl.convert.places import find
from moerl.rollout.engine import RouteLayout, ServedModel
from moerl.rollout.engines.sglang_engine import SglangEngine, SglangEngineConfig
from moerl.types import SamplingParams
from moerl.weight_sync.servers import SenderPlace
from moerl.weight_sync.transports.disk import DiskConfig, DiskSender

POLICY = Path(__file__).resolve().parents[2] / "configs" / "demo" / "policy"
PROMPT = np.array([11, 14, 10, 15, 9, 14, 13, 18, 21], dtype=np.int32)
TOLERANCE = 1e-5
SHAPES = {
    "softmax": {},
    "sigmoid": {},
    "mixtral": {"hidden_size": 48, "num_attention_heads": 4, "head_dim": None},
    "wide": {"num_key_value_heads": 6, "rms_norm_eps": 1e-5},
    "dense": {},
    "llama": {},
}
"""Kind -> what SGLang's code for the family takes for granted (`moerl.rollout.sglang.model_support`)."""

pytestmark = pytest.mark.slow


def exported(folder: Path, kind: str) -> Path:
    """A model of this kind, to two tensor ranks and back."""
    source = tiny_models.save_model(folder / "source", kind, **SHAPES[kind])
    for path in POLICY.glob("tokenizer*"):
        shutil.copy(path, source)
    import_checkpoint(find(source), folder / "shards", Layout(tensor=2), Options())
    export_checkpoint(find(folder / "shards"), folder / "exported", Options())
    return folder / "exported"


def answers(python: Path, folder: Path, layout: RouteLayout | None):
    """Of a server of its own to the prompt."""
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    servers = {"python": str(python), "dtype": "float32", "max_total_tokens": 4096, "max_running_requests": 8}
    cfg = SglangEngineConfig(servers=servers, precision="fp32", routes="always" if layout else "never")
    model = ServedModel(folder, folder.parent, vocab_size, layout, wants_routes=layout is not None)
    sender = DiskSender(DiskConfig(check_every=0), SenderPlace(folder.parent / "engine_weights", folder))
    engine = SglangEngine(cfg, served_model=model, sender=sender)

    async def ask():
        return await asyncio.gather(
            *(engine.generate(PROMPT, SamplingParams(16, seed=i), f"p{i}/0#0") for i in range(4))
        )

    try:
        return asyncio.run(ask())
    finally:
        engine.close()


@pytest.mark.parametrize("name", SHAPES)
def test_an_export_is_served_as_transformers_computes_it(python, tmp_path, name):
    import transformers

    folder, kind = exported(tmp_path, name), tiny_models.KINDS[name]
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    layout = None
    if kind.layers:
        moe_layers = tuple(range(layers - kind.layers, layers))
        layout = RouteLayout(layers, moe_layers, experts_per_token=kind.topk, num_experts=kind.experts)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if kind.layers:
        model.set_experts_implementation("eager")
    for got in answers(python, folder, layout):
        ids = torch.tensor(np.concatenate([PROMPT, got.token_ids])).long()
        with torch.no_grad():
            logits, chosen = tiny_models.logits_of(
                model, SimpleNamespace(token_ids=ids, cu_seqlens=torch.tensor([0, len(ids)]))
            )
        wanted = logits.log_softmax(-1)[len(PROMPT) - 1 : -1].gather(-1, ids[len(PROMPT) :, None])[:, 0]
        np.testing.assert_allclose(got.logprobs, wanted.numpy(), atol=TOLERANCE)
        if layout is not None:
            rows = got.routed_experts.open()
            np.testing.assert_array_equal(np.sort(rows, -1), np.sort(chosen[:-1].numpy(), -1))
