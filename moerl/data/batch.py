"""Samples and a plan to this rank's `StepBatch` of flat tensors. Weights are fixed here, over the whole minibatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from moerl.errors import DataError
from moerl.types import MicroBatch, PackedSupport, PackPlan, Sample, StepBatch, TokenWeights

TermWeigh = Callable[[np.ndarray, np.ndarray, np.ndarray], Mapping[str, np.ndarray]]
"""(live lengths [n] int64, group ids [n] int64, task rewards [n] float64) of one minibatch, all ranks -> weights [n] of
the terms of `TokenWeights` that have their own."""

Weigh = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(live lengths [n] int64, group ids [n] int64) of one minibatch, all ranks -> weight of each live token [n]
(aggregation)."""


def build_step_batch(
    samples: Sequence[Sample],
    plan: PackPlan,
    *,
    dp_rank: int,
    weigh: Weigh,
    device: torch.device | str,
    policy_version: int,
    weigh_terms: TermWeigh | None = None,
) -> StepBatch:
    """Tensors of `dp_rank`'s share of `plan`; `samples[i]` has `sample_id` i. Only this rank's routes are opened.

    Raises:
        DataError: a sample whose columns disagree in length, or that cannot be trained on; names the sample and the
        column.
    """
    for position, sample in enumerate(samples):
        _check(sample, position)
    live = np.array([int(s.loss_mask.sum()) for s in samples], dtype=np.int64)
    groups = np.array([s.group_id for s in samples], dtype=np.int64)
    tasks = np.array([s.reward - s.shaping for s in samples], dtype=np.float64)
    minibatches = []
    num_score = 0
    unseen = set(range(len(samples)))
    for index, ranks in enumerate(plan.assignment):
        members = np.array(sorted(plan.minibatch_samples(index)), dtype=np.int64)
        if unseen:
            num_score = index + 1
            unseen.difference_update(members.tolist())
        own = {"policy": weigh(live[members], groups[members])}
        if weigh_terms is not None:
            own.update(weigh_terms(live[members], groups[members], tasks[members]))
        shares = {term: _spread(values, members, len(samples)) for term, values in own.items()}
        minibatches.append(
            tuple(
                _pack([samples[i] for i in micro], shares, device) if micro else filler(device)
                for micro in ranks[dp_rank]
            )
        )
    if unseen:
        raise DataError(f"the plan leaves out samples {sorted(unseen)[:10]}; it was made for another step")
    return StepBatch(
        minibatches=tuple(minibatches),
        num_score_minibatches=num_score,
        policy_version=policy_version,
        num_samples=len(samples),
        num_tokens=sum(len(s.token_ids) for s in samples),
        num_live_tokens=int(live.sum()),
    )


def filler(device: torch.device | str) -> MicroBatch:
    """A micro-batch without a sample."""
    whole, real = (torch.zeros(0, dtype=dtype, device=device) for dtype in (torch.int64, torch.float32))
    return MicroBatch(
        sample_ids=(),
        token_ids=whole,
        position_ids=whole,
        cu_seqlens=torch.zeros(1, dtype=torch.int32, device=device),
        seq_ids=whole,
        group_ids=whole,
        rewards=real,
        mask=torch.zeros(0, dtype=torch.bool, device=device),
        rollout_logprobs=real,
        advantages=real,
        temperature=real,
        weights=TokenWeights.shared(real),
    )


def split_updates(
    minibatch: tuple[MicroBatch, ...], updates: int, update_of: Callable[[Tensor], Tensor]
) -> list[tuple[MicroBatch, ...]]:
    """One minibatch per optimizer update; weights stay those of all its tokens.

    `update_of`: old logprobs [t] -> in which update each token trains.
    """
    if updates == 1:
        return [minibatch]
    parts: list[list[MicroBatch]] = [[] for _ in range(updates)]
    for micro in minibatch:
        assert micro.old_logprobs is not None
        chosen = update_of(micro.old_logprobs)
        for index, part in enumerate(parts):
            part.append(replace(micro, mask=micro.mask & (chosen == index)))
    return [tuple(part) for part in parts]


def token_weights(
    shares: Mapping[str, np.ndarray], sample_ids: Sequence[int], lengths: np.ndarray, mask: np.ndarray
) -> dict[str, np.ndarray]:
    """[t] float64 of every term: `shares` [term] -> [samples], spread over the live tokens of a pack."""
    return {term: np.repeat(values[list(sample_ids)], lengths) * mask for term, values in shares.items()}


def as_token_weights(arrays: Mapping[str, Tensor]) -> TokenWeights:
    """Terms that have no tensor of their own share the policy's."""
    policy = arrays["policy"]
    return TokenWeights(policy, *(arrays.get(term, policy) for term in ("kl", "entropy", "value", "nll")))


def _spread(values: np.ndarray, members: np.ndarray, count: int) -> np.ndarray:
    shares = np.zeros(count, dtype=np.float64)
    shares[members] = values
    return shares


