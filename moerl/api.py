"""The mathematics alone: build an objective, give it tensors, get loss, per-token loss, gradient and metrics.

Nothing here needs a model, megatron-core, transformers or an engine. Four answers to two prompts, packed:

>>> import torch, moerl
>>> lengths = torch.tensor([3, 2, 4, 1])
>>> cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])  # 0, 3, 5, 9, 10
>>> old = torch.tensor([-0.1, -2.3, -0.7, -0.5, -3.0, -1.0, -0.1, -1.6, -0.4, -0.9])
>>> now = (old + 0.05).requires_grad_()
>>> result = moerl.objective("grpo", kl={"place": "none"})(
...     logprobs=now, old_logprobs=old, cu_seqlens=cu_seqlens,
...     rewards=torch.tensor([1.0, 0.0, 0.0, 0.0]), group_ids=torch.tensor([0, 0, 1, 1]))
>>> [round(value, 3) for value in result.advantages.tolist()]  # group 0: +1 and -1; group 1 has no spread
[1.0, 1.0, 1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
>>> [round(value, 4) for value in result.token_loss.tolist()[:5]]  # -A e^0.05, shared: 1/4 a sequence, 1/length a token
[-0.0876, -0.0876, -0.0876, 0.1314, 0.1314]
>>> torch.equal(result.token_loss.sum(), result.loss)
True
>>> [round(value, 4) for value in result.gradient.tolist()[:5]]
[-0.0876, -0.0876, -0.0876, 0.1314, 0.1314]
>>> round(result.metrics["pg/ratio_mean"], 4), result.metrics["pg/clip_high"]
(1.0513, 0.0)
>>> result.loss.backward()  # into whatever made `now`
>>> torch.equal(now.grad, result.gradient)
True

The same padded; what lies outside the mask is never read, so NaN is as good as anything:

>>> mask = torch.arange(4) < lengths[:, None]
>>> def pad(values): return torch.full((4, 4), float("nan")).masked_scatter(mask, values)
>>> padded = moerl.objective("grpo", kl={"place": "none"})(
...     logprobs=pad(now.detach()), old_logprobs=pad(old), mask=mask,
...     rewards=torch.tensor([1.0, 0.0, 0.0, 0.0]), group_ids=torch.tensor([0, 0, 1, 1]))
>>> padded.gradient.shape, torch.equal(padded.gradient[mask], result.gradient)
(torch.Size([4, 4]), True)

Any axis of `configs` under `algorithm` can be overridden, with or without a preset to start from:

>>> mine = moerl.objective("gspo", trust={"lo": 0.003}, correction={"name": "tis", "cap": 2.0})
>>> mine.needs  # old_logprobs may be left out (the first update); rollout_logprobs may not
('old_logprobs', 'rollout_logprobs')
>>> moerl.objective("gspo", trust={"low": 0.003})
Traceback (most recent call last):
  ...
moerl.errors.ConfigError: algorithm.trust (clip): unknown key 'low'; did you mean 'lo'? (allowed: lo, hi, dual_c, delta)

Shapes: b batch, s sequence, t packed tokens, n sequences, c rewards. Log-probabilities, KL and entropy are in nats;
anything narrower than float32 is widened. `docs/algorithms.md` has the source and the equation of every method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from moerl.algorithms.advantage.credit import group_advantages
from moerl.algorithms.aggregation import sequence_weights
from moerl.algorithms.objective import CORRECTION_MEAN, Objective, build_objective
from moerl.algorithms.presets import PRESETS
from moerl.algorithms.types import CreditInputs, LossInputs
from moerl.config.load import config_from_dict
from moerl.config.schema import AlgorithmSection
from moerl.data.token_batch import TensorFields, TokenBatch
from moerl.errors import ConfigError, DataError
from moerl.metrics import Metrics, merge_into, to_floats
from moerl.types import TokenWeights

BUDGET_KEY = "${rollout.max_new_tokens}"


@dataclass(frozen=True)
class Evaluation:
    """An objective at one batch, in the layout of the batch: per token is [t] packed or [b, s] padded."""

    loss: Tensor
    """0-dim, with the graph of whatever made the log-probabilities."""
    token_loss: Tensor
    """Per token, detached: what it adds to `loss`; sums to it."""
    gradient: Tensor
    """Per token: d loss / d logprobs. The graph is kept, so that `loss.backward()` may follow."""
    advantages: Tensor
    """Per token, as the objective saw them."""
    metrics: Mapping[str, float]
    """Names as in the training loop's metrics: `pg/ratio_mean`, `pg/clip_high`, `mm/reject`, `kl/ref`, ..."""
    batch: TokenBatch
    """The batch, packed."""

    @property
    def gradient_norm(self) -> float:
        """Euclidean norm of `gradient`."""
        return float(self.gradient.double().norm())


