"""What `build.py` hands over to environments and tools that ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class Dialogue(Protocol):
    """Text between turns, by the tokenizer of the policy; `data.chat.ChatTokenizer` is one."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """End tokens."""
        ...

    def encode_text(self, text: str) -> np.ndarray:
        """Token ids [s] int32 of new text; what reads like an added token is that token. Raises `DataError`."""
        ...

    def token_text(self, token: int) -> str:
        """How one token is written."""
        ...

    def without_added_tokens(self, text: str) -> str:
        """`text` of a stranger, with every string in it broken up that the tokenizer would read as one added token."""
        ...

    def after_calls(self, results: Sequence[str]) -> str:
        """What the chat template writes after an assistant's content that tools answered with `results`, up to where
        the assistant speaks again. Raises `DataError`.
        """
        ...


class Answer(Protocol):
    """What came of one sandboxed call."""

    @property
    def value(self) -> Any:
        """JSON value of the function; None where it failed."""
        ...

    @property
    def error(self) -> str:
        """`timeout`, `crash`, `exception`, or nothing."""
        ...

    @property
    def text(self) -> str:
        """Why it failed."""
        ...


class Sandbox(Protocol):
    """Runs `module:function` on JSON arguments in a walled process; `rewards.pool.SandboxPool` is one."""

    async def run(self, function: str, kwargs: dict[str, Any], *, timeout_seconds: float | None = None) -> Answer:
        """The function's value, or how it failed."""
        ...
