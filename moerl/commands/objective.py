"""`moerl objective`: evaluate policy-optimisation methods on a dumped batch, or list them."""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from typing import TYPE_CHECKING, Any

from moerl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from moerl.api import Evaluation, Method
    from moerl.data.token_batch import TokenBatch

logger = logging.getLogger(__name__)

HELP = """Evaluate an objective on a batch: loss, gradient norm, clip and mask fractions.

  moerl objective --list                                              every method: preset, one line, paper, needs
  moerl objective --preset gspo --batch BATCHES/step_000003.npz       a step of a run, from runs/NAME/batches
  moerl objective --preset dapo --batch small.json trust.hi=0.3       a few sequences by hand; any axis overridden
  moerl objective --compare grpo,gspo,cispo --batch b.npz --move 0.1  side by side, and the tokens that tell them apart
  moerl objective --preset grpo --batch data_0.pt --group-size 8      a debug dump of slime (--format verl: of verl)

A run writes its steps with telemetry.dump_batches=true, and the last one where a loss or gradient was not finite.
The policy of a dump is the one at the start of the step, so every ratio is 1 unless the dump says otherwise (JSON) or
--move is given. docs/algorithms.md has the layouts of the files.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `moerl objective`."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--preset", metavar="NAME", help="one method")
    what.add_argument("--compare", metavar="A,B,...", help="several methods on the same batch")
    what.add_argument("--list", action="store_true", help="print the table of methods")
    parser.add_argument("--batch", metavar="FILE", help=".npz, .json, .pt")
    parser.add_argument("--format", default="auto", help="auto, moerl, json, slime, verl")
    parser.add_argument("--minibatch", type=int, help="of moerl's dump, this one; default: the first epoch as one")
    parser.add_argument("--group-size", type=int, help="answers per prompt, where the dump does not say")
    parser.add_argument("--reward-key", help="which of slime's rewards")
    parser.add_argument("--keep-advantages", action="store_true", help="those of the dump, not the method's own")
    parser.add_argument("--max-new-tokens", type=int, help="generation budget (dr_grpo, dppo_*)")
    parser.add_argument("--move", type=float, default=0.0, metavar="NATS", help="noise on the current logprobs")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    parser.add_argument("--tokens", type=int, default=10, help="tokens to show with --compare")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="axes, such as trust.hi=0.28")


def run(args: argparse.Namespace) -> int:
    """Evaluate or list, and print."""
    if args.list:
        _print_list(args.json)
        return 0
    if not args.batch:
        raise ConfigError("--batch is missing; give a dumped batch (.npz, .json, .pt), or --list to see the methods")
    if not (math.isfinite(args.move) and args.move >= 0):
        raise ConfigError(f"--move is {args.move}, but must be a number of nats, 0 or more")
    from moerl.side_by_side import compare, summarise

    names = [args.preset] if args.preset else [name for name in args.compare.split(",") if name]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"--compare {args.compare!r}: give different presets, separated by commas")
    methods = {name: _method(name, args) for name in names}
    batch = _batch(args)
    results = {name: _evaluation(name, method, batch) for name, method in methods.items()}
    if args.preset:
        figures = summarise(results[args.preset])
        _print_json({"method": args.preset, **figures}) if args.json else _print_figures({args.preset: figures})
        return 0
    comparison = compare(results, num_tokens=args.tokens)
    if args.json:
        _print_json(comparison.as_json())
        return 0
    _print_figures(comparison.figures)
    _print_tokens(comparison.gaps, names)
    return 0


def _method(name: str, args: argparse.Namespace) -> Method:
    from moerl.api import objective

    method = objective(name, max_new_tokens=args.max_new_tokens, overrides=args.overrides)
    for kind, nodes in (("filters", method.section.filters), ("shaping", method.section.shaping)):
        if nodes:
            listed = ", ".join(str(node["name"]) for node in nodes)
            logger.warning("%s: its %s (%s) can only act where answers are sampled, not here", name, kind, listed)
    return method


def _evaluation(name: str, method: Method, batch: TokenBatch) -> Evaluation:
    try:
        return method.evaluate(batch)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error


def _batch(args: argparse.Namespace) -> TokenBatch:
    from moerl.data.batch_file import read_batch

    batch = read_batch(
        args.batch,
        args.format,
        minibatch=args.minibatch,
        group_size=args.group_size,
        reward_key=args.reward_key,
        keep_advantages=args.keep_advantages,
    )
    return batch.moved(args.move, args.seed) if args.move else batch


def _print_list(as_json: bool) -> None:
    from moerl.catalogue import method_rows

    rows = method_rows()
    if as_json:
        _print_json([vars(row) for row in rows])
        return
    _print_table(
        "methods", ["preset", "what it is", "paper", "needs"], [[r.name, r.summary, r.paper, r.needs] for r in rows]
    )


def _print_figures(figures: Any) -> None:
    names = list(dict.fromkeys(key for values in figures.values() for key in values))
    rows = [[name, *(_number(values.get(name)) for values in figures.values())] for name in names]
    _print_table("objective", ["", *figures], rows)


def _print_tokens(gaps: Any, names: list[str]) -> None:
    has_one_advantage = all(len(set(gap.advantages.values())) == 1 for gap in gaps)
    credit = ["A"] if has_one_advantage else [f"A {name}" for name in names]
    rows = []
    for gap in gaps:
        advantages = list(gap.advantages.values())[: len(credit)]
        where = [str(gap.sequence), str(gap.position), "-" if gap.token_id is None else str(gap.token_id)]
        rows.append(
            [*where, *(f"{value + 0.0:.3g}" for value in (gap.log_ratio, *advantages, *gap.gradients.values()))]
        )
    columns = ["seq", "pos", "token", "log ratio", *credit, *(f"grad {name}" for name in names)]
    _print_table("where the gradients differ most", columns, rows)


def _print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=index == 0)  # names are there to be copied
    for row in rows:
        table.add_row(*row)
    # A file or a pipe has no width: one line a row, so that grep finds it whole.
    width = None if sys.stdout.isatty() else sum(max(map(len, cells)) + 3 for cells in zip(columns, *rows, strict=True))
    Console(file=sys.stdout, width=None if width is None else width + 1).print(table)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, sort_keys=False) + "\n")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value + 0.0:.6g}"  # the sum makes -0 a plain 0
