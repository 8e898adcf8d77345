r"""Prompt templates: the published texts to the letter, registration from outside, rows that do not fit.

The texts of `r1` and `qwen_math` are those of the code of Dr. GRPO (arXiv 2503.20783, understand-r1-zero).
"""

from __future__ import annotations

import pytest

from moerl.data.rows import Row
from moerl.data.templates import prompt_templates
from moerl.data.templating import PromptText, resolve_template
from moerl.errors import ConfigError, DataError

QUESTION = "What is 1+1?\n"
CONVERSATION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]


class Tokenizer:
    """A chat template that shows what it was given."""

    has_chat_template = True

    def apply_chat_template(self, messages, source):
        return "".join(f"[{message['role']}]{message['content']}" for message in messages) + "[assistant]"


class BaseTokenizer(Tokenizer):
    has_chat_template = False


def render(node, prompt=QUESTION, tokenizer=None):
    node = {"name": node} if isinstance(node, str) else node
    return resolve_template(node).render(Row(0, prompt, "2", "a.jsonl:7"), tokenizer or Tokenizer())


PUBLISHED = {
    "none": "What is 1+1?\n",
    "r1": "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The "
    "Assistant first thinks about the reasoning process in the mind and then provides the User with the answer. The "
    "reasoning process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> tags, "
    "respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>.\nUser: What is 1+1?\n"
    "\nAssistant: <think>",
    "qwen_math": "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>"
    "\n<|im_start|>user\nWhat is 1+1?\n<|im_end|>\n<|im_start|>assistant\n",
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("prompt", [QUESTION, [{"role": "user", "content": QUESTION}]], ids=["text", "one message"])
def test_text_templates_are_the_published_ones(name, prompt):
    assert render(name, prompt) == PromptText(PUBLISHED[name], add_special_tokens=True)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_conversation_is_no_question(name):
    expected = rf"a\.jsonl:7: has messages of system, user, and data\.template is {name}, .*use chat or auto"
    with pytest.raises(DataError, match=expected):
        render(name, CONVERSATION)


def test_chat_is_the_tokenizer_s_own():
    assert render("chat") == PromptText(f"[user]{QUESTION}[assistant]", add_special_tokens=False)
    assert render("chat", CONVERSATION).text == f"[system]Be brief.[user]{QUESTION}[assistant]"
    with_system = {"name": "chat", "system": "Reason."}
    assert render(with_system).text == f"[system]Reason.[user]{QUESTION}[assistant]"
    assert render(with_system, CONVERSATION).text == f"[system]Be brief.[user]{QUESTION}[assistant]"
    assert CONVERSATION[0]["content"] == "Be brief."


def test_auto_is_chat_where_there_is_a_chat_template_or_a_conversation():
    assert render("auto") == render("chat")
    assert render("auto", tokenizer=BaseTokenizer()) == render("none")
    assert render("auto", CONVERSATION, BaseTokenizer()) == render("chat", CONVERSATION)


def test_where_a_template_asks_for_the_answer_and_where_it_ends():
    found = {name: resolve_template({"name": name}) for name in prompt_templates.names() if name != "shout"}
    assert {name: one.extract for name, one in found.items() if one.extract != "boxed"} == {"r1": "answer_tag"}
    assert {name: one.stop for name, one in found.items() if one.stop} == {"r1": ("</answer>",)}
    assert set(found) == {"auto", "none", "chat", "r1", "qwen_math"}


def test_a_template_from_outside_the_package(tmp_path, monkeypatch):
    (tmp_path / "shouting.py").write_text(
        "from dataclasses import dataclass\n"
        "from moerl.data.templates import prompt_templates\n"
        "from moerl.data.templating import PromptText, question_of\n"
        "@dataclass(frozen=True)\n"
        "class Config:\n"
        "    marks: int = 1\n"
        "@prompt_templates.register('shout', Config, extract='last_line', stop=('!',))\n"
        "def shout(row, chat, cfg):\n"
        "    return PromptText(question_of(row, 'shout').upper() + '!' * cfg.marks)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    node = {"name": "shouting:shout", "marks": 2}
    assert render(node, "hello").text == "HELLO!!"
    template = resolve_template(node)
    assert (template.name, template.extract, template.stop) == ("shout", "last_line", ("!",))


def test_unknown_names_and_arguments_are_refused():
    with pytest.raises(ConfigError, match="no prompt template is called 'qwen_maths'; did you mean 'qwen_math'"):
        resolve_template({"name": "qwen_maths"})
    with pytest.raises(ConfigError, match=r"data\.template"):
        resolve_template({"name": "r1", "system": "x"})
