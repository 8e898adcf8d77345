"""`moerl train`: build the rooms of a configuration and walk the loop."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from moerl.errors import Interrupted

HELP = """Train a policy from a configuration file, supervised or with reinforcement learning.

The run folder <run.output_dir>/<run.name> holds config.yaml (resolved), metrics.jsonl (one object per step),
samples.jsonl, summary.json, report.html, checkpoints/ and, at the end, hf/ (the weights for transformers and SGLang).
The same command again goes on from the last complete checkpoint. Ctrl-C finishes the step, saves, and exits with 130.

  moerl train configs/demo/gspo.yaml
  moerl train configs/demo/gspo.yaml run.name=two run.seed=1 algorithm.routing=R3
  moerl train configs/demo/gspo.yaml run.resume=never        start anew; the old folder is set aside
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `moerl train`."""
    parser.add_argument("config", help="YAML file")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="override any key, such as run.seed=1"
    )


def run(args: argparse.Namespace) -> int:
    """Check everything, then train; returns 0 when the run reached its last step."""
    from moerl.configure import load

    cfg = load(args.config, args.overrides)

    from rich.console import Console

    from moerl.build import build_run
    from moerl.finish import finish_run
    from moerl.loop import train

    run_parts = build_run(cfg)
    if run_parts is None:
        return 0
    try:
        train(run_parts.rooms, run_parts.schedule, run_parts.resume_from)
        summary = finish_run(cfg, run_parts.folder, run_parts.rooms.policy, run_parts.rooms.records.seconds)
    except Interrupted as error:
        command = shlex.join(["moerl", "train", args.config, *_going_on(args.overrides, cfg.run.resume)])
        raise Interrupted(f"{error}; go on with: {command}") from error
    finally:
        run_parts.close()
    Console(file=sys.stdout).print(summary)
    return 0


def _going_on(overrides: Sequence[str], resume: str) -> list[str]:
    """The overrides with which the run goes on; `run.resume=never` would start it anew."""
    if resume != "never":
        return list(overrides)
    return [*(text for text in overrides if text.partition("=")[0].strip() != "run.resume"), "run.resume=auto"]
