"""Environments: each plays one episode of one prompt. One file per environment; found by scanning.

    @environments.register("mine", MineConfig, injects=("decode", "max_context_tokens"))
    class Mine:
        def __init__(self, cfg: MineConfig, *, decode: Decode, max_context_tokens: int) -> None: ...

`injects` names the keyword arguments that `build.py` hands over: `decode` (token ids to text, special tokens kept),
`max_context_tokens` (most tokens of prompt and response together), `dialogue` (`given.Dialogue`: text between turns),
`sandbox` (`given.Sandbox`: the pool of walled processes). Optional traits: `check(cfg)` refuses wrong arguments and
gives the strings that the tokenizer must be able to write, `rewrite(cfg, task)` is the task as the environment asks it,
`schemas(cfg)` are the tools that the chat template announces, `multi_turn` says that the engine is asked several times,
and `evaluate_as` names the environment of held-out tasks where it is another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moerl.registry import Registry

environments: Registry[Any] = Registry("environment", "moerl.envs")

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""
