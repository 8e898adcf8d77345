"""Turns with tools at the end of the context: where no token has room, none is asked for."""

from __future__ import annotations

import json

import pytest
from talking import Says, folder_with_chat_template, played

from moerl.data.chat import ChatTokenizer


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> ChatTokenizer:
    return ChatTokenizer(folder_with_chat_template(tmp_path_factory.mktemp("chat")))


@pytest.mark.parametrize(("more", "budgets"), [(1, [1]), (0, []), (-1, [])])
def test_a_prompt_that_fills_the_context_asks_for_nothing(chat, more, budgets):
    """BUGS 28: at the prompt's length and below nothing is asked, with one token more one is."""
    prompt = Says([chat.eos_token_id])
    length = len(played(chat, prompt).token_ids) - 1
    engine = Says([5, 6, chat.eos_token_id])
    got = played(chat, engine, max_context_tokens=length + more)
    assert engine.budgets == budgets
    assert (got.status, got.finish_reason) == ("ok" if budgets else "too_long", "length")
    assert len(got.token_ids) == length + len(budgets)


@pytest.mark.parametrize(("more", "budgets"), [(2, [2]), (1, [1]), (0, []), (-1, [])])
def test_a_later_turn_that_the_context_has_no_room_for_is_not_asked_for(chat, more, budgets):
    """BUGS 28: what a tool answered is not appended either, where no token may follow it."""
    call = json.dumps({"name": "calculator", "arguments": {"expression": "3+4"}})
    first = [*chat.encode_text(f"<tool_call>{call}</tool_call>"), chat.eos_token_id]
    wide = Says(first, [chat.eos_token_id])
    length = len(played(chat, wide).token_ids) - 1
    engine = Says(first, [5, 6, 7])
    got = played(chat, engine, max_context_tokens=length + more)
    assert engine.budgets[1:] == budgets
    assert len(got.token_ids) == (length + more if budgets else len(wide.asked[0]) + len(first))
    assert (got.finish_reason, got.metrics["tool_limit_context"]) == ("length", float(not budgets))
    assert got.loss_mask[-1]
