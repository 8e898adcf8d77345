"""Laws of the packing plan, for any lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moerl.data.packing import plan_packing
from moerl.errors import DataError


def plan(lengths, group_ids=None, live=None, **options):
    defaults = {"dp_size": 1, "num_minibatches": 1, "num_epochs": 1, "max_tokens_per_microbatch": 100, "seed": 0}
    groups = list(range(len(lengths))) if group_ids is None else group_ids
    return plan_packing(lengths, groups, lengths if live is None else live, **{**defaults, **options})


@st.composite
def steps(draw):
    dp_size = draw(st.integers(1, 4))
    num_groups = draw(st.integers(1, 12))
    group_size = dp_size * draw(st.integers(1, 3))
    groups = [g for g in range(num_groups) for _ in range(group_size)]
    lengths = draw(st.lists(st.integers(1, 100), min_size=len(groups), max_size=len(groups)))
    dead = draw(st.sets(st.integers(0, num_groups - 1)))
    live = [0 if group in dead else length for group, length in zip(groups, lengths, strict=True)]
    options = {
        "dp_size": dp_size,
        "num_minibatches": draw(st.integers(1, 5)),
        "num_epochs": draw(st.integers(1, 3)),
        "max_tokens_per_microbatch": draw(st.integers(100, 300)),
        "seed": draw(st.integers(0, 2**31)),
    }
    return lengths, groups, live, options


@settings(max_examples=150)
@given(steps())
def test_laws(step):
    lengths, groups, live, options = step
    made = plan(lengths, groups, live, **options)
    assert made == plan(lengths, groups, live, **options)
    num_epochs = options["num_epochs"]
    assert len(made.assignment) % num_epochs == 0
    per_epoch = len(made.assignment) // num_epochs
    live_groups = {g for g, n in zip(groups, live, strict=True) if n}
    assert per_epoch == min(options["num_minibatches"], max(len(live_groups), 1))
    for epoch in range(num_epochs):
        own = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        samples = [s for m in own for s in made.minibatch_samples(m)]
        assert sorted(samples) == list(range(len(lengths)))
        members = [{groups[s] for s in made.minibatch_samples(m)} for m in own]
        assert sum(len(m) for m in members) == len(set(groups)), "a group was split"
        sizes = [len(m & live_groups) for m in members]
        assert max(sizes) - min(sizes) <= 1
        assert max(len(m) for m in members) - min(len(m) for m in members) <= 1
    home = {}
    for index, ranks in enumerate(made.assignment):
        for rank, micros in enumerate(ranks):
            assert all(home.setdefault(s, rank) == rank for micro in micros for s in micro), "what was scored elsewhere"
        assert len(ranks) == options["dp_size"]
        assert len({len(rank) for rank in ranks}) == 1
        micros = [micro for rank in ranks for micro in rank]
        assert all(sum(lengths[s] for s in micro) <= options["max_tokens_per_microbatch"] for micro in micros)
        assert all(not any(rank[rank.index(()) :]) for rank in ranks if () in rank), "fillers come last"
        if () in micros and index < per_epoch:
            assert all(len(micro) <= 1 for micro in micros), "only where samples run out"


@settings(max_examples=150)
@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=40),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(100, 200),
    st.integers(1, 4),
)
def test_any_sizes_give_a_lawful_plan_whose_minibatches_are_those_of_one_rank(
    lengths, dp_size, multiple, budget, wanted
):
    options = {"num_minibatches": wanted, "max_tokens_per_microbatch": budget}
    alone = plan(lengths, **options)
    made = plan(lengths, **options, dp_size=dp_size, microbatch_multiple=multiple)
    assert len(made.assignment) == len(alone.assignment)
    for index, ranks in enumerate(made.assignment):
        members = made.minibatch_samples(index)
        assert sorted(members) == sorted(alone.minibatch_samples(index))
        (count,) = {len(rank) for rank in ranks}
        assert count % multiple == 0
        # no more rounds than the budget asks for, or than a sample each would take
        assert (count - multiple) * dp_size < len(members)
        assert len(ranks) == dp_size
        assert all(sum(lengths[s] for s in micro) <= budget for rank in ranks for micro in rank)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=8, max_size=60), st.integers(1, 4))
def test_load_is_balanced(lengths, dp_size):
    """Longest-first: the heaviest rank without its shortest sample is no heavier than the lightest."""
    assume(len(lengths) % dp_size == 0)
    made = plan(lengths, dp_size=dp_size, max_tokens_per_microbatch=10_000)
    shares = [[lengths[s] for micro in rank for s in micro] for rank in made.assignment[0]]
    heaviest = max(shares, key=sum)
    assert sum(heaviest) - min(heaviest) <= min(sum(share) for share in shares)


def test_as_few_micro_batches_as_the_budget_allows():
    made = plan([50, 50, 50, 50, 30, 30, 30], max_tokens_per_microbatch=100)
    assert len(made.assignment[0][0]) == 3, "even filling would need four"
    assert len(plan([50, 50, 50, 50], max_tokens_per_microbatch=100).assignment[0][0]) == 2


def test_shuffling_differs_by_epoch_and_seed():
    lengths = [10] * 40
    made = plan(lengths, num_minibatches=2, num_epochs=2)
    assert set(made.minibatch_samples(0)) != set(made.minibatch_samples(2))
    assert made != plan(lengths, num_minibatches=2, num_epochs=2, seed=1)


def test_minibatches_are_not_without_a_live_token():
    made = plan([10] * 6, live=[10, 0, 0, 0, 10, 0], num_minibatches=4)
    assert len(made.assignment) == 2
    assert [len(made.minibatch_samples(m)) for m in range(2)] == [3, 3]
    assert len(plan([10] * 6, live=[0] * 6, num_minibatches=4).assignment) == 1


def test_fillers_where_ranks_would_stay_empty():
    made = plan([10] * 3, dp_size=4, num_minibatches=2)
    assert sorted(len([rank for rank in ranks if rank == ((),)]) for ranks in made.assignment) == [2, 3]
    (ranks,) = plan([5], dp_size=2).assignment
    assert ranks == (((0,),), ((),))
    (ranks,) = plan([5], microbatch_multiple=2).assignment
    assert ranks == (((0,), ()),)


def test_one_filler_where_samples_fill_their_micro_batches():
    """127 samples above half of the budget, as of one failed episode, for eight ranks."""
    (ranks,) = plan([60] * 127, dp_size=8).assignment
    assert [len(rank) for rank in ranks] == [16] * 8
    assert sum(micro == () for rank in ranks for micro in rank) == 1


def test_no_filler_where_samples_can_be_spread():
    (ranks,) = plan([60, 60, 60, 10], dp_size=2).assignment
    assert [len(rank) for rank in ranks] == [2, 2]
    assert all(micro for rank in ranks for micro in rank)


def test_pairs_are_what_ranks_share():
    pairs = [i // 2 for i in range(6)]
    (ranks,) = plan([10] * 6, pairs, atoms=pairs, dp_size=4).assignment
    assert sorted(micro for rank in ranks for micro in rank) == [(), (0, 1), (2, 3), (4, 5)]


def test_refusals_name_both_numbers():
    with pytest.raises(DataError, match=r"sample 1 has 101 tokens and batch\.max_tokens_per_microbatch is 100"):
        plan([5, 101])
    with pytest.raises(DataError, match="without samples"):
        plan([])


def test_atoms_share_a_micro_batch_and_everything_is_still_trained_on_once():
    rng = np.random.default_rng(3)
    lengths = rng.integers(2, 30, size=24).tolist()
    pairs = [i // 2 for i in range(24)]
    made = plan(lengths, pairs, atoms=pairs, max_tokens_per_microbatch=70, num_minibatches=3, dp_size=2)
    micros = [set(micro) for ranks in made.assignment for rank in ranks for micro in rank]
    assert sorted(sample for micro in micros for sample in micro) == list(range(24))
    assert all(({2 * i, 2 * i + 1} & micro) in (set(), {2 * i, 2 * i + 1}) for micro in micros for i in range(12))
    assert all(sum(lengths[s] for s in micro) <= 70 for micro in micros)


def test_atoms_of_one_change_nothing():
    lengths, groups = [5, 9, 3, 7, 2, 8], [0, 0, 1, 1, 2, 2]
    assert plan(lengths, groups, atoms=list(range(6))) == plan(lengths, groups)


def test_an_atom_above_the_budget_says_what_to_raise():
    with pytest.raises(DataError, match=r"samples \[0, 1\] must share a micro-batch and have 12 tokens"):
        plan([6, 6], [0, 0], atoms=[0, 0], max_tokens_per_microbatch=8)
