"""Tools that a policy may call in the environment `tool_use`. One file per tool; found by scanning.

    class Arguments(BaseModel, extra="forbid"):
        city: str = Field(description="name of the city")

    @tools.register("weather", WeatherConfig, arguments=Arguments, about="Tells the weather of a city.")
    class Weather:
        def __init__(self, cfg: WeatherConfig) -> None: ...
        async def call(self, arguments: Arguments) -> str: ...

`arguments` is a pydantic model: its JSON schema is what the prompt announces, and a call that does not fit it is
answered with what is wrong. `about` is the tool's description for the policy. `call` raises `ToolError` with a text for
the policy; any other error is the tool's own fault. `injects=("sandbox",)` hands over the pool of walled processes, and
the pool then keeps the tool's time limit (`docs/environments.md`). One tool serves all episodes at once.
"""

from __future__ import annotations

from typing import Any, Protocol

from moerl.errors import MoerlError
from moerl.registry import Registry

tools: Registry[Any] = Registry("tool", "moerl.envs.tools")


class ToolError(MoerlError):
    """A call that cannot be answered; its text is what the policy reads."""


class ToolLateError(ToolError):
    """A call that found no answer in time; counted as such."""


class Tool(Protocol):
    """A registered tool."""

    async def call(self, arguments: Any) -> str:
        """The answer to one call. `arguments` is the registered pydantic model. Raises `ToolError`."""
        ...
