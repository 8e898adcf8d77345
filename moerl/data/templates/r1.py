"""The template of DeepSeek-R1-Zero (arXiv 2501.12948) in the wording of Dr. GRPO's code (arXiv 2503.20783)."""

from __future__ import annotations

from dataclasses import dataclass

from moerl.data.rows import Row
from moerl.data.templates import prompt_templates
from moerl.data.templating import ChatTemplate, PromptText, question_of

BEFORE = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant "
    "first thinks about the reasoning process in the mind and then provides the User with the answer. The reasoning "
    "process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> tags, respectively, "
    "i.e., <think> reasoning process here </think> <answer> answer here </answer>.\nUser: "
)
AFTER = "\nAssistant: <think>"


@dataclass(frozen=True)
class R1Config:
    """No arguments."""


@prompt_templates.register("r1", R1Config, extract="answer_tag", stop=("</answer>",))
def r1(row: Row, chat: ChatTemplate, cfg: R1Config) -> PromptText:
    """The answer begins inside `<think>` and is complete with `</answer>`: base models rarely stop by themselves."""
    return PromptText(f"{BEFORE}{question_of(row, 'r1')}{AFTER}")
