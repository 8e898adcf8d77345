"""What routers saw over all experts lives as long as its micro-batch: memory does not grow with the number of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from moerl.errors import DataError

LAYERS, EXPERTS, TOPK = 2, 7, 3
LENGTHS = (5, 11, 17)
FEW, MANY = 2, 7


class OverExperts(TorchDispatchMode):
    """Bytes in memory of all tensors [x, layers, experts], views counted as what they are views of."""

    def __init__(self):
        super().__init__()
        self._storages = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.shape[1:] == (LAYERS, EXPERTS):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.peak = max(self.peak, self.alive())
        return out

    def alive(self):
        self._storages = {key: kept for key, kept in self._storages.items() if not kept[0].expired()}
        return sum(size for _, size in self._storages.values())


class Shift:
    """Reads all that routing can give."""

    needs = frozenset({"old_logprobs", "router_shift"})

    def __call__(self, x):
        gap = torch.where(x.mask, x.logprobs - x.old_logprobs, 0.0)
        return -(x.weights.policy * x.router_shift * gap.exp() * x.advantages).sum(), {}


def micros(kit, count, *, first=0):
    """As many packs of the same lengths."""
    found = [kit.make_micro(LENGTHS, first_id=len(LENGTHS) * (first + i), seed=first + i) for i in range(count)]
    return [kit.with_routes(micro, LAYERS, EXPERTS, TOPK, seed=i) for i, micro in enumerate(found)]


@pytest.mark.parametrize("routing", ["none", "R2", "R3"])
def test_a_score_pass_holds_one_micro_batch_however_many_there_are(kit, tiny_folder, routing):
    policy = kit.make_policy(tiny_folder, routing=routing)
    peaks = []
    for count in (FEW, MANY):
        step = kit.make_step(micros(kit, count), micros(kit, 1, first=count))
        with OverExperts() as memory:
            policy.score(step, Shift.needs)
        peaks.append(memory.peak)
    assert peaks[0] == peaks[1] >= sum(LENGTHS) * LAYERS * EXPERTS * 4


@pytest.mark.parametrize("objective", ["ratio", "shift"])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_last_minibatch_holds_one_micro_batch_however_many_it_has(kit, tiny_folder, objective, minibatches):
    """Beyond what the score pass left of it, which a device does not hold."""
    policy = kit.make_policy(tiny_folder)
    objective = {"ratio": kit.SequenceRatio, "shift": Shift}[objective]()
    peaks = []
    for count in (FEW, MANY):
        before = [micros(kit, 1, first=count)] * (minibatches - 1)
        with OverExperts() as memory:
            scored, _ = policy.score(kit.make_step(*before, micros(kit, count)), objective.needs)
            left = memory.peak = memory.alive()
            metrics = policy.update(scored, objective)
        peaks.append(memory.peak - left)
        was_scored = minibatches > 1 or "router_shift" in objective.needs
        assert ("route_update/kl" in metrics, "route/jaccard" in metrics) == (was_scored, not was_scored)
    assert peaks[0] == peaks[1] >= sum(LENGTHS) * LAYERS * EXPERTS * 4


def test_the_score_pass_leaves_the_live_rows_of_the_last_minibatch_alone(kit, tiny_folder):
    """One sample of a pack keeps itself, and not the pack."""
    policy = kit.make_policy(tiny_folder)
    packs = micros(kit, 3)
    bounds = packs[1].cu_seqlens.tolist()
    middle = slice(bounds[1], bounds[2])
    alone = replace(kit.make_micro([LENGTHS[1]]), sample_ids=packs[1].sample_ids[1:2], mask=packs[1].mask[middle])
    alone = kit.with_routes(replace(alone, token_ids=packs[1].token_ids[middle]), LAYERS, EXPERTS, TOPK)
    step = replace(kit.make_step(packs[:2], packs[2:], [alone]), num_score_minibatches=2)
    with OverExperts() as memory:
        scored, _ = policy.score(step, Shift.needs)
        assert memory.alive() == int(alone.mask.sum()) * LAYERS * EXPERTS * 4
        metrics = policy.update(scored, Shift())
    assert metrics["route_update/kl"].count == int(alone.mask.sum()) * LAYERS
    assert memory.alive() == 0


def test_tokens_masked_after_the_score_pass_leave_the_pair_and_unmasked_ones_are_refused(kit, tiny_folder):
    """The distances are those of a step whose tokens had the narrow mask all along."""
    found = []
    minibatches = [micros(kit, 1), micros(kit, 2, first=1)]

    def narrowed(batch):
        last = tuple(replace(micro, mask=micro.mask & (micro.position_ids % 3 != 1)) for micro in batch.minibatches[-1])
        return replace(batch, minibatches=(*batch.minibatches[:-1], last))

    for is_early in (True, False):
        policy = kit.make_policy(tiny_folder)
        step = kit.make_step(*minibatches)
        scored, _ = policy.score(narrowed(step) if is_early else step, Shift.needs)
        metrics = policy.update(narrowed(scored), Shift())
        found.append({name: metric.value() for name, metric in metrics.items() if name.startswith("route_update/")})
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    assert found[0]["route_update/kl"] > 0

    policy = kit.make_policy(tiny_folder)
    scored, _ = policy.score(narrowed(kit.make_step(*minibatches)), Shift.needs)
    last = zip(scored.minibatches[1], minibatches[1], strict=True)
    unmasked = tuple(replace(micro, mask=whole.mask) for micro, whole in last)
    with pytest.raises(DataError, match=r"sample 3 .* has 4 live tokens.*2 were live then.*only lose tokens after"):
        policy.update(replace(scored, minibatches=(scored.minibatches[0], unmasked)), Shift())


def test_routes_are_kept_as_small_as_their_experts_allow(kit, tiny_folder):
    from moerl.mcore.router_replay import compact

    scored, _ = kit.make_policy(tiny_folder).score(kit.make_step(micros(kit, 1), micros(kit, 1, first=1)), Shift.needs)
    assert scored.minibatches[0][0].old_routes.dtype == torch.uint8
    routes = torch.tensor([0, 255, 256, 511])
    assert torch.equal(compact(routes, 512).long(), routes)
    assert compact(routes, 512).dtype == torch.int16
