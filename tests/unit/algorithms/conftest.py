"""Batch V: four sequences of ten live tokens with hand-checked losses and gradients, in float64."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from moerl.algorithms.aggregation import sequence_weights
from moerl.algorithms.objective import Objective, build_objective
from moerl.algorithms.types import LossInputs
from moerl.config.schema import AlgorithmSection
from moerl.metrics import to_floats
from moerl.types import TokenWeights

sys.path.append(str(Path(__file__).parent))  # tests of this folder import the `oracle_*` files beside them

BUDGET = 4


def row(text: str) -> Tensor:
    return torch.tensor([float(number) for number in text.replace("|", " ").split()], dtype=torch.float64)


LENGTHS = torch.tensor([4, 2, 3, 1])
GROUPS = torch.tensor([0, 0, 1, 1])
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64)
OLD = row("-0.10 -2.30 -0.70 -1.20 | -0.50 -3.00 | -1.00 -0.05 -1.60 | -0.90")
NOW = row("-0.05 -1.70 -1.00 -1.00 | -0.05 -3.50 | -1.25 -0.03 -1.25 | -1.50")
ROLLOUT = row("-0.12 -3.20 -0.66 -1.21 | -0.47 -1.80 | -1.00 -0.06 -1.70 | -1.20")
REF = row("-0.10 -2.50 -0.60 -1.20 | -0.20 -2.90 | -1.00 -0.05 -1.70 | -0.70")
TOKENS = ("old_logprobs", "ref_logprobs", "router_shift", "topk_logprobs", "rollout_topk")
"""Optional fields of the batch with one row per token."""


def with_another_token(logprobs: Tensor) -> Tensor:
    """[t] -> [t, 3]: one other token that has half of the rest, the sampled one, and a column that is not there."""
    other = torch.log(0.5 * -torch.expm1(logprobs))
    return torch.stack([other, logprobs, torch.full_like(logprobs, -torch.inf)], 1)


GAMMA = row(".95 .70 .90 .99 | .85 .60 | 1 .92 .97 | .50")


def resolved(value: Any) -> Any:
    """A preset's values with the generation budget filled in, as the configuration would."""
    if isinstance(value, Mapping):
        return {key: resolved(item) for key, item in value.items()}
    if isinstance(value, list):
        return [resolved(item) for item in value]
    return BUDGET if value == "${rollout.max_new_tokens}" else value


@functools.cache
def _built(values: str) -> tuple[AlgorithmSection, Objective]:
    merged = OmegaConf.merge(OmegaConf.structured(AlgorithmSection), json.loads(values))
    cfg = OmegaConf.to_object(merged)
    assert isinstance(cfg, AlgorithmSection)
    return cfg, build_objective(cfg)


def built(values: Mapping[str, Any]) -> tuple[AlgorithmSection, Objective]:
    return _built(json.dumps(resolved(values)))


def inputs(
    logprobs: Tensor,
    *,
    aggregation: Mapping[str, Any],
    dtype: torch.dtype = torch.float64,
    advantages: Tensor | None = None,
    rows: slice = slice(None),
    **changed: Tensor,
) -> LossInputs:
    """`LossInputs` of batch V, or of its sequences `rows`; the weights are always those of the whole batch."""
    seq_ids = torch.repeat_interleave(torch.arange(4), LENGTHS)
    picked = torch.arange(4)[rows]
    tokens = torch.isin(seq_ids, picked)
    fields = {"old_logprobs": OLD, "ref_logprobs": REF, "rollout_logprobs": ROLLOUT, "router_shift": GAMMA}
    fields |= {"topk_logprobs": with_another_token(NOW), "rollout_topk": with_another_token(ROLLOUT), **changed}
    fields = {
        name: values[tokens].to(dtype) if values.dtype.is_floating_point else values for name, values in fields.items()
    }
    weight = sequence_weights(aggregation, LENGTHS, GROUPS)[seq_ids][tokens].to(dtype)
    token_advantages = ADVANTAGES[seq_ids] if advantages is None else advantages
    return LossInputs(
        logprobs=logprobs[tokens],
        rollout_logprobs=fields.pop("rollout_logprobs"),
        advantages=token_advantages[tokens].to(dtype),
        mask=torch.ones(int(tokens.sum()), dtype=torch.bool),
        weights=TokenWeights.shared(weight),
        seq_ids=seq_ids[tokens] - picked[0],
        num_seqs=len(picked),
        constants={},
        optional={**{name: fields[name] for name in TOKENS}, "group_ids": GROUPS[rows]},
    )


@dataclass
class BatchV:
    """Runs objectives on the batch."""

    resolved = staticmethod(resolved)
    with_another_token = staticmethod(with_another_token)
    inputs = staticmethod(inputs)
    now: Tensor = field(default_factory=lambda: NOW)
    old: Tensor = field(default_factory=lambda: OLD)
    rollout: Tensor = field(default_factory=lambda: ROLLOUT)
    ref: Tensor = field(default_factory=lambda: REF)
    gamma: Tensor = field(default_factory=lambda: GAMMA)
    lengths: Tensor = field(default_factory=lambda: LENGTHS)
    groups: Tensor = field(default_factory=lambda: GROUPS)
    sequence_advantages: Tensor = field(default_factory=lambda: ADVANTAGES)

    def objective(self, values: Mapping[str, Any]) -> Objective:
        return built(values)[1]

    def run(
        self, values: Mapping[str, Any], logprobs: Tensor | None = None, **changed: Any
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Loss, dL/dlp [10] and metrics of the objective of `values`; `changed` goes to `inputs`."""
        cfg, objective = built(values)
        leaf = (NOW if logprobs is None else logprobs).clone().requires_grad_()
        loss, metrics = objective(inputs(leaf, aggregation=cfg.aggregation, **changed))
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient, to_floats(metrics)


@pytest.fixture
def batch_v() -> BatchV:
    return BatchV()
