"""An update brings every name of the model's rules and no other: of one too few or too many no server says a word."""

from __future__ import annotations

import asyncio

import pytest
import torch
from omegaconf import OmegaConf
from prediction_layers import save_fp8_with_prediction
from small_configs import save_random

from moerl.build_weights import build_precision, build_publisher
from moerl.config.schema import RunConfig
from moerl.errors import WeightSyncError
from moerl.models.family import family_of
from moerl.models.hf_folder import read_config
from moerl.weight_sync.transport import transports

PRECISIONS = ["as_is", "bf16", "fp8_block"]


class Lenient:
    """Takes every bucket, as an SGLang server takes unknown names and does not miss absent ones."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.version = 0

    async def pause(self) -> None:
        pass

    async def resume(self) -> None:
        pass

    async def update_weights(self, bucket) -> None:
        self.names += [name for name, _ in bucket.tensors]
        if bucket.is_last:
            self.version = bucket.version


def publishing(tmp_path, precision):
    """(publisher as a run composes it, what it reaches, what the trainer exports, how that is sent)."""
    if precision == "fp8_block":
        folder, _ = save_fp8_with_prediction(tmp_path / "model", "latent")
    else:
        folder = save_random(tmp_path / "model", "qwen3_moe")
    cfg = OmegaConf.structured(RunConfig)
    cfg.model.path, cfg.weight_sync.precision, cfg.weight_sync.bucket_bytes = str(folder), precision, 4096
    hf = read_config(folder)
    names = [name for rule in family_of(hf).weight_rules(hf) for name in rule.hf_names]
    plugin, transport_cfg = transports.resolve(cfg.weight_sync.transport)
    engine, sent = Lenient(), build_precision(cfg)
    publisher = build_publisher(cfg, [engine], plugin.target(transport_cfg), sent)  # pyright: ignore[reportArgumentType]
    return publisher, engine, {name: torch.ones(8, 8) for name in names}, sent


@pytest.mark.parametrize("precision", PRECISIONS)
def test_all_names_of_the_rules_are_an_update(tmp_path, precision):
    publisher, engine, weights, sent = publishing(tmp_path, precision)
    asyncio.run(publisher.publish(sent.apply(weights.items()), 1))
    assert engine.version == 1
    assert set(engine.names) == sent.names(weights)
    assert any(name.endswith("_scale_inv") for name in engine.names) == (precision == "fp8_block")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("change", ["lacking", "adding"])
def test_one_name_too_few_or_too_many_ends_the_update_before_its_last_bucket(tmp_path, precision, change):
    """Pitfall 14: the missing one would keep its old values, the unknown one would be dropped."""
    publisher, engine, weights, sent = publishing(tmp_path, precision)
    victim = next(name for name in weights if name.endswith("down_proj.weight"))
    unknown = f"{victim}_of_another"
    if change == "lacking":
        del weights[victim]
    else:
        weights[unknown] = torch.ones(8, 8)
    words = rf"missing {victim}.*; unexpected none" if change == "lacking" else f"missing none; unexpected {unknown}"
    with pytest.raises(WeightSyncError, match=words):
        asyncio.run(publisher.publish(sent.apply(weights.items()), 1))
    assert engine.version == 0
    assert engine.names, "the others were on their way"


def test_a_scale_too_few_is_missed_too(tmp_path):
    publisher, engine, weights, sent = publishing(tmp_path, "fp8_block")
    stream = list(sent.apply(weights.items()))
    scale = next(name for name, _ in stream if name.endswith("_scale_inv"))
    with pytest.raises(WeightSyncError, match=f"missing {scale}; unexpected none"):
        asyncio.run(publisher.publish([one for one in stream if one[0] != scale], 1))
    assert engine.version == 0
