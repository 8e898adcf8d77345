"""Routes in and out: record, replay, fall-back, recomputation, and the router-shift factor."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from moerl.mcore.moe_stats import keep_choice

LAYERS, EXPERTS, TOPK = 2, 7, 3
NEEDS_OLD = frozenset({"old_logprobs"})
RECOMPUTE = ["none", "selective", "full"]


def distance(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.fixture(scope="module")
def micro(kit):
    return kit.with_routes(kit.make_micro([5, 1, 17, 9]), LAYERS, EXPERTS, TOPK)


def step_of(kit, *micros):
    return kit.make_step(*[[micro] for micro in micros])


def oracle_logprobs(model, micro, routes):
    """Transformers with its routers' choice replaced by `routes` [t, l, k], one sequence at a time."""
    moe_layers = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    found = []
    bounds = micro.cu_seqlens.tolist()
    for start, stop in pairwise(bounds):
        handles = [
            mlp.gate.register_forward_hook(
                lambda _module, _inputs, out, chosen=routes[start:stop, i]: (out[0], *forced(out[0], chosen))
            )
            for i, mlp in enumerate(moe_layers)
        ]
        ids = micro.token_ids[start:stop][None]
        with torch.no_grad():
            logq = torch.log_softmax(model(ids).logits[0], -1)
        found += [logq.new_zeros(1), logq[:-1].gather(-1, ids[0, 1:, None])[:, 0]]
        for handle in handles:
            handle.remove()
    return torch.cat(found)


def forced(logits, chosen):
    q = logits if torch.allclose(logits.sum(-1), torch.ones(())) else torch.softmax(logits, -1)
    gates = q.gather(-1, chosen)
    return gates / gates.sum(-1, keepdim=True), chosen


def test_foreign_routes_decide_the_forward_and_rows_without_one_fall_back(kit, tiny_folder, hf_model, micro):
    policy = kit.make_policy(tiny_folder, routing="R3")
    predicts = torch.nonzero(micro.mask)[:, 0] - 1
    has_route = micro.has_route.clone()
    has_route[predicts[::4]] = False
    holed = replace(micro, has_route=has_route)
    scored, metrics = policy.score(step_of(kit, holed, replace(holed, sample_ids=(4, 5, 6, 7))), NEEDS_OLD)
    old = scored.minibatches[0][0]
    assert (old.old_logprobs - policy.logprobs(micro)).abs().max() > 1e-2
    effective = torch.where(has_route[:, None, None], micro.routes, old.old_routes)
    assert (old.old_logprobs - oracle_logprobs(hf_model, micro, effective)).abs().max() < 1e-5
    covered = 1 - len(predicts[::4]) / len(predicts)
    assert metrics["route/replay_coverage"].value() == pytest.approx(covered)


def test_rows_without_a_route_use_the_own_choice(kit, tiny_folder, micro):
    policy = kit.make_policy(tiny_folder, routing="R3")
    none = replace(micro, has_route=torch.zeros_like(micro.has_route))
    scored, metrics = policy.score(step_of(kit, none, replace(none, sample_ids=(4, 5, 6, 7))), NEEDS_OLD)
    assert torch.equal(scored.minibatches[0][0].old_logprobs, policy.logprobs(micro))
    assert metrics["route/replay_coverage"].value() == 0


@pytest.mark.parametrize("routing", ["none", "R2", "R3"])
def test_first_minibatch_sees_the_scored_logprobs_to_the_bit(kit, tiny_folder, micro, routing):
    policy = kit.make_policy(tiny_folder, routing=routing, recompute="selective")
    other = kit.with_routes(kit.make_micro([6, 8], first_id=4, seed=1), LAYERS, EXPERTS, TOPK)
    scored, _ = policy.score(step_of(kit, micro, other), NEEDS_OLD)
    assert policy.update(scored, kit.SequenceRatio())["contract/ratio_deviation"].value() == 0.0


