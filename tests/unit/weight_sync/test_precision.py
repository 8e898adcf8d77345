from __future__ import annotations

import json

import pytest
import torch
from omegaconf import OmegaConf
from prediction_layers import save_fp8_with_prediction
from quantised_folders import SETTINGS
from safetensors.torch import load_file

from moerl.build_weights import build_precision
from moerl.config.schema import RunConfig
from moerl.errors import WeightSyncError
from moerl.models.family import family_of
from moerl.models.fp8 import dequantise_fp8
from moerl.models.hf_folder import HFFolder, read_config
from moerl.types import WeightBucket
from moerl.weight_sync.precision import SCALE, Precision
from moerl.weight_sync.servers import SenderPlace
from moerl.weight_sync.version_folder import VersionFolder

torch.manual_seed(0)
WEIGHTS = {
    "proj.weight": torch.randn(200, 130),
    "norm.weight": torch.randn(130),
    "router.weight": torch.randn(4, 130),
    "count": torch.arange(3),
}


def test_as_it_is_changes_nothing():
    sent = dict(Precision().apply(WEIGHTS.items()))
    assert all(sent[name] is tensor for name, tensor in WEIGHTS.items())
    assert Precision().names(WEIGHTS) == frozenset(WEIGHTS)


def test_bf16_rounds_once_and_leaves_routers_and_integers():
    sent = dict(Precision(casts=True, kept=frozenset({"router.weight"})).apply(WEIGHTS.items()))
    assert torch.equal(sent["proj.weight"], WEIGHTS["proj.weight"].bfloat16())
    assert torch.equal(sent["norm.weight"], WEIGHTS["norm.weight"].bfloat16())
    assert sent["router.weight"] is WEIGHTS["router.weight"]
    assert sent["count"] is WEIGHTS["count"]


def test_fp8_blocks_come_with_their_scales_and_are_the_weights_within_a_step():
    precision = Precision(True, frozenset({"router.weight"}), frozenset({"proj.weight"}))
    sent = dict(precision.apply(WEIGHTS.items()))
    assert set(sent) == precision.names(WEIGHTS) == {*WEIGHTS, "proj.weight_scale_inv"}
    assert list(sent)[:2] == ["proj.weight", "proj.weight_scale_inv"]
    scale = sent["proj.weight_scale_inv"]
    assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (2, 2))
    back = dequantise_fp8(sent["proj.weight"], scale, (128, 128), dtype=torch.float32)
    step = WEIGHTS["proj.weight"].abs() / 16 + scale.max() * 2**-9  # half of 2^-3, and of the smallest subnormal
    assert (back - WEIGHTS["proj.weight"]).abs().le(step).all()
    assert sent["norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("quantisation", [SETTINGS, None])
def test_a_version_says_whether_it_is_in_blocks(tmp_path, quantisation):
    """Whatever the model's folder says: a server reads the weights by this word."""
    model = tmp_path / "model"
    model.mkdir()
    stored = {"model_type": "qwen3", "torch_dtype": "float32", "quantization_config": {"quant_method": "gptq"}}
    (model / "config.json").write_text(json.dumps(stored))
    quantised = frozenset({"proj.weight"} if quantisation else ())
    sent = list(Precision(True, frozenset({"router.weight"}), quantised).apply(WEIGHTS.items()))
    versions = VersionFolder(SenderPlace(tmp_path / "versions", model, quantisation))
    versions.write(WeightBucket(3, sent[:2], is_last=False, checksum=None))
    versions.write(WeightBucket(3, sent[2:], is_last=True, checksum=None))
    folder = versions.finish(3)
    assert json.loads((folder / "config.json").read_text()).get("quantization_config") == quantisation
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert list(index) == sorted(name for name, _ in sent)
    assert ("proj.weight_scale_inv" in index) is bool(quantisation)
    for name, tensor in sent:
        assert torch.equal(load_file(folder / index[name])[name].float(), tensor.float()), name


def test_a_value_that_fp8_cannot_hold_names_its_tensor():
    weights = {"proj.weight": torch.full((2, 2), float("nan"))}
    with pytest.raises(WeightSyncError, match=r"proj.weight: a value is not finite .*not published"):
        dict(Precision(quantised=frozenset(weights)).apply(weights.items()))


@pytest.mark.parametrize("kind", ["latent", "sigmoid"])
def test_carried_layers_in_fp8_blocks_are_not_waited_for(tmp_path, kind):
    """DeepSeek-V3 and GLM-4.5 in FP8: layers of multi-token prediction are stored, and never trained or sent."""
    folder, _ = save_fp8_with_prediction(tmp_path / "fp8", kind)
    cfg = OmegaConf.structured(RunConfig)
    cfg.model.path, cfg.weight_sync.precision = str(folder), "fp8_block"
    hf = read_config(folder)
    exported = {name for rule in family_of(hf).weight_rules(hf) for name in rule.hf_names}
    precision = build_precision(cfg)
    stored = HFFolder(folder).names()
    assert precision.names(exported) == {name for name in stored if name.removesuffix(SCALE) in exported}
    assert precision.quantised
    assert stored - precision.names(exported), "this folder has no carried layer in blocks"
