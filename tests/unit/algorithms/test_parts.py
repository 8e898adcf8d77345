"""Closed forms of the parts: segments, logprobs, KL estimators, bounds, kernels, divergences and mismatch ratios."""

from __future__ import annotations

import math

import pytest
import torch

from moerl.algorithms import segments
from moerl.algorithms.kl import importance_kl, kl_estimate, straight_through_kl
from moerl.algorithms.logprobs import token_logprobs
from moerl.algorithms.mismatch import log_mismatch
from moerl.algorithms.registries import corrections
from moerl.algorithms.surrogate import clipped_surrogate
from moerl.algorithms.trust.div_mask import binary_divergence
from moerl.algorithms.trust.dyn_clip import DynClipConfig, dynamic_bounds
from moerl.algorithms.trust.gamma_kernel import GammaKernelConfig, gamma_kernel_weight

SEQ_IDS = torch.tensor([0, 0, 0, 2, 2])
MASK = torch.tensor([True, False, True, True, False])


def close(actual, wanted, atol=2e-6):
    torch.testing.assert_close(actual, torch.as_tensor(wanted, dtype=actual.dtype), rtol=0, atol=atol)


def test_segment_statistics_skip_masked_tokens_and_empty_sequences():
    values = torch.tensor([1.0, math.nan, 3.0, 5.0, math.inf], dtype=torch.float64)
    close(segments.masked_seq_sum(values, MASK, SEQ_IDS, 4), [4.0, 4.0, 4.0, 5.0, 5.0])
    close(segments.masked_seq_mean(values, MASK, SEQ_IDS, 4), [2.0, 2.0, 2.0, 5.0, 5.0])
    close(segments.masked_seq_max(values, MASK, SEQ_IDS, 4), [3.0, 3.0, 3.0, 5.0, 5.0])
    close(segments.per_sequence(values, MASK, SEQ_IDS, 4), [4.0, 0.0, 5.0, 0.0])
    assert segments.seq_lengths(SEQ_IDS, 4).tolist() == [3, 0, 2, 0]


def test_segment_gradients_equal_finite_differences():
    values = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: segments.masked_seq_mean(v, MASK, SEQ_IDS, 4), values)
    assert torch.autograd.gradgradcheck(lambda v: segments.masked_seq_sum(v, MASK, SEQ_IDS, 4) ** 3, values)


def test_no_tokens_at_all():
    empty = torch.zeros(0, dtype=torch.float64)
    result = segments.masked_seq_mean(empty, torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64), 2)
    assert result.shape == (0,)


def test_entropy_vector_and_its_gradient():
    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    logprob, entropy = token_logprobs(logits, torch.tensor(0), 1.0)
    close(entropy.detach(), 0.832396)
    (gradient,) = torch.autograd.grad(entropy, logits)
    close(gradient, [-0.282587, 0.140770, 0.141817])
    close(logprob.detach(), float(torch.log_softmax(logits.detach(), 0)[0]), atol=1e-12)


def test_temperature_is_that_of_each_token_and_low_precision_is_widened():
    logits = torch.tensor([[2.0, 0.0, -1.0], [2.0, 0.0, -1.0]], dtype=torch.bfloat16)
    logprobs, entropy = token_logprobs(logits, torch.tensor([0, 1]), torch.tensor([0.6, 1.0]))
    wanted = [torch.log_softmax(logits[i].double() / t, 0) for i, t in enumerate((0.6, 1.0))]
    assert logprobs.dtype == entropy.dtype == torch.float32
    close(logprobs, [float(wanted[0][0]), float(wanted[1][1])], atol=1e-6)


def test_support_renormalises_over_the_allowed_tokens():
    logits = torch.tensor([2.0, 1.0, 7.0], dtype=torch.float64, requires_grad=True)
    allowed = torch.tensor([True, True, False])
    logprob, entropy = token_logprobs(logits, torch.tensor(1), 1.0, allowed=allowed)
    two = torch.log_softmax(torch.tensor([2.0, 1.0], dtype=torch.float64), 0)
    close(logprob.detach(), float(two[1]), atol=1e-12)
    close(entropy.detach(), float(-(two.exp() * two).sum()), atol=1e-12)
    (gradient,) = torch.autograd.grad(logprob + entropy, logits)
    assert gradient.isfinite().all()
    assert gradient[2] == 0


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_one_step_on_the_kl_alone_lowers_it(estimator):
    """And never raises it, on either side of the reference."""
    reference = torch.log_softmax(torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64), 0)
    logits = torch.tensor([-0.2, 0.4, 0.1], dtype=torch.float64, requires_grad=True)
    policy = torch.log_softmax(logits, 0)
    loss = (policy.detach().exp() * kl_estimate(estimator, policy, reference)).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    after = torch.log_softmax(logits.detach() - 0.1 * gradient, 0)
    exact = [float((p.exp() * (p - reference)).sum()) for p in (policy.detach(), after)]
    assert exact[1] < exact[0]


