"""Laws of the cut of a pack into rows, for any lengths, sizes and cuts; megatron's rotation as the judge of places."""

from __future__ import annotations

import importlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.data.batch import filler
from moerl.data.packing import plan_packing
from moerl.mcore.local_spec import packed_layout
from moerl.mcore.model import score_tokens, unwrap
from moerl.mcore.rows import AUTO, FILLED, NONE, WHOLE, ZIGZAG, RowCut, plan_rows, predictions
from moerl.types import PackedSupport

rope_utils = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=9)
CONTEXT = st.sampled_from([1, 2, 3, 4])
TENSOR = st.sampled_from([1, 2, 3, 4])
CUT = st.sampled_from([ZIGZAG, WHOLE, AUTO])


def bounds(lengths):
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def every_rank(lengths, context, tensor, context_cut=ZIGZAG):
    return [plan_rows(bounds(lengths), RowCut(rank, context, tensor, context_cut)) for rank in range(context)]


def megatrons_positions(rank, context, num_rows, angles):
    """What megatron's rotation takes of `angles` for a sequence with `num_rows` rows on this rank."""
    return rope_utils._get_thd_freqs_on_this_cp_rank(rank, context, torch.empty(num_rows), angles)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, CONTEXT, TENSOR, CUT)
def test_every_token_is_on_one_rank_and_finds_its_way_back(lengths, context, tensor, context_cut):
    ranks = every_rank(lengths, context, tensor, context_cut)
    total = sum(lengths)
    values = torch.rand(total, 3)
    together = torch.cat([plan.carry(values) for plan in ranks])
    assert torch.equal(ranks[0].by_token(together), values)
    tokens = torch.cat([plan.token for plan in ranks])
    assert torch.equal(tokens[tokens != NONE].sort().values, torch.arange(total))
    sizes = {len(plan.token) for plan in ranks}
    assert len(sizes) == 1
    assert sizes.pop() % tensor == 0
    assert len(tokens) == ranks[0].num_rows
    assert len({plan.is_whole for plan in ranks}) == 1
    if context_cut != WHOLE:
        assert ranks[0].num_rows - total < len(lengths) * ranks[0].cut.sequence_multiple + ranks[0].cut.pack_multiple
    assert sorted(torch.cat([plan.turn[plan.is_filler] for plan in ranks]).tolist()) == list(range(len(tokens) - total))


@settings(max_examples=200, deadline=None)
@given(LENGTHS, CONTEXT, TENSOR)
def test_whole_sequences_lie_on_one_rank_each_in_order(lengths, context, tensor):
    starts = bounds(lengths).tolist()
    found, loads = [], []
    for plan in every_rank(lengths, context, tensor, WHOLE):
        assert plan.is_whole
        cuts = plan.cu_seqlens.tolist()
        assert cuts[-1] == len(plan.token)
        assert torch.equal(plan.sequence, torch.repeat_interleave(torch.arange(len(cuts) - 1), plan.cu_seqlens.diff()))
        pieces = [plan.token[first:last].tolist() for first, last in itertools.pairwise(cuts)]
        for piece, (first, last) in zip(pieces, itertools.pairwise(cuts), strict=True):
            assert plan.position[first:last].tolist() == list(range(last - first))
            if NONE in piece:
                assert set(piece) == {NONE}
            else:
                found.append(piece)
        loads.append(sum(len(piece) for piece in pieces if NONE not in piece))
    expected = [list(range(first, last)) for first, last in itertools.pairwise(starts)]
    assert sorted(found) == expected
    assert max(loads) - min(loads) <= max(lengths), "the longest go first, each to the rank with the fewest tokens"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=40), st.sampled_from([2, 3, 4, 8]), TENSOR)
def test_short_sequences_stay_whole_where_that_saves_rows(lengths, context, tensor):
    zigzag, whole, chosen = (every_rank(lengths, context, tensor, cut)[0] for cut in (ZIGZAG, WHOLE, AUTO))
    assert not zigzag.is_whole
    saves = whole.num_rows < zigzag.num_rows > (1 + FILLED) * sum(lengths)
    assert chosen.is_whole == saves
    assert torch.equal(chosen.token, (whole if saves else zigzag).token)


