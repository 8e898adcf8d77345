"""Rules of generation that runs ahead of training. Part of `rules.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moerl.config.schema import RunConfig


def ahead(cfg: RunConfig) -> Iterator[str]:
    """What `rollout.max_staleness` above 0 cannot be combined with."""
    rollout = cfg.rollout
    if rollout.max_staleness < 1:
        return
    seen = f"rollout.max_staleness is {rollout.max_staleness}"
    if rollout.engine.get("name") == "dataset":
        yield f"{seen} with rollout.engine=dataset, whose completions no policy samples: set it to 0"
    for index, node in enumerate(cfg.algorithm.filters):
        if node.get("name") == "duplicates" and node.get("mode") == "resample":
            yield (
                f"{seen} with algorithm.filters[{index}] (duplicates, mode=resample), which samples answers anew once "
                "its step's groups are there; groups ahead of training belong to no step yet: set mode=mask, or "
                "rollout.max_staleness=0"
            )


def on_policy(cfg: RunConfig) -> Iterator[str]:
    """What means nothing where every group is sampled for its own step."""
    if cfg.rollout.max_staleness == 0 and cfg.rollout.long_tail in ("resume", "drop"):
        yield (
            f"rollout.long_tail is {cfg.rollout.long_tail} with rollout.max_staleness=0, where a step waits for all of "
            "its answers, as a later one would be of an older version: set rollout.max_staleness to 1 or more, or "
            "rollout.long_tail=wait"
        )
    if cfg.rollout.max_staleness == 0 and cfg.rollout.oversampling > 1:
        yield (
            f"rollout.oversampling is {cfg.rollout.oversampling:g} with rollout.max_staleness=0, where what is left "
            "over would be too old for the next step: set it to 1 (algorithm.refill_rounds makes up for filtered "
            "groups), or rollout.max_staleness to 1 or more"
        )


def releases_memory(cfg: RunConfig) -> bool:
    """Whether the engine's servers share the learner's devices, and give their memory to it while it trains."""
    engine = cfg.rollout.engine
    if engine.get("name") != "sglang":
        return False
    return bool(engine.get("release_memory") or (engine.get("servers") or {}).get("memory_saver"))


def colocated(cfg: RunConfig) -> Iterator[str]:
    """What needs the engine while the learner trains, or leaves it without the weights that bring it back."""
    if not releases_memory(cfg):
        return
    seen = "rollout.engine gives its memory to the learner while that trains (servers.memory_saver or release_memory)"
    if cfg.rollout.max_staleness > 0:
        yield (
            f"{seen}, but with rollout.max_staleness={cfg.rollout.max_staleness} it generates meanwhile: set "
            "rollout.max_staleness to 0, or have the servers keep their memory"
        )
    if cfg.algorithm.critic.pretrain_steps > 0:
        yield (
            f"{seen}, and has weights again with the next update, but the steps of algorithm.critic.pretrain_steps="
            f"{cfg.algorithm.critic.pretrain_steps} update no policy: set it to 0, or have the servers keep their "
            "memory"
        )


RULES: tuple[Callable[[RunConfig], Iterator[str]], ...] = (ahead, on_policy, colocated)
