"""Token credit on batch V packed as a step: vectors, one exchange over ranks, removal, updates, constants, memory."""

from __future__ import annotations

import dataclasses
import itertools
import threading

import numpy as np
import pytest
import torch
from credit_steps import (
    ENTROPY,
    KL_REWARD,
    LENGTHS,
    OLD,
    REF,
    RETURNS,
    REWARDS,
    ROLLOUT,
    WHITENED,
    Step,
    parts,
    section,
)

from moerl.algorithms.objective import build_objective
from moerl.algorithms.types import OLD_PASS, LossInputs
from moerl.build_credit import MinibatchWeights
from moerl.data.batch import build_step_batch
from moerl.metrics import Mean, merge_into, to_floats
from moerl.types import PackPlan, StepBatch


def by_sample(batch: StepBatch, field="advantages"):
    """Sample -> the field on its answer's tokens, of the first epoch."""
    found = {}
    for micro in itertools.chain.from_iterable(batch.minibatches[: batch.num_score_minibatches]):
        bounds = micro.cu_seqlens.tolist()
        value = micro.weights.policy if field == "weights_of_policy" else getattr(micro, field)
        for i, sample in enumerate(micro.sample_ids):
            found[sample] = value[bounds[i] + 1 : bounds[i + 1]]
    return torch.cat([found[i] for i in sorted(found)])


