"""The registries of this room: one per plugin kind of the configuration; torch-free until one of them is read."""

from __future__ import annotations

from moerl.registry import Registry

trust_regions: Registry = Registry("trust region", "moerl.algorithms.trust")
"""`(log_ratio [t], x: LossInputs, cfg) -> TokenLoss`; trait `form`: `ratio`, `score`, or `any` (then trait `score` is
the score-form function). Reads only usable values; never masks or reduces. `needs` may also name `rollout_logprobs`;
trait `needs_of(cfg)` adds what depends on the arguments; trait `has_slope(cfg)`: `TokenLoss.slope` is always there."""

corrections: Registry = Registry("correction", "moerl.algorithms.correction")
"""`(x: LossInputs, cfg) -> TokenCorrection`; trait `weighs`: whether the weight can differ from 1."""

aggregations: Registry = Registry("aggregation", "moerl.algorithms.aggregation")
"""`(Lengths, cfg) -> [n] float64`: the constant v_i of each sequence; rows without tokens are zeroed afterwards."""

advantage_transforms: Registry = Registry("advantage transform", "moerl.algorithms.advantage.transform")
"""`(table: RewardTable, cfg) -> [n] float64`."""

advantage_posts: Registry = Registry("advantage post", "moerl.algorithms.advantage.post")
"""`(advantages [n] float64, scored [n] bool, cfg) -> [n] float64`; one with trait `acts_on="tokens"` is
`(advantages [m] float64, cfg) -> [m]` over the live tokens of the step, after the score pass."""

token_weights: Registry = Registry("token weight", "moerl.algorithms.token_weight")
"""`(x: LossInputs, cfg) -> [t]`, detached: multiplies the policy term."""

schedules: Registry = Registry("update schedule", "moerl.algorithms.schedule")
"""`(old_logprobs [t], cfg) -> [t] int64`: in which optimizer update of its minibatch a token trains; trait `updates`:
how many there are."""

objectives: Registry = Registry("objective", "moerl.algorithms.objectives")
"""`(x: LossInputs, cfg) -> TokenLoss` in place of the policy term; trait `replaces`: False for the policy gradient."""

shapings: Registry = Registry("shaping", "moerl.algorithms.shaping")
"""`(group: RolloutGroup, cfg) -> [g] float64`: what is added to the reward of each trajectory."""

filters: Registry = Registry("filter", "moerl.algorithms.filters")
"""By trait `acts_on`: `group`, `(RolloutGroup, cfg) -> reason to drop it | None`; `sample`, `(Trajectory, cfg) ->
keep`; `members`, `(RolloutGroup, cfg) -> [g] bool, keep`; `prompt`, `(PassRate, step, cfg) -> sample it`, before the
rollout; `rollout`, `(RolloutGroup, cfg) -> [g] bool, sample it anew`."""
