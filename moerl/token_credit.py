"""Credit that needs logprobs: between the score pass and the update, over the whole step and all ranks.

KL and entropy in the reward, GAE on a critic's values, removal of rejected tokens, whitening over tokens, the constants
of every minibatch, and the optimizer updates that a minibatch is made of. What ranks must know of one another travels
in one exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moerl.algorithms.adaptive import Coefficients
from moerl.algorithms.kl import kl_estimate
from moerl.algorithms.objective import Objective
from moerl.algorithms.returns import returns_to_go
from moerl.algorithms.segments import per_sequence
from moerl.algorithms.types import (
    CORRECTION_MEAN,
    ENTROPY_COEFFICIENT,
    ENTROPY_THRESHOLD,
    KL_COEFFICIENT,
    OLD_PASS,
    CreditInputs,
    LossInputs,
)
from moerl.algorithms.values import ValueCredit, on_last_token
from moerl.config.schema import EntropySection, KLSection
from moerl.credit import credit_inputs
from moerl.data.batch import TermWeigh, Weigh, as_token_weights, split_updates, token_weights
from moerl.metrics import Last, Mean, Metrics, Sum, merge_into, to_floats
from moerl.types import MicroBatch, Sample, StepBatch

ROW = ("minibatch", "sample", "live", "kl", "weight", "weighed")
TOKEN = ("minibatch", "sample", "advantage", "entropy")

Rows = dict[str, np.ndarray]
"""Columns [n] float64 of `ROW` or `TOKEN`."""


@dataclass(frozen=True)
class TokenRules:
    """The configured rules; `build.py` fills it from the algorithm section."""

    objective: Objective
    kl: KLSection
    entropy: EntropySection
    is_per_token: bool
    """The KL in the reward goes to tokens, not to the answer's reward."""
    removes: bool
    """Rejected tokens leave the batch."""
    teacher: float
    """Coefficient of the KL to a teacher in the advantage of each token; 0 is off."""
    values: ValueCredit | None
    """Advantages and returns from a critic's values; the samples' advantages are then their rewards."""
    whiten: Callable[[Tensor], Tensor] | None
    """Live tokens' advantages of the step [m] float64 -> [m]."""
    threshold: Callable[[Tensor], float] | None
    """Live tokens' old entropies of a minibatch [m] -> the constant `entropy_threshold`."""
    updates: int
    """Optimizer updates per minibatch."""
    update_of: Callable[[Tensor], Tensor]
    """Old logprobs [t] -> in which of them each token trains."""
    advantages: Callable[[CreditInputs], tuple[Tensor, Metrics]]
    reward_weights: Mapping[str, float]
    state: Mapping[str, Any]
    weigh: Weigh
    weigh_terms: TermWeigh

    @property
    def has_kl_reward(self) -> bool:
        """The KL to the reference is part of the reward."""
        return self.kl.place == "reward"

    @property
    def has_entropy_reward(self) -> bool:
        """The entropy is part of the advantage."""
        return self.entropy.place == "reward"

    @property
    def credits_anew(self) -> bool:
        """Group advantages must be made again from what the score pass found."""
        return self.values is None and (self.removes or (self.has_kl_reward and not self.is_per_token))

    @property
    def reads_tokens(self) -> bool:
        """Ranks must see one another's tokens, not only sums of sequences."""
        return self.whiten is not None or self.threshold is not None


@dataclass(frozen=True)
class _Look:
    """What this rank found in one micro-batch."""

    micro: MicroBatch
    """With the tokens masked that are removed."""
    extra: Tensor
    """[t] float64: what tokens get beside their sequence's advantage."""
    rows: Tensor
    """[n, row] float64."""
    tokens: Tensor
    """[m, token] float64, live tokens in order; empty where nobody reads them."""
    kl: Mean
    dropped: tuple[float, float]
    """Tokens that are removed, and sequences of which none is left."""
    teacher_kl: Mean


