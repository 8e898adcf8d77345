"""Value of an arithmetic expression that a model wrote: `ast` with an allow list, no `eval`. Runs in the sandbox.

Whole numbers stay whole where they can (`6/2` is 3); everything else is a double. Not allowed, and said so: names,
calls, comparisons, powers beyond 4096 bits, more than 500 characters.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

MAX_CHARACTERS = 500
_MAX_BITS = 4096

Number = int | float


def evaluate(expression: str) -> dict[str, str]:
    """`{"value": "12"}`, or `{"error": why}` where there is none."""
    try:
        return {"value": _written(_value(_parsed(expression)))}
    except ZeroDivisionError:
        return {"error": "division by zero"}
    except (ArithmeticError, ValueError) as error:
        return {"error": str(error)}
    except RecursionError:
        return {"error": "nested too deeply"}


def _parsed(expression: str) -> ast.expr:
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"longer than {MAX_CHARACTERS} characters")
    text = expression.strip().replace("×", "*").replace("÷", "/").replace("−", "-").replace("^", "**")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, MemoryError, ValueError):  # some Pythons raise the last one for a null byte
        raise ValueError("not an arithmetic expression") from None


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)  # pyright: ignore[reportArgumentType]  # its type was just compared
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _bounded(_BINARY[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("only numbers, brackets and + - * / // % ** are allowed")


def _quotient(left: Number, right: Number) -> Number:
    if isinstance(left, int) and isinstance(right, int) and right and left % right == 0:
        return left // right
    return left / right


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1:
        if exponent * base.bit_length() > _MAX_BITS:
            raise ValueError("too large")
        if exponent < -_MAX_BITS:
            return 0.0
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("not a real number")
    return value


def _bounded(value: Number) -> Number:
    """Whole numbers within so many bits, doubles that are finite."""
    too_large = value.bit_length() > _MAX_BITS if isinstance(value, int) else not math.isfinite(value)
    if too_large:
        raise ValueError("too large")
    return value


def _written(value: Number) -> str:
    """As a person would write it: no trailing `.0`, ten significant digits."""
    if isinstance(value, int):
        return str(value)
    if value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.10g}"


_UNARY: dict[type, Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: dict[type, Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
