"""`moerl report`: report.html of a run folder, also of one that is still being written."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HELP = """Write <run>/report.html: what was learnt, how training and rollout agree, how routes and loads move.

The page needs no network and no other file. Several runs may be named.

  moerl report runs/demo-gspo
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `moerl report`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")


def run(args: argparse.Namespace) -> int:
    """Write every report and say where it is."""
    from moerl.analysis.report import write_report

    for folder in args.runs:
        sys.stdout.write(f"{write_report(folder)}\n")
    return 0