@pytest.mark.parametrize(
    ("lengths", "stays_whole"),
    [
        ([4096] * 2, False),
        ([4095] * 2, False),
        ([9, 9], True),
        ([9, 40], False),
        ([1], False),
        ([30] * 8 + [31] * 8, True),
    ],
)
def test_which_packs_keep_their_sequences_whole(lengths, stays_whole):
    """Long ones are cut, though they fit; so are short ones that no deal balances."""
    assert every_rank(lengths, 2, 1, AUTO)[0].is_whole == stays_whole


@pytest.mark.parametrize("context_cut", [ZIGZAG, WHOLE, AUTO])
@pytest.mark.parametrize("context", [1, 2, 3, 4])
@pytest.mark.parametrize("tensor", [1, 2, 3, 4])
def test_a_filler_has_rows_for_every_rank_and_no_token(context, tensor, context_cut):
    batch = filler("cpu")
    ranks = [plan_rows(batch.cu_seqlens, RowCut(rank, context, tensor, context_cut)) for rank in range(context)]
    for plan in ranks:
        assert plan.num_tokens == 0
        assert plan.num_rows == max(plan.cut.pack_multiple, 1) == context * len(plan.token)
        assert len(plan.token) % tensor == 0
        assert bool(plan.is_filler.all())
        assert plan.cu_seqlens.tolist() == [0, len(plan.token) if plan.is_whole else plan.num_rows]
        asked = predictions(batch, plan)
        assert len(asked.targets) == len(asked.temperature) == len(plan.token)
        assert bool((asked.temperature == 1).all())
        scores = torch.rand(plan.num_rows, 2, requires_grad=True)
        by_token = plan.by_predicted(scores, batch.position_ids)
        assert by_token.shape == (0, 2)
        by_token.sum().backward()
        assert bool((scores.grad == 0).all())
    together = torch.cat([plan.carry(torch.rand(0, 3)) for plan in ranks])
    assert ranks[0].by_token(together).shape == (0, 3)
    routes, _ = ranks[0].replayed(torch.zeros(0, 2, 3, dtype=torch.int64), None, num_experts=5)
    assert routes.shape == (len(ranks[0].token), 2, 3)
    assert all(len(set(chosen)) == 3 for row in routes.tolist() for chosen in row)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.sampled_from([2, 3, 4]), TENSOR)
def test_rank_r_has_chunks_r_and_its_mirror_of_every_sequence(lengths, context, tensor):
    for rank, plan in enumerate(every_rank(lengths, context, tensor)):
        expected = []
        start = 0
        for length in lengths:
            padded = -(-length // (2 * context)) * 2 * context
            tokens = np.where(np.arange(padded) < length, start + np.arange(padded), NONE)
            chunks = np.split(tokens, 2 * context)
            expected += [*chunks[rank], *chunks[2 * context - 1 - rank]]
            start += length
        assert plan.token[: len(expected)].tolist() == expected
        assert bool((plan.token[len(expected) :] == NONE).all())


@settings(max_examples=100, deadline=None)
@given(LENGTHS, CONTEXT, TENSOR)
def test_causal_attention_costs_every_rank_the_same(lengths, context, tensor):
    costs = {int((plan.position + 1).sum()) for plan in every_rank(lengths, context, tensor)}
    assert len(costs) == 1


@settings(max_examples=100, deadline=None)
@given(LENGTHS, CONTEXT, TENSOR, CUT)
def test_megatron_rotates_every_row_by_its_position(lengths, context, tensor, context_cut):
    for rank, plan in enumerate(every_rank(lengths, context, tensor, context_cut)):
        layout = packed_layout(plan, use_te=False)
        assert layout.cu_seqlens_q_padded.tolist() == [0, plan.num_rows]
        assert layout.angles is not None
        assert len(layout.angles) == plan.num_rows
        found = megatrons_positions(rank, context, len(plan.token), layout.angles)
        assert torch.equal(found, plan.position)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, CONTEXT, TENSOR)