RF = {"advantage": {"center": "none", "scale": "none"}, "aggregation": {"name": "token_mean"}, "kl": KL_REWARD}
CUTS = {
    "whole": ((((0, 1, 2, 3),),),),
    "micro-batches": ((((3, 1), (2, 0)),),),
    "two minibatches": ((((0, 1),),), (((2, 3),),)),
    "two epochs": ((((0, 1, 2, 3),),), (((2, 0), (1, 3)),)),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_returns_of_reinforce_pp(cut):
    batch, metrics = Step(section(**RF)).run(cut)
    torch.testing.assert_close(by_sample(batch), RETURNS, rtol=0, atol=1e-6)
    assert metrics["kl/reward"] == pytest.approx(float((OLD - REF).mean()), abs=1e-6)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_whitening_is_over_all_tokens_of_the_step(cut):
    cfg = section(**{**RF, "advantage": {**RF["advantage"], "post": {"name": "whiten_tokens"}}})
    batch, _ = Step(cfg).run(cut)
    torch.testing.assert_close(by_sample(batch), WHITENED, rtol=0, atol=2e-6)
    last = torch.cat([micro.advantages[micro.mask] for micro in batch.minibatches[-1]])
    assert torch.isin(last.round(decimals=4), WHITENED.round(decimals=4)).all()


def test_tokens_that_are_not_trained_get_no_credit():
    micro = Step(section(**RF)).run()[0].minibatches[0][0]
    assert (micro.advantages[~micro.mask] == 0).all()


def test_kl_of_a_group_estimator_is_part_of_the_answers_reward():
    cfg = section(advantage={"center": "group_loo", "scale": "none"}, kl=KL_REWARD)
    batch, _ = Step(cfg).run()
    kl = torch.stack([(old - ref).sum() for old, ref in zip(parts(OLD), parts(REF), strict=True)])
    r = torch.tensor(REWARDS) - 0.1 * kl
    a = torch.stack([r[0] - r[1], r[1] - r[0], r[2] - r[3], r[3] - r[2]])
    wanted = torch.repeat_interleave(a, torch.tensor(LENGTHS))
    torch.testing.assert_close(by_sample(batch), wanted, rtol=0, atol=1e-6)


def test_entropy_is_added_to_each_tokens_advantage():
    plain = Step(section())
    cfg = section(entropy={"place": "reward", "coefficient": 0.5})
    batch, _ = Step(cfg).run()
    torch.testing.assert_close(by_sample(batch), by_sample(plain.batch(CUTS["whole"])) + 0.5 * ENTROPY)


def test_without_anything_to_do_the_batch_is_the_same_object():
    step = Step(section())
    batch = step.batch(CUTS["whole"])
    credit = step.token_credit()
    assert credit(batch, step.samples, step.samples) == (batch, {})
    assert credit.needs == frozenset()


# Ranks


def on_ranks(step: Step, assignment, count: int):
    """The token credit of every rank, with one exchange among threads."""
    slots: list = [None] * count
    barrier = threading.Barrier(count)
    calls = []

    def exchange_of(rank):
        def exchange(value):
            calls.append(rank)
            slots[rank] = value
            barrier.wait(timeout=30)
            return list(slots)

        return exchange

    results: list = [None] * count

    def work(rank):
        credit = step.token_credit(exchange_of(rank))
        results[rank] = credit(step.batch(assignment, rank), step.samples, step.samples)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(calls) == list(range(count))
    return results


EVERYTHING = {
    "reinforce_pp": {**RF, "advantage": {**RF["advantage"], "post": {"name": "whiten_tokens"}}},
    "rloo": {"advantage": {"center": "group_loo", "scale": "none"}, "kl": KL_REWARD},
    "removal": {"correction": {"name": "icepop", "rejected": "remove"}, "aggregation": {"name": "token_mean"}},
    "constants": {
        "correction": {"name": "tis", "batch_normalize": True},
        "token_weight": {"name": "top_entropy", "q": 0.3},
    },
}


@pytest.mark.parametrize("name", EVERYTHING)
def test_ranks_agree_with_one_rank_in_one_exchange(name):
    step = Step(section(**EVERYTHING[name]))
    alone, _ = step.run()
    split = on_ranks(step, ((((0, 3),), ((2, 1),)),), 2)
    for rank, samples in enumerate(((0, 3), (2, 1))):
        (micro,) = split[rank][0].minibatches[0]
        whole = alone.minibatches[0][0]
        rows = torch.cat([(whole.seq_ids == s).nonzero()[:, 0] for s in samples])
        torch.testing.assert_close(micro.advantages, whole.advantages[rows])
        torch.testing.assert_close(micro.weights.policy, whole.weights.policy[rows])
        assert torch.equal(micro.mask, whole.mask[rows])
        assert micro.constants == pytest.approx(whole.constants)
        assert split[rank][0].num_live_tokens == alone.num_live_tokens


@pytest.mark.parametrize("name", [*EVERYTHING, "lopti"])
def test_a_rank_that_holds_fillers_alone_changes_nothing(name):
    lopti = {"schedule": {"name": "lopti", "eta": 0.5}, "aggregation": {"name": "token_mean"}}
    step = Step(section(**{**EVERYTHING, "lopti": lopti}[name]))
    alone, metrics = step.run()
    found = on_ranks(step, ((((0, 1, 2, 3), ()), ((), ())),), 2)
    assert len(found[1][0].minibatches) == len(alone.minibatches)
    for index, (whole,) in enumerate(alone.minibatches):
        micro, *fillers = (*found[0][0].minibatches[index], *found[1][0].minibatches[index])
        for field in ("advantages", "mask"):
            assert torch.equal(getattr(micro, field), getattr(whole, field))
        assert torch.equal(micro.weights.policy, whole.weights.policy)
        assert [filler.num_tokens for filler in fillers] == [0, 0, 0]
        assert all(one.constants == micro.constants == whole.constants for one in fillers)
    merged = merge_into(dict(found[0][1]), found[1][1])
    assert to_floats(merged) == pytest.approx(metrics)
    assert found[1][0].num_live_tokens == alone.num_live_tokens


# Removal


def test_a_removed_batch_is_that_of_a_batch_without_it():
    """Every token of answer 1 is rejected: baselines and denominators are those of the other three."""
    rollout = ROLLOUT.clone()
    rollout[4:6] = -9.0
    cfg = section(correction={"name": "icepop", "rejected": "remove"}, aggregation={"name": "seq_mean_token_mean"})
    groups = (0, 0, 0, 0)
    batch, metrics = Step(cfg, groups=groups, rollout=rollout).run()
    micro = batch.minibatches[0][0]
    kept = torch.tensor([4, 0, 3, 1])
    assert torch.equal(torch.stack([micro.mask[micro.seq_ids == i].sum() for i in range(4)]), kept)
    r = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
    a = (r - r.mean()) / (r.std(correction=0) + 1e-6)
    found = [float(micro.advantages[(micro.seq_ids == i) & micro.mask][0]) for i in (0, 2, 3)]
    assert found == pytest.approx(a.tolist(), abs=1e-6)
    weights = [float(micro.weights.policy[(micro.seq_ids == i) & micro.mask][0]) for i in (0, 2, 3)]
    assert weights == pytest.approx([1 / 12, 1 / 9, 1 / 3])
    assert metrics["mm/removed_tokens"] == 2
    assert metrics["mm/removed_seqs"] == 1
    assert batch.num_live_tokens == 8


@pytest.mark.parametrize("name", ["seq_mean_token_mean", "seq_mean_token_sum"])
def test_where_empty_answers_count_a_rejected_one_is_still_gone(name):
    """A wholly rejected answer is not in the batch; one that a filter emptied is, and was not removed."""
    rollout = ROLLOUT.clone()
    rollout[4:6] = -9.0
    correction = {"name": "icepop", "rejected": "remove"}
    counted = section(correction=correction, aggregation={"name": name, "count_empty": True})
    plain = section(correction=correction, aggregation={"name": name})
    groups = (0, 0, 0, 0)
    expected = by_sample(Step(plain, groups=groups, rollout=rollout).run()[0], "weights_of_policy")
    step = Step(counted, groups=groups, rollout=rollout)
    batch, metrics = step.run()
    torch.testing.assert_close(by_sample(batch, "weights_of_policy"), expected)
    assert metrics["mm/removed_seqs"] == 1
    step.samples[3] = dataclasses.replace(step.samples[3], loss_mask=np.zeros_like(step.samples[3].loss_mask))
    batch, metrics = step.run()
    assert metrics["mm/removed_seqs"] == 1
    share = [1 / 12, 1 / 9] if name == "seq_mean_token_mean" else [1 / 3, 1 / 3]
    micro = batch.minibatches[0][0]
    found = [float(micro.weights.policy[(micro.seq_ids == i) & micro.mask][0]) for i in (0, 2)]
    assert found == pytest.approx(share)


def test_a_rejected_sibling_sets_no_baseline():
    """Rewards 100, all rejected, and 1: the kept one is in a group of itself."""
    rollout = ROLLOUT.clone()
    rollout[0:4] = -9.0
    cfg = section(
        correction={"name": "icepop", "rejected": "remove"}, advantage={"center": "group_mean", "scale": "none"}
    )
    batch, _ = Step(cfg, rewards=(100.0, 1.0, 0.5, 0.0), rollout=rollout).run()
    assert (by_sample(batch)[4:6] == 0).all()


def test_rejected_tokens_leave_the_denominator():
    """Log-ratios (.1, -1.5, .8, -10, .3) in a band [.5, 2]: three of five go, and the loss is divided by two."""
    cfg = section(
        correction={"name": "mis", "min": 0.5, "max": 2.0, "rejected": "remove", "weight": "one"},
        aggregation={"name": "token_mean"},
        advantage={"center": "none", "scale": "none"},
    )
    rollout = OLD.clone()
    rollout[[0, 1, 2, 3]] = OLD[:4] - torch.tensor([0.1, -1.5, 0.8, -10.0])
    rollout[4] = OLD[4] - 0.3
    batch, _ = Step(cfg, rollout=rollout).run()
    micro = batch.minibatches[0][0]
    assert micro.mask[micro.seq_ids < 2].tolist() == [False, True, False, False, False, False, True, True]
    torch.testing.assert_close(micro.weights.policy[micro.mask], torch.full((7,), 1 / 7))
    wanted = section(**{"aggregation": {"name": "token_mean"}, "advantage": {"center": "none", "scale": "none"}})
    x = _loss_inputs(micro)
    removed = build_objective(cfg)(x)[0]
    only = build_objective(wanted)(x)[0]
    assert float(removed) == pytest.approx(float(only), abs=1e-7)


def _loss_inputs(micro) -> LossInputs:
    return LossInputs(
        logprobs=micro.old_logprobs + 0.01,
        rollout_logprobs=micro.rollout_logprobs,
        advantages=micro.advantages,
        mask=micro.mask,
        weights=micro.weights,
        seq_ids=micro.seq_ids,
        num_seqs=micro.num_seqs,
        optional={"old_logprobs": micro.old_logprobs},
    )


def test_filtered_answers_are_not_taken_for_rejected_ones():
    """An answer whose mask a filter emptied still counts for its group."""
    step = Step(section(correction={"name": "icepop", "rejected": "remove"}))
    emptied = dataclasses.replace(step.samples[1], loss_mask=np.zeros(3, dtype=bool))
    samples = [step.samples[0], emptied, *step.samples[2:]]
    packed = [samples[0], *samples[2:]]
    step.samples = [dataclasses.replace(s, sample_id=i) for i, s in enumerate(packed)]
    batch = build_step_batch(
        step.samples,
        PackPlan(((((0, 1, 2),),),)),
        dp_rank=0,
        weigh=MinibatchWeights(step.cfg).policy,
        device="cpu",
        policy_version=0,
    )
    micro = batch.minibatches[0][0]
    filled = dataclasses.replace(micro, old_logprobs=micro.rollout_logprobs)
    batch = dataclasses.replace(batch, minibatches=((filled,),))
    result, _ = step.token_credit()(batch, packed, samples)
    done = result.minibatches[0][0]
    assert float(done.advantages[done.mask][0]) == pytest.approx(1.0, abs=1e-5)


# Constants, updates, memory


def test_constants_are_of_the_whole_minibatch():
    cfg = section(
        correction={"name": "tis", "cap": 2.0, "batch_normalize": True},
        token_weight={"name": "top_entropy", "q": 0.2},
    )
    step = Step(cfg)
    assert step.token_credit().needs == {OLD_PASS, "old_logprobs", "old_entropy"}
    batch, _ = step.run(CUTS["micro-batches"])
    for micro in batch.minibatches[0]:
        wanted = float((OLD - ROLLOUT).double().exp().clamp(max=2).mean())
        assert micro.constants["correction_mean"] == pytest.approx(wanted, abs=1e-6)
        assert micro.constants["entropy_threshold"] == pytest.approx(0.9)
    alone, _ = step.run(CUTS["two minibatches"])
    thresholds = [mini[0].constants["entropy_threshold"] for mini in alone.minibatches]
    assert thresholds == pytest.approx([0.8, 1.5])


def test_every_constant_that_an_objective_asks_for_is_filled():
    cfg = section(
        correction={"name": "tis", "batch_normalize": True},
        token_weight={"name": "top_entropy"},
        kl={"place": "loss", "coefficient": 0.1, "target": 0.01},
        entropy={"place": "loss", "coefficient": 0.1, "target": 0.01},
    )
    step = Step(cfg)
    batch, _ = step.run()
    assert set(batch.minibatches[0][0].constants) == step.objective.needs_constants
    assert len(step.objective.needs_constants) == 4


def test_lopti_makes_two_updates_of_each_minibatch():
    step = Step(section(schedule={"name": "lopti", "eta": 0.5}, aggregation={"name": "token_mean"}))
    before = step.batch(CUTS["two minibatches"])
    batch, _ = step.run(CUTS["two minibatches"])
    assert len(batch.minibatches) == 4
    assert batch.num_score_minibatches == 4
    for index, mini in enumerate(before.minibatches):
        whole, first, second = mini[0], batch.minibatches[2 * index][0], batch.minibatches[2 * index + 1][0]
        rare = whole.old_logprobs.exp() < 0.5
        assert torch.equal(first.mask, whole.mask & rare)
        assert torch.equal(second.mask, whole.mask & ~rare)
        assert torch.equal(first.weights.policy, whole.weights.policy)


def test_adaptive_coefficients_follow_the_measured_step():
    cfg = section(**{**RF, "kl": {**KL_REWARD, "target": 1e-6}})
    step = Step(cfg)
    credit = step.token_credit()
    assert credit.is_adaptive
    _, metrics = step.run(credit=credit)
    assert metrics["kl/coefficient"] == pytest.approx(0.1)
    credit.adapt({"kl/reward": Mean(1.0, 1.0)})
    assert credit.coefficients.kl == pytest.approx(0.102)
    again = step.token_credit()
    again.load_state_dict(credit.state_dict())
    assert again.coefficients == credit.coefficients
    batch, _ = step.run(credit=again)
    first = 1.0 - 0.102 * float((OLD - REF)[:4].sum())
    assert float(by_sample(batch)[0]) == pytest.approx(first, abs=1e-6)
