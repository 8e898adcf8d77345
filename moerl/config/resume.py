"""Which settings may differ when a run goes on from its checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from moerl.config.schema import RunConfig
from moerl.errors import ConfigError

RESUME_MAY_CHANGE = (
    "run.name",
    "run.num_steps",
    "run.output_dir",
    "run.resume",
    "run.num_threads",
    "parallel.*",
    "precision.recompute",
    "data.check_disjoint",
    "rollout.timeout_seconds",
    *(
        f"rollout.engine.{key}"
        for key in (
            "urls*",
            "key_file",
            "servers*",
            "requests_per_server",
            "affinity_slack",
            "request_timeout_seconds",
            "num_retries",
            "retry_wait_seconds",
            "control_timeout_seconds",
            "update_timeout_seconds",
            "release_memory",
            "health_seconds",
            "no_server_seconds",
        )
    ),
    "reward.num_workers",
    "reward.timeout_seconds",
    "reward.memory_bytes",
    "reward.max_error_fraction",
    "optim.distributed",
    "optim.cpu_offload",
    "batch.max_tokens_per_microbatch",
    "weight_sync.*",
    "checkpoint.*",
    "evaluation.*",
    "telemetry.*",
)
"""Keys and `section.*` that change neither the objective, nor the data, nor the optimizer's path."""

RESUME_MUST_STAY = ("telemetry.probe_prompts",)
"""Exceptions from the former: the probe of route drift is drawn once, at step 0."""

_ABSENT = "(not set)"


def config_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of every leaf that differs, sorted; an absent key has the schema's default."""
    defaults = dict(_leaves(dataclasses.asdict(RunConfig()), ""))
    left, right = dict(_leaves(old, "")), dict(_leaves(new, ""))
    differences = []
    for key in sorted({*left, *right}):
        before = left.get(key, defaults.get(key, _ABSENT))
        after = right.get(key, defaults.get(key, _ABSENT))
        if before != after or isinstance(before, bool) != isinstance(after, bool):
            differences.append((key, before, after))
    return differences


def may_change(key: str) -> bool:
    """Whether `key` may differ between a run and its continuation."""
    if key in RESUME_MUST_STAY:
        return False
    return any(
        key == allowed or (allowed.endswith("*") and key.startswith(allowed[:-1])) for allowed in RESUME_MAY_CHANGE
    )


def check_resume(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse to go on with settings that would make it another run.

    Raises:
        ConfigError: names every changed key that may not change, with both values, and lists what may.
    """
    differences = config_differences(_with_decay_end(old), _with_decay_end(new))
    refused = [item for item in differences if not may_change(item[0])]
    if not refused:
        return
    lines = []
    for key, before, after in refused:
        hint = ""
        if key == "optim.decay_steps" and new.get("optim", {}).get("decay_steps") is None:
            hint = f" (null follows run.num_steps; set optim.decay_steps={before} to train on after the decay)"
        lines.append(f"  {key}: {before!r} in the run, {after!r} now{hint}")
    raise ConfigError(
        "the run cannot go on with another configuration:\n"
        + "\n".join(lines)
        + f"\nMay change on resume: {', '.join(RESUME_MAY_CHANGE)} (except {', '.join(RESUME_MUST_STAY)}). "
        "Set the others back, or start anew with another run.name or run.resume=never."
    )


def _with_decay_end(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """`optim.decay_steps` spelled out: null ends the decay with the policy's last update, which may itself change."""
    optim = values.get("optim", {})
    if optim.get("decay_steps") is not None or optim.get("schedule", "constant") == "constant":
        return values
    critic, steps = values.get("algorithm", {}).get("critic", {}), values.get("run", {}).get("num_steps")
    if steps is not None and critic.get("init", "none") != "none":
        steps -= critic.get("pretrain_steps", 0)
    return {**values, "optim": {**optim, "decay_steps": steps}}


def _leaves(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{prefix}[{index}]")
    else:
        yield prefix, value
