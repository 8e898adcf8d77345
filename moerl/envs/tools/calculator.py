"""A calculator. The expression is a model's text, so it is parsed in the sandbox (`arithmetic.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, Field

from moerl.envs.given import Sandbox
from moerl.envs.tools import ToolError, ToolLateError, tools
from moerl.envs.tools.arithmetic import MAX_CHARACTERS
from moerl.errors import RolloutError


@dataclass(frozen=True)
class CalculatorConfig:
    """Nothing to choose."""


class Arguments(BaseModel, extra="forbid"):
    """Of one call."""

    expression: str = Field(description="such as (3 + 4) * 2 / 7", max_length=MAX_CHARACTERS)


@tools.register(
    "calculator",
    CalculatorConfig,
    arguments=Arguments,
    about="Works out an arithmetic expression: numbers, brackets, + - * / // % **.",
    injects=("sandbox",),
)
class Calculator:
    """Exact on whole numbers up to 4096 bits."""

    def __init__(self, cfg: CalculatorConfig, *, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def call(self, arguments: Arguments) -> str:
        """The value as text. Raises `ToolError` where the expression has none, or none in time."""
        answer = await self._sandbox.run("moerl.envs.tools.arithmetic:evaluate", {"expression": arguments.expression})
        if answer.error == "timeout":
            raise ToolLateError("no value within the time limit")
        if answer.error:
            raise RolloutError(f"calculator: {answer.error}: {answer.text}")
        if "error" in answer.value:
            raise ToolError(answer.value["error"])
        return answer.value["value"]
