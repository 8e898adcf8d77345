"""The product under test: methods by name, built once for all tests, and their loss inputs cut into micro-batches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import oracle_methods
import torch
from omegaconf import OmegaConf
from oracle_batches import tensors
from oracle_numbers import Batch
from torch import Tensor

import moerl
from moerl.algorithms import presets as moerl_presets
from moerl.algorithms.types import PER_SEQUENCE_FIELDS, LossInputs
from moerl.api import BUDGET_KEY, Method
from moerl.api_credit import BatchCredit
from moerl.config.schema import AlgorithmSection
from moerl.data.token_batch import TokenBatch
from moerl.types import TokenWeights

PRESETS = sorted(oracle_methods.METHODS)
WEIGHT_TERMS = tuple(f.name for f in dataclasses.fields(TokenWeights))


def of_axes(axes: Mapping[str, Any]) -> Method:
    """Axes over the schema's defaults; `moerl.objective(**axes)` without the rest of a configuration, in a fifth of
    the time.
    """
    section = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(AlgorithmSection), axes))
    assert isinstance(section, AlgorithmSection)
    return moerl.objective(section)


@functools.cache
def preset(name: str) -> Method:
    return of_axes(_with_budget(moerl_presets.PRESETS[name].values))


def _with_budget(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_budget(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_budget(item) for item in value]
    return oracle_methods.BUDGET if value == BUDGET_KEY else value


@functools.cache
def case(name: str) -> Method:
    """A preset, or a case of `oracle_methods`."""
    return preset(name) if name in oracle_methods.METHODS else of_axes(oracle_methods.CASES[name][0])


def loss_inputs(method: Method, batch: Batch, dtype: torch.dtype = torch.float64) -> LossInputs:
    """What the objective sees of a whole minibatch, credit done; the advantages are made from the rewards."""
    packed = TokenBatch.from_tensors(tensors(batch, dtype, skip=("advantages",)))
    micro, _ = BatchCredit(method.section, method.objective)(packed)
    columns = {**packed.columns, "group_ids": micro.group_ids, "rewards": micro.rewards}
    return LossInputs(
        logprobs=packed.logprobs.detach(),
        rollout_logprobs=packed.columns["rollout_logprobs"],
        advantages=micro.advantages,
        mask=micro.mask,
        weights=micro.weights,
        seq_ids=packed.seq_ids,
        num_seqs=packed.num_seqs,
        constants=micro.constants,
        optional={name: columns[name] for name in method.objective.needs},
    )


def part(x: LossInputs, rows: list[int]) -> tuple[LossInputs, Tensor]:
    """The sequences `rows` in this order, each with its weights of the whole; and where their tokens are in `x`."""
    at = torch.cat([(x.seq_ids == i).nonzero()[:, 0] for i in rows])
    lengths = torch.tensor([int((x.seq_ids == i).sum()) for i in rows])
    cut = dataclasses.replace(
        x,
        logprobs=x.logprobs[at],
        rollout_logprobs=x.rollout_logprobs[at],
        advantages=x.advantages[at],
        mask=x.mask[at],
        weights=TokenWeights(*(getattr(x.weights, term)[at] for term in WEIGHT_TERMS)),
        seq_ids=torch.repeat_interleave(torch.arange(len(rows)), lengths),
        num_seqs=len(rows),
        optional={
            name: values[torch.tensor(rows)] if name in PER_SEQUENCE_FIELDS else values[at]
            for name, values in x.optional.items()
        },
    )
    return cut, at


def evaluate(method: Method, x: LossInputs) -> tuple[Tensor, Tensor, dict]:
    """Loss, gradient [t] and metrics of one micro-batch."""
    leaf = x.logprobs.detach().clone().requires_grad_()
    loss, metrics = method.objective(dataclasses.replace(x, logprobs=leaf))
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient, metrics
