"""`moerl eval`: the held-out evaluation of a checkpoint of a run, or of any Hugging Face folder."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from moerl.errors import ConfigError

HELP = """Run the held-out evaluation: greedy, sampled and pass@k on the sets of `evaluation.sets`.

  moerl eval configs/demo/gspo.yaml                 the policy that the configuration starts from
  moerl eval configs/demo/gspo.yaml --model DIR     any Hugging Face folder of the same tokenizer
  moerl eval runs/demo-gspo                         the newest checkpoint of a run
  moerl eval runs/demo-gspo --step 40 --json        an earlier one; one JSON object on standard output
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `moerl eval`."""
    parser.add_argument("target", help="configuration file, or run folder")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="override any key, such as evaluation.num_samples=8",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", help="evaluate this Hugging Face folder")
    source.add_argument("--step", type=int, help="evaluate the checkpoint of this step (run folder only)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Evaluate and print."""
    from moerl.analysis.run_folder import CONFIG_FILE
    from moerl.configure import load

    target = Path(args.target)
    is_run = target.is_dir()
    if is_run and not (target / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{target} is a folder without {CONFIG_FILE}: give a run folder, or a configuration with --model {target}"
        )
    if args.step is not None and not is_run:
        raise ConfigError(f"--step {args.step} needs a run folder, and {target} is a configuration file")
    cfg = load(target / CONFIG_FILE if is_run else target, args.overrides)
    if not cfg.evaluation.sets:
        raise ConfigError(
            f"{args.target} names no evaluation.sets, so that there is nothing to evaluate on; add one, such as "
            "evaluation.sets='[{name: held, source: {name: file, path: held.jsonl}}]'"
        )
    if args.model:
        cfg.model.path = args.model
        cfg.model.init = "weights"

    from moerl.build_evaluation import build_evaluation

    run_folder = target if is_run and not args.model else None
    with build_evaluation(cfg, run_folder=run_folder, step=args.step) as evaluation:
        values = evaluation.run()
    if args.json:
        sys.stdout.write(json.dumps(values, sort_keys=True) + "\n")
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"held-out evaluation of {evaluation.subject}", title_justify="left")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in sorted(values.items()):
        table.add_row(name, f"{value:.4f}")
    Console(file=sys.stdout).print(table)
    return 0
