"""Prompt templates side by side on one policy and the same held-out tasks, before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from moerl.build_answers import reward_section
from moerl.build_evaluation import engine_with_weights
from moerl.build_rollout import Data, RolloutSide, build_evaluator, load_data, side_with
from moerl.config.schema import RunConfig
from moerl.data.templating import resolve_template
from moerl.errors import ConfigError, DataError
from moerl.metrics import to_floats


@dataclass(frozen=True)
class TemplateComparison:
    """Evaluations of one policy under several templates."""

    subject: str
    """What is judged, for people."""
    values: Mapping[str, Mapping[str, float]]
    """Template -> `eval/*`."""
    extracts: Mapping[str, tuple[str, ...]]
    """Template -> where its rewards look for the answer."""
    refused: Mapping[str, str]
    """Template -> why it cannot be used with this tokenizer and these limits."""
    num_prompts: int
    """Tasks that every template was judged on."""
    num_left_out: int
    """Tasks that some template made longer than `data.max_prompt_tokens`."""


def compare_templates(
    cfg: RunConfig, names: Sequence[str], *, run_folder: Path | None, step: int | None
) -> TemplateComparison:
    """Evaluate what `build_evaluation` would, once for each template. Weights are loaded once.

    A template is compared on the tasks that fit all; one that fits none is told, with the reason.

    Raises:
        ConfigError: an unknown template, or one that is named twice.
        DataError: no template can be used.
        CheckpointError: no such checkpoint, or it is damaged.
    """
    configs = {name: _with_template(cfg, name) for name in names}
    if len(configs) < len(names):
        raise ConfigError(f"--compare-templates {','.join(names)} names a template twice; name each once")
    with ExitStack() as stack:
        usable: dict[str, Data] = {}
        refused: dict[str, str] = {}
        for name, config in configs.items():
            try:
                usable[name] = load_data(config, with_train=False)
                stack.callback(usable[name].close)
            except DataError as error:
                refused[name] = str(error)
        shared, everything = _task_ids(usable, refused)
        data = next(iter(usable.values()))
        side, subject = engine_with_weights(cfg, data, stack, run_folder=run_folder, step=step)
        values = {name: _evaluate(configs[name], data, side, shared) for name, data in usable.items()}
    extracts = {name: _extracts(configs[name]) for name in usable}
    return TemplateComparison(subject, values, extracts, refused, len(shared), len(everything - shared))


def _with_template(cfg: RunConfig, name: str) -> RunConfig:
    """With the arguments that the configuration gives the template, where it is the one of that name."""
    node = cfg.data.template if cfg.data.template["name"] == name else {"name": name}
    resolve_template(node)
    return replace(cfg, data=replace(cfg.data, template=node))


def _task_ids(usable: Mapping[str, Data], refused: Mapping[str, str]) -> tuple[set[str], set[str]]:
    """(Tasks that every usable template holds, tasks that any holds)."""
    reasons = "\n  ".join(f"{name}: {reason}" for name, reason in refused.items())
    if not usable:
        raise DataError(f"none of the templates can be used:\n  {reasons}")
    ids = [{prompt.prompt_id for one in data.held_out for prompt in one.prompts} for data in usable.values()]
    shared = set.intersection(*ids)
    if not shared:
        raise DataError(
            "no task is within data.max_prompt_tokens under all of the templates "
            f"{', '.join(usable)}; raise it, or compare fewer of them"
        )
    return shared, set.union(*ids)


def _evaluate(cfg: RunConfig, data: Data, side: RolloutSide, shared: set[str]) -> dict[str, float]:
    held_out = (
        replace(one, prompts=tuple(prompt for prompt in one.prompts if prompt.prompt_id in shared))
        for one in data.held_out
    )
    restricted = replace(data, held_out=tuple(held_out))
    with ExitStack() as stack:
        own = side_with(cfg, restricted, side)
        stack.callback(own.eval_collector.close)
        return to_floats(build_evaluator(cfg, restricted, own).run())


def _extracts(cfg: RunConfig) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(node["extract"]) for node in reward_section(cfg).rewards if "extract" in node))
