"""Losses and gradients of every axis on batch V, as numbers (float64, six digits)."""

from __future__ import annotations

import pytest
import torch

from moerl.algorithms import presets
from moerl.algorithms.kl import kl_estimate

TOLERANCE = 2e-6
SEQ_MEAN, TOKEN_MEAN, SEQ_SUM = ({"name": name} for name in ("seq_mean_token_mean", "token_mean", "seq_mean_token_sum"))
FIXED = {"name": "fixed_denominator", "tokens": 4}
PROMPT = {"name": "prompt_mean"}
SHIFT = {"enabled": True, "stage": "before_clip", "gamma_min": 0.8}


def clip(aggregation, lo=0.2, hi=0.2, level="token", **more):
    trust = {"name": "clip", "lo": lo, "hi": hi} | {k: more.pop(k) for k in ("dual_c", "delta") if k in more}
    return {"trust": trust, "aggregation": aggregation, "level": level, **more}


def score(aggregation, name, anchor="old", level="token", **trust):
    return {
        "form": "score",
        "anchor": anchor,
        "level": level,
        "trust": {"name": name, **trust},
        "aggregation": aggregation,
    }


def corrected(aggregation=TOKEN_MEAN, lo=0.2, hi=0.2, kl=None, **correction):
    return clip(aggregation, lo, hi, correction=correction, **({"kl": kl} if kl else {}))


def gmpo(**more):
    return {"level": "geo_clip", "trust": {"name": "log_clip", "lo": 0.4, "hi": 0.4}, "aggregation": SEQ_MEAN, **more}


def is_clip(**bounds):
    return score(TOKEN_MEAN, "is_clip", **bounds)


def soft_gate(form="two_sided"):
    return {"trust": {"name": "soft_gate", "form": form}, "aggregation": SEQ_MEAN}


UNCLIPPED = {"trust": {"name": "none"}, "aggregation": TOKEN_MEAN}
K3 = {"place": "loss", "estimator": "k3", "coefficient": 0.04}

