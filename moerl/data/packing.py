"""From lengths alone: which sample goes to which minibatch, rank and micro-batch. The same on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from moerl.errors import DataError
from moerl.types import PackPlan

_Ranks = tuple[tuple[tuple[int, ...], ...], ...]
"""[data-parallel ranks][micro-batches] -> samples, of one minibatch."""


def plan_packing(  # noqa: PLR0913 the numbers of one step, each named by its caller
    lengths: Sequence[int],
    group_ids: Sequence[int],
    live_lengths: Sequence[int],
    *,
    dp_size: int,
    num_minibatches: int,
    num_epochs: int,
    max_tokens_per_microbatch: int,
    seed: int,
    atoms: Sequence[int] | None = None,
    microbatch_multiple: int = 1,
) -> PackPlan:
    """Plan a step. Every sample is trained on once per epoch; none is dropped, none is split.

    Groups stay whole inside a minibatch and are dealt out anew, shuffled, in every epoch; groups with a live token
    and groups without are dealt apart, so minibatches hold (nearly) equal numbers of both. Each rank of a minibatch
    gets the same number of micro-batches, as few as longest-first filling finds within the budget, with nearly equal
    tokens side by side. Where there are fewer samples (or pairs) than micro-batches, the last ones of some ranks are
    fillers: micro-batches without a sample, `()`.

    A sample stays on the rank that has it in the first epoch, which alone has what the score pass found of it; in later
    epochs a rank with fewer samples than others of a minibatch has fillers.

    There are fewer than `num_minibatches` minibatches where there are fewer groups with a live token. Which samples
    make a minibatch depends on no layout.

    Args:
        lengths: [n] tokens of each sample, prompt included; the sample's id is its index.
        group_ids: [n].
        live_lengths: [n] tokens that the loss reads.
        dp_size: number of data-parallel ranks.
        num_minibatches: optimizer steps per epoch.
        num_epochs: passes over the samples.
        max_tokens_per_microbatch: budget of one forward.
        seed: of this step's shuffling.
        atoms: [n], or None: samples of one group with the same number share a micro-batch (pairs of an objective).
        microbatch_multiple: every rank's number of micro-batches is a multiple of this (interleaved pipelines).

    Raises:
        DataError: no samples, or a sample or atom above the budget.
    """
    _refuse_lengths(lengths, max_tokens_per_microbatch)
    if atoms is not None:
        _refuse_wide_atoms(atoms, lengths, max_tokens_per_microbatch)
    groups = _group_members(group_ids)
    live = [g for g, members in groups.items() if any(live_lengths[s] for s in members)]
    dead = [g for g in groups if g not in set(live)]
    multiple, budget = microbatch_multiple, max_tokens_per_microbatch
    count = min(num_minibatches, max(len(live), 1))
    rngs = [np.random.default_rng([seed % 2**63, epoch]) for epoch in range(num_epochs)]
    first, *others = [_deal(groups, live, dead, count, rng) for rng in rngs]
    share = partial(_share_out, lengths=lengths, dp_size=dp_size, multiple=multiple, budget=budget, atoms=atoms)
    plan = [share(hand) for hand in first]
    home = {s: rank for ranks in plan for rank, micros in enumerate(ranks) for micro in micros for s in micro}
    keep = partial(_keep_ranks, home=home, lengths=lengths, dp_size=dp_size, multiple=multiple, budget=budget)
    plan += [keep(hand, atoms=atoms) for hands in others for hand in hands]
    return PackPlan(tuple(plan))


def _refuse_lengths(lengths: Sequence[int], budget: int) -> None:
    if len(lengths) == 0:
        raise DataError("a step without samples cannot be packed; look at the filters and at reward errors")
    for sample, length in enumerate(lengths):
        if length > budget:
            raise DataError(
                f"sample {sample} has {length} tokens and batch.max_tokens_per_microbatch is {budget}; raise it, or "
                "lower data.max_prompt_tokens or rollout.max_new_tokens"
            )


def _refuse_wide_atoms(atoms: Sequence[int], lengths: Sequence[int], budget: int) -> None:
    for members in _group_members(atoms).values():
        total = sum(lengths[sample] for sample in members)
        if total > budget:
            raise DataError(
                f"samples {members} must share a micro-batch and have {total} tokens, but "
                f"batch.max_tokens_per_microbatch is {budget}; raise it to twice the longest sample"
            )


def _group_members(group_ids: Sequence[int]) -> dict[int, list[int]]:
    members: dict[int, list[int]] = {}
    for sample, group in enumerate(group_ids):
        members.setdefault(int(group), []).append(sample)
    return members


def _deal(
    groups: dict[int, list[int]], live: list[int], dead: list[int], count: int, rng: np.random.Generator
) -> list[list[int]]:
    """Deal shuffled groups like cards; groups without a live token go round the other way, to even out the rest."""
    hands: list[list[int]] = [[] for _ in range(count)]
    for pile, offset, direction in ((live, 0, 1), (dead, count - 1, -1)):
        for turn, index in enumerate(rng.permutation(len(pile))):
            hands[(offset + direction * turn) % count] += groups[pile[int(index)]]
    return hands


def _share_out(
    samples: list[int], lengths: Sequence[int], *, dp_size: int, multiple: int, budget: int, atoms: Sequence[int] | None
) -> _Ranks:
    """Micro-batch counts equal, with fillers where samples run out."""
    total = sum(lengths[s] for s in samples)
    fewest = -(-max(1, -(-total // (budget * dp_size))) // multiple) * multiple
    for per_rank in itertools.count(fewest, multiple):  # ends at the latest where every unit has a bin to itself
        bins = _bins(samples, lengths, count=per_rank * dp_size, budget=budget, atoms=atoms)
        if bins is not None:
            return _bins_to_ranks(bins, lengths, dp_size)
    raise AssertionError("counting has no end")


def _keep_ranks(
    samples: list[int],
    home: Mapping[int, int],
    lengths: Sequence[int],
    *,
    dp_size: int,
    multiple: int,
    budget: int,
    atoms: Sequence[int] | None,
) -> _Ranks:
    """As `_share_out`, with every sample on the rank that `home` says."""
    shares = [[s for s in samples if home[s] == rank] for rank in range(dp_size)]
    for per_rank in itertools.count(multiple, multiple):
        ranks = [_bins(share, lengths, count=per_rank, budget=budget, atoms=atoms) for share in shares]
        found = [bins for bins in ranks if bins is not None]
        if len(found) == dp_size:
            return tuple(_bins_to_ranks(bins, lengths, 1)[0] for bins in found)
    raise AssertionError("counting has no end")


def _bins(
    samples: list[int], lengths: Sequence[int], *, count: int, budget: int, atoms: Sequence[int] | None
) -> list[list[int]] | None:
    """`samples` in `count` bins, none empty while there are units; None where they do not go in."""
    units = _units(samples, atoms)
    sizes = {unit: sum(lengths[s] for s in members) for unit, members in units.items()}
    num_bins = min(count, len(units))
    for fill in (_fill_evenly, _fill_tightly):
        bins = fill(list(units), sizes, num_bins=num_bins, budget=budget)
        if all(members and sum(sizes[u] for u in members) <= budget for members in bins):
            filled = [[s for u in members for s in units[u]] for members in bins]
            return filled + [[] for _ in range(count - num_bins)]
    return None


def _units(samples: list[int], atoms: Sequence[int] | None) -> dict[int, list[int]]:
    """What cannot be parted, by its first sample."""
    if atoms is None:
        return {sample: [sample] for sample in samples}
    members: dict[int, list[int]] = {}
    for sample in samples:
        members.setdefault(atoms[sample], []).append(sample)
    return {min(one): one for one in members.values()}


def _fill_evenly(samples: list[int], lengths: Mapping[int, int], *, num_bins: int, budget: int) -> list[list[int]]:
    """Longest first, each into the lightest bin, whatever the budget: the best balance; no bin stays empty."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [0] * num_bins
    for sample in sorted(samples, key=lambda s: (-lengths[s], s)):
        lightest = min(range(num_bins), key=lambda b: (loads[b], len(bins[b]), b))
        bins[lightest].append(sample)
        loads[lightest] += lengths[sample]
    return bins