@pytest.mark.parametrize("routing", ["R2", "R3"])
def test_recomputation_replays_the_routes_of_its_own_micro_batch(kit, tiny_folder, micro, routing):
    other = kit.with_routes(kit.make_micro([6, 8], first_id=4, seed=1), LAYERS, EXPERTS, TOPK, seed=9)
    found = {}
    for mode in RECOMPUTE:
        policy = kit.make_policy(tiny_folder, routing=routing, recompute=mode)
        # R2 replays what the score pass recorded: foreign routes there make a wrong replay visible.
        micros = [replace(m, old_routes=m.routes) if routing == "R2" else m for m in (micro, other)]
        found[mode] = policy.gradients(micros, kit.Nll())
    scale = max(float(g.abs().max()) for g in found["none"].values())
    assert distance(found["none"], found["selective"]) < 1e-6 * max(1.0, scale)
    assert distance(found["none"], found["full"]) < 1e-6 * max(1.0, scale)
    own = kit.make_policy(tiny_folder, recompute="full").gradients([micro, other], kit.Nll())
    assert distance(found["none"], own) > 1e-3


def test_backward_may_run_in_any_order(kit, tiny_folder, micro):
    """F0 F1 B1 B0, which no first-in-first-out list of routes survives, through the schedule's own forward step."""
    from moerl.mcore.model import unwrap
    from moerl.mcore.step import _Pass

    other = kit.with_routes(kit.make_micro([6, 8, 18], first_id=4, seed=1), LAYERS, EXPERTS, TOPK, seed=9)
    policy = kit.make_policy(tiny_folder, routing="R3", recompute="full")
    (chunk,) = policy._runner._chunks
    chunk.train()

    def run(schedule):
        policy._optimizer.zero_grad()
        work = _Pass([micro, other], lambda batch: (batch.routes, batch.has_route), policy.parallel, keep=None, scale=1)
        outputs = {}
        for action, i in schedule:
            if action == "F":
                outputs[i] = work.forward_step(iter([i]), chunk)[0][0].sum()
            else:
                outputs.pop(i).backward()
        return {name: tensor.main_grad.clone() for name, tensor in policy._weights.local.items()}

    one_by_one = run([("F", 0), ("B", 0), ("F", 1), ("B", 1)])
    scale = max(float(g.abs().max()) for g in one_by_one.values())
    for order in ((0, 1), (1, 0)):
        both = run([("F", 0), ("F", 1), *(("B", i) for i in order)])
        assert distance(one_by_one, both) < 1e-6 * scale
    unwrap(chunk).routes.release()


def test_replaying_own_routes_changes_nothing(kit, tiny_folder, micro):
    own = kit.make_policy(tiny_folder)
    (stats,) = own._runner.forward([micro], lambda _: (None, None), keep=keep_choice)
    routed = replace(micro, routes=stats.kept["own_routes"].long(), has_route=None)
    replay = kit.make_policy(tiny_folder, routing="R3")
    assert distance(replay.gradients([routed], kit.Nll()), own.gradients([micro], kit.Nll())) == 0.0
    _, metrics = own.score(step_of(kit, routed, replace(routed, sample_ids=(4, 5, 6, 7))), NEEDS_OLD)
    assert metrics["route/set_change"].value() == 0
    assert metrics["route/max_margin_of_changed"].value() == 0


def test_routers_learn_through_replayed_routes(kit, tiny_folder, micro):
    policy = kit.make_policy(tiny_folder, routing="R3")
    grads = policy.gradients([micro], kit.Nll())
    assert all(grads[f"model.layers.{i}.mlp.gate.weight"].abs().max() > 1e-4 for i in (0, 2))


def test_two_models_in_one_process_do_not_share_routes(kit, tiny_folder, micro):
    first, second = kit.make_policy(tiny_folder, routing="R3"), kit.make_policy(tiny_folder)
    before = second.logprobs(micro)
    first.gradients([micro], kit.Nll())
    assert torch.equal(second.logprobs(micro), before)


def test_own_choice_is_observed_under_replay(kit, tiny_folder, micro):
    """`old_routes` is the router's own top-k whatever was replayed; layer 0 sees the same input in both runs."""
    pair = (micro, replace(micro, sample_ids=(4, 5, 6, 7)))
    replayed, _ = kit.make_policy(tiny_folder, routing="R3").score(step_of(kit, *pair), NEEDS_OLD)
    plain, _ = kit.make_policy(tiny_folder).score(step_of(kit, *pair), NEEDS_OLD)
    a, b = replayed.minibatches[0][0].old_routes, plain.minibatches[0][0].old_routes
    assert torch.equal(a[:, 0], b[:, 0])
    assert not torch.equal(a[:, 1].sort(-1).values, b[:, 1].sort(-1).values)


