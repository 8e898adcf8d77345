"""Chooses which mutants of a cosmic-ray session are run: `python tools/mutation/sample.py SESSION --count N --seed N`.

Left out are mutants of annotations and decorators, an order of names (`kind <= "k1"`), the star of a signature, and
replacements that only raise a type error (a shift of floats): they say nothing about a number, and would raise or lower
the score without a meaning. Of the rest those run whose name, with the seed before it, has the smallest hash: the same
in every session of the same code, and a change to one file hardly moves the sample of the others. A new score takes a
new seed, for the tests have learned the mutants of the old one.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from argparse import ArgumentParser, Namespace
from functools import cache
from pathlib import Path

from cosmic_ray.tools.filters.filter_app import FilterApp
from cosmic_ray.work_db import WorkDB
from cosmic_ray.work_item import MutationSpec, WorkerOutcome, WorkItem, WorkResult

ARITHMETIC = "(Add|Sub|Mul|Div)"
BITWISE = "(BitAnd|BitOr|BitXor)"
ORDER = "(Eq|NotEq|Lt|LtE|Gt|GtE)"
MEANINGFUL = re.compile(
    "core/("
    f"ReplaceBinaryOperator_{ARITHMETIC}_{ARITHMETIC}|ReplaceBinaryOperator_{BITWISE}_{BITWISE}"
    f"|ReplaceComparisonOperator_{ORDER}_{ORDER}|ReplaceComparisonOperator_(Is_IsNot|IsNot_Is)"
    "|ReplaceUnaryOperator_Delete_.*|ReplaceAndWithOr|ReplaceOrWithAnd|ReplaceTrueWithFalse|ReplaceFalseWithTrue"
    "|AddNot|NumberReplacer|ReplaceBreakWithContinue|ReplaceContinueWithBreak|ZeroIterationForLoop"
    ")"
)
ORDER_ALONE = re.compile(r"core/ReplaceComparisonOperator_\w*_(Lt|LtE|Gt|GtE)")
BINARY = re.compile("core/ReplaceBinaryOperator_.*")
Span = tuple[tuple[int, int], tuple[int, int]]


def silent_nodes(tree: ast.AST) -> list[ast.expr]:
    """Annotations and decorators."""
    found: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found += node.decorator_list
        if isinstance(node, ast.FunctionDef):
            found.append(node.returns)
        if isinstance(node, ast.AnnAssign | ast.arg):
            found.append(node.annotation)
    return [node for node in found if node is not None]


def is_text(node: ast.expr) -> bool:
    """A string constant."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def span(node: ast.expr | ast.stmt) -> Span:
    """(line, column) of start and end."""
    return (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)


@cache
def silent_spans(path: Path) -> list[tuple[re.Pattern[str], Span]]:
    """Which operators say nothing, and where in the file."""
    tree = ast.parse(path.read_text())
    found = [(re.compile(".*"), span(node)) for node in silent_nodes(tree)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(is_text(other) for other in node.comparators):
            found.append((ORDER_ALONE, span(node)))
        if isinstance(node, ast.FunctionDef):
            found.append((BINARY, (span(node)[0], span(node.body[0])[0])))
    return found


def is_meaningful(mutation: MutationSpec) -> bool:
    """Whether a test of numbers could tell the mutant from the code."""
    name, start, end = mutation.operator_name, tuple(mutation.start_pos), tuple(mutation.end_pos)
    is_silent = any(
        pattern.fullmatch(name) and low <= start and end <= high
        for pattern, (low, high) in silent_spans(mutation.module_path)
    )
    return not is_silent and MEANINGFUL.fullmatch(name) is not None


class Sample(FilterApp):
    """Marks as skipped what is not run."""

    def description(self) -> str:
        return __doc__ or ""

    def add_args(self, parser: ArgumentParser) -> None:
        parser.add_argument("--count", type=int, default=600, help="mutants to run at most")
        parser.add_argument("--seed", default="", help="any word; another one draws other mutants")

    def filter(self, work_db: WorkDB, args: Namespace) -> None:
        items = list(work_db.pending_work_items)
        meaningful = [item for item in items if all(is_meaningful(m) for m in item.mutations)]
        chosen = sorted(meaningful, key=lambda item: lot(item, args.seed))[: args.count]
        kept = {item.job_id for item in chosen}
        for item in items:
            if item.job_id not in kept:
                work_db.set_result(item.job_id, WorkResult(WorkerOutcome.SKIPPED, "not in the sample"))
        print(f"{len(items)} mutants, {len(meaningful)} meaningful, {len(kept)} chosen")


def lot(item: WorkItem, seed: str) -> str:
    """The same for a mutant in every session with this seed."""
    mutation = item.mutations[0]
    name = f"{mutation.module_path} {mutation.definition_name} {mutation.operator_name} {mutation.occurrence}"
    return hashlib.sha256((seed + name).encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(Sample().main())
