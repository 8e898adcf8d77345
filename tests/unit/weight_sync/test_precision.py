from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf
from prediction_layers import save_fp8_with_prediction

from moerl.build_weights import build_precision
from moerl.config.schema import RunConfig
from moerl.errors import WeightSyncError
from moerl.models.family import family_of
from moerl.models.fp8 import dequantise_fp8
from moerl.models.hf_folder import HFFolder, read_config
from moerl.weight_sync.precision import SCALE, Precision

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
