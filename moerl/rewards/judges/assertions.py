"""Runs a test's code against a program that is elsewhere: its functions are stand-ins that answer what was recorded.

The test never shares a process with the program, so the program can neither read what is expected nor change what is
asserted, and only plain values cross. Where the test makes a call that is not recorded yet, the call is what comes
back; whoever asks has the program answer it and runs the test again. A test must therefore make the same calls each
time: no clocks, no random numbers without a seed.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable
from typing import Any

from moerl.rewards import sandbox
from moerl.rewards.judges.values import decode, encode


class _Unknown(BaseException):
    """A call that nobody has answered yet; no `except Exception` of a test swallows it."""


class _Methods:
    """Stands for `Solution()`: its methods are functions of the program, which makes a new object for each call."""

    def __init__(self, stand_in: Callable[[str], Any]) -> None:
        self._stand_in = stand_in

    def __getattr__(self, name: str) -> Any:
        return self._stand_in(name)


def check(source: str, functions: dict[str, str], recorded: list[dict[str, Any]]) -> dict[str, Any]:
    """`{"passed": bool, "text": why not, "lacks_module": whether an import failed}`, or, where a call must be answered
    first, `{"call": [function, arguments, keywords]}`.

    Args:
        source: the test.
        functions: name in the test -> function of the program.
        recorded: answers so far in the order of the calls: `{"value": encoded}` or `{"failed": kind, "text": why}`.
    """
    sandbox.narrow_files()
    pending: list[list[Any]] = []
    answers = iter(recorded)

    def stand_in(function: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            answer = None if pending else next(answers, None)
            if answer is None:
                named = [[name, encode(value)] for name, value in keywords.items()]
                pending.append([function, [encode(one) for one in arguments], named])
                raise _Unknown
            if "failed" in answer:
                raise _error(answer)
            return decode(answer["value"])

        return call

    names: dict[str, Any] = {"__name__": "__test__"}
    names.update({name: stand_in(function) for name, function in functions.items()})
    if "Solution" in functions:
        names["Solution"] = lambda: _Methods(stand_in)
    try:
        exec(compile(source, "<test>", "exec"), names)
    except BaseException as error:  # noqa: BLE001  # a test says by raising that it failed
        if not pending:
            text = f"{type(error).__name__}: {str(error)[:200]}"
            return {"passed": False, "text": text, "lacks_module": isinstance(error, ImportError)}
    return {"call": pending[0]} if pending else {"passed": True, "text": "", "lacks_module": False}


def _error(answer: dict[str, Any]) -> Exception:
    """The builtin exception that the program raised, so that tests may expect it."""
    text = str(answer["text"])
    kind = getattr(builtins, text.partition(":")[0], None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # a few want more arguments than a text
            return kind(text)
    return RuntimeError(text)