VECTORS = {
    "reinforce score token_mean": (
        score(TOKEN_MEAN, "none", level="none"),
        "0.071500 | -0.100000 -0.100000 -0.100000 -0.100000 0.100000 0.100000 -0.050000 -0.050000 -0.050000 0.050000",
    ),
    "clip seq_mean_token_mean": (
        clip(SEQ_MEAN),
        "0.009075 | -0.065704 0 -0.046301 0 0.196039 0 -0.032450 -0.042508 0 0",
    ),
    "clip token_mean": (
        clip(TOKEN_MEAN),
        "-0.292328 | -0.105127 0 -0.074082 0 0.156831 0 -0.038940 -0.051010 0 0",
    ),
    "clip seq_mean_token_sum": (
        clip(SEQ_SUM),
        "-0.730820 | -0.262818 0 -0.185205 0 0.392078 0 -0.097350 -0.127525 0 0",
    ),
    "clip fixed_denominator": (
        clip(FIXED),
        "-0.182705 | -0.065704 0 -0.046301 0 0.098020 0 -0.024338 -0.031881 0 0",
    ),
    "clip prompt_mean": (
        clip(PROMPT),
        "-0.289419 | -0.087606 0 -0.061735 0 0.130693 0 -0.048675 -0.063763 0 0",
    ),
    "dapo": (
        clip(TOKEN_MEAN, 0.2, 0.28),
        "-0.306468 | -0.105127 0 -0.074082 -0.122140 0.156831 0 -0.038940 -0.051010 0 0",
    ),
    "dapo_unclipped": (
        UNCLIPPED,
        "-0.399540 | -0.105127 -0.182212 -0.074082 -0.122140 0.156831 0.060653 -0.038940 -0.051010 -0.070953 0.027441",
    ),
    "dual 1.2": (
        clip(SEQ_MEAN, 0.2, 0.28, dual_c=1.2),
        "-0.046635 | -0.065704 0 -0.046301 -0.076338 0 0 -0.032450 -0.042508 0 0",
    ),
    "delta 1.5": (
        clip(SEQ_MEAN, delta=1.5),
        "0.000536 | -0.065704 0 -0.046301 0 0 0 -0.032450 -0.042508 0 0",
    ),
    "gspo .1": (
        clip(SEQ_MEAN, 0.1, 0.1, "seq_geo"),
        "-0.048774 | 0 0 0 0 0.121914 0.121914 -0.043367 -0.043367 -0.043367 0",
    ),
    "gspo 3e-4/4e-4": (clip(SEQ_MEAN, 3e-4, 4e-4, "seq_geo"), "-0.000262 | 0 0 0 0 0 0 0 0 0 0"),
    "luspo .1": (
        clip(SEQ_SUM, 0.1, 0.1, "seq_geo"),
        "-0.890149 | 0 0 0 0 0.243827 0.243827 -0.130101 -0.130101 -0.130101 0",
    ),
    "gmpo": (
        gmpo(),
        "-0.062843 | -0.068215 0 -0.068215 -0.068215 0.128164 0 -0.043367 -0.043367 -0.043367 0",
    ),
    "cispo max 5": (
        is_clip(max=5.0),
        "0.388848 | -0.105127 -0.182212 -0.074082 -0.122140 0.156831 0.060653 -0.038940 -0.051010 -0.070953 0.027441",
    ),
    "cispo max 1.2": (
        is_clip(max=1.2),
        "0.269097 | -0.105127 -0.120000 -0.074082 -0.120000 0.120000 0.060653 -0.038940 -0.051010 -0.060000 0.027441",
    ),
    "cispo unified mask": (
        is_clip(min=0.8, max=1.2, mask=True),
        "0.130787 | -0.105127 0 -0.080000 0 0.120000 0 -0.040000 -0.051010 0 0",
    ),
    "scalerl": (
        score(PROMPT, "is_clip", "rollout", max=5.0),
        "0.857720 | -0.089376 -0.373474 -0.059314 -0.102807 0.126830 0.015224 -0.048675 -0.064403 -0.098020 0.046301",
    ),
    "sapo": (
        soft_gate(),
        "-0.128994 | -0.065661 -0.096617 -0.045532 -0.075410 0.179573 0.072671 -0.032056 -0.042504 -0.056606 0.064892",
    ),
    "soft_gate one_sided": (
        soft_gate("one_sided"),
        "-0.088317 | -0.050951 -0.123124 -0.028600 -0.065403 0.004030 0.034356 -0.020679 -0.032310 -0.055751 0.032996",
    ),
    "vespo anchor old": (
        score(TOKEN_MEAN, "gamma_kernel", "old", "seq_prod"),
        "-0.132865 | -0.033295 -0.033295 -0.033295 -0.033295 0.094889 0.094889 -0.043360 -0.043360 -0.043360 0.020377",
    ),
    "vespo anchor rollout": (
        score(TOKEN_MEAN, "gamma_kernel", "rollout", "seq_prod"),
        "0.009132 | -0.000113 -0.000113 -0.000113 -0.000113 0.009107 0.009107 -0.036460 -0.036460 -0.036460 0.034137",
    ),
    "dppo_tv .15": (
        score(TOKEN_MEAN, "div_mask", "rollout", delta=0.15),
        "0.982924 | -0.107251 -0.448169 -0.071177 -0.123368 0.152196 0.018268 -0.038940 -0.051523 -0.078416 0.037041",
    ),
    "dppo_tv .10": (
        score(TOKEN_MEAN, "div_mask", "rollout", delta=0.10),
        "0.186957 | -0.107251 0 -0.071177 -0.123368 0.152196 0 -0.038940 -0.051523 0 0.037041",
    ),
    "dppo_kl .05": (
        score(TOKEN_MEAN, "div_mask", "rollout", kind="binary_kl", delta=0.05),
        "0.284976 | -0.107251 0 -0.071177 -0.123368 0.152196 0 -0.038940 -0.051523 -0.078416 0.037041",
    ),
    "minirl": (
        score(SEQ_SUM, "ratio_mask", "rollout"),
        "0.606296 | -0.268127 0 -0.177943 -0.308420 0.380490 0 -0.097350 -0.128807 0 0",
    ),
    "dcpo": (
        {"trust": {"name": "dyn_clip"}, "aggregation": {"name": "seq_sum_token_mean"}},
        "-0.383420 | -0.262818 -0.455530 -0.185205 -0.305351 0.784156 0.303265 -0.129800 -0.170034 -0.236511 0.274406",
    ),
    "tis token": (
        corrected(name="tis", level="token", cap=2.0),
        "-0.466121 | -0.107251 0 -0.071177 0 0.152196 0 -0.038940 -0.051523 0 0",
    ),
    "tis seq": (
        corrected(name="tis", level="seq", cap=2.0),
        "-0.882586 | -0.210254 0 -0.148164 0 0.045841 0 -0.043468 -0.056941 0 0",
    ),
    "tis geo": (
        corrected(name="tis", level="geo", cap=2.0),
        "-0.497189 | -0.131324 0 -0.092543 0 0.084789 0 -0.040394 -0.052915 0 0",
    ),
    "mis token": (
        corrected(name="mis", level="token", min=0.5, max=2.0),
        "-0.250216 | -0.107251 0 -0.071177 0 0.152196 0 -0.038940 -0.051523 0 0",
    ),
    "mis weight one": (
        corrected(name="mis", level="token", max=2.0, weight="one"),
        "-0.172328 | -0.105127 0 -0.074082 0 0.156831 0 -0.038940 -0.051010 0 0",
    ),
    "mis seq": (
        corrected(name="mis", level="seq", min=0.5, max=2.0),
        "-0.113392 | 0 0 0 0 0 0 -0.043468 -0.056941 0 0",
    ),
    "icepop": (
        corrected(name="icepop", min=0.5, max=5.0),
        "-0.545369 | -0.107251 0 -0.071177 0 0.152196 0 -0.038940 -0.051523 0 0",
    ),
    "opsm": (
        corrected(SEQ_MEAN, name="opsm", delta=0.25),
        "-0.386964 | -0.065704 0 -0.046301 0 0 0 -0.032450 -0.042508 0 0",
    ),
    "olmo3": (
        corrected(hi=0.272, name="tis", level="token", cap=2.0),
        "-0.486661 | -0.107251 0 -0.071177 -0.123368 0.152196 0 -0.038940 -0.051523 0 0",
    ),
    "cisco": (
        corrected(SEQ_MEAN, kl=K3, name="tis", level="token", cap=2.0),
        "-0.105836 | -0.066910 0.001377 -0.045715 0.000453 0.190942 -0.004111 -0.033397 -0.042870 0.001208 -0.012255",
    ),
    "rspo": (
        gmpo(router_shift=SHIFT),
        "-0.065356 | -0.065053 -0.065053 -0.065053 -0.065053 0.118162 0 -0.041752 -0.041752 -0.041752 0",
    ),
    "gmpo after_clip": (
        gmpo(router_shift=SHIFT | {"stage": "after_clip"}),
        "-0.094373 | -0.061880 0 -0.061880 -0.061880 0.105687 0 -0.041752 -0.041752 -0.041752 0",
    ),
    "gspo before_clip": (
        clip(SEQ_MEAN, 0.1, 0.1, "seq_geo", router_shift=SHIFT),
        "-0.047969 | -0.065053 -0.065053 -0.065053 -0.065053 0 0 -0.041752 -0.041752 -0.041752 0",
    ),
    "grpo before_clip": (
        clip(SEQ_MEAN, router_shift=SHIFT),
        "-0.009015 | -0.062419 0 -0.041671 0 0.166633 0 -0.032450 -0.039108 0 0",
    ),
}

