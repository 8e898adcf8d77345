"""`moerl train`: build the rooms of a configuration and walk the loop."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moerl.errors import ConfigError, Interrupted, PeerError, exit_status
from moerl.world import launched_world, let_the_first_speak

if TYPE_CHECKING:
    from rich.console import RenderableType

    from moerl.config.schema import RunConfig
    from moerl.protocols import Team

HELP = """Train a policy from a configuration file, supervised or with reinforcement learning.

The run folder <run.output_dir>/<run.name> holds config.yaml (resolved), metrics.jsonl (one object per step),
samples.jsonl, summary.json, report.html, checkpoints/ and, at the end, hf/ (the weights for transformers and SGLang).
The same command again goes on from the last complete checkpoint. Ctrl-C finishes the step, saves, and exits with 130.

  moerl train configs/demo/gspo.yaml
  moerl train configs/demo/gspo.yaml run.name=two run.seed=1 algorithm.routing=R3
  moerl train configs/demo/gspo.yaml run.resume=never        start anew; the old folder is set aside
  torchrun --standalone --nproc-per-node 4 -m moerl train configs/demo/gspo.yaml parallel.tensor=2 parallel.expert=2
                                                             in four processes (launch/local.sh does the same)
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

    world = launched_world()
    try:
        cfg = load(args.config, args.overrides)
    except ConfigError as error:
        let_the_first_speak(world)
        if world.local_rank:
            raise PeerError(exit_status(error)) from error
        raise

    from moerl.mcore.team import joined

    with joined(world, cfg.parallel) as team:
        summary = _train(cfg, args, team)
        team.meet()  # the leader may write for a while yet
    if summary is not None:
        from rich.console import Console

        Console(file=sys.stdout).print(summary)
    return 0


def _train(cfg: RunConfig, args: argparse.Namespace, team: Team) -> RenderableType | None:
    """What to print at the end; None on ranks that do not lead, and where the run had ended before."""
    from moerl.build import build_run
    from moerl.finish import finish_run
    from moerl.loop import train

    run_parts = build_run(cfg, team)
    if run_parts is None:
        return None
    rooms = run_parts.rooms
    try:
        train(rooms, run_parts.schedule, run_parts.resume_from)
        return finish_run(cfg, run_parts.folder, rooms.policy, rooms.records.seconds, is_leader=team.is_leader)
    except Interrupted as error:
        command = shlex.join([*_launcher(), "train", args.config, *_going_on(args.overrides, cfg.run.resume)])
        raise Interrupted(f"{error}; go on with: {command}") from error
    finally:
        run_parts.close()


def _launcher() -> list[str]:
    """How this process was started, as far as it knows."""
    world = launched_world()
    if world.is_alone:
        return ["moerl"]
    nodes = ["--nnodes", str(world.num_nodes)] if world.num_nodes > 1 else ["--standalone"]
    return ["torchrun", *nodes, "--nproc-per-node", str(world.local_size), "-m", "moerl"]


def _going_on(overrides: Sequence[str], resume: str) -> list[str]:
    """The overrides with which the run goes on; `run.resume=never` would start it anew."""
    if resume != "never":
        return list(overrides)
    return [*(text for text in overrides if text.partition("=")[0].strip() != "run.resume"), "run.resume=auto"]
