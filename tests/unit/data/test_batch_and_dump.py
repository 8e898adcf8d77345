"""Samples to flat tensors, and tensors to a file and back."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from moerl.data.batch import build_step_batch
from moerl.data.dump import load_extra, load_step_batch, save_step_batch
from moerl.data.packing import plan_packing
from moerl.data.token_batch import from_micro_batches
from moerl.errors import DataError
from moerl.types import LocalArray, MicroBatch, Sample, StepBatch, Support, TokenWeights

ROOT = Path(__file__).parents[3]
PROMPT, LAYERS, TOP_K = 3, 2, 4


def make_sample(i, *, length=8, routes=True, with_support=True, **changes):
    rng = np.random.default_rng(i)
    mask = np.arange(length) >= PROMPT
    counts = np.where(mask, rng.integers(0, 4, length), 0)
    sample = Sample(
        sample_id=i,
        group_id=i // 2,
        prompt_id=f"sum/{i // 2}",
        token_ids=(np.arange(length) + 100 * i).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
        advantages=np.where(mask, i - 1.5, 0).astype(np.float32),
        reward=float(i),
        temperature=0.5 + i,
        routed_experts=LocalArray(rng.integers(0, 200, (length, LAYERS, TOP_K)).astype(np.uint8)) if routes else None,
        has_route=np.arange(length) < length - 1 if routes else None,
        support=Support(rng.integers(0, 99, counts.sum()).astype(np.int32), np.concatenate(([0], np.cumsum(counts))))
        if with_support
        else None,
    )
    return dataclasses.replace(sample, **changes)


def sequence_mean(lengths, group_ids):
    return np.where(lengths > 0, 1.0 / (np.maximum(lengths, 1) * max((lengths > 0).sum(), 1)), 0.0)


def build(samples, *, dp_size=1, dp_rank=0, budget=20, num_minibatches=2, num_epochs=1, weigh=sequence_mean):
    plan = plan_packing(
        [len(s.token_ids) for s in samples],
        [s.group_id for s in samples],
        [int(s.loss_mask.sum()) for s in samples],
        dp_size=dp_size,
        num_minibatches=num_minibatches,
        num_epochs=num_epochs,
        max_tokens_per_microbatch=budget,
        seed=0,
    )
    return build_step_batch(samples, plan, dp_rank=dp_rank, weigh=weigh, device="cpu", policy_version=7)


def samples_of(num, **options):
    return [make_sample(i, length=6 + i, **options) for i in range(num)]


def micro_batches(batch):
    return [micro for minibatch in batch.minibatches for micro in minibatch]


def test_every_column_of_every_token_is_the_samples_own():
    """slime#1784: all columns are split alike, on every rank."""
    samples = samples_of(8)
    seen = []
    for rank in range(2):
        for micro in micro_batches(build(samples, dp_size=2, dp_rank=rank)):
            for n, i in enumerate(micro.sample_ids):
                at = slice(int(micro.cu_seqlens[n]), int(micro.cu_seqlens[n + 1]))
                sample = samples[i]
                seen.append(i)
                assert micro.token_ids[at].tolist() == sample.token_ids.tolist()
                assert micro.position_ids[at].tolist() == list(range(len(sample.token_ids)))
                assert micro.seq_ids[at].tolist() == [n] * len(sample.token_ids)
                assert int(micro.group_ids[n]) == sample.group_id
                assert float(micro.rewards[n]) == sample.reward
                assert np.array_equal(micro.mask[at], sample.loss_mask)
                assert np.array_equal(micro.rollout_logprobs[at], sample.rollout_logprobs)
                assert np.array_equal(micro.advantages[at], sample.advantages)
                assert set(micro.temperature[at].tolist()) == {sample.temperature}
                assert micro.routes is not None
                assert micro.has_route is not None
                assert sample.routed_experts is not None
                assert np.array_equal(micro.routes[at], sample.routed_experts.open())
                assert np.array_equal(micro.has_route[at], sample.has_route)
    assert sorted(seen) == list(range(8))


