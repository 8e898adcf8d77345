"""The public API: examples run, layouts agree, the same numbers as the closed forms, every refusal says what to do."""

from __future__ import annotations

import doctest
import importlib
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moerl
from moerl.algorithms.presets import PRESETS
from moerl.config.schema import AlgorithmSection
from moerl.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = torch.tensor([4, 2, 3, 1])
OLD = torch.tensor([-0.1, -2.3, -0.7, -1.2, -0.5, -3.0, -1.0, -0.05, -1.6, -0.9], dtype=torch.float64)
NOW = torch.tensor([-0.05, -1.7, -1.0, -1.0, -0.05, -3.5, -1.25, -0.03, -1.25, -1.5], dtype=torch.float64)
ROLLOUT = torch.tensor([-0.12, -3.2, -0.66, -1.21, -0.47, -1.8, -1.0, -0.06, -1.7, -1.2], dtype=torch.float64)
REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.25])
GROUPS = torch.tensor([7, 7, 3, 3])
CU = torch.tensor([0, 4, 6, 9, 10])
MASK = torch.arange(4) < LENGTHS[:, None]


def fields(**changed):
    given = {
        "logprobs": NOW,
        "old_logprobs": OLD,
        "rollout_logprobs": ROLLOUT,
        "ref_logprobs": OLD - 0.1,
        "router_shift": torch.full_like(OLD, 0.9),
        "entropy": torch.full_like(OLD, 0.5),
        "values": OLD,
        "old_values": OLD,
        "returns": OLD,
        "teacher_logprobs": OLD,
        "topk_logprobs": torch.stack([OLD, OLD - 1], 1),
        "rollout_topk": torch.stack([ROLLOUT, OLD - 1.5], 1),
        "rewards": REWARDS,
        "group_ids": GROUPS,
    }
    return {**given, **changed}


def padded(values):
    grid = torch.full((4, 4, *values.shape[1:]), math.nan, dtype=values.dtype)
    grid[MASK] = values
    return grid


@pytest.mark.parametrize("module", ["moerl.api"])
def test_every_example_in_the_docstrings_runs(module):
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted > 10
    assert results.failed == 0


def test_the_examples_of_the_guide_run():
    results = doctest.testfile(str(ROOT / "docs/algorithms.md"), module_relative=False)
    assert results.attempted >= 5
    assert results.failed == 0


def test_it_works_without_megatron_transformers_and_engines():
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'megatron', 'transformers', 'sglang', 'wandb', 'reasoning_gym'}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import moerl\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "r = moerl.objective('gspo')(logprobs=torch.zeros(2), seq_ids=torch.tensor([0, 1]),"
        " rewards=torch.tensor([1., 0.]), group_ids=torch.tensor([0, 0]))\n"
        "assert len(r.gradient) == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", PRESETS)
