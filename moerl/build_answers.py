"""Where the answer stands in a text: where the prompt template asks for it, or a reward is told. Part of `build.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from moerl.config.schema import RewardSection, RunConfig
from moerl.data.templating import resolve_template
from moerl.rewards import rewards
from moerl.rewards.extract import extract_answer
from moerl.types import Prompt


def reward_section(cfg: RunConfig) -> RewardSection:
    """`cfg.reward`, its rewards that can look in several places and are not told which looking where the template asks
    for the answer (`r1`: in `<answer>`; the others: in a box).
    """
    extract = resolve_template(cfg.data.template).extract
    return dataclasses.replace(cfg.reward, rewards=[_placed(node, extract) for node in cfg.reward.rewards])


def answer_reader(cfg: RunConfig) -> Callable[[Prompt, str], str | None]:
    """Finds the answer as the first reward of the prompt's data set does that looks for one, else by the template."""
    default = resolve_template(cfg.data.template).extract
    places = [(node.get("datasets"), node["extract"]) for node in reward_section(cfg).rewards if "extract" in node]

    def read(prompt: Prompt, text: str) -> str | None:
        chosen = (how for datasets, how in places if datasets is None or prompt.dataset in datasets)
        return extract_answer(text, next(chosen, default)) or None

    return read


def _placed(node: dict[str, Any], extract: str) -> dict[str, Any]:
    config_class = rewards.get(node["name"]).config_class
    looks = any(item.name == "extract" for item in dataclasses.fields(config_class))
    return {**node, "extract": extract} if looks and "extract" not in node else node