@dataclass(frozen=True)
class Method:
    """A policy-optimisation method: credit of groups, aggregation, objective. Made by `objective`; call it on tensors.

    Filters, shaping, refills and routing act where answers are sampled; they are in `section`, and not applied here.
    """

    section: AlgorithmSection
    """All axes, resolved."""
    objective: Objective

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the per-token fields that the method reads beside `logprobs` and `mask`, sorted."""
        rollout = {"rollout_logprobs"} if self.objective.reads_rollout_logprobs else set()
        return tuple(sorted(self.objective.needs | rollout))

    def __call__(self, **fields: Unpack[TensorFields]) -> Evaluation:
        """Evaluate on tensors; `moerl.data.token_batch.TensorFields` says name, shape and unit of each.

        The batch is taken to be a whole minibatch: its sequences are the denominator of every mean.

        Raises:
            DataError: a field that is missing, of the wrong shape, or not what the method can work with.
        """
        return self.evaluate(TokenBatch.from_tensors(fields))

    def evaluate(self, batch: TokenBatch) -> Evaluation:
        """Evaluate on a batch that was read from a file. Raises `DataError` as a call does."""
        advantages, credit_metrics = self._token_advantages(batch)
        inputs = self._inputs(batch, advantages)
        if CORRECTION_MEAN in self.objective.needs_constants:
            mean = self.objective.correction_mean(inputs).value()
            inputs = dataclasses.replace(inputs, constants={CORRECTION_MEAN: 1.0 if mean is None else mean})
        losses, metrics = self.objective.token_losses(inputs)
        loss = losses.sum()
        source = batch.logprobs if batch.source is None else batch.source
        return Evaluation(
            loss=loss,
            gradient=torch.autograd.grad(loss, source, retain_graph=True)[0],
            token_loss=batch.as_given(losses.detach()),
            advantages=batch.as_given(inputs.advantages),
            metrics=to_floats(merge_into(dict(credit_metrics), metrics)),
            batch=batch,
        )

    def advantages(
        self, rewards: Tensor, group_ids: Tensor, *, lengths: Tensor | None = None, weights: Sequence[float] = ()
    ) -> tuple[Tensor, dict[str, float]]:
        """Credit alone: one advantage for each answer.

        Args:
            rewards: [n] or [n, c] float; NaN marks an answer that was not scored.
            group_ids: [n] int: which answers share a prompt.
            lengths: [n] int, sampled tokens of each; 1 where absent.
            weights: c weights of the rewards; 1 where absent.

        Returns:
            [n] float64, and the metrics of the credit.
        """
        table = rewards.double().reshape(len(rewards), -1)
        inputs = CreditInputs(
            rewards=table,
            reward_weights=torch.tensor(weights or [1.0] * table.shape[1], dtype=torch.float64),
            group_ids=group_ids.to(torch.int64),
            lengths=torch.ones(len(table), dtype=torch.int64) if lengths is None else lengths,
            prompt_ids=tuple(str(label) for label in group_ids.tolist()),
            shaping=torch.zeros(len(table), dtype=torch.float64),
        )
        values, metrics = group_advantages(self.section.advantage, inputs)
        return values, to_floats(metrics)

    def _token_advantages(self, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        if batch.advantages is not None:
            self._check_constant(batch, batch.advantages)
            return batch.advantages, {}
        if batch.rewards is None:
            raise DataError("neither advantages nor rewards were given; give one of them")
        rule = self.section.advantage
        if batch.group_ids is None and (rule.center.startswith("group") or rule.scale.startswith("group")):
            raise DataError(
                f"the advantage ({rule.center}, {rule.scale}) is made within groups; give group_ids [n], or advantages"
            )
        groups = torch.arange(batch.num_seqs) if batch.group_ids is None else batch.group_ids
        values, _ = self.advantages(batch.rewards, groups, lengths=batch.lengths)
        return values[batch.seq_ids].to(_wide(batch.logprobs)), {}

    def _check_constant(self, batch: TokenBatch, advantages: Tensor) -> None:
        if not self.objective.constant_advantage or not batch.mask.any():
            return
        seen, at = advantages[batch.mask], batch.seq_ids[batch.mask]
        varies = (at.diff() == 0) & (seen.diff() != 0)
        if varies.any():
            raise DataError(
                f"algorithm.level {self.section.level!r} has one ratio per sequence, but the advantages of sequence "
                f"{int(at[1:][varies][0])} differ between tokens; give one per sequence, or use level seq_geo_token"
            )

    def _inputs(self, batch: TokenBatch, advantages: Tensor) -> LossInputs:
        dtype = _wide(batch.logprobs)
        current = batch.logprobs.detach()
        columns = dict(batch.columns)
        columns.setdefault("old_logprobs", current)
        for name in self.needs:
            if name in ("group_ids", "rewards"):
                continue
            if name not in columns:
                raise DataError(f"the method reads {name}, which was not given; give it per token, like logprobs")
        groups = torch.arange(batch.num_seqs) if batch.group_ids is None else batch.group_ids
        shares = sequence_weights(self.section.aggregation, batch.lengths, groups)[batch.seq_ids].to(dtype)
        optional = {name: columns[name] for name in self.objective.needs if name in columns}
        if "group_ids" in self.objective.needs:
            optional["group_ids"] = groups
        if "rewards" in self.objective.needs and batch.rewards is not None:
            optional["rewards"] = batch.rewards.sum(1)
        return LossInputs(
            logprobs=batch.logprobs,
            rollout_logprobs=columns.get("rollout_logprobs", current),
            advantages=advantages.to(dtype),
            mask=batch.mask,
            weights=TokenWeights.shared(shares),
            seq_ids=batch.seq_ids,
            num_seqs=batch.num_seqs,
            optional=optional,
        )


def objective(
    preset: str | AlgorithmSection | None = None,
    /,
    *,
    max_new_tokens: int | None = None,
    overrides: Sequence[str] = (),
    **axes: Any,
) -> Method:
    """A method by name, by axes, or both: the axes lie over the preset's.

    Args:
        preset: a name of `methods()`, or a whole section of a configuration (then nothing else may be given).
        max_new_tokens: the generation budget, which Dr. GRPO's and DPPO's aggregation divide by.
        overrides: `key=value` texts, keys of the algorithm section such as `trust.hi=0.28`; laid over `axes`.
        axes: fields of `moerl.config.schema.AlgorithmSection`: `trust={"hi": 0.28}`, `level="seq_geo"`, ... A node
            merges with the preset's while its `name` stays, and replaces it when that changes.

    Raises:
        ConfigError: an unknown name or key, a wrong type, axes that do not go together; says what to do.
    """
    if isinstance(preset, AlgorithmSection):
        if axes or overrides or max_new_tokens is not None:
            raise ConfigError("a whole section was given, and axes beside it; put them into the section")
        return Method(preset, build_objective(preset))
    algorithm = dict(axes) if preset is None else {"preset": preset, **axes}
    cfg = config_from_dict(
        {
            "run": {"name": "objective", "num_steps": 1},
            "model": {"path": "."},
            "rollout": {"max_new_tokens": max_new_tokens or 1},
            "algorithm": algorithm,
        },
        "moerl.objective",
        [text if text.startswith("algorithm.") else f"algorithm.{text}" for text in overrides],
        presets={name: entry.values for name, entry in PRESETS.items()},
    )
    if max_new_tokens is None and _reads_budget(preset, axes, overrides):
        raise ConfigError(
            f"{preset or 'algorithm.aggregation'} divides by the generation budget; give max_new_tokens, such as 4096"
        )
    return Method(cfg.algorithm, build_objective(cfg.algorithm))


def methods() -> dict[str, str]:
    """Every preset and its one line.

    >>> import moerl
    >>> moerl.methods()["gspo"]
    'one geometric-mean ratio per sequence, clipped as a whole'
    """
    return {name: preset.summary for name, preset in PRESETS.items()}


def _reads_budget(preset: str | None, axes: Mapping[str, Any], overrides: Sequence[str]) -> bool:
    if any(text.removeprefix("algorithm.").startswith("aggregation") for text in overrides):
        return any(BUDGET_KEY in text for text in overrides)
    given = axes.get("aggregation")
    if given is None:
        given = PRESETS[preset].values.get("aggregation", {}) if preset else {}
    return isinstance(given, Mapping) and given.get("tokens") == BUDGET_KEY


def _wide(logprobs: Tensor) -> torch.dtype:
    return torch.promote_types(logprobs.dtype, torch.float32)
