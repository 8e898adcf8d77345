"""v_i: closed forms of every aggregation, and the averages of averages that must not happen."""

from __future__ import annotations

import pytest
import torch

from moerl.algorithms.aggregation import sequence_weights
from moerl.algorithms.registries import aggregations
from moerl.errors import ConfigError

LENGTHS = torch.tensor([4, 2, 3, 1, 0])
GROUPS = torch.tensor([7, 7, -1, -1, 3])

CLOSED_FORMS = {
    "token_mean": [1 / 10] * 4,
    "seq_mean_token_mean": [1 / 16, 1 / 8, 1 / 12, 1 / 4],
    "seq_mean_token_sum": [1 / 4] * 4,
    "fixed_denominator": [1 / 32] * 4,
    "prompt_mean": [1 / 12, 1 / 12, 1 / 8, 1 / 8],
    "seq_sum_token_mean": [1 / 4, 1 / 2, 1 / 3, 1.0],
    "token_sum": [1.0] * 4,
}


def node(name):
    return {"name": name, "tokens": 8} if name == "fixed_denominator" else {"name": name}


def test_every_aggregation_has_a_closed_form():
    assert aggregations.names() == sorted(CLOSED_FORMS)


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_form_and_a_sequence_without_tokens(name):
    weights = sequence_weights(node(name), LENGTHS, GROUPS)
    assert weights.dtype == torch.float64
    torch.testing.assert_close(weights, torch.tensor([*CLOSED_FORMS[name], 0.0], dtype=torch.float64))


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_nothing_live_is_all_zeros(name):
    weights = sequence_weights(node(name), torch.zeros(3, dtype=torch.int64), torch.tensor([0, 0, 1]))
    assert weights.tolist() == [0.0, 0.0, 0.0]


def test_micro_batches_of_any_size_add_up():
    """100 tokens of loss 2.0 and 900 of 0.5 are 0.65 in any partition, never the mean of means, 1.25."""
    lengths, losses = torch.tensor([100, 900]), torch.tensor([2.0, 0.5], dtype=torch.float64)
    weights = sequence_weights({"name": "token_mean"}, lengths, torch.tensor([0, 1]))
    parts = weights * lengths * losses
    assert float(parts.sum()) == pytest.approx(0.65)
    assert float(parts[0]) + float(parts[1]) == pytest.approx(0.65)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_share_the_count(num_ranks):
    lengths, losses = torch.tensor([5, 5, 10, 20]), torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    weights = sequence_weights({"name": "token_mean"}, lengths, torch.arange(4))
    shares = [(weights * lengths * losses)[rank::num_ranks].sum() for rank in range(num_ranks)]
    assert float(sum(shares)) == pytest.approx(0.25)


def test_rejected_tokens_leave_the_denominator_when_lengths_say_so():
    """Three of five tokens rejected: counting the two that are left is the same as removing the others."""
    kept = sequence_weights({"name": "token_mean"}, torch.tensor([2]), torch.tensor([0]))
    assert kept.tolist() == [0.5]
    wholly = sequence_weights({"name": "seq_mean_token_mean"}, torch.tensor([0, 2]), torch.tensor([0, 0]))
    assert wholly.tolist() == [0.0, 0.5]


def test_fixed_denominator_needs_a_length():
    with pytest.raises(ConfigError, match=r"algorithm\.aggregation\.tokens is 0.*\$\{rollout\.max_new_tokens\}"):
        sequence_weights({"name": "fixed_denominator"}, LENGTHS, GROUPS)


def test_unknown_name_and_argument():
    with pytest.raises(ConfigError, match="did you mean 'token_mean'"):
        sequence_weights({"name": "tokenmean"}, LENGTHS, GROUPS)
    with pytest.raises(ConfigError, match="unknown key 'length'"):
        sequence_weights({"name": "token_mean", "length": 3}, LENGTHS, GROUPS)
