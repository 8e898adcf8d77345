"""From a file and overrides to a checked `RunConfig`: presets, rules across fields, plugin nodes.

Two passes: everything that plain values can tell is reported first, before torch is imported; then the plugin nodes,
whose dataclasses live beside their code.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moerl.algorithms.compose import SAME_AGGREGATION, composition_errors, composition_warnings, value_errors
from moerl.algorithms.modifiers import PresetValues
from moerl.config.load import as_dict, load_config
from moerl.config.rules import check
from moerl.config.schema import DatasetConfig, RunConfig
from moerl.errors import ConfigError
from moerl.world import launched_world

logger = logging.getLogger(__name__)


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a configuration.

    Raises:
        ConfigError: everything that is wrong with it, together.
    """
    cfg = load_config(path, overrides, presets=PresetValues())
    check(cfg, world_size=launched_world().size, extra_rules=[_algorithm_rules])
    check_plugins(cfg)
    for warning in composition_warnings(as_dict(cfg)["algorithm"]):
        logger.warning(warning)
    return cfg


def check_plugins(cfg: RunConfig) -> None:
    """Resolve every plugin node; imports torch, but nothing of megatron, transformers or an engine.

    Raises:
        ConfigError: every unknown plugin, unknown argument and wrong type, together.
    """
    problems = []
    for registry, node, where in _plugin_nodes(cfg):
        try:
            registry.resolve(node, where=where)
        except ConfigError as error:
            problems.append(str(error))
    if not problems:
        problems += [*_engine_rules(cfg), *_environment_rules(cfg), *_weight_rules(cfg)]
    if problems:
        raise ConfigError(*problems)


def _engine_rules(cfg: RunConfig) -> list[str]:
    """What the algorithm asks of the engine, and whether it computes the model as it is."""
    from moerl.algorithms.registries import trust_regions
    from moerl.rollout.engine import engines

    trust, trust_cfg = trust_regions.resolve(cfg.algorithm.trust)
    engine, engine_cfg = engines.resolve(cfg.rollout.engine)
    try:
        engine.traits.get("check_model", _anything)(engine_cfg, Path(cfg.model.path))
    except ConfigError as error:
        return [str(error)]
    needs_of = trust.traits.get("needs_of")
    asks_topk = needs_of is not None and "rollout_topk" in needs_of(trust_cfg)
    if asks_topk and not engine.traits.get("returns_topk", False):
        return [
            f"algorithm.trust.kind is {trust_cfg.kind!r}, which compares the engine's likeliest tokens, but "
            f"rollout.engine {engine.name!r} returns no top-k logprobs: set algorithm.trust.kind to binary_tv or "
            "binary_kl (presets dppo_tv, dppo_kl)"
        ]
    return []


def _environment_rules(cfg: RunConfig) -> list[str]:
    """What can be told of the environment without a tokenizer."""
    from moerl.envs import environments
    from moerl.rollout.engine import engines

    plugin, env_cfg = environments.resolve(cfg.rollout.environment, where="rollout.environment")
    found = []
    try:
        plugin.traits.get("check", _anything)(env_cfg)
    except ConfigError as error:
        found.append(str(error))
    engine, _ = engines.resolve(cfg.rollout.engine, where="rollout.engine")
    if "rewrite" in plugin.traits and engine.name == "dataset":
        found.append(
            f"rollout.environment={plugin.name} rewrites the task, and rollout.engine=dataset answers with the file's "
            "completions of the task as it is; use single_turn"
        )
    if plugin.traits.get("multi_turn") and engine.name == "dataset":
        found.append(
            f"rollout.environment={plugin.name} asks several times, and rollout.engine=dataset has one completion a "
            "prompt; use single_turn"
        )
    return found


