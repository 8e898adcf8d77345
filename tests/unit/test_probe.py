"""RouteProbe: what is compared with what, and that neither packing nor a resume changes the comparison."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from moerl.data.batch import build_step_batch
from moerl.data.packing import plan_packing
from moerl.metrics import to_floats
from moerl.probe import RouteProbe, probe_samples
from moerl.types import Prompt, RolloutGroup, RouterStats, Trajectory

LAYERS, EXPERTS, TOP_K, VOCABULARY = 2, 8, 2, 32
LENGTHS = (9, 4, 7, 12, 5)


class Router:
    """A router that looks at one token alone: log q and top-k of `table[token]`. It counts its passes."""

    def __init__(self, seed=0):
        self.table = torch.randn(VOCABULARY, LAYERS, EXPERTS, generator=torch.Generator().manual_seed(seed))
        self.passes = 0

    def move(self, seed, size):
        generator = torch.Generator().manual_seed(seed)
        self.table = self.table + size * torch.randn(self.table.shape, generator=generator)

    def observe(self, micro_batches):
        self.passes += 1
        return [self._stats(micro.token_ids[micro.mask]) for micro in micro_batches]

    def _stats(self, tokens):
        log_probs = self.table[tokens].log_softmax(-1)
        return RouterStats(log_probs.topk(TOP_K).indices, log_probs)


class Packer:
    """The packing of the run, at a budget of tokens per micro-batch."""

    def __init__(self, budget, multiple=1):
        self.budget = budget
        self.multiple = multiple
        self.sizes = []

    def __call__(self, samples):
        plan = plan_packing(
            [len(s.token_ids) for s in samples],
            [s.group_id for s in samples],
            [int(s.loss_mask.sum()) for s in samples],
            dp_size=1,
            num_minibatches=1,
            num_epochs=1,
            max_tokens_per_microbatch=self.budget,
            seed=0,
            microbatch_multiple=self.multiple,
        )

        def weigh(lengths, group_ids):
            return np.ones(len(lengths), dtype=np.float32)

        batch = build_step_batch(samples, plan, dp_rank=0, weigh=weigh, device=torch.device("cpu"), policy_version=0)
        self.sizes.append([micro.num_tokens for micro in batch.minibatches[0]])
        return batch.minibatches[0]


def trajectory(rng, length, *, status="ok", live=True):
    mask = np.arange(length) >= 2 if live else np.zeros(length, dtype=bool)
    return Trajectory(
        token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, np.float32(-1), np.float32(0)),
        temperature=1.0,
        finish_reason="stop",
        version_spans=(),
        status=status,
    )


def groups(lengths=LENGTHS, **options):
    rng = np.random.default_rng(3)
    prompt = Prompt("a/0", np.array([1, 2], dtype=np.int32), "1", "a")
    return [RolloutGroup(prompt, (trajectory(rng, length, **options),)) for length in lengths]


def probe_of(router, budget=64):
    probe = RouteProbe(router.observe, Packer(budget))
    probe.start(probe_samples(groups()))
    return probe


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_pipeline_may_have_more_stages_than_the_probe_has_sequences(count):
    """An interleaved one takes micro-batches by the number of its stages; what fills them up is not measured."""
    found = []
    for multiple in (1, 4):
        router, packer = Router(), Packer(64, multiple)
        probe = RouteProbe(router.observe, packer)
        probe.start(probe_samples(groups()[:count]))
        router.move(1, 0.1)
        found.append(to_floats(probe.measure()))
        assert len(packer.sizes[-1]) % multiple == 0
    assert found[0] == found[1]


def by_group(metrics):
    """Values of the two groups, by the name they share."""
    values = to_floats(metrics)
    found = {
        prefix: {name.partition("/")[2]: v for name, v in values.items() if name.startswith(f"{prefix}/")}
        for prefix in ("route_probe", "route_long")
    }
    assert len(values) == sum(map(len, found.values()))
    return found["route_probe"], found["route_long"]


def test_weights_that_stay_do_not_drift():
    probe = probe_of(Router())
    short, long = by_group(probe.measure())
    assert short == long
    assert short["set_change"] == short["any_layer"] == short["dev"] == 0.0
    assert short["jaccard"] == short["zero_deviation"] == 1.0


def test_one_is_since_the_last_step_the_other_since_step_0():
    router = Router()
    probe = probe_of(router)
    first_table = router.table
    router.move(1, 0.5)
    short, long = by_group(probe.measure())
    assert short == long
    assert short["set_change"] > 0
    short, long_again = by_group(probe.measure())  # a step that moved nothing
    assert short["set_change"] == short["dev"] == 0.0
    assert long_again == long
    router.table = first_table  # the way back
    short, back = by_group(probe.measure())
    assert short["set_change"] == pytest.approx(long["set_change"])
    assert back["set_change"] == back["dev"] == 0.0


def test_the_share_of_changed_sets_is_over_live_tokens():
    router = Router()
    probe = probe_of(router)
    tokens = np.concatenate([t.token_ids[t.loss_mask] for group in groups() for t in group.trajectories])
    before = router.table.log_softmax(-1).topk(TOP_K).indices.sort(-1).values
    router.move(7, 0.3)
    after = router.table.log_softmax(-1).topk(TOP_K).indices.sort(-1).values
    changed = (before != after).any(-1)[torch.from_numpy(tokens).long()]
    short, _ = by_group(probe.measure())
    assert 0 < changed.double().mean() < 1
    assert short["set_change"] == pytest.approx(float(changed.double().mean()))
    assert short["any_layer"] == pytest.approx(float(changed.any(-1).double().mean()))


def test_each_measure_is_one_pass():
    router = Router()
    probe = probe_of(router)
    started = router.passes
    probe.measure()
    probe.measure()
    assert router.passes == started + 2


def test_no_more_is_observed_than_is_kept(monkeypatch):
    """Log q of all answers of a set would be large, however few of them are to be kept."""
    kept = 20
    monkeypatch.setattr("moerl.probe.MAX_LOG_PROBS", kept * LAYERS * EXPERTS)
    router, packer = Router(), Packer(64)
    probe = RouteProbe(router.observe, packer)
    probe.start(probe_samples(groups()))
    assert router.passes == 2
    assert packer.sizes == [[LENGTHS[0]], [sum(LENGTHS[:3])]], "7 + 2 + 5 live tokens, and 10 more would not fit"
    assert len(probe.state_dict()["tokens"]) == 3


def test_answers_without_a_verdict_or_a_live_token_are_left_out():
    router = Router()
    mixed, plain = RouteProbe(router.observe, Packer(64)), RouteProbe(router.observe, Packer(64))
    mixed.start(probe_samples([*groups(), *groups(status="error"), *groups(live=False)]))
    plain.start(probe_samples(groups()))
    router.move(1, 0.5)
    assert to_floats(mixed.measure()) == to_floats(plain.measure())


@pytest.mark.parametrize("nothing", [[], groups(status="error"), groups(live=False)])
def test_without_a_sequence_there_is_no_probe(nothing):
    router = Router()
    probe = RouteProbe(router.observe, Packer(64))
    probe.start(probe_samples(nothing))
    assert probe.measure() == {}
    assert probe.state_dict() == {}
    assert router.passes == 0


def test_before_the_start_there_is_no_probe():
    assert RouteProbe(Router().observe, Packer(64)).measure() == {}


@pytest.mark.parametrize("budget", [64, 20, 12])
def test_a_resumed_run_measures_the_same_whatever_its_micro_batches(budget):
    """`batch.max_tokens_per_microbatch` may change on resume; the tokens that are compared must not."""
    router = Router()
    probe = probe_of(router, budget=64)
    router.move(1, 0.4)
    probe.measure()
    state = json.loads(json.dumps(probe.state_dict(), allow_nan=False))  # as a checkpoint holds it

    packer = Packer(budget)
    resumed = RouteProbe(router.observe, packer)
    resumed.load_state_dict(state)
    assert (len(packer.sizes[0]) == 1) == (budget == 64)
    router.move(2, 0.4)
    expected, found = to_floats(probe.measure()), to_floats(resumed.measure())
    assert expected["route_long/set_change"] > 0
    assert found == expected
    assert resumed.state_dict() == probe.state_dict()


def test_a_large_model_keeps_fewer_sequences(monkeypatch):
    """What step 0 leaves in memory and in every checkpoint is bounded, at whole sequences and at least one."""
    live = [len(group.trajectories[0].token_ids) - 1 for group in groups()]
    for budget, kept in ((10**9, len(live)), (live[0] + live[1], 2), (1, 1)):
        monkeypatch.setattr("moerl.probe.MAX_LOG_PROBS", budget * LAYERS * EXPERTS)
        assert len(probe_of(Router()).state_dict()["tokens"]) == kept


def test_an_empty_state_is_no_probe():
    probe = RouteProbe(Router().observe, Packer(64))
    probe.load_state_dict({})
    assert probe.measure() == {}