def enumerated(estimator_of):
    """Expected gradient of an estimator over the policy's own samples, and the gradient of the exact reverse KL."""
    reference = torch.log_softmax(torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64), 0)
    logits = torch.tensor([-0.2, 0.4, 0.1], dtype=torch.float64, requires_grad=True)
    policy = torch.log_softmax(logits, 0)
    (estimated,) = torch.autograd.grad(
        (policy.detach().exp() * estimator_of(policy, reference)).sum(), logits, retain_graph=True
    )
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)
    return estimated, exact


def test_which_estimators_have_the_gradient_of_the_kl():
    k1, exact = enumerated(lambda p, r: kl_estimate("k1", p, r))
    close(k1, [0.0, 0.0, 0.0], atol=1e-12)
    for unbiased in (
        lambda p, r: kl_estimate("k2", p, r),
        lambda p, r: straight_through_kl("k3", p, r),
        lambda p, r: importance_kl("k1", p, r, p.detach()),
        lambda p, r: importance_kl("k3", p, r, p.detach()),
    ):
        close(enumerated(unbiased)[0], exact.tolist(), atol=1e-12)
    assert not torch.allclose(enumerated(lambda p, r: kl_estimate("k3", p, r))[0], exact, atol=1e-3)


@pytest.mark.parametrize("difference", [-1e4, -200.0, -1e-4, 0.0, 200.0, 1e4])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_stays_finite_and_never_pulls_the_wrong_way(estimator, difference):
    logprobs = torch.tensor([difference], dtype=torch.float32, requires_grad=True)
    value = kl_estimate(estimator, logprobs, torch.zeros(1))
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    if estimator != "k1":
        assert float(value.detach()) >= 0
        assert float(gradient) * difference >= 0


def test_dcpo_bounds():
    low, high = dynamic_bounds(torch.tensor([0.9, 0.01], dtype=torch.float64).log(), DynClipConfig())
    close(low, [0.768742, 0.5])
    close(high, [1.187184, 5.0])
    low, high = dynamic_bounds(torch.tensor([-1e4], dtype=torch.float64), DynClipConfig())
    assert (low.item(), high.item()) == (0.5, 10.0)


def test_dcpo_bounds_on_batch_v(batch_v):
    low, high = dynamic_bounds(batch_v.old, DynClipConfig())
    close(low, [0.770504, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.786001, 0.5, 0.5])
    close(
        high,
        [1.186319, 1.998278, 1.307930, 1.456046, 1.261409, 2.565698, 1.390874, 1.178420, 1.613825, 1.361348],
    )


def test_vespo_kernel_on_batch_v(batch_v):
    x = batch_v.inputs(batch_v.now, aggregation={"name": "token_mean"})
    log_w = segments.masked_seq_sum(batch_v.now - batch_v.old, x.mask, x.seq_ids, 4)
    phi = gamma_kernel_weight(log_w, x.advantages, GammaKernelConfig())
    first = [0, 4, 6, 9]
    close(log_w.exp()[first], [1.733253, 0.951229, 1.127497, 0.548812])
    close(phi[first], [0.332951, 0.948893, 0.867196, 0.407537])