def _weight_rules(cfg: RunConfig) -> list[str]:
    """Whether the transport reaches the engine's model."""
    from moerl.rollout.engine import engines
    from moerl.weight_sync.transport import transports

    engine, engine_cfg = engines.resolve(cfg.rollout.engine, where="rollout.engine")
    transport, transport_cfg = transports.resolve(cfg.weight_sync.transport, where="weight_sync.transport")
    is_remote = "sender" in engine.traits.get("injects", ())
    if is_remote != ("sender" in transport.traits):
        fitting = [name for name in transports.names() if ("sender" in transports.get(name).traits) == is_remote]
        place = "in other processes" if is_remote else "in the trainer's own process"
        return [
            f"weight_sync.transport={transport.name} does not reach rollout.engine={engine.name}, whose model is "
            f"{place}; set it to {' or '.join(fitting)}"
        ]
    if not is_remote:
        if cfg.weight_sync.precision == "as_is":
            return []
        return [
            f"weight_sync.precision={cfg.weight_sync.precision} is for servers in other processes; with "
            f"rollout.engine={engine.name} leave it as_is (rollout.engine.precision says how it computes)"
        ]
    far = [url for url in getattr(engine_cfg, "urls", []) if not _is_here(url)]
    if far and transport.name == "tensor":
        return [
            f"weight_sync.transport=tensor hands over this machine's memory, but {far[0]} is not on it; use "
            "distributed, or disk with a folder that both see"
        ]
    if far and transport.name == "distributed" and _is_here(f"//{transport_cfg.address}"):
        return [
            f"weight_sync.transport.address is {transport_cfg.address}, which {far[0]} cannot reach; set it to this "
            "machine's address as the servers see it"
        ]
    return []


def _is_here(url: str) -> bool:
    from urllib.parse import urlsplit

    return urlsplit(url).hostname in {"127.0.0.1", "localhost", "::1"}


def _anything(*_: Any) -> tuple[str, ...]:
    return ()


def _algorithm_rules(values: Mapping[str, Any]) -> list[str]:
    return [*value_errors(values["algorithm"]), *composition_errors(values["algorithm"])]


def _plugin_nodes(cfg: RunConfig) -> list[tuple[Any, Mapping[str, Any], str]]:
    """(registry, node, where) of every plugin node; importing the registries imports torch."""
    from moerl.algorithms import registries
    from moerl.data.sources import prompt_sources
    from moerl.data.templates import prompt_templates
    from moerl.envs import environments
    from moerl.rewards import rewards
    from moerl.rollout.engine import engines
    from moerl.weight_sync.transport import transports

    a = cfg.algorithm
    nodes: list[tuple[Any, Mapping[str, Any], str]] = [
        (registries.trust_regions, a.trust, "algorithm.trust"),
        (registries.aggregations, a.aggregation, "algorithm.aggregation"),
        (registries.corrections, a.correction, "algorithm.correction"),
        (registries.objectives, a.objective, "algorithm.objective"),
        (registries.token_weights, a.token_weight, "algorithm.token_weight"),
        (registries.schedules, a.schedule, "algorithm.schedule"),
        (registries.advantage_transforms, a.advantage.transform, "algorithm.advantage.transform"),
        (registries.advantage_posts, a.advantage.post, "algorithm.advantage.post"),
        (prompt_templates, cfg.data.template, "data.template"),
        (engines, cfg.rollout.engine, "rollout.engine"),
        (environments, cfg.rollout.environment, "rollout.environment"),
        (transports, cfg.weight_sync.transport, "weight_sync.transport"),
    ]
    own = {"kl": a.term_aggregation.kl, "entropy": a.term_aggregation.entropy, "value": a.term_aggregation.value}
    own["nll"] = a.term_aggregation.nll
    nodes += [
        (registries.aggregations, node, f"algorithm.term_aggregation.{term}")
        for term, node in own.items()
        if node["name"] != SAME_AGGREGATION
    ]
    nodes += [(registries.shapings, node, f"algorithm.shaping[{i}]") for i, node in enumerate(a.shaping)]
    nodes += [(registries.filters, node, f"algorithm.filters[{i}]") for i, node in enumerate(a.filters)]
    nodes += [(rewards, node, f"reward.rewards[{i}]") for i, node in enumerate(cfg.reward.rewards)]
    nodes += [(prompt_sources, d.source, f"data.train[{i}].source") for i, d in _datasets(cfg.data.train)]
    nodes += [(prompt_sources, d.source, f"evaluation.sets[{i}].source") for i, d in _datasets(cfg.evaluation.sets)]
    return nodes


def _datasets(items: Sequence[DatasetConfig]) -> list[tuple[int, DatasetConfig]]:
    return list(enumerate(items))
