"""The facts of the step-0 contract: what follows from a near tie is not judged, whatever precedes it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moerl.mcore.agreement import rollout_agreement
from moerl.mcore.moe_stats import keep_choice
from moerl.mcore.router_replay import Observation
from moerl.mcore.step import MicroResult

LAYERS, EXPERTS, TOPK = 3, 6, 2
LENGTHS = [8, 6]
TIE = 1e-6


@pytest.fixture
def sides(kit):
    """A batch and the learner's view of it, in full agreement."""
    micro = kit.make_micro(LENGTHS)
    selection = torch.rand(sum(LENGTHS), LAYERS, EXPERTS, generator=torch.Generator().manual_seed(1))
    own = selection.topk(TOPK).indices
    engine = torch.where(micro.mask, -2.0, 0.0)
    batch = replace(micro, routes=own.flip(-1), has_route=micro.position_ids >= 0, rollout_logprobs=engine)
    return batch, engine.clone(), Observation(own, selection.log_softmax(-1), selection)


def look(batch, logprobs, seen):
    kept = keep_choice(batch, seen, tuple(range(LAYERS)))
    result = MicroResult(logprobs, torch.zeros_like(logprobs), kept, None, {})
    return {name: metric.value() for name, metric in rollout_agreement([batch], [result]).items()}


def tie(seen, row, layer, margin):
    """The learner's last expert there, and the next: the engine took the next, `margin` behind."""
    order = seen.selection[row, layer].argsort(descending=True)
    last, following = order[TOPK - 1], order[TOPK]
    seen.selection[row, layer, following] = seen.selection[row, layer, last] - margin
    return torch.stack([order[0], following])


def test_agreement_is_nothing_apart(sides):
    assert look(*sides) == {"contract/logp_gap": 0.0, "contract/route_margin": 0.0, "contract/judged_fraction": 1.0}


def test_a_logprob_is_judged_as_it_is(sides):
    batch, logprobs, seen = sides
    logprobs[5] += 1e-5
    assert look(batch, logprobs, seen)["contract/logp_gap"] == pytest.approx(1e-5, rel=0.02)


def test_what_follows_from_a_near_tie_is_not_judged(sides):
    batch, logprobs, seen = sides
    row = 4
    batch.routes[row, 1] = tie(seen, row, 1, TIE)
    batch.routes[row, 2] = tie(seen, row, 2, 0.1)  # the layer above saw another input
    batch.routes[row + 2, 2] = tie(seen, row + 2, 2, 0.1)  # and so did a later row, through attention
    logprobs[row + 1 : LENGTHS[0]] += 0.5
    found = look(batch, logprobs, seen)
    assert found["contract/logp_gap"] == 0.0
    assert found["contract/route_margin"] == pytest.approx(TIE, rel=0.1)
    live = batch.mask.float()
    assert found["contract/judged_fraction"] == pytest.approx(float(1 - live[row + 1 : LENGTHS[0]].sum() / live.sum()))


def test_a_route_below_or_before_a_near_tie_is_judged(sides):
    batch, logprobs, seen = sides
    batch.routes[4, 1] = tie(seen, 4, 1, TIE)
    for row, layer in ((5, 1), (5, 0), (3, 2), (9, 2)):
        routes = batch.routes.clone()
        routes[row, layer] = tie(seen, row, layer, 0.1)
        found = look(replace(batch, routes=routes), logprobs, seen)
        assert found["contract/route_margin"] == pytest.approx(0.1, rel=1e-4), (row, layer)


@pytest.mark.parametrize("at", [4, LENGTHS[0] + 3])
def test_a_logprob_before_a_near_tie_or_in_another_sequence_is_judged(sides, at):
    batch, logprobs, seen = sides
    batch.routes[4, 0] = tie(seen, 4, 0, TIE)
    assert batch.mask[at]
    logprobs[at] += 0.3
    assert look(batch, logprobs, seen)["contract/logp_gap"] == pytest.approx(0.3, rel=1e-4)


def test_a_row_without_a_route_differs_from_nothing(sides):
    batch, logprobs, seen = sides
    batch.routes[4, 1] = tie(seen, 4, 1, 0.1)
    batch.has_route[4] = False
    assert look(batch, logprobs, seen)["contract/route_margin"] == 0.0


def test_not_a_number_is_not_agreement(sides):
    batch, logprobs, seen = sides
    logprobs[5] = torch.nan
    assert not look(batch, logprobs, seen)["contract/logp_gap"] <= 1.0


def test_an_engine_without_routes_cannot_be_judged(sides):
    batch, logprobs, seen = sides
    assert look(replace(batch, routes=None), logprobs, seen) == {}