def test_vespo_kernel_is_one_on_policy_and_vanishes_far_away():
    log_w = torch.tensor([0.0, 0.0, 1e4, -1e4], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    phi = gamma_kernel_weight(log_w, advantages, GammaKernelConfig())
    close(phi[:2], [1.0, 1.0], atol=0)
    assert phi[2] == 0
    assert 0 <= phi[3] < 1e-14


def test_binary_divergences():
    p, b = torch.tensor([0.12], dtype=torch.float64).log(), torch.tensor([0.1], dtype=torch.float64).log()
    close(binary_divergence("binary_tv", p, b), [0.020000])
    close(binary_divergence("binary_kl", p, b), [0.001993])
    certain = binary_divergence("binary_kl", torch.zeros(1, dtype=torch.float64), b)
    assert certain.isfinite().all()


def test_clip_takes_the_unclipped_gradient_at_the_bound():
    ratio = torch.tensor([1.25, 0.75, 3.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64)
    token = clipped_surrogate(ratio, advantages, (0.75, 1.25), dual_c=3.0)
    (gradient,) = torch.autograd.grad(token.loss.sum(), ratio)
    close(gradient, [-1.0, 1.0, 1.0], atol=0)
    assert not any(values.any() for values in token.metrics.values())


def test_mismatch_ratios_of_batch_v(batch_v):
    x = batch_v.inputs(batch_v.now, aggregation={"name": "token_mean"})
    close(
        log_mismatch(x, "token").exp(),
        [1.020201, 2.459603, 0.960789, 1.010050, 0.970446, 0.301194, 1, 1.010050, 1.105171, 1.349859],
    )
    first = [0, 4, 6, 9]
    close(log_mismatch(x, "seq").exp()[first], [2.435130, 0.292293, 1.116278, 1.349859])
    close(log_mismatch(x, "geo").exp()[first], [1.249196, 0.540641, 1.037347, 1.349859])
    distance = segments.masked_seq_mean(x.rollout_logprobs - x.logprobs, x.mask, x.seq_ids, 4)
    close(distance[first], [-0.360000, 0.640000, -0.076667, 0.300000])


REJECTIONS = {
    "token k1": (
        {"stat": "token", "estimator": "k1", "min_ratio": 0.5, "max_ratio": 2.0},
        [1, 0, 1, 1, 1, 0, 1, 1, 1, 1],
    ),
    "seq_max k1": ({"stat": "seq_max", "estimator": "k1", "min_ratio": 0.5, "max_ratio": 2.0}, [0] * 6 + [1] * 4),
    "seq_mean k1": (
        {"stat": "seq_mean", "estimator": "k1", "min_ratio": 0.55, "max_ratio": 1.3},
        [1] * 4 + [0] * 2 + [1] * 3 + [0],
    ),
    "seq_sum k1": ({"stat": "seq_sum", "estimator": "k1", "min_ratio": 0.5, "max_ratio": 2.0}, [0] * 6 + [1] * 4),
    # k2 = c^2 / 2; sums .406 .72045 .00505 .045
    "seq_sum k2": ({"stat": "seq_sum", "estimator": "k2", "threshold": 0.1}, [0] * 6 + [1] * 4),
    # k3 of c: .9 -> .559603, -1.2 -> .501194, .3 -> .049859
    "token k3": ({"stat": "token", "estimator": "k3", "threshold": 0.52}, [1, 0, 1, 1, 1, 1, 1, 1, 1, 1]),
    "seq_mean k3": ({"stat": "seq_mean", "estimator": "k3", "threshold": 0.15}, [1] * 4 + [0] * 2 + [1] * 4),
}


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejection_statistics_on_batch_v(batch_v, name):
    arguments, kept = REJECTIONS[name]
    plugin, cfg = corrections.resolve({"name": "rs", **arguments})
    x = batch_v.inputs(batch_v.now, aggregation={"name": "token_mean"})
    result = plugin.target(x, cfg)
    assert result.keep.int().tolist() == kept
    assert result.weight.tolist() == [1.0] * 10


def test_sequence_mask_with_token_weights(batch_v):
    plugin, cfg = corrections.resolve({"name": "seq_mask_tis", "cap": 2.0, "min": 0.6, "max": 1.3})
    x = batch_v.inputs(batch_v.now, aggregation={"name": "token_mean"})
    result = plugin.target(x, cfg)
    assert result.keep.int().tolist() == [1] * 4 + [0] * 2 + [1] * 3 + [0]
    close(result.weight, [1.020201, 2.0, 0.960789, 1.010050, 0.970446, 0.301194, 1, 1.010050, 1.105171, 1.349859])


def test_one_weight_per_sequence_by_geometric_mean(batch_v):
    plugin, cfg = corrections.resolve({"name": "tis", "cap": 100.0, "w_reduce": "geo_mean"})
    x = batch_v.inputs(batch_v.now, aggregation={"name": "token_mean"})
    close(plugin.target(x, cfg).weight[[0, 4, 6, 9]], [1.249196, 0.540641, 1.037347, 1.349859])
