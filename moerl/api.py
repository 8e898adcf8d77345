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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from moerl.algorithms.advantage.credit import group_advantages
from moerl.algorithms.modifiers import PresetValues
from moerl.algorithms.objective import Objective, build_objective
from moerl.algorithms.presets import PRESETS
from moerl.algorithms.types import PER_SEQUENCE_FIELDS, CreditInputs, LossInputs
from moerl.api_credit import BatchCredit
from moerl.build_credit import credit_state
from moerl.config.load import config_from_dict
from moerl.config.schema import AlgorithmSection
from moerl.data.token_batch import TensorFields, TokenBatch
from moerl.errors import ConfigError, DataError
from moerl.metrics import merge_into, to_floats
from moerl.types import MicroBatch

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
    KL and entropy in the reward, GAE, whitening over tokens and rejected answers that leave the batch are applied; of a
    schedule of several updates the whole is one. A critic's own loss is `moerl.algorithms.values.value_loss`.
    """

    section: AlgorithmSection
    """All axes, resolved."""
    objective: Objective

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the per-token fields that the method reads beside `logprobs` and `mask`, sorted."""
        rollout = {"rollout_logprobs"} if self.objective.reads_rollout_logprobs else set()
        credit = BatchCredit(self.section, self.objective).needs
        return tuple(sorted(self.objective.needs | rollout | credit))

    def __call__(self, **fields: Unpack[TensorFields]) -> Evaluation:
        """Evaluate on tensors; `moerl.data.token_batch.TensorFields` says name, shape and unit of each.

        The batch is taken to be a whole minibatch: its sequences are the denominator of every mean.

        Raises:
            DataError: a field that is missing, of the wrong shape, or not what the method can work with.
        """
        return self.evaluate(TokenBatch.from_tensors(fields))

    def evaluate(self, batch: TokenBatch) -> Evaluation:
        """Evaluate on a batch that was read from a file. Raises `DataError` as a call does."""
        self._check_columns(batch)
        micro, metrics = BatchCredit(self.section, self.objective)(batch)
        self._check_constant(micro)
        inputs = self._inputs(batch, micro)
        losses, found = self.objective.token_losses(inputs)
        loss = losses.sum()
        source = batch.logprobs if batch.source is None else batch.source
        return Evaluation(
            loss=loss,
            gradient=torch.autograd.grad(loss, source, retain_graph=True)[0],
            token_loss=batch.as_given(losses.detach()),
            advantages=batch.as_given(inputs.advantages),
            metrics=to_floats(merge_into(metrics, found)),
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
            state=credit_state(self.section),
        )
        values, metrics = group_advantages(self.section.advantage, inputs)
        return values, to_floats(metrics)

    def _check_columns(self, batch: TokenBatch) -> None:
        stand_ins = {"old_entropy": "entropy", "old_values": "values"}
        for name in self.needs:
            has = name in batch.columns or stand_ins.get(name) in batch.columns
            if not has and name not in ("old_logprobs", *PER_SEQUENCE_FIELDS):
                is_of_kl = name == "ref_logprobs" and self.section.kl.place != "none"
                instead = ", or set kl.place to none" if is_of_kl else ""
                raise DataError(
                    f"the method reads {name}, which was not given; give it per token, like logprobs{instead}"
                )

    def _check_constant(self, micro: MicroBatch) -> None:
        if not self.objective.constant_advantage or not micro.mask.any():
            return
        seen, at = micro.advantages[micro.mask], micro.seq_ids[micro.mask]
        varies = (at.diff() == 0) & (seen.diff() != 0)
        if varies.any():
            raise DataError(
                f"algorithm.level {self.section.level!r} has one ratio per sequence, but the advantages of sequence "
                f"{int(at[1:][varies][0])} differ between tokens; give one per sequence, or use level seq_geo_token"
            )

    def _inputs(self, batch: TokenBatch, micro: MicroBatch) -> LossInputs:
        columns = {"old_logprobs": batch.logprobs.detach(), **batch.columns}
        for name, stand_in in (("old_entropy", "entropy"), ("old_values", "values")):
            if name not in columns and stand_in in columns:
                columns[name] = columns[stand_in].detach()
        columns |= {"group_ids": micro.group_ids, "rewards": micro.rewards}
        return LossInputs(
            logprobs=batch.logprobs,
            rollout_logprobs=columns.get("rollout_logprobs", batch.logprobs.detach()),
            advantages=micro.advantages,
            mask=micro.mask,
            weights=micro.weights,
            seq_ids=batch.seq_ids,
            num_seqs=batch.num_seqs,
            constants=micro.constants,
            optional={name: columns[name] for name in self.objective.needs},
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
            merges with the preset's while its `name` stays, and replaces it when that changes. `filters` and `shaping`
            may only be emptied: a batch of tensors lacks what they read.

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
        presets=PresetValues(),
    )
    if max_new_tokens is None and _reads_budget(preset, axes, overrides):
        raise ConfigError(
            f"{preset or 'algorithm.aggregation'} divides by the generation budget; give max_new_tokens, such as 4096"
        )
    _refuse_sampling_rules(cfg.algorithm, [*axes, *(text.removeprefix("algorithm.") for text in overrides)])
    return Method(cfg.algorithm, build_objective(cfg.algorithm))


def _refuse_sampling_rules(section: AlgorithmSection, given: Sequence[str]) -> None:
    """Those of a preset are known not to be applied; those that a caller asks for must not be ignored."""
    for name, nodes in (("filters", section.filters), ("shaping", section.shaping)):
        if nodes and any(text.startswith(name) for text in given):
            listed = ", ".join(str(node["name"]) for node in nodes)
            raise ConfigError(
                f"algorithm.{name} asks for {listed}, but a batch of tensors has no finish_reason, text or status of "
                f"its answers; leave algorithm.{name} out, set the mask of unwanted answers to 0 and give final rewards"
            )


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
        given = PresetValues()[preset].get("aggregation", {}) if preset else {}
    return isinstance(given, Mapping) and given.get("tokens") == BUDGET_KEY