class TokenCredit:
    """Called once per step, on the scored batch."""

    def __init__(self, rules: TokenRules, exchange: Callable[[Tensor], list[Tensor]]) -> None:
        """`exchange` gives every data-parallel rank's flat float64 tensor, in rank order."""
        self.rules = rules
        self.coefficients = Coefficients.start(rules.kl, rules.entropy)
        self._exchange = exchange

    @property
    def is_adaptive(self) -> bool:
        """Has a memory."""
        return self.rules.kl.target is not None or self.rules.entropy.target is not None

    @property
    def needs(self) -> frozenset[str]:
        """What `Policy.score` must fill beside the objective's own needs."""
        rules = self.rules
        needs: set[str] = set()
        if rules.has_kl_reward or rules.teacher or rules.removes or rules.updates > 1 or self._wants(CORRECTION_MEAN):
            needs |= {OLD_PASS, "old_logprobs"}
        if rules.has_kl_reward:
            needs.add("ref_logprobs")
        if rules.teacher:
            needs.add("teacher_logprobs")
        if rules.has_entropy_reward or rules.threshold is not None:
            needs.add("old_entropy")
        return frozenset(needs)

    def __call__(
        self, batch: StepBatch, packed: Sequence[Sample], samples: Sequence[Sample]
    ) -> tuple[StepBatch, Metrics]:
        """The batch with final masks, advantages, weights and constants, cut into its optimizer updates.

        Args:
            batch: scored; its sample ids are positions in `packed`.
            packed: what was packed, in order; each with its `sample_id` in `samples`.
            samples: all samples of the step, those without a live token too.
        """
        rules = self.rules
        if not (self.needs or rules.reads_tokens or rules.values is not None or rules.objective.needs_constants):
            return batch, {}
        looks = [[self._look(m, micro) for micro in mini] for m, mini in enumerate(batch.minibatches)]
        rows, tokens = self._share([look for mini in looks for look in mini])
        anew = self._credit_anew(rows, packed, samples) if rules.credits_anew else None
        whitened = self._whitened(tokens, anew, batch.num_score_minibatches)
        weights = self._weights(rows, packed, len(looks)) if rules.removes else None
        minibatches = []
        for m, mini in enumerate(looks):
            constants = self._constants(m, rows, tokens)
            shares = None if weights is None else weights[m]
            done = tuple(replace(_finish(look, anew, whitened, shares), constants=constants) for look in mini)
            minibatches += split_updates(done, rules.updates, rules.update_of)
        first = rows["minibatch"] < batch.num_score_minibatches
        result = replace(
            batch,
            minibatches=tuple(minibatches),
            num_score_minibatches=batch.num_score_minibatches * rules.updates,
            num_live_tokens=int(rows["live"][first].sum()),
        )
        return result, self._metrics(looks[: batch.num_score_minibatches])

    def adapt(self, metrics: Metrics) -> None:
        """After the update: coefficients with a target follow what was measured."""
        kl, entropy = self.rules.kl, self.rules.entropy
        if not self.is_adaptive:
            return
        values = to_floats(metrics)
        measured = values.get("kl/reward" if self.rules.has_kl_reward else "kl/ref")
        if measured is not None:
            self.coefficients.adapt_kl(measured, kl)
        if "pg/entropy" in values:
            self.coefficients.adapt_entropy(values["pg/entropy"], entropy)

    def state_dict(self) -> dict[str, Any]:
        """The adaptive coefficients."""
        return self.coefficients.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self.coefficients.load_state_dict(state)

    def _wants(self, constant: str) -> bool:
        return constant in self.rules.objective.needs_constants

    def _look(self, minibatch: int, micro: MicroBatch) -> _Look:
        rules = self.rules
        if micro.is_filler:
            return _look_of_filler(micro, rules.values)
        weight = torch.ones_like(micro.advantages)
        kept = micro.mask
        if rules.removes or self._wants(CORRECTION_MEAN):
            correction, usable = rules.objective.correct(_old_inputs(micro))
            weight, kept = correction.weight, usable & correction.keep
        live = kept if rules.removes else micro.mask
        before, after = (per_sequence(m.double(), m, micro.seq_ids, micro.num_seqs) for m in (micro.mask, live))
        dropped = float((micro.mask & ~live).sum()), float(((before > 0) & (after == 0)).sum())
        micro = replace(micro, mask=live) if rules.removes else micro
        nothing = torch.zeros_like(micro.advantages, dtype=torch.float64)
        kl = _reward_kl(micro, micro.ref_logprobs) if rules.has_kl_reward else nothing
        teacher_kl = _reward_kl(micro, micro.teacher_logprobs) if rules.teacher else nothing
        micro, extra = self._extra(micro, kl)
        extra = extra - rules.teacher * teacher_kl
        columns = torch.stack([live.double(), kl, weight.double() * kept, kept.double()])
        sums = [per_sequence(values, micro.mask | kept, micro.seq_ids, micro.num_seqs) for values in columns]
        ids = torch.tensor(micro.sample_ids, dtype=torch.float64, device=live.device)
        rows = torch.stack([torch.full_like(ids, minibatch), ids, *sums], 1)
        means = [Mean(values.sum(), live.sum()) for values in (kl, teacher_kl)]
        return _Look(micro, extra, rows, self._tokens(minibatch, micro, extra), means[0], dropped, means[1])

    def _extra(self, micro: MicroBatch, kl: Tensor) -> tuple[MicroBatch, Tensor]:
        rules = self.rules
        rewards = torch.zeros_like(kl)
        if rules.has_entropy_reward:
            assert micro.old_entropy is not None
            rewards = rewards + self.coefficients.applied_entropy * micro.old_entropy.double()
        if rules.values is not None:
            return _valued(micro, rewards - self.coefficients.kl * kl, rules.values)
        if rules.has_kl_reward and rules.is_per_token:
            rewards += returns_to_go(-self.coefficients.kl * kl, micro.mask, micro.seq_ids, micro.num_seqs)
        return micro, torch.where(micro.mask, rewards, 0.0)

    def _tokens(self, minibatch: int, micro: MicroBatch, extra: Tensor) -> Tensor:
        rules, live = self.rules, micro.mask
        if not rules.reads_tokens:
            return extra.new_zeros(0, len(TOKEN))
        ids = torch.tensor(micro.sample_ids, dtype=torch.float64, device=live.device)[micro.seq_ids]
        own = extra if rules.credits_anew else extra + micro.advantages.double()
        entropy = torch.zeros_like(extra) if micro.old_entropy is None else micro.old_entropy.double()
        return torch.stack([torch.full_like(extra, minibatch), ids, own, entropy], 1)[live]

    def _share(self, looks: Sequence[_Look]) -> tuple[Rows, Rows]:
        """Rows and tokens of all ranks."""
        rows, tokens = torch.cat([look.rows for look in looks]), torch.cat([look.tokens for look in looks])
        parts = self._exchange(torch.cat([rows.new_tensor([len(rows)]), rows.flatten(), tokens.flatten()]))
        all_rows, all_tokens = [], []
        for part in (part.cpu().numpy() for part in parts):
            end = 1 + int(part[0]) * len(ROW)
            all_rows.append(part[1:end].reshape(-1, len(ROW)))
            all_tokens.append(part[end:].reshape(-1, len(TOKEN)))
        named = np.concatenate(all_rows), np.concatenate(all_tokens)
        return dict(zip(ROW, named[0].T, strict=True)), dict(zip(TOKEN, named[1].T, strict=True))

    def _credit_anew(self, rows: Rows, packed: Sequence[Sample], samples: Sequence[Sample]) -> np.ndarray:
        """[packed] float64: group advantages with the KL in the rewards, and without answers that were all rejected."""
        made = list(samples)
        for index, live, kl in zip(rows["sample"].astype(int), rows["live"], rows["kl"], strict=True):
            before = samples[packed[index].sample_id]
            bonus = -self.coefficients.kl * kl if self.rules.has_kl_reward else 0.0
            assert before.components is not None
            gone = self.rules.removes and live == 0 and packed[index].loss_mask.any()
            components = np.full_like(before.components, np.nan) if gone else before.components
            made[before.sample_id] = replace(before, shaping=before.shaping + bonus, components=components)
        advantages, _ = self.rules.advantages(credit_inputs(made, self.rules.reward_weights, self.rules.state))
        return advantages.numpy()[[sample.sample_id for sample in packed]]

    def _whitened(self, tokens: Rows, anew: np.ndarray | None, num_score: int) -> dict[int, np.ndarray] | None:
        """Sample -> whitened advantages of its live tokens."""
        if self.rules.whiten is None:
            return None
        first = tokens["minibatch"] < num_score
        sample = tokens["sample"][first].astype(int)
        order = np.argsort(sample, kind="stable")
        values = tokens["advantage"][first][order]
        sample = sample[order]
        if anew is not None:
            values = values + anew[sample]
        white = self.rules.whiten(torch.from_numpy(values)).numpy()
        names, starts = np.unique(sample, return_index=True)
        return dict(zip(names.tolist(), np.split(white, starts[1:]), strict=True))

    def _weights(self, rows: Rows, packed: Sequence[Sample], count: int) -> list[dict[str, np.ndarray]]:
        """[minibatches] of term -> [packed]: the weights of what was not removed."""
        groups = np.array([sample.group_id for sample in packed], dtype=np.int64)
        tasks = np.array([sample.reward - sample.shaping for sample in packed])
        removable = np.array([self.rules.removes and sample.loss_mask.any() for sample in packed], dtype=bool)
        stays = (rows["live"] > 0) | ~removable[rows["sample"].astype(int)]  # `count_empty` counts none that is gone
        result = []
        for m in range(count):
            mine = (rows["minibatch"] == m) & stays
            members, live = rows["sample"][mine].astype(int), rows["live"][mine].astype(np.int64)
            own = {"policy": self.rules.weigh(live, groups[members])}
            own.update(self.rules.weigh_terms(live, groups[members], tasks[members]))
            spread = {term: np.zeros(len(packed)) for term in own}
            for term, values in own.items():
                spread[term][members] = values
            result.append(spread)
        return result

    def _constants(self, minibatch: int, rows: Rows, tokens: Rows) -> dict[str, float]:
        """Scalars of one minibatch that the objective reads."""
        constants: dict[str, float] = {}
        mine = rows["minibatch"] == minibatch
        if self._wants(CORRECTION_MEAN):
            kept = rows["weighed"][mine].sum()
            constants[CORRECTION_MEAN] = float(rows["weight"][mine].sum() / kept) if kept else 1.0
        if self.rules.threshold is not None:
            entropies = tokens["entropy"][tokens["minibatch"] == minibatch]
            constants[ENTROPY_THRESHOLD] = self.rules.threshold(torch.from_numpy(entropies))
        if self._wants(KL_COEFFICIENT):
            constants[KL_COEFFICIENT] = self.coefficients.kl
        if self._wants(ENTROPY_COEFFICIENT):
            constants[ENTROPY_COEFFICIENT] = self.coefficients.applied_entropy
        return constants

    def _metrics(self, looks: Sequence[Sequence[_Look]]) -> Metrics:
        """Of this rank's share of the first epoch."""
        metrics: Metrics = {}
        for look in [look for mini in looks for look in mini]:
            if self.rules.has_kl_reward:
                merge_into(metrics, {"kl/reward": look.kl})
            if self.rules.teacher:
                merge_into(metrics, {"kl/teacher": look.teacher_kl})
            if self.rules.removes:
                merge_into(
                    metrics, {"mm/removed_tokens": Sum(look.dropped[0]), "mm/removed_seqs": Sum(look.dropped[1])}
                )
        if self.rules.kl.target is not None:
            metrics["kl/coefficient"] = Last(self.coefficients.kl)
        if self.rules.entropy.target is not None:
            metrics["pg/entropy_coefficient"] = Last(self.coefficients.applied_entropy)
        return metrics