def test_packed_and_padded_agree_and_the_token_losses_sum_to_the_loss(name):
    method = moerl.objective(name, max_new_tokens=4)
    packed = method(**fields(cu_seqlens=CU))
    per_token = {key: padded(value) if len(value) == len(NOW) else value for key, value in fields().items()}
    grid = method(**per_token, mask=MASK)
    torch.testing.assert_close(grid.loss, packed.loss, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(grid.gradient[MASK], packed.gradient, rtol=1e-12, atol=1e-15)
    assert (grid.gradient[~MASK] == 0).all()
    assert (grid.token_loss[~MASK] == 0).all()
    torch.testing.assert_close(packed.token_loss.sum(), packed.loss.detach(), rtol=1e-12, atol=1e-15)


def test_grpo_equals_its_formula():
    result = moerl.objective("grpo", kl={"place": "none"})(**fields(cu_seqlens=CU))
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    spread = torch.tensor([0.5, 0.5, 0.125, 0.125], dtype=torch.float64)
    token_a = torch.repeat_interleave(advantages * spread / (spread + 1e-6), LENGTHS)
    ratio = (NOW - OLD).exp()
    share = torch.repeat_interleave(1 / (4.0 * LENGTHS), LENGTHS)
    wanted = -share * torch.minimum(ratio * token_a, ratio.clamp(0.8, 1.2) * token_a)
    torch.testing.assert_close(result.token_loss, wanted)
    inside = ~(((token_a > 0) & (ratio > 1.2)) | ((token_a < 0) & (ratio < 0.8)))
    torch.testing.assert_close(result.gradient, torch.where(inside, -share * ratio * token_a, 0.0))


def test_the_gradient_flows_into_what_made_the_logprobs():
    weight = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    result = moerl.objective("cispo")(**fields(logprobs=NOW * weight, cu_seqlens=CU))
    result.loss.backward()
    torch.testing.assert_close(weight.grad, (result.gradient * NOW).sum())


def test_absent_old_logprobs_mean_the_first_update():
    given = fields(cu_seqlens=CU)
    del given["old_logprobs"]
    metrics = moerl.objective("grpo", kl={"place": "none"})(**given).metrics
    assert (metrics["pg/ratio_mean"], metrics["pg/clip_high"]) == (1.0, 0.0)


def test_masked_tokens_have_no_gradient_whatever_they_hold():
    mask = torch.arange(10) != 4
    poisoned = torch.where(mask, OLD, math.nan)
    result = moerl.objective("gmpo")(**fields(cu_seqlens=CU, mask=mask, old_logprobs=poisoned))
    assert result.gradient[4] == 0
    assert result.gradient.isfinite().all()


def test_seq_ids_and_cu_seqlens_say_the_same():
    seq_ids = torch.repeat_interleave(torch.arange(4), LENGTHS)
    method = moerl.objective("gspo")
    assert torch.equal(method(**fields(seq_ids=seq_ids)).gradient, method(**fields(cu_seqlens=CU)).gradient)


def test_advantages_may_be_given_per_sequence_or_per_token():
    method = moerl.objective("dapo")
    per_sequence = torch.tensor([1.0, -1.0, 0.5, -0.5])
    by_row = method(**fields(cu_seqlens=CU, advantages=per_sequence))
    by_token = method(**fields(cu_seqlens=CU, advantages=torch.repeat_interleave(per_sequence, LENGTHS)))
    assert torch.equal(by_row.gradient, by_token.gradient)
    assert by_row.advantages.tolist()[:5] == [1.0, 1.0, 1.0, 1.0, -1.0]


def test_credit_alone():
    values, metrics = moerl.objective("dr_grpo", max_new_tokens=8).advantages(REWARDS, GROUPS)
    torch.testing.assert_close(values, torch.tensor([0.5, -0.5, 0.125, -0.125], dtype=torch.float64))
    assert metrics["advantage/zero_variance_groups"] == 0


def test_overrides_lie_over_axes_and_axes_over_the_preset():
    method = moerl.objective("gspo", trust={"lo": 0.01}, overrides=["trust.hi=0.02", "algorithm.kl.coefficient=0.5"])
    assert method.section.trust == {"name": "clip", "lo": 0.01, "hi": 0.02}
    assert method.section.kl.coefficient == 0.5
    assert moerl.objective(AlgorithmSection(level="none", form="score", trust={"name": "none"})).needs == ()


def test_batch_normalised_corrections_get_their_constant():
    node = {"name": "tis", "batch_normalize": True}
    plain = moerl.objective("grpo", kl={"place": "none"}, correction={"name": "tis"})(**fields(cu_seqlens=CU))
    normal = moerl.objective("grpo", kl={"place": "none"}, correction=node)(**fields(cu_seqlens=CU))
    mean = (OLD - ROLLOUT).exp().clamp(max=2).mean()
    torch.testing.assert_close(normal.gradient * mean, plain.gradient)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cu_seqlens": None}, "either seq_ids"),
        ({"cu_seqlens": torch.tensor([0, 4, 6, 9])}, r"rise from 0 to the number of tokens, 10"),
        ({"mask": torch.ones(9, dtype=torch.bool)}, r"mask has shape \[9\], but logprobs have \[10\]"),
        ({"mask": torch.full((10,), 2)}, "values other than 0 and 1"),
        ({"old_logprobs": OLD[:9]}, r"old_logprobs has shape \[9\], but must be \[10\]"),
        ({"rewards": REWARDS[:3]}, r"rewards have shape \[3\], but must be \[4\]"),
        ({"group_ids": GROUPS[:3]}, r"group_ids has shape \[3\]"),
        ({"group_ids": None}, "give group_ids"),
        ({"rewards": None}, "neither advantages nor rewards"),
        ({"advantages": torch.arange(10.0)}, "differ between tokens"),
        ({"rollout_logprobs": None}, "reads rollout_logprobs, which was not given"),
        ({"logprobs": torch.ones(10, dtype=torch.int64)}, "must be floating-point"),
        ({"logprobs": NOW.reshape(1, 2, 5)}, "must be [[]t[]] packed"),
        ({"logprobs": NOW.reshape(2, 5)}, "must be left out"),
        ({"logprobs": NOW.reshape(2, 5), "cu_seqlens": None}, "mask .* is needed"),
        ({"logprob": NOW}, "no such field: logprob"),
    ],
)
def test_wrong_tensors_are_refused_with_what_they_must_be(changed, message):
    given = {key: value for key, value in fields(cu_seqlens=CU, **{}).items()} | changed
    given = {key: value for key, value in given.items() if value is not None}
    with pytest.raises(DataError, match=message):
        moerl.objective("gspo", correction={"name": "tis"})(**given)


@pytest.mark.parametrize(
    ("arguments", "axes", "message"),
    [
        (("gsop",), {}, "did you mean 'gspo'"),
        (("gspo",), {"trust": {"low": 1}}, "did you mean 'lo'"),
        (("gspo",), {"trst": "clip"}, "did you mean 'algorithm.trust'"),
        (("gspo",), {"level": "geo_clip"}, "log_clip"),
        (("dr_grpo",), {}, "give max_new_tokens"),
        ((AlgorithmSection(),), {"level": "token"}, "put them into the section"),
        ((), {"overrides": ["trust"]}, "must be key=value"),
    ],
)
def test_wrong_methods_are_refused(arguments, axes, message):
    with pytest.raises(ConfigError, match=message):
        moerl.objective(*arguments, **axes)


def test_the_package_has_no_other_lazy_names():
    assert set(moerl.methods()) == set(PRESETS)
    with pytest.raises(AttributeError, match="no attribute 'objectiv'"):
        _ = moerl.objectiv
