"""The tests of a programming task, as files have them, and what counts as passing one.

What is expected is compared here, in the trainer's process, on strings and plain values alone.
"""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moerl.rewards.judges.program import MAX_INPUT_BYTES

COMPARISONS = ("lines", "tokens", "exact")


@dataclass(frozen=True, slots=True)
class PrintTest:
    """The program reads `stdin` and must print `expected`."""

    stdin: str
    expected: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """`function` of the program must return `expected`."""

    function: str
    arguments: tuple[Any, ...]
    expected: Any


@dataclass(frozen=True, slots=True)
class CodeTest:
    """Code that must run without raising; it calls the program by the names of `functions`."""

    source: str
    functions: Mapping[str, str]


Test = PrintTest | CallTest | CodeTest


def read_tests(value: Any, entry_point: str | None) -> list[Test]:
    """The tests of one row: a JSON text or a list of `{input, output}`, `{function, arguments, output}`, `{code}` or
    plain code, or `{inputs: [...], outputs: [...], fn_name: ...}` (as APPS and TACO have it), or one text of code.

    Raises:
        ValueError: says what is wrong.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = [value]
    if isinstance(value, Mapping) and "inputs" in value:
        value = _paired(value)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"tests must be a list that is not empty, not {value!r:.60}")
    return [_read_one(item, entry_point, number) for number, item in enumerate(value)]


def _paired(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    inputs, outputs, name = value["inputs"], value.get("outputs", []), value.get("fn_name")
    if len(inputs) != len(outputs):
        raise ValueError(f"tests have {len(inputs)} inputs and {len(outputs)} outputs")
    if name is None:
        return [{"input": left, "output": right} for left, right in zip(inputs, outputs, strict=True)]
    return [{"function": name, "arguments": i, "output": o} for i, o in zip(inputs, outputs, strict=True)]


def _read_one(item: Any, entry_point: str | None, number: int) -> Test:
    if isinstance(item, str):
        return _code(item, entry_point, number)
    keys = set(item) if isinstance(item, Mapping) else set()
    if {"function", "output"} <= keys:
        return CallTest(str(item["function"]), tuple(item.get("arguments", ())), item["output"])
    if {"input", "output"} <= keys:
        stdin, expected = item["input"], item["output"]
        if not isinstance(stdin, str) or not isinstance(expected, str):
            raise ValueError(f"test {number}: input and output must be text")
        if len(stdin.encode()) > MAX_INPUT_BYTES:
            raise ValueError(f"test {number}: an input of more than {MAX_INPUT_BYTES} bytes cannot be given")
        return PrintTest(stdin, expected)
    if "code" in keys:
        return _code(item["code"], entry_point, number)
    raise ValueError(
        f"test {number} has the keys {sorted(keys)}; give input and output, or function, arguments and output, or code"
    )


def _code(source: str, entry_point: str | None, number: int) -> CodeTest:
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"test {number} is not Python ({error})") from error
    if entry_point:
        functions = {entry_point: entry_point, "candidate": entry_point}
        if any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
            source += "\ncheck(candidate)\n"
    else:
        functions = {name: name for name in _unbound(tree)}
    if not functions:
        raise ValueError(f"test {number} calls no function of the program: {source[:60]!r}")
    return CodeTest(source, functions)


def _unbound(tree: ast.AST) -> list[str]:
    """Names that are called and bound nowhere in the test."""
    called, bound = [], set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.append(node.func.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    return [name for name in dict.fromkeys(called) if name not in bound]


def is_printed(expected: str, printed: str, how: str) -> bool:
    """`lines`: white space at the ends of lines and blank lines at the end aside; `tokens`: all white space alike."""
    if how == "exact":
        return printed == expected
    if how == "tokens":
        return printed.split() == expected.split()
    return _lines(printed) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def is_returned(expected: Any, value: Any) -> bool:
    """Equal as JSON has it: tuples are lists, numbers are equal by value, True is not 1."""
    if isinstance(expected, list | tuple):
        is_list = isinstance(value, list | tuple) and len(value) == len(expected)
        return is_list and all(is_returned(e, v) for e, v in zip(expected, value, strict=True))
    if isinstance(expected, Mapping):
        is_dict = isinstance(value, Mapping) and {str(key) for key in value} == set(expected)
        return is_dict and all(is_returned(expected[str(key)], item) for key, item in value.items())
    if isinstance(expected, bool) or isinstance(value, bool) or expected is None:
        return value is expected
    return type(value) in (int, float, str) and value == expected


def last_program(text: str) -> str | None:
    """Inside the last fence of three backticks; None where there is none that is closed."""
    parts = text.split("```")
    if len(parts) < 3:
        return None
    block = parts[-2] if len(parts) % 2 else parts[-3]
    first, newline, rest = block.partition("\n")
    return rest if newline and first.strip().lower() in ("", "python", "python3", "py") else block
