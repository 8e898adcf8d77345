"""Loss aggregation as one constant v_i per sequence, fixed over the whole minibatch: all micro-batches, all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moerl.algorithms.checks import check_tokens
from moerl.algorithms.compose import SAME_AGGREGATION
from moerl.algorithms.registries import aggregations
from moerl.config.schema import AlgorithmSection


@dataclass(frozen=True)
class Lengths:
    """Live tokens of every sequence of a minibatch."""

    tokens: Tensor
    """[n] float64, at least 1 (rows without tokens are zeroed later)."""
    live: Tensor
    """[n] bool: has a live token."""
    group_ids: Tensor
    """[n] int64."""

    @property
    def num_tokens(self) -> float:
        """N_tok, at least 1."""
        return max(float(self.tokens[self.live].sum()), 1.0)

    def num_seqs(self, *, count_empty: bool) -> float:
        """N_seq, at least 1; with `count_empty` sequences without a live token count too."""
        return max(float(len(self.live) if count_empty else self.live.sum()), 1.0)


def build_aggregation(node: Mapping[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """`(lengths, group_ids) -> v_i` of the aggregation `node`, which is read and checked once (`sequence_weights`)."""
    plugin, cfg = aggregations.resolve(node, where="algorithm.aggregation")

    def weigh(lengths: Tensor, group_ids: Tensor) -> Tensor:
        live = lengths > 0
        seen = Lengths(lengths.to(torch.float64).clamp(min=1.0), live, group_ids)
        return torch.where(live, plugin.target(seen, cfg), 0.0)

    return weigh


def sequence_weights(node: Mapping[str, Any], lengths: Tensor, group_ids: Tensor) -> Tensor:
    """v_i [n] float64 of the aggregation `node`; 0 for sequences without live tokens, which count nowhere.

    Args:
        node: `{name: token_mean}` and the like.
        lengths: [n] int64, live tokens of each sequence of the minibatch.
        group_ids: [n] int64; any labels, groups of any size.

    Raises:
        ConfigError: unknown aggregation or argument.
    """
    return build_aggregation(node)(lengths, group_ids)


def term_weights(cfg: AlgorithmSection, lengths: Tensor, group_ids: Tensor, task_rewards: Tensor) -> dict[str, Tensor]:
    """v_i [n] float64 of the terms that have weights of their own: `nll`, over good answers alone, and those set apart.

    Args:
        cfg: the algorithm section.
        lengths: [n] int64, live tokens of each sequence of the minibatch.
        group_ids: [n] int64.
        task_rewards: [n], before shaping: what makes an answer good.
    """
    terms = cfg.term_aggregation
    nodes = {"kl": terms.kl, "entropy": terms.entropy, "value": terms.value}
    weights = {
        name: sequence_weights(node, lengths, group_ids)
        for name, node in nodes.items()
        if node["name"] != SAME_AGGREGATION
    }
    if cfg.positive_nll.coefficient:
        node = cfg.aggregation if terms.nll["name"] == SAME_AGGREGATION else terms.nll
        good = torch.where(task_rewards > cfg.positive_nll.threshold, lengths, 0)
        weights["nll"] = sequence_weights(node, good, group_ids)
    return weights


@dataclass(frozen=True)
class NoArguments:
    """No arguments."""


@dataclass(frozen=True)
class SequencesConfig:
    """Which sequences a mean over sequences counts."""

    count_empty: bool = False
    """Also those without a live token (TRL, ROLL)."""


@dataclass(frozen=True)
class FixedDenominatorConfig(SequencesConfig):
    """Constant length of Dr. GRPO."""

    tokens: int = 0
    """F, the generation budget, the same over the whole training: `${rollout.max_new_tokens}`."""
    per_sequence: bool = True
    """False divides by F alone (ROLL's and DCPO's repository)."""

    def __post_init__(self) -> None:
        check_tokens("algorithm.aggregation.tokens", self.tokens, "${rollout.max_new_tokens}")


def _everywhere(lengths: Lengths, value: float) -> Tensor:
    return torch.full_like(lengths.tokens, value)


@aggregations.register("token_mean", NoArguments)
def token_mean(lengths: Lengths, cfg: NoArguments) -> Tensor:
    """1 / N_tok."""
    return _everywhere(lengths, 1.0 / lengths.num_tokens)


@aggregations.register("seq_mean_token_mean", SequencesConfig)
def seq_mean_token_mean(lengths: Lengths, cfg: SequencesConfig) -> Tensor:
    """1 / (N_seq n_i)."""
    return 1.0 / (lengths.num_seqs(count_empty=cfg.count_empty) * lengths.tokens)


@aggregations.register("seq_mean_token_sum", SequencesConfig)
def seq_mean_token_sum(lengths: Lengths, cfg: SequencesConfig) -> Tensor:
    """1 / N_seq."""
    return _everywhere(lengths, 1.0 / lengths.num_seqs(count_empty=cfg.count_empty))


@aggregations.register("fixed_denominator", FixedDenominatorConfig)
def fixed_denominator(lengths: Lengths, cfg: FixedDenominatorConfig) -> Tensor:
    """1 / (N_seq F)."""
    count = lengths.num_seqs(count_empty=cfg.count_empty) if cfg.per_sequence else 1.0
    return _everywhere(lengths, 1.0 / (count * cfg.tokens))


@aggregations.register("prompt_mean", NoArguments, whole_groups=True)
def prompt_mean(lengths: Lengths, cfg: NoArguments) -> Tensor:
    """1 / (N_grp N_tok(group)); a group must lie within one minibatch."""
    _, index = lengths.group_ids.unique(return_inverse=True)
    live_tokens = torch.where(lengths.live, lengths.tokens, 0.0)
    per_group = torch.zeros(int(index.max()) + 1 if len(index) else 0, dtype=torch.float64, device=index.device)
    per_group = per_group.index_add(0, index, live_tokens)
    num_groups = max(float((per_group > 0).sum()), 1.0)
    return 1.0 / (num_groups * per_group.clamp(min=1.0)[index])


@aggregations.register("seq_sum_token_mean", NoArguments)
def seq_sum_token_mean(lengths: Lengths, cfg: NoArguments) -> Tensor:
    """1 / n_i."""
    return 1.0 / lengths.tokens


@aggregations.register("token_sum", NoArguments)
def token_sum(lengths: Lengths, cfg: NoArguments) -> Tensor:
    """1."""
    return torch.ones_like(lengths.tokens)