def test_route_metrics_are_aligned_to_predictions(kit, tiny_folder):
    """Only the row that predicts a live token counts: foreign experts on other rows leave `route/*` at zero."""
    policy = kit.make_policy(tiny_folder)
    micro = kit.make_micro([9, 12])
    (seen,) = policy._runner.forward([micro], lambda _: (None, None), keep=keep_choice)
    own = seen.kept["own_routes"].long()
    live_rows = torch.nonzero(micro.mask)[:, 0] - 1
    foreign = (own + 1) % EXPERTS
    routes = foreign.clone()
    routes[live_rows] = own[live_rows].flip(-1)
    pair = [replace(micro, routes=routes), replace(micro, routes=routes, sample_ids=(2, 3))]
    _, metrics = policy.score(step_of(kit, *pair), NEEDS_OLD)
    assert metrics["route/set_change"].value() == 0
    routes[live_rows[0]] = foreign[live_rows[0]]
    _, metrics = policy.score(step_of(kit, *[replace(m, routes=routes) for m in pair]), NEEDS_OLD)
    assert metrics["route/set_change"].value() == pytest.approx(1 / len(live_rows))
    assert metrics["route/max_margin_of_changed"].value() > 0


class ShiftProbe:
    """Keeps the router-shift factor that it was given."""

    needs = frozenset({"old_logprobs", "router_shift"})

    def __init__(self):
        self.seen = []

    def __call__(self, x):
        self.seen.append(x.router_shift)
        return -(x.weights.policy * torch.where(x.mask, x.logprobs, 0)).sum(), {}


@pytest.mark.parametrize("routing", ["none", "R3"])
def test_router_shift_is_one_before_a_step_and_the_closed_form_after_it(kit, tiny_folder, micro, routing):
    policy = kit.make_policy(tiny_folder, routing=routing, router_shift=True, optim={"lr": 0.02})
    probe = ShiftProbe()
    pair = (micro, replace(micro, sample_ids=(4, 5, 6, 7)))
    scored, _ = policy.score(step_of(kit, *pair), NEEDS_OLD | {"router_shift"})
    metrics = policy.update(scored, probe)
    first, second = probe.seen
    assert torch.equal(first, torch.ones_like(first))
    assert not second.requires_grad
    assert (second[micro.position_ids > 0] < 1).all()
    # What the second minibatch saw: the weights after one step. Rebuild them and compute gamma by hand.
    again = kit.make_policy(tiny_folder, routing=routing, router_shift=True, optim={"lr": 0.02})
    one, _ = again.score(step_of(kit, *pair), NEEDS_OLD | {"router_shift"})
    again.update(replace(one, minibatches=one.minibatches[:1], num_score_minibatches=1), ShiftProbe())
    replay = (micro.routes, micro.has_route) if routing == "R3" else (None, None)
    (now,) = again._runner.forward([micro], lambda _: replay, keep=lambda _, seen, layers: {"log_q": seen.log_probs})
    used = one.minibatches[0][0].old_routes.long()
    if routing == "R3":
        used = torch.where(micro.has_route[:, None, None], micro.routes, used)
    gap = now.kept["log_q"].gather(-1, used) - one.minibatches[0][0].old_router_logprobs
    gamma = torch.exp(-gap.abs().mean((1, 2)))
    expected = torch.where(micro.position_ids > 0, gamma.roll(1), 1.0)
    assert (second - expected).abs().max() < 1e-5
    assert metrics["route_update/gamma_mean"].value() < 1


def test_routes_of_another_model_are_refused(kit, tiny_folder, micro):
    from moerl.errors import DataError

    policy = kit.make_policy(tiny_folder, routing="R3")
    with pytest.raises(DataError, match="name 2 experts a token, but the model routes to 3"):
        policy.gradients([replace(micro, routes=micro.routes[:, :, :2])], kit.Nll())
    with pytest.raises(DataError, match="have 1 layers, but the model has 2 MoE layers"):
        policy.gradients([replace(micro, routes=micro.routes[:, :1])], kit.Nll())
    with pytest.raises(DataError, match="R3, but the samples carry no routes"):
        policy.gradients([replace(micro, routes=None)], kit.Nll())