@pytest.mark.parametrize("rank", range(4))
def test_no_column_is_split_otherwise_than_the_others(rank):
    """slime#1784, for every column there is and will be: a rank's micro-batch is that of its samples built alone."""
    samples = samples_of(8)
    for micro in micro_batches(build(samples, dp_size=4, dp_rank=rank)):
        alone = [dataclasses.replace(samples[i], sample_id=n) for n, i in enumerate(micro.sample_ids)]
        (other,) = micro_batches(build(alone, budget=200, num_minibatches=1))
        order = [other.sample_ids.index(n) for n in range(len(alone))]
        tokens = torch.cat([torch.nonzero(other.seq_ids == n)[:, 0] for n in order])
        columns = [c.name for c in dataclasses.fields(micro) if torch.is_tensor(getattr(micro, c.name))]
        for column in set(columns) - {"cu_seqlens", "seq_ids"}:
            mine, theirs = getattr(micro, column), getattr(other, column)
            at = tokens if len(mine) == micro.num_tokens else torch.tensor(order)
            assert torch.equal(mine, theirs[at]), column


def test_dtypes_and_counts():
    samples = samples_of(4)
    batch = build(samples, num_epochs=3)
    micro = batch.minibatches[0][0]
    assert micro.token_ids.dtype == torch.int64
    assert micro.routes.dtype == torch.uint8, "as small as they came"
    assert micro.cu_seqlens.dtype == torch.int32
    assert micro.mask.dtype == torch.bool
    assert micro.weights.policy.dtype == micro.advantages.dtype == torch.float32
    assert micro.weights.policy is micro.weights.kl
    assert (len(batch.minibatches), batch.num_score_minibatches, batch.policy_version) == (6, 2, 7)
    assert batch.num_samples == 4
    assert batch.num_tokens == sum(len(s.token_ids) for s in samples)
    assert batch.num_live_tokens == sum(int(s.loss_mask.sum()) for s in samples)


def test_ranks_without_a_sample_hold_a_filler_that_a_dump_keeps(tmp_path):
    samples = samples_of(3)
    ranks = [build(samples, dp_size=4, dp_rank=rank, num_minibatches=1) for rank in range(4)]
    micros = [micro for batch in ranks for (micro,) in batch.minibatches]
    assert sorted(micro.sample_ids for micro in micros) == [(), (0,), (1,), (2,)]
    assert [micro.is_filler for micro in micros].count(True) == 1
    (empty,) = [batch for batch in ranks if batch.minibatches[0][0].is_filler]
    assert (empty.num_samples, empty.num_score_minibatches) == (3, 1)
    assert empty.num_live_tokens == sum(int(s.loss_mask.sum()) for s in samples)
    kept = load_step_batch(save_step_batch(tmp_path / "x.npz", empty)).minibatches[0][0]
    assert kept.is_filler
    assert kept.num_tokens == kept.weights.policy.numel() == 0
    assert kept.cu_seqlens.tolist() == [0]
    with pytest.raises(DataError, match="the dump holds no micro-batches"):
        from_micro_batches((kept,))


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("budget", [20, 1000])
def test_weights_are_those_of_the_whole_minibatch_for_every_layout(dp_size, budget):
    samples = samples_of(8)
    ranks = [build(samples, dp_size=dp_size, dp_rank=r, budget=budget) for r in range(dp_size)]
    for minibatch in range(2):
        parts = [micro for batch in ranks for micro in batch.minibatches[minibatch]]
        assert sum(float(m.weights.policy.sum()) for m in parts) == pytest.approx(1.0, abs=1e-6)
        for micro in parts:
            assert bool((micro.weights.policy[~micro.mask] == 0).all())
            for n, i in enumerate(micro.sample_ids):
                own = micro.weights.policy[(micro.seq_ids == n) & micro.mask]
                assert own.tolist() == pytest.approx([1 / (4 * int(samples[i].loss_mask.sum()))] * len(own))


