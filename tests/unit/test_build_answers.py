"""Where answers are read: by the template, unless a reward says otherwise; the same for rewards, format and votes."""

from __future__ import annotations

import pytest

from moerl.build_answers import answer_reader, reward_section
from moerl.config.schema import RunConfig
from moerl.types import Prompt

BOXED, TAGGED = r"so \boxed{7}", "</think> <answer> 7 </answer>"


def config(template, *rewards):
    cfg = RunConfig()
    cfg.data.template = {"name": template}
    cfg.reward.rewards = list(rewards)
    return cfg


def prompt(dataset="a"):
    return Prompt(f"{dataset}/0", [1], "7", dataset)


@pytest.mark.parametrize(
    ("template", "place"),
    [("auto", "boxed"), ("none", "boxed"), ("chat", "boxed"), ("qwen_math", "boxed"), ("r1", "answer_tag")],
)
def test_rewards_that_are_not_told_where_look_where_the_template_asks(template, place):
    nodes = [
        {"name": "math_verify", "weight": 2.0},
        {"name": "exact_match", "extract": "all"},
        {"name": "boxed_format"},
    ]
    cfg = config(template, *nodes)
    placed = [{"name": "math_verify", "weight": 2.0, "extract": place}, *nodes[1:]]
    assert reward_section(cfg).rewards == placed
    assert cfg.reward.rewards == nodes
    read = answer_reader(cfg)
    assert (read(prompt(), BOXED), read(prompt(), TAGGED)) == (("7", None) if place == "boxed" else (None, "7"))


def test_the_first_reward_of_the_data_set_that_looks_for_an_answer_decides():
    cfg = config(
        "none",
        {"name": "boxed_format"},
        {"name": "exact_match", "extract": "last_line", "datasets": ["a"]},
        {"name": "math_verify", "extract": "answer_tag"},
    )
    read = answer_reader(cfg)
    assert read(prompt("a"), "1\n2\n") == "2"
    assert read(prompt("b"), TAGGED) == "7"
    assert read(prompt("a"), "  ") is None


def test_without_such_a_reward_the_template_decides():
    assert answer_reader(config("r1", {"name": "boxed_format"}))(prompt(), TAGGED) == "7"
    assert answer_reader(config("r1", {"name": "boxed_format"}))(prompt(), "<answer></answer>") is None