def _old_inputs(micro: MicroBatch) -> LossInputs:
    """The loss inputs at the old policy."""
    assert micro.old_logprobs is not None
    old = micro.old_logprobs
    return LossInputs(
        logprobs=old,
        rollout_logprobs=torch.where(micro.mask, micro.rollout_logprobs, old),
        advantages=micro.advantages,
        mask=micro.mask,
        weights=micro.weights,
        seq_ids=micro.seq_ids,
        num_seqs=micro.num_seqs,
        optional={"old_logprobs": old},
    )


def _reward_kl(micro: MicroBatch, other: Tensor | None) -> Tensor:
    """k1 of the old policy to `other` [t] float64 on live tokens; 0 where a logprob is not finite."""
    assert micro.old_logprobs is not None and other is not None  # noqa: PT018
    usable = micro.mask & micro.old_logprobs.isfinite() & other.isfinite()
    return torch.where(usable, kl_estimate("k1", micro.old_logprobs.double(), other.double()), 0.0)


def _valued(micro: MicroBatch, token_rewards: Tensor, credit: ValueCredit) -> tuple[MicroBatch, Tensor]:
    """Returns into the batch; advantages [t] in place of the answer's reward, which its last live token gets."""
    assert micro.old_values is not None
    paid = token_rewards + on_last_token(micro.advantages.double(), micro.mask, micro.seq_ids)
    advantages, returns = credit(paid, micro.old_values, micro.mask, micro.seq_ids, micro.num_seqs)
    rest = torch.zeros_like(micro.advantages)
    return replace(micro, advantages=rest, returns=returns.to(rest.dtype)), advantages