def test_weigh_sees_live_lengths_and_groups_of_one_minibatch():
    samples = samples_of(6)
    samples[2] = dataclasses.replace(samples[2], loss_mask=np.zeros(8, bool))
    calls = []

    def weigh(lengths, group_ids):
        calls.append((lengths.tolist(), group_ids.tolist()))
        return np.ones(len(lengths))

    build(samples, num_minibatches=3, weigh=weigh)
    assert sorted(calls, key=lambda call: call[1]) == [([3, 4], [0, 0]), ([0, 6], [1, 1]), ([7, 8], [2, 2])]


def test_support_of_each_token():
    samples = samples_of(3)
    samples[1] = dataclasses.replace(samples[1], support=None)
    micro = build(samples, budget=1000, num_minibatches=1).minibatches[0][0]
    assert micro.support is not None
    assert micro.support.offsets.dtype == micro.support.ids.dtype == torch.int64
    assert len(micro.support.offsets) == micro.num_tokens + 1
    for n, i in enumerate(micro.sample_ids):
        start, support = int(micro.cu_seqlens[n]), samples[i].support
        for j in range(len(samples[i].token_ids)):
            a, b = micro.support.offsets[start + j : start + j + 2].tolist()
            own = [] if support is None else support.ids[support.offsets[j] : support.offsets[j + 1]].tolist()
            assert micro.support.ids[a:b].tolist() == own
    assert build(samples_of(2, with_support=False)).minibatches[0][0].support is None


def test_routes_only_where_all_samples_have_them():
    samples = samples_of(3)
    samples[1] = dataclasses.replace(samples[1], routed_experts=None, has_route=None)
    batch = build(samples, budget=1000, num_minibatches=1)
    assert batch.minibatches[0][0].routes is None
    assert batch.minibatches[0][0].has_route is None
    without_flags = dataclasses.replace(make_sample(0), has_route=None)
    flags = build([without_flags], num_minibatches=1).minibatches[0][0].has_route
    assert flags.tolist() == [True] * 7 + [False]


def test_engine_logprobs_that_are_not_finite_pass_through():
    logprobs = np.array([0, 0, 0, -1, -np.inf, np.nan, -2, -3], np.float32)
    micro = build([make_sample(0, rollout_logprobs=logprobs)], num_minibatches=1).minibatches[0][0]
    assert np.array_equal(micro.rollout_logprobs.numpy(), logprobs, equal_nan=True)
    assert bool(micro.mask[4])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantages": np.zeros(7)}, r"sample 0 \(prompt sum/0\): advantages has 7 entries and token_ids has 8"),
        ({"has_route": np.zeros(9, bool)}, "has_route has 9 entries"),
        ({"routed_experts": LocalArray(np.zeros((7, 2, 4), np.uint8))}, "routed_experts has 7 entries"),
        ({"support": Support(np.zeros(0, np.int32), np.zeros(8, np.int64))}, "support has 8 offsets, needs 9"),
        ({"loss_mask": np.ones(8, bool)}, "its first token is in the loss"),
        ({"temperature": 0.0}, "temperature is 0.0; training needs one above 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"sample_id": 4}, "has sample_id 4"),
    ],
)
def test_samples_that_cannot_be_trained_on_are_named(changes, message):
    with pytest.raises(DataError, match=message):
        build([make_sample(0, **changes)], num_minibatches=1)


def test_routes_of_two_models_are_refused():
    other = LocalArray(np.zeros((8, 3, 4), np.uint8))
    with pytest.raises(DataError, match=r"\[3, 4\], and \[2, 4\] in the others"):
        build([make_sample(0), make_sample(1, routed_experts=other)], num_minibatches=1)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a == b


def scored(batch: StepBatch) -> StepBatch:
    """With every optional field filled, and a weight apart."""

    def fill(micro: MicroBatch) -> MicroBatch:
        noise = torch.rand(micro.num_tokens)
        return dataclasses.replace(
            micro,
            old_logprobs=-noise,
            ref_logprobs=-2 * noise,
            old_routes=micro.routes,
            old_router_logprobs=torch.rand(micro.num_tokens, LAYERS, TOP_K),
            weights=dataclasses.replace(micro.weights, kl=noise),
            constants={"entropy_quantile": 0.1},
        )

    minibatches = tuple(tuple(fill(m) for m in minibatch) for minibatch in batch.minibatches)
    return dataclasses.replace(batch, minibatches=minibatches)