KL_VECTORS = {
    "k2": (
        {"estimator": "k2"},
        "0.106520 | 0.005000 0.080000 -0.040000 0.020000 0.015000 -0.060000 -0.025000 0.002000 0.045000 -0.080000",
    ),
    "k3": (
        {"estimator": "k3"},
        "0.114133 | 0.004877 0.055067 -0.049182 0.018127 0.013929 -0.082212 -0.028403 0.001980 0.036237 -0.122554",
    ),
    "k3 importance": (
        {"estimator": "k3", "importance": True},
        "0.108261 | 0.005256 0.145770 -0.029633 0.024428 0.023525 -0.036392 -0.019470 0.002040 0.063858 -0.043905",
    ),
    "k3 value, k2 gradient": (
        {"estimator": "k3", "straight_through": True},
        "0.114133 | 0.005000 0.080000 -0.040000 0.020000 0.015000 -0.060000 -0.025000 0.002000 0.045000 -0.080000",
    ),
    "k1 value, k2 gradient": (
        {"estimator": "k1", "straight_through": True},
        "-0.038000 | 0.005000 0.080000 -0.040000 0.020000 0.015000 -0.060000 -0.025000 0.002000 0.045000 -0.080000",
    ),
}


def expected(line):
    loss, _, gradient = line.partition("|")
    return float(loss), torch.tensor([float(number) for number in gradient.split()], dtype=torch.float64)


