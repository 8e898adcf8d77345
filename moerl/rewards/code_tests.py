"""The tests of a programming task, as files have them, and what counts as passing one.

What is expected is compared here, in the trainer's process, on strings and plain values alone.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moerl.rewards.judges.program import MAX_INPUT_BYTES
from moerl.rewards.judges.values import encode

COMPARISONS = ("lines", "tokens", "exact")
_ENTRY_POINT = re.compile(r"(?:Solution\(\)\.)?([^\W\d]\w*)")
_HARMLESS_STARS = frozenset({"typing"})
"""`from typing import *` names nothing that a test calls."""


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
    may_be_wrapped: bool = False
    """Whether the first item of `expected` will do: APPS writes one returned value as `3` or as `[3]`."""


@dataclass(frozen=True, slots=True)
class CodeTest:
    """Code that must run without raising; it calls the program by the names of `functions`."""

    source: str
    functions: Mapping[str, str]


Test = PrintTest | CallTest | CodeTest


def read_tests(value: Any, entry_point: str | None) -> list[Test]:
    """The tests of one row: a JSON text or a list of `{input, output}`, `{function, arguments, output}`, `{code}` or
    plain code, or `{inputs: [...], outputs: [...], fn_name: ...}` (as APPS and TACO have it), or one text of code.

    Keys without a value are as if they were not there, since a table gives every row the keys of all.

    Raises:
        ValueError: says what is wrong.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = [value]
        except RecursionError as error:
            raise ValueError("tests are nested too deeply") from error
    if isinstance(value, Mapping) and "inputs" in value:
        return _paired(value)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise ValueError(f"tests must be a list that is not empty, not {value!r:.60}")
    function = _function(entry_point)
    return [_read_one(item, function, number) for number, item in enumerate(value)]


def _function(entry_point: Any) -> str | None:
    """`two` of `two` or `Solution().two`: where a program has no function of the name, its Solution's is taken."""
    if entry_point is None or entry_point == "":
        return None
    found = _ENTRY_POINT.fullmatch(entry_point.strip()) if isinstance(entry_point, str) else None
    if found is None:
        raise ValueError(f"the entry point must be a function's name or Solution().name, not {entry_point!r:.60}")
    return found[1]


def _paired(value: Mapping[str, Any]) -> list[Test]:
    inputs, outputs, name = value["inputs"], value.get("outputs"), value.get("fn_name")
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple) or not inputs:
        raise ValueError("inputs and outputs must be lists that are not empty")
    if len(inputs) != len(outputs):
        raise ValueError(f"tests have {len(inputs)} inputs and {len(outputs)} outputs")
    pairs = enumerate(zip(inputs, outputs, strict=True))
    if name is None:
        return [_print_test(_joined(left), _joined(right), number) for number, (left, right) in pairs]
    return [_call_test(name, left, right, number, may_be_wrapped=True) for number, (left, right) in pairs]


def _joined(lines: Any) -> Any:
    """APPS has some texts as lists of lines."""
    is_lines = isinstance(lines, list | tuple) and all(isinstance(line, str) for line in lines)
    return "\n".join(lines) if is_lines else lines


def _read_one(item: Any, entry_point: str | None, number: int) -> Test:
    if isinstance(item, str):
        return _code(item, entry_point, number)
    if not isinstance(item, Mapping):
        raise ValueError(f"test {number} must be code or a mapping, not {item!r:.60}")
    keys = {key for key in item if item[key] is not None or key == "output"}
    if {"function", "output"} <= keys:
        arguments = item["arguments"] if "arguments" in keys else ()
        return _call_test(item["function"], arguments, item["output"], number)
    if {"input", "output"} <= keys:
        return _print_test(item["input"], item["output"], number)
    if "code" in keys:
        return _code(item["code"], entry_point, number)
    raise ValueError(
        f"test {number} has the keys {sorted(map(str, keys))}; give input and output, or function, arguments and "
        "output, or code"
    )


def _print_test(stdin: Any, expected: Any, number: int) -> PrintTest:
    if not isinstance(stdin, str) or not isinstance(expected, str):
        raise ValueError(f"test {number}: input and output must be text")
    if len(stdin.encode()) > MAX_INPUT_BYTES:
        raise ValueError(f"test {number}: an input of more than {MAX_INPUT_BYTES} bytes cannot be given")
    return PrintTest(stdin, expected)


def _call_test(function: Any, arguments: Any, expected: Any, number: int, *, may_be_wrapped: bool = False) -> CallTest:
    if not isinstance(function, str):
        raise ValueError(f"test {number}: function must be a name, not {function!r:.60}")
    if not isinstance(arguments, list | tuple):
        raise ValueError(f"test {number}: arguments must be a list, not {arguments!r:.60}")
    try:
        encode([list(arguments), expected])
    except TypeError as error:
        raise ValueError(f"test {number}: {error}") from error
    return CallTest(_function(function) or "", tuple(arguments), expected, may_be_wrapped)


def _code(source: Any, entry_point: str | None, number: int) -> CodeTest:
    if not isinstance(source, str):
        raise ValueError(f"test {number}: code must be text, not {source!r:.60}")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"test {number} is not Python ({error})") from error
    if entry_point:
        functions = {entry_point: entry_point, "candidate": entry_point, "Solution": "Solution"}
        if any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
            source += "\ncheck(candidate)\n"
    else:
        functions = {name: name for name in _unbound(tree, number)}
    if not functions:
        raise ValueError(f"test {number} calls no function of the program: {source[:60]!r}")
    return CodeTest(source, functions)


def _unbound(tree: ast.AST, number: int) -> list[str]:
    """Names that are called and bound nowhere in the test."""
    called, bound = [], set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.append(node.func.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and node.module not in _HARMLESS_STARS:
            raise ValueError(
                f"test {number} has `from {node.module} import *`, which hides what is the program's; name what it "
                "imports, or give the row an entry point"
            )
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    unbound = [name for name in dict.fromkeys(called) if name not in bound]
    classes = [name for name in unbound if name[0].isupper() and name != "Solution"]
    if classes:
        raise ValueError(
            f"test {number} makes an object of the program's {classes[0]}, and plain values alone come out of a "
            "program; let it call functions, or methods of Solution()"
        )
    return unbound


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


def is_right(test: CallTest, value: Any) -> bool:
    """Whether `value` is what the test expects."""
    expected = test.expected
    if is_returned(expected, value):
        return True
    return test.may_be_wrapped and isinstance(expected, list) and bool(expected) and is_returned(expected[0], value)


def last_program(text: str) -> str | None:
    """Inside the last fence of three backticks; None where there is none that is closed."""
    parts = text.split("```")
    if len(parts) < 3:
        return None
    block = parts[-2] if len(parts) % 2 else parts[-3]
    first, newline, rest = block.partition("\n")
    return rest if newline and first.strip().lower() in ("", "python", "python3", "py") else block