@pytest.mark.parametrize("change", [scored, lambda batch: batch], ids=["scored", "plain"])
def test_dump_and_load_is_the_identity(tmp_path, change):
    batch = change(build(samples_of(6), num_epochs=2))
    path = save_step_batch(tmp_path / "new" / "step.npz", batch, {"step": 3, "reason": "loss is nan"})
    loaded = load_step_batch(path)
    assert same(batch, loaded)
    assert load_extra(path) == {"step": 3, "reason": "loss is nan"}
    weights: TokenWeights = loaded.minibatches[0][0].weights
    assert weights.entropy is weights.policy
    assert [p.name for p in path.parent.iterdir()] == ["step.npz"]


def test_dump_replaces_whole_or_not_at_all(tmp_path):
    path = save_step_batch(tmp_path / "a.npz", build(samples_of(2)), {"n": 1})
    with pytest.raises(TypeError):
        save_step_batch(path, build(samples_of(2)), {"n": object()})
    save_step_batch(path, build(samples_of(2)), {"n": 2})
    assert load_extra(path) == {"n": 2}
    assert list(tmp_path.iterdir()) == [path]


def test_damaged_dumps_are_refused(tmp_path):
    path = save_step_batch(tmp_path / "a.npz", build(samples_of(2)))
    (tmp_path / "cut.npz").write_bytes(path.read_bytes()[:-200])
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    np.savez(tmp_path / "pickled.npz", header=np.array([{}], dtype=object))
    np.savez(tmp_path / "newer.npz", header=np.frombuffer(json.dumps({"format": 9}).encode(), np.uint8))
    (tmp_path / "text.npz").write_text("hello")
    reasons = {"cut": "not a zip file", "text": "not a zip file", "other": "'header'", "pickled": "could run code"}
    for name, reason in reasons.items():
        with pytest.raises(DataError, match=rf"{name}\.npz: is not a whole batch dump \(.*{reason}\)"):
            load_step_batch(tmp_path / f"{name}.npz")
    with pytest.raises(DataError, match=r"missing\.npz: there is no such file"):
        load_step_batch(tmp_path / "missing.npz")
    with pytest.raises(DataError, match="dump format 9, this moerl reads 1"):
        load_step_batch(tmp_path / "newer.npz")


def inspect_tool():
    spec = importlib.util.spec_from_file_location("inspect_batch", ROOT / "tools" / "inspect_batch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_inspect_prints_every_token_of_a_sample(tmp_path, capsys):
    path = save_step_batch(tmp_path / "a.npz", scored(build(samples_of(4))), {"step": 3})
    assert inspect_tool().main([str(path)]) == 0
    text = capsys.readouterr().out
    assert "4 samples" in text
    assert "policy version 7" in text
    assert '"step": 3' in text
    assert all(f"sample {i} " in text for i in range(4))
    assert inspect_tool().main([str(path), "--sample", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[1:] if line.strip()[:1].isdigit()]
    assert [row[1] for row in rows] == [str(200 + j) for j in range(8)]
    assert [row[2] for row in rows] == ["."] * PROMPT + ["x"] * 5
    sample = make_sample(2, length=8)
    assert [float(row[3]) for row in rows] == pytest.approx(sample.advantages.tolist())
    assert float(rows[-1][6]) == pytest.approx(float(sample.rollout_logprobs[-1]), abs=1e-4)


def test_inspect_says_what_is_wrong(tmp_path, capsys):
    path = save_step_batch(tmp_path / "a.npz", build(samples_of(2)))
    assert inspect_tool().main([str(path), "--sample", "9"]) == 1
    assert "has no sample 9; it has 0, 1" in capsys.readouterr().err
    assert inspect_tool().main([str(tmp_path / "no.npz")]) == 1
    assert "there is no such file" in capsys.readouterr().err
