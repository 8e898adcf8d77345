r"""The template that Qwen2.5-Math was tuned with (arXiv 2409.12122): think step by step, answer in `\boxed{}`."""

from __future__ import annotations

from dataclasses import dataclass

from moerl.data.rows import Row
from moerl.data.templates import prompt_templates
from moerl.data.templating import ChatTemplate, PromptText, question_of

BEFORE = (
    "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
    "<|im_start|>user\n"
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class QwenMathConfig:
    """No arguments."""


@prompt_templates.register("qwen_math", QwenMathConfig)
def qwen_math(row: Row, chat: ChatTemplate, cfg: QwenMathConfig) -> PromptText:
    """Written out, whatever chat template the tokenizer brings."""
    return PromptText(f"{BEFORE}{question_of(row, 'qwen_math')}{AFTER}")
