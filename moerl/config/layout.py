"""The arithmetic of the parallel axes: world size, and what the model's sizes allow. Part of `rules.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moerl.config.schema import ParallelSection, RunConfig
from moerl.config.stages import StageSplit

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Names of the number of experts in config.json."""


def parallel_axes(cfg: RunConfig, world_size: int) -> Iterator[str]:
    """Every axis must divide what it cuts, with the sum written out."""
    axes = cfg.parallel
    sizes = (axes.tensor, axes.pipeline, axes.context, axes.expert, axes.expert_tensor, axes.virtual_pipeline or 1)
    if min(sizes) < 1:
        return  # the bounds say it
    yield from _world(axes, world_size)
    if axes.virtual_pipeline is not None and axes.pipeline == 1:
        yield (
            f"parallel.virtual_pipeline is {axes.virtual_pipeline} with parallel.pipeline=1, but it splits a "
            "pipeline's stages: set it to null"
        )
    elif axes.virtual_pipeline == 1:
        yield (
            f"parallel.virtual_pipeline is 1 with parallel.pipeline={axes.pipeline}, but it is the number of chunks "
            "that a stage is split into: set it to null for whole stages, or to 2 or more"
        )
    yield from _model(axes, _config_of(cfg.model.path))
    yield from _samples(cfg, world_size)


def _world(axes: ParallelSection, world_size: int) -> Iterator[str]:
    products = {
        "parallel.tensor x parallel.pipeline x parallel.context": (axes.tensor, axes.pipeline, axes.context),
        "parallel.expert x parallel.expert_tensor x parallel.pipeline": (
            axes.expert,
            axes.expert_tensor,
            axes.pipeline,
        ),
    }
    for names, factors in products.items():
        product = factors[0] * factors[1] * factors[2]
        if world_size % product:
            yield (
                f"{names} = {' x '.join(map(str, factors))} = {product} must divide the world size, {world_size} "
                f"(data parallelism is the rest); {_started(world_size, product)}"
            )


def _started(world_size: int, product: int) -> str:
    if world_size == 1:
        return f"start {product}, or a multiple, with torchrun --standalone --nproc-per-node {product} -m moerl"
    return f"start a multiple of {product} processes, or choose sizes whose product divides {world_size}"


def _model(axes: ParallelSection, hf: Mapping[str, Any]) -> Iterator[str]:
    """What the sizes of config.json allow; one that it does not name is left to the model family."""
    experts = next((hf[name] for name in _EXPERTS if isinstance(hf.get(name), int)), None)
    limits = (
        ("parallel.expert is", axes.expert, "experts", experts),
        ("parallel.tensor is", axes.tensor, "attention heads", hf.get("num_attention_heads")),
        ("parallel.expert_tensor is", axes.expert_tensor, "rows of an expert", hf.get("moe_intermediate_size")),
    )
    for name, size, what, number in limits:
        if isinstance(number, int) and number % size:
            yield f"{name} {size}, but must divide the model's {number} {what}"
    layers = hf.get("num_hidden_layers")
    if isinstance(layers, int):
        split = StageSplit(
            pipeline=axes.pipeline,
            virtual=axes.virtual_pipeline or 1,
            first=axes.first_stage_layers,
            last=axes.last_stage_layers,
        )
        yield from split.faults(layers)
    groups = hf.get("num_key_value_heads")
    if isinstance(groups, int) and groups % axes.tensor and axes.tensor % groups:
        yield (
            f"parallel.tensor is {axes.tensor}, but must divide the model's {groups} key-value heads, or be a multiple "
            "of them (ranks then hold parts of one)"
        )


def _samples(cfg: RunConfig, world_size: int) -> Iterator[str]:
    """A step that happens to be small runs fillers; one that always is would leave ranks idle in every step."""
    axes = cfg.parallel
    model = axes.tensor * axes.pipeline * axes.context
    if world_size % model:
        return
    data = world_size // model
    rounds = axes.pipeline if axes.virtual_pipeline else 1
    samples = cfg.rollout.prompts_per_step * cfg.rollout.group_size
    if samples < data * rounds:
        of = f"{data} data-parallel ranks"
        if rounds > 1:
            of += f" with {rounds} micro-batches each (interleaved pipeline)"
        yield (
            f"rollout.prompts_per_step x rollout.group_size = {cfg.rollout.prompts_per_step} x "
            f"{cfg.rollout.group_size} = {samples} samples leave some of {of} idle in every step; raise "
            "rollout.prompts_per_step"
        )


def _config_of(folder: str) -> Mapping[str, Any]:
    """config.json of a model folder; nothing where it cannot be read, which is another rule's to say."""
    try:
        values = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
