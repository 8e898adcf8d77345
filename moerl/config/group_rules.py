"""Rules of groups of answers, and of the sequences that are packed. Part of `rules.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moerl.config.schema import RunConfig


def group_size(cfg: RunConfig) -> Iterator[str]:
    """What compares the answers of a group needs a group."""
    advantage = cfg.algorithm.advantage
    if cfg.rollout.group_size > 1:
        return
    group_statistics = [word for word in (advantage.center, advantage.scale) if word.startswith("group_")]
    if group_statistics and advantage.singleton == "zero":
        yield (
            f"rollout.group_size is 1 with algorithm.advantage.{{center, scale}} = {advantage.center}, "
            f"{advantage.scale}: every advantage would be 0; take at least 2, or algorithm.advantage.singleton=raw, or "
            "center=batch_mean with scale=none"
        )
    transform = advantage.transform.get("name", "identity")
    if transform in ("rank", "best_worst"):
        yield (
            f"rollout.group_size is 1 with algorithm.advantage.transform={transform}, which compares the answers of a "
            "group: every advantage would be 0; take at least 2"
        )
    if any(node.get("name") == "zero_variance" for node in cfg.algorithm.filters):
        yield (
            "rollout.group_size is 1 with the filter zero_variance, which drops every group whose answers have one "
            "reward: none would be left; take at least 2, or leave the filter out"
        )
    if cfg.algorithm.objective.get("name") == "group_dpo":
        yield "rollout.group_size is 1 with algorithm.objective=group_dpo, which pairs answers; take at least 2"


def microbatch_tokens(cfg: RunConfig) -> Iterator[str]:
    """A sequence is never split, and a pair of answers is never parted."""
    longest, budget = cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens, cfg.batch.max_tokens_per_microbatch
    if budget < longest:
        yield (
            f"batch.max_tokens_per_microbatch is {budget}, but must hold the longest "
            f"sequence: data.max_prompt_tokens + rollout.max_new_tokens = {cfg.data.max_prompt_tokens} + "
            f"{cfg.rollout.max_new_tokens} = {longest}"
        )
    elif budget < 2 * longest and cfg.algorithm.objective.get("name") == "group_dpo":
        yield (
            f"batch.max_tokens_per_microbatch is {budget}, but algorithm.objective=group_dpo keeps two answers "
            f"together: it must hold both, 2 x (data.max_prompt_tokens + rollout.max_new_tokens) = {2 * longest}"
        )


def decoupled_weights(cfg: RunConfig) -> Iterator[str]:
    """One for each reward."""
    transform, count = cfg.algorithm.advantage.transform, len(cfg.reward.rewards)
    weights = transform.get("weights") if transform.get("name") == "decoupled" else None
    if weights and len(weights) != count:
        yield (
            f"algorithm.advantage.transform.weights has {len(weights)} numbers, and reward.rewards has {count}: give "
            "one each, or leave it empty to take the rewards' own weights"
        )


RULES: tuple[Callable[[RunConfig], Iterator[str]], ...] = (group_size, microbatch_tokens, decoupled_weights)
