"""The tool and the environment of docs/environments.md, as a package of somebody else has them."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest
from talking import Says, folder_with_chat_template, played

from moerl.data.chat import ChatTokenizer
from moerl.envs import environments
from moerl.types import Prompt, SamplingParams

PAGE = Path(__file__).resolve().parents[3] / "docs" / "environments.md"


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return ChatTokenizer(folder_with_chat_template(tmp_path_factory.mktemp("chat")))


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory):
    """`outside.words` and `outside.second_try`, taken out of the page."""
    folder = tmp_path_factory.mktemp("package")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    (folder / "outside").mkdir()
    (folder / "outside" / "__init__.py").write_text("")
    for name, block in zip(("words", "second_try"), blocks, strict=True):
        (folder / "outside" / f"{name}.py").write_text(block)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "outside"]:
        del sys.modules[name]


def test_the_tool_is_called_and_refuses(chat):
    text = '<tool_call>{"name": "count_words", "arguments": {"text": "one two three"}}</tool_call>'
    node = {"name": "outside.words:count_words", "longest": 13}
    engine = Says([*chat.encode_text(text), chat.eos_token_id], [chat.eos_token_id])
    got = played(chat, engine, tools=[node])
    assert "<|im_start|>tool\n3<|im_end|>" in chat.decode(engine.asked[1], skip_stop=False)
    assert got.metrics["tool_errors"] == 0.0
    engine = Says([*chat.encode_text(text), chat.eos_token_id], [chat.eos_token_id])
    got = played(chat, engine, tools=[{**node, "longest": 12}])
    assert "error: the text is longer than 12 characters" in chat.decode(engine.asked[1], skip_stop=False)
    assert got.metrics["tool_errors"] == 1.0


def second_try(chat, engine, context=64, budget=32):
    plugin, cfg = environments.resolve({"name": "outside.second_try:second_try", "hint": "so:"})
    env = plugin.target(cfg, decode=chat.decode, max_context_tokens=context, dialogue=chat)
    prompt = Prompt("d/1", chat.encode_text("3+4?"), "7", "d")
    params = SamplingParams(max_new_tokens=budget, stop_token_ids=chat.stop_token_ids)
    return asyncio.run(env.run(prompt, engine, params, "d/1#0"))


def test_the_environment_gives_a_hint_once(chat):
    hint = chat.encode_text("so:").tolist()
    engine = Says([9, chat.eos_token_id], [10, chat.eos_token_id])
    got = second_try(chat, engine)
    assert engine.asked[1] == [*engine.asked[0], 9, chat.eos_token_id, *hint]
    assert got.metrics == {"second_tries": 1.0}
    assert got.loss_mask[len(engine.asked[0]) :].tolist() == [True, True, *[False] * len(hint), True, True]
    boxed = [*chat.encode_text("\\boxed{7}"), chat.eos_token_id]
    engine = Says(boxed)
    assert second_try(chat, engine).response_text == "\\boxed{7}"
    assert second_try(chat, Says([9, chat.eos_token_id]), budget=4).metrics == {"second_tries": 0.0}
    assert second_try(chat, Says(), context=2).status == "too_long"
