"""A chat tokenizer, a scripted engine and a sandbox for tests of environments with several turns."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from moerl.data.chat import ChatTokenizer
from moerl.envs import environments
from moerl.types import Completion, LocalArray, Prompt, SamplingParams, Support, TopLogprobs, Trajectory

CHAT_END = "<|im_end|>"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def folder_with_chat_template(folder: Path) -> Path:
    """A tokenizer whose merges make (he, llo) into (hello), with a template of the ChatML kind."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), ("1", "+"), ("t", "o"), ("3", "+")]
    words = ["<pad>", CHAT_END, "<|im_start|>", "<|endoftext|>", *letters, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:4])
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=CHAT_END)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(str(folder))
    return folder


class Says:
    """An engine that gives `turns` one after the other; the n-th answer has version n and n in its routes' first cell.

    The first `aborts` answers end with `abort`. Row r of the routes holds r % 200 in its last cell.
    """

    def __init__(self, *turns: list[int], aborts: int = 0) -> None:
        self.turns, self.aborts = list(turns), aborts
        self.asked: list[list[int]] = []
        self.budgets: list[int] = []
        self.stops: list[tuple[str, ...]] = []
        self.num_logprobs = 0

    async def generate(self, token_ids: np.ndarray, params: SamplingParams, request_id: str) -> Completion:
        """The next turn, cut at the budget."""
        self.asked.append(token_ids.tolist())
        self.budgets.append(params.max_new_tokens)
        self.stops.append(params.stop_strings)
        number = len(self.asked)
        whole = self.turns.pop(0)
        tokens = np.array(whole[: params.max_new_tokens], dtype=np.int32)
        count = len(tokens)
        self.num_logprobs += count
        rows = np.zeros((len(token_ids) + count - 1, 2, 3), dtype=np.uint8)
        rows[:, 0, 0], rows[:, 1, 2] = number, np.arange(len(rows)) % 200
        reason = "length" if count < len(whole) else "abort" if number <= self.aborts else "stop"
        top = None
        if params.top_logprobs:
            ids = np.full((count, params.top_logprobs), -1, dtype=np.int32)
            ids[:, 0] = tokens
            top = TopLogprobs(ids, np.where(ids >= 0, 0.0, -np.inf).astype(np.float32))
        return Completion(
            token_ids=tokens,
            logprobs=-tokens.astype(np.float32),
            finish_reason=reason,
            policy_version=number,
            routed_experts=LocalArray(rows),
            support=Support(tokens, np.arange(count + 1)),
            top_logprobs=top,
        )


class Sandboxed:
    """Calls the calculator's function in this process, or fails as it is told."""

    def __init__(self, error: str = "", text: str = "") -> None:
        self.error, self.text = error, text

    async def run(self, function: str, kwargs: dict[str, Any], *, timeout_seconds: float | None = None) -> Any:
        """As the pool's."""
        from moerl.envs.tools.arithmetic import evaluate

        assert function == "moerl.envs.tools.arithmetic:evaluate"
        value = None if self.error else evaluate(**kwargs)
        return SimpleNamespace(value=value, error=self.error, text=self.text)


def tool_environment(
    chat: ChatTokenizer, *, sandbox: Any = None, tool: Any = None, max_context_tokens: int = 4096, **changes: Any
) -> Any:
    """`tool_use` with a calculator, or with `tool` in its place."""
    plugin = environments.get("tool_use")
    env = plugin.target(
        plugin.config_class(**{"tools": [{"name": "calculator"}], **changes}),
        decode=chat.decode,
        max_context_tokens=max_context_tokens,
        dialogue=chat,
        sandbox=sandbox or Sandboxed(),
    )
    if tool is not None:
        served = env._tools["calculator"]
        env._tools["calculator"] = type(served)(served.arguments, tool)
    return env


def played(
    chat: ChatTokenizer, engine: Says, *, max_new_tokens: int = 300, top_logprobs: int = 0, **changes: Any
) -> Trajectory:
    """One episode of the prompt `3+4?`."""
    text = chat.apply_chat_template([{"role": "user", "content": "3+4?"}], "test")
    prompt = Prompt("d/1", chat.encode_text(text), "7", "d", env="tool_use")
    params = SamplingParams(
        max_new_tokens=max_new_tokens, stop_token_ids=chat.stop_token_ids, seed=3, top_logprobs=top_logprobs
    )
    return asyncio.run(tool_environment(chat, **changes).run(prompt, engine, params, "d/1#0"))