def _check(sample: Sample, position: int) -> None:
    name = f"sample {position} (prompt {sample.prompt_id})"
    if sample.sample_id != position:
        raise DataError(f"{name}: has sample_id {sample.sample_id}; samples must be in the order of their ids")
    length = len(sample.token_ids)
    if length == 0:
        raise DataError(f"{name}: has no tokens")
    columns = {
        "loss_mask": sample.loss_mask,
        "rollout_logprobs": sample.rollout_logprobs,
        "advantages": sample.advantages,
        "has_route": sample.has_route,
        "routed_experts": sample.routed_experts,
    }
    for column, value in columns.items():
        if value is not None and value.shape[0] != length:
            raise DataError(
                f"{name}: {column} has {value.shape[0]} entries and token_ids has {length}; they must agree"
            )
    if sample.support is not None and len(sample.support.offsets) != length + 1:
        raise DataError(
            f"{name}: support has {len(sample.support.offsets)} offsets, needs {length + 1} for {length} tokens"
        )
    if sample.top_logprobs is not None:
        ids, logprobs = sample.top_logprobs.ids.shape, sample.top_logprobs.logprobs.shape
        if len(ids) != 2 or ids[0] != length or logprobs != ids:
            raise DataError(f"{name}: top logprobs have ids {ids} and values {logprobs}; both must be ({length}, k)")
    if bool(sample.loss_mask[0]):
        raise DataError(f"{name}: its first token is in the loss, but nothing comes before it that could predict it")
    if not sample.temperature > 0:
        raise DataError(f"{name}: temperature is {sample.temperature}; training needs one above 0")


def _pack(samples: Sequence[Sample], shares: Mapping[str, np.ndarray], device: torch.device | str) -> MicroBatch:
    lengths = np.array([len(s.token_ids) for s in samples], dtype=np.int64)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    mask = np.concatenate([s.loss_mask for s in samples]).astype(bool)
    weights = token_weights(shares, [s.sample_id for s in samples], lengths, mask)
    routes, has_route = _routes(samples)
    top = _top_logprobs(samples)

    def put(values: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device=device, dtype=dtype)

    return MicroBatch(
        sample_ids=tuple(s.sample_id for s in samples),
        token_ids=put(np.concatenate([s.token_ids for s in samples]), torch.int64),
        position_ids=put(np.concatenate([np.arange(n) for n in lengths]), torch.int64),
        cu_seqlens=put(offsets, torch.int32),
        seq_ids=put(np.repeat(np.arange(len(samples)), lengths), torch.int64),
        group_ids=put(np.array([s.group_id for s in samples]), torch.int64),
        rewards=put(np.array([s.reward for s in samples], dtype=np.float64), torch.float32),
        mask=put(mask, torch.bool),
        rollout_logprobs=put(np.concatenate([s.rollout_logprobs for s in samples]), torch.float32),
        advantages=put(np.concatenate([s.advantages for s in samples]), torch.float32),
        temperature=put(np.repeat([float(s.temperature) for s in samples], lengths), torch.float32),
        weights=as_token_weights({term: put(values, torch.float32) for term, values in weights.items()}),
        routes=None if routes is None else torch.from_numpy(routes).to(device),  # as small as it came
        has_route=None if has_route is None else put(has_route, torch.bool),
        support=_support(samples, put),
        rollout_top_ids=None if top is None else put(top[0], torch.int64),
        rollout_top_logprobs=None if top is None else put(top[1], torch.float32),
    )


def _routes(samples: Sequence[Sample]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """([t, l, k], [t] bool) where every sample of the micro-batch has routes, else nothing."""
    if any(s.routed_experts is None for s in samples):
        return None, None
    arrays, flags = [], []
    for sample in samples:
        assert sample.routed_experts is not None
        array = sample.routed_experts.open()
        if arrays and array.shape[1:] != arrays[0].shape[1:]:
            raise DataError(
                f"sample {sample.sample_id} (prompt {sample.prompt_id}): routes are [layers, experts per token] "
                f"{list(array.shape[1:])}, and {list(arrays[0].shape[1:])} in the others; all engines must run one "
                f"model"
            )
        flag = sample.has_route
        if flag is None:
            flag = np.ones(len(array), dtype=bool)
            flag[-1] = False  # the last token never went through a forward of the rollout
        arrays.append(array)
        flags.append(flag)
    return np.concatenate(arrays), np.concatenate(flags)


def _top_logprobs(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray] | None:
    """Ids [t, k] and logprobs [t, k] where the samples have any; rows of -1 for one without."""
    widths = {s.top_logprobs.ids.shape[1] for s in samples if s.top_logprobs is not None}
    if not widths:
        return None
    if len(widths) > 1:
        raise DataError(f"samples have {sorted(widths)} top logprobs a token; all engines must return the same number")
    shape = next(iter(widths))
    ids = [np.full((len(s.token_ids), shape), -1) if s.top_logprobs is None else s.top_logprobs.ids for s in samples]
    values = [
        np.full((len(s.token_ids), shape), -np.inf) if s.top_logprobs is None else s.top_logprobs.logprobs
        for s in samples
    ]
    return np.concatenate(ids), np.concatenate(values)


def _support(samples: Sequence[Sample], put: Callable[[np.ndarray, torch.dtype], Tensor]) -> PackedSupport | None:
    if all(s.support is None for s in samples):
        return None
    ids, counts = [], []
    for sample in samples:
        if sample.support is None:
            counts.append(np.zeros(len(sample.token_ids), dtype=np.int64))
        else:
            ids.append(sample.support.ids)
            counts.append(np.diff(sample.support.offsets))
    offsets = np.concatenate(([0], np.cumsum(np.concatenate(counts))))
    return PackedSupport(ids=put(np.concatenate(ids), torch.int64), offsets=put(offsets, torch.int64))
