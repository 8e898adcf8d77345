"""Compare two metric files (or run folders) step by step; exit status 1 if they differ, 2 if one cannot be read.

Examples:
python tools/compare_runs.py runs/a runs/b                      exactly
python tools/compare_runs.py runs/a runs/b --tolerance 1e-5     |a - b| <= 1e-5 * max(1, |a|, |b|)
python tools/compare_runs.py runs/a runs/b --ignore 'mm/*'      leave names out, beside times and rates
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from moerl.analysis.compare import compare_files, comparison_table
from moerl.errors import MoerlError


def main() -> int:
    """Compare, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, help="run folder or metrics.jsonl")
    parser.add_argument("b", type=Path, help="run folder or metrics.jsonl")
    parser.add_argument("--tolerance", type=float, default=0.0, help="0 (default): exact")
    parser.add_argument("--ignore", action="append", default=[], metavar="PATTERN", help="may be given several times")
    parser.add_argument("--max-rows", type=int, default=20, help="metrics to show (default %(default)s)")
    args = parser.parse_args()
    try:
        comparison = compare_files(args.a, args.b, tolerance=args.tolerance, ignore=args.ignore)
    except MoerlError as error:
        print(f"compare_runs: {error}", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    console.print(comparison_table(comparison, max_rows=args.max_rows))
    return 0 if comparison.is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