def _finish(
    look: _Look, anew: np.ndarray | None, whitened: Mapping[int, np.ndarray] | None, shares: Rows | None
) -> MicroBatch:
    """The micro-batch with its final advantages and weights."""
    micro, device = look.micro, look.micro.mask.device
    if micro.is_filler:
        return micro
    ids = list(micro.sample_ids)
    if whitened is not None:
        values = torch.zeros_like(look.extra)
        values[micro.mask] = torch.from_numpy(np.concatenate([whitened.get(i, np.zeros(0)) for i in ids])).to(device)
    else:
        base = micro.advantages.double() if anew is None else torch.from_numpy(anew[ids]).to(device)[micro.seq_ids]
        values = torch.where(micro.mask, base + look.extra, 0.0)
    micro = replace(micro, advantages=values.to(micro.advantages.dtype))
    if shares is None:
        return micro
    arrays = token_weights(shares, ids, micro.cu_seqlens.diff().cpu().numpy(), micro.mask.cpu().numpy())
    tensors = {term: torch.from_numpy(values).to(device, micro.weights.policy.dtype) for term, values in arrays.items()}
    return replace(micro, weights=as_token_weights(tensors))


def _look_of_filler(micro: MicroBatch, values: ValueCredit | None) -> _Look:
    """Nothing of nothing: no rule is asked about a micro-batch without a sequence."""
    nothing = torch.zeros_like(micro.advantages, dtype=torch.float64)
    micro = micro if values is None else replace(micro, returns=micro.advantages)
    rows, tokens = (nothing.new_zeros(0, len(names)) for names in (ROW, TOKEN))
    return _Look(micro, nothing, rows, tokens, kl=Mean(0.0, 0.0), dropped=(0.0, 0.0), teacher_kl=Mean(0.0, 0.0))
