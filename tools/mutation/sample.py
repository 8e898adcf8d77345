"""Chooses which mutants of a cosmic-ray session are run: `python tools/mutation/sample.py SESSION [--count 600]`.

Left out are mutants of annotations and decorators, which say nothing about a number, and replacements that only raise a
type error (a shift of floats): both would raise or lower the score without a meaning. Of the rest those run whose name
has the smallest hash, so that a change to one file hardly moves the sample of the others.
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


@cache
def silent_spans(path: Path) -> list[Span]:
    """Their (line, column) of start and end in one file."""
    nodes = silent_nodes(ast.parse(path.read_text()))
    return [((n.lineno, n.col_offset), (n.end_lineno or 0, n.end_col_offset or 0)) for n in nodes]


def is_meaningful(mutation: MutationSpec) -> bool:
    """Whether a test of numbers could tell the mutant from the code."""
    inside = any(
        start <= tuple(mutation.start_pos) and tuple(mutation.end_pos) <= end
        for start, end in silent_spans(mutation.module_path)
    )
    return not inside and MEANINGFUL.fullmatch(mutation.operator_name) is not None


class Sample(FilterApp):
    """Marks as skipped what is not run."""

    def description(self) -> str:
        return __doc__ or ""

    def add_args(self, parser: ArgumentParser) -> None:
        parser.add_argument("--count", type=int, default=600, help="mutants to run at most")

    def filter(self, work_db: WorkDB, args: Namespace) -> None:
        items = list(work_db.pending_work_items)
        meaningful = [item for item in items if all(is_meaningful(m) for m in item.mutations)]
        chosen = sorted(meaningful, key=lot)[: args.count]
        kept = {item.job_id for item in chosen}
        for item in items:
            if item.job_id not in kept:
                work_db.set_result(item.job_id, WorkResult(WorkerOutcome.SKIPPED, "not in the sample"))
        print(f"{len(items)} mutants, {len(meaningful)} meaningful, {len(kept)} chosen")


def lot(item: WorkItem) -> str:
    """The same for a mutant in every session."""
    mutation = item.mutations[0]
    name = f"{mutation.module_path} {mutation.definition_name} {mutation.operator_name} {mutation.occurrence}"
    return hashlib.sha256(name.encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(Sample().main())
