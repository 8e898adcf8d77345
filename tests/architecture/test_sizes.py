"""Files, functions and nesting stay small. An allowance has a reason, and goes when it is not needed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("moerl", "tools", "tests")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_NESTING = 3
MAX_PARAMETERS = 8

ALLOWED: dict[str, tuple[int, str]] = {
    "moerl/loop.py::train nesting": (4, "a step inside `try` inside the records' `with`: the loop reads top to bottom"),
    "moerl/rewards/scorer.py::RewardScorer.check_prompts nesting": (4, "sets x prompts x rewards, and a fault of one"),
    "moerl/reference/loading.py::read_weights nesting": (4, "files x tensors under their open handle"),
    "moerl/data/sources/file.py::_jsonl_rows nesting": (4, "lines of an open file, each with its own error"),
    "moerl/data/sources/file.py::_parquet_rows nesting": (
        4,
        "rows of batches of an open file, each with its own error",
    ),
    "moerl/data/packing.py::plan_packing parameters": (10, "the numbers of one step, each named by its caller"),
    "moerl/mcore/policy.py::MegatronPolicy.build parameters": (12, "the composition root names each part once"),
}

BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Deepest block inside a function; `elif` does not nest, an inner function counts for itself."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, SCOPES):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deeper = depth + (isinstance(child, BLOCKS) and not is_elif)
        deepest = max(deepest, nesting(child, deeper))
    return deepest


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(tree):
        name = f"{prefix}{child.name}" if isinstance(child, SCOPES) and not isinstance(child, ast.Lambda) else prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, child
        yield from functions(child, f"{name}." if name != prefix else prefix)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [item.arg for item in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def measured() -> dict[str, tuple[int, int]]:
    """What -> (size, limit) of everything that is over its limit."""
    sizes = {}
    for path in sources():
        text, where = path.read_text(), path.relative_to(ROOT).as_posix()
        sizes[f"{where} lines"] = (len(text.splitlines()), MAX_FILE_LINES)
        for name, function in functions(ast.parse(text)):
            first = min([function.lineno, *(item.lineno for item in function.decorator_list)])
            lines = function.end_lineno - first + 1
            sizes[f"{where}::{name} lines"] = (lines, MAX_FUNCTION_LINES + (function.lineno - first))
            sizes[f"{where}::{name} nesting"] = (nesting(function), MAX_NESTING)
            if not where.startswith("tests/"):
                sizes[f"{where}::{name} parameters"] = (parameters(function), MAX_PARAMETERS)
    return sizes


@pytest.fixture(scope="module")
def sizes() -> dict[str, tuple[int, int]]:
    return measured()


def test_nothing_is_over_its_limit(sizes):
    over = [
        f"{what}: {size}, limit {max(limit, ALLOWED.get(what, (0, ''))[0])}"
        for what, (size, limit) in sizes.items()
        if size > max(limit, ALLOWED.get(what, (0, ""))[0])
    ]
    assert not over, "too large:\n" + "\n".join(over)


def test_every_allowance_is_still_needed(sizes):
    unneeded = [what for what in ALLOWED if sizes.get(what, (0, 0))[0] <= sizes.get(what, (0, 0))[1]]
    assert not unneeded, f"remove these allowances: {unneeded}"


def test_the_measure_itself():
    tree = ast.parse(
        "class A:\n"
        "    def f(self, a, *, b):\n"
        "        if a:\n"
        "            pass\n"
        "        elif b:\n"
        "            for x in a:\n"
        "                with x:\n"
        "                    pass\n"
        "        def g():\n"
        "            return 1\n"
    )
    found = dict(functions(tree))
    assert set(found) == {"A.f", "A.f.g"}
    assert nesting(found["A.f"]) == 3
    assert nesting(found["A.f.g"]) == 0
    assert parameters(found["A.f"]) == 2


def test_a_package_init_is_short():
    for path in (ROOT / "moerl").rglob("__init__.py"):
        assert len(path.read_text().splitlines()) <= 40, path