def assert_equal(loss, gradient, line):
    want_loss, want_gradient = expected(line)
    assert abs(float(loss) - want_loss) < TOLERANCE
    torch.testing.assert_close(gradient, want_gradient, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", VECTORS)
def test_objective(batch_v, name):
    values, line = VECTORS[name]
    loss, gradient, _ = batch_v.run(values)
    assert_equal(loss, gradient, line)


def test_gspo_token_takes_an_advantage_per_token(batch_v):
    advantages = torch.tensor([1, 0.5, 1, 1, -1, -1, 0.5, 0.5, 1, -0.5], dtype=torch.float64)
    loss, gradient, _ = batch_v.run(clip(SEQ_MEAN, 0.1, 0.1, "seq_geo_token"), advantages=advantages)
    assert_equal(
        loss,
        gradient,
        "-0.057766 | 0 0 0 0 0.121914 0.121914 -0.043367 -0.043367 -0.086734 0",
    )


@pytest.mark.parametrize("name", KL_VECTORS)
def test_kl_term_alone(batch_v, name):
    """Advantages of zero leave the KL alone."""
    kl, line = KL_VECTORS[name]
    values = clip(TOKEN_MEAN, kl={"place": "loss", "coefficient": 1.0, **kl})
    loss, gradient, metrics = batch_v.run(values, advantages=torch.zeros(10, dtype=torch.float64))
    assert_equal(loss, gradient, line)
    assert metrics["kl/ref"] == pytest.approx(float(loss), abs=1e-12)


def test_k1_has_a_constant_gradient(batch_v):
    leaf = batch_v.now.clone().requires_grad_()
    loss = kl_estimate("k1", leaf, batch_v.ref).mean()
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert_equal(loss.detach(), gradient, "-0.038000 |" + " 0.1" * 10)


PRESET_VECTORS = {
    "gspo": "gspo 3e-4/4e-4",
    "dapo": "dapo",
    "gmpo": "gmpo",
    "cispo": "cispo max 5",
    "rspo": "rspo",
    "clip_dapo": "clip token_mean",
    "dapo_unclipped": "dapo_unclipped",
    "dr_grpo": "clip fixed_denominator",
    "two_grpo": "clip seq_mean_token_mean",
    "gmpo_rs_v1": "gmpo after_clip",
    "scalerl_loss": "scalerl",
    "sapo": "sapo",
    "vespo": "vespo anchor rollout",
    "minirl": "minirl",
    "olmo3": "olmo3",
    "cisco": "cisco",
    "lite_ppo": "clip token_mean",
}


@pytest.mark.parametrize("name", PRESET_VECTORS)
def test_preset_is_its_vector(batch_v, name):
    loss, gradient, _ = batch_v.run(presets.PRESETS[name].values)
    assert_equal(loss, gradient, VECTORS[PRESET_VECTORS[name]][1])


def test_grpo_preset_is_clip_plus_k3(batch_v):
    loss, gradient, _ = batch_v.run(presets.PRESETS["grpo"].values)
    policy_loss, policy_gradient, _ = batch_v.run(clip(SEQ_MEAN))
    kl_loss, kl_gradient, _ = batch_v.run(clip(SEQ_MEAN, kl=K3), advantages=torch.zeros(10, dtype=torch.float64))
    assert float(loss) == pytest.approx(float(policy_loss + kl_loss), abs=1e-12)
    torch.testing.assert_close(gradient, policy_gradient + kl_gradient, rtol=0, atol=1e-12)


def test_sft_is_the_mean_negative_logprob(batch_v):
    ones = torch.ones(10, dtype=torch.float64)
    loss, gradient, _ = batch_v.run(presets.PRESETS["sft"].values, advantages=ones)
    assert float(loss) == pytest.approx(-float(batch_v.now.mean()), abs=1e-12)
    torch.testing.assert_close(gradient, -ones / 10, rtol=0, atol=1e-15)
    assert batch_v.objective(presets.PRESETS["sft"].values).needs == frozenset()


def test_clip_fractions(batch_v):
    """Batch V: clip .2 zeroes s0t1, s0t3 and s2t2 from above, s1t1 and s3t0 from below."""
    _, _, metrics = batch_v.run(clip(TOKEN_MEAN))
    assert metrics["pg/clip_high"] == pytest.approx(0.3)
    assert metrics["pg/clip_low"] == pytest.approx(0.2)
    assert metrics["pg/kl_old"] == pytest.approx(float((batch_v.old - batch_v.now).mean()))
    ratio = (batch_v.now - batch_v.old).exp()
    assert metrics["pg/ratio_mean"] == pytest.approx(float(ratio.mean()))
    assert metrics["pg/ratio_max"] == pytest.approx(float(ratio.max()))
    _, _, dual = batch_v.run(clip(TOKEN_MEAN, dual_c=1.2))
    assert dual["pg/dual"] == pytest.approx(0.1)


def test_correction_metrics(batch_v):
    _, _, metrics = batch_v.run(corrected(name="mis", level="token", min=0.5, max=2.0))
    assert metrics["mm/reject"] == pytest.approx(0.2)
    assert metrics["mm/reject_seq"] == 0.0
    _, _, sequences = batch_v.run(corrected(name="mis", level="seq", min=0.5, max=2.0))
    assert sequences["mm/reject"] == pytest.approx(0.6)
    assert sequences["mm/reject_seq"] == pytest.approx(0.5)
    _, _, tis = batch_v.run(corrected(name="tis", level="token", cap=2.0))
    assert tis["mm/tis_clip"] == pytest.approx(0.1)