def test_transformer_engine_is_given_bounds_that_every_chunk_divides(lengths, context, tensor):
    for rank, plan in enumerate(every_rank(lengths, context, tensor)):
        layout = packed_layout(plan, use_te=True)
        sizes = layout.cu_seqlens_q.diff()
        assert bool((sizes % plan.cut.sequence_multiple == 0).all())
        assert int(layout.cu_seqlens_q[-1]) == plan.num_rows
        if context > 1:
            assert torch.equal(layout.cu_seqlens_q_padded, layout.cu_seqlens_q)
            rotated = [
                megatrons_positions(rank, context, size // context, torch.arange(size)) for size in sizes.tolist()
            ]
            assert torch.equal(torch.cat(rotated), plan.position)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, CONTEXT, TENSOR, CUT)
def test_rows_without_a_token_take_the_experts_in_turn(lengths, context, tensor, context_cut):
    experts, topk, layers = 5, 2, 3
    total = sum(lengths)
    routes = torch.randint(0, experts, (total, layers, topk))
    has_route = torch.rand(total) < 0.5
    ranks = every_rank(lengths, context, tensor, context_cut)
    parts = [plan.replayed(routes, has_route, experts) for plan in ranks]
    together = torch.cat([carried for carried, _ in parts])
    assert torch.equal(ranks[0].by_token(together), routes)
    assert torch.equal(ranks[0].by_token(torch.cat([present for _, present in parts])), has_route)
    filler = torch.cat([plan.is_filler for plan in ranks])
    assert bool(torch.cat([present for _, present in parts])[filler].all())
    counts = torch.bincount(together[filler][:, 1].flatten(), minlength=experts)
    assert int(counts.max() - counts.min()) <= 1


@pytest.mark.parametrize("context_cut", [ZIGZAG, WHOLE])
@pytest.mark.parametrize(("context", "tensor"), [(1, 1), (1, 4), (2, 1), (2, 2), (3, 2), (4, 1)])
def test_what_a_row_predicts_is_the_token_after_its_own(kit, context, tensor, context_cut):
    """Labels are looked up in the whole pack: at the border of a chunk the next token is on another rank."""
    lengths = [7, 1, 12, 5, 2]
    micro = kit.make_micro(lengths)
    counts = torch.arange(micro.num_tokens) % 3
    ids = torch.arange(int(counts.sum()))
    object.__setattr__(micro, "support", PackedSupport(ids, torch.cat([torch.zeros(1).long(), counts.cumsum(0)])))
    object.__setattr__(micro, "temperature", 1 + torch.rand(micro.num_tokens))
    object.__setattr__(micro, "rollout_top_ids", torch.arange(2 * micro.num_tokens).view(-1, 2))
    ranks = every_rank(lengths, context, tensor, context_cut)
    made = [predictions(micro, plan) for plan in ranks]
    plan, follows = ranks[0], (micro.position_ids > 0)[:, None]

    def returned(parts):
        return plan.by_predicted(torch.cat(parts).float(), micro.position_ids)

    assert torch.equal(returned([one.targets[:, None] for one in made]), (micro.token_ids[:, None] * follows).float())
    assert torch.equal(returned([one.temperature[:, None] for one in made]), micro.temperature[:, None] * follows)
    assert torch.equal(returned([one.top_ids for one in made]), (micro.rollout_top_ids * follows).float())
    sums = []
    for one in made:
        rows = torch.repeat_interleave(torch.arange(len(one.targets)), one.support.offsets.diff())
        sums.append(torch.zeros(len(one.targets)).index_add(0, rows, one.support.ids.float())[:, None])
    owners = torch.repeat_interleave(torch.arange(micro.num_tokens), counts)
    expected = torch.zeros(micro.num_tokens).index_add(0, owners, ids.float())[:, None] * follows
    assert torch.equal(returned(sums), expected)