def _fill_tightly(samples: list[int], lengths: Mapping[int, int], *, num_bins: int, budget: int) -> list[list[int]]:
    """Longest first, each into the fullest bin with room: fits where even filling does not. No bin stays empty."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [0] * num_bins
    for sample in sorted(samples, key=lambda s: (-lengths[s], s)):
        with_room = [b for b in range(num_bins) if loads[b] + lengths[sample] <= budget]
        chosen = max(with_room, key=lambda b: (loads[b], -b), default=0)
        bins[chosen].append(sample)
        loads[chosen] += lengths[sample]
    for empty in (members for members in bins if not members):
        empty.append(max(bins, key=len).pop())
    return bins


def _bins_to_ranks(bins: list[list[int]], lengths: Sequence[int], dp_size: int) -> _Ranks:
    """Bins of like weight run side by side; within a round the rank with least so far takes the heaviest."""
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(dp_size)]
    totals = [0] * dp_size
    weighed = sorted(
        ((sum(lengths[s] for s in members), sorted(members)) for members in bins), key=lambda b: (-b[0], b[1])
    )
    for start in range(0, len(weighed), dp_size):
        order = sorted(range(dp_size), key=lambda r: (totals[r], r))
        for rank, (load, members) in zip(order, weighed[start : start + dp_size], strict=True):
            ranks[rank].append(tuple(members))
            totals[rank] += load
    return tuple(tuple(micro) for micro in ranks)
