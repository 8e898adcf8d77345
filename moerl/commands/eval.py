"""`moerl eval`: the held-out evaluation of a checkpoint of a run, or of any Hugging Face folder."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from moerl.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from moerl.compare_templates import TemplateComparison
    from moerl.config.schema import RunConfig

HELP = """Run the held-out evaluation: greedy, sampled, pass@k, maj@k and best-of-k on the sets of `evaluation.sets`.

  moerl eval configs/demo/gspo.yaml                 the policy that the configuration starts from
  moerl eval configs/demo/gspo.yaml --model DIR     any Hugging Face folder of the same tokenizer
  moerl eval runs/demo-gspo                         the newest checkpoint of a run
  moerl eval runs/demo-gspo --step 40 --json        an earlier one; one JSON object on standard output
  moerl eval CONFIG evaluation.num_samples=8 'evaluation.maj_at=[8]' 'evaluation.best_of=[8]'
  moerl eval CONFIG --compare-templates none,chat,r1,qwen_math
                                                    which prompt template suits the policy, before training
"""

ORDER = ("accuracy", "pass", "maj", "best", "max", "response", "truncated", "format", "errors")
"""How the kinds of metrics follow one another in a comparison."""


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
    parser.add_argument(
        "--compare-templates",
        metavar="NAMES",
        help="evaluate under each of these prompt templates, comma-separated, and put them side by side",
    )
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

    run_folder = target if is_run and not args.model else None
    if args.compare_templates is not None:
        _compare(cfg, args, run_folder)
    else:
        _evaluate(cfg, args, run_folder)
    return 0


def _evaluate(cfg: RunConfig, args: argparse.Namespace, run_folder: Path | None) -> None:
    from moerl.build_evaluation import build_evaluation

    with build_evaluation(cfg, run_folder=run_folder, step=args.step) as evaluation:
        values = evaluation.run()
    if args.json:
        sys.stdout.write(json.dumps(values, sort_keys=True) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"held-out evaluation of {evaluation.subject}", title_justify="left")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in sorted(values.items()):
        table.add_row(name, f"{value:.4f}")
    Console(file=sys.stdout).print(table)


def _compare(cfg: RunConfig, args: argparse.Namespace, run_folder: Path | None) -> None:
    from moerl.compare_templates import compare_templates

    names = [name.strip() for name in args.compare_templates.split(",") if name.strip()]
    if not names:
        raise ConfigError("--compare-templates names no template; give some, such as none,chat,r1,qwen_math")
    found = compare_templates(cfg, names, run_folder=run_folder, step=args.step)
    if args.json:
        sys.stdout.write(json.dumps(dataclasses.asdict(found), sort_keys=True) + "\n")
        return
    from rich.console import Console

    console = Console(file=sys.stdout)
    console.print(comparison_table(found))
    for name, reason in found.refused.items():
        console.print(f"{name} cannot be used: {reason}", markup=False, highlight=False, soft_wrap=True)
    if found.num_left_out:
        console.print(
            f"{found.num_left_out} tasks are left out: some template makes them longer than data.max_prompt_tokens="
            f"{cfg.data.max_prompt_tokens}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def comparison_table(found: TemplateComparison) -> Table:
    """Metrics down, templates across; over all sets first, then each set where there are several."""
    from rich.table import Table

    title = f"prompt templates on {found.subject}, {found.num_prompts} held-out tasks"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in found.values:
        table.add_column(name, justify="right")
    table.add_row("answer read in", *(", ".join(extracts) or "-" for extracts in found.extracts.values()))
    names = dict.fromkeys(name for values in found.values.values() for name in values)
    for name in sorted(names, key=_place):
        cells = [f"{values[name]:.3f}" if name in values else "-" for values in found.values.values()]
        table.add_row(name.removeprefix("eval/").replace("_", " "), *cells)
    return table


def _place(name: str) -> tuple[str, int, str, int]:
    """Where a metric stands in the table: by its set, then by kind, then by k."""
    held_out, _, metric = name.removeprefix("eval/").rpartition("/")
    kind, _, k = metric.partition("@")
    ranks = [rank for rank, start in enumerate(ORDER) if kind.startswith(start)]
    return held_out, min(ranks, default=len(ORDER)), kind, int(k or 0)