@pytest.fixture(scope="module")
def policy(kit, tiny_folder):
    return kit.make_policy(tiny_folder)


def test_rows_that_fill_up_change_no_score_and_no_gradient(kit, policy):
    micro = kit.make_micro([6, 13, 8])
    chunk = policy._runner._chunks[0]

    def scores(cut):
        plan = plan_rows(micro.cu_seqlens, cut)
        unwrap(chunk).routes.begin(plan, None, None, observe=False)
        policy._optimizer.zero_grad()
        found = score_tokens(chunk, micro, plan)
        (found[0] * micro.weights.policy).sum().backward()
        grads = {name: p.main_grad.clone() for name, p in chunk.named_parameters()}
        return plan, found.detach(), grads

    plain, padded = scores(RowCut()), scores(RowCut(tensor_size=8))
    assert (plain[0].num_rows, padded[0].num_rows) == (27, 32)
    assert (padded[1] - plain[1]).abs().max() < 2e-6
    for name, grad in plain[2].items():
        assert (padded[2][name] - grad).abs().max() <= 2e-6 * grad.abs().max() + 1e-9, name


def spread(kind, count=256):
    """Tokens of samples as the demo has them (prompt and answer), and as answers of a reasoning model."""
    rng = np.random.default_rng(0)
    if kind == "demo":
        return (8 + rng.integers(0, 8, count) + np.clip(rng.gamma(2.5, 8, count), 4, 44)).astype(int).tolist()
    return (200 + np.clip(rng.lognormal(6.6, 0.8, count), 16, 7000)).astype(int).tolist()


@pytest.mark.parametrize(
    ("kind", "budget", "cut", "most"),
    [
        ("demo", 4096, RowCut(0, 1, 1), 0.0),
        ("demo", 4096, RowCut(0, 1, 2), 0.002),
        ("demo", 256, RowCut(0, 1, 2), 0.004),
        ("demo", 4096, RowCut(0, 2, 1), 0.06),
        ("demo", 4096, RowCut(0, 2, 2), 0.06),
        ("demo", 16384, RowCut(0, 2, 1, AUTO), 0.005),
        ("demo", 4096, RowCut(0, 2, 1, AUTO), 0.005),
        ("demo", 4096, RowCut(0, 2, 2, AUTO), 0.005),
        ("demo", 4096, RowCut(0, 4, 1, AUTO), 0.02),
        ("demo", 1024, RowCut(0, 2, 1, AUTO), 0.02),
        ("long", 16384, RowCut(0, 2, 2, AUTO), 0.002),
        ("long", 16384, RowCut(0, 1, 8), 0.001),
        ("long", 16384, RowCut(0, 2, 2), 0.002),
        ("long", 16384, RowCut(0, 4, 2), 0.004),
        ("long", 16384, RowCut(0, 8, 8), 0.01),
    ],
)
def test_share_of_rows_without_a_token(kind, budget, cut, most):
    """Only the cut adds rows: none for data, expert and pipeline ranks, and few where sequences are cut in chunks."""
    lengths = spread(kind)
    groups = [i // 8 for i in range(len(lengths))]
    plan = plan_packing(
        lengths,
        groups,
        lengths,
        dp_size=2,
        num_minibatches=2,
        num_epochs=1,
        max_tokens_per_microbatch=budget,
        seed=0,
    )
    rows = tokens = 0
    for ranks in plan.assignment:
        assert len({len(rank) for rank in ranks}) == 1
        loads = [sum(lengths[s] for micro in rank for s in micro) for rank in ranks]
        assert max(loads) <= 1.02 * min(loads)
        for micro in (micro for rank in ranks for micro in rank):
            made = plan_rows(bounds([lengths[s] for s in micro]), cut)
            rows, tokens = rows + made.num_rows, tokens + made.num_tokens
    assert tokens == sum(lengths)
    fraction = 1 - tokens / rows
    assert fraction <= most
