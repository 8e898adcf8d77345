"""`moerl` and `python -m moerl`: one line per subcommand. What a subcommand does is in `moerl/commands/`."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import warnings
from collections.abc import Sequence

from moerl import __version__
from moerl.errors import ConfigError, DataError, Interrupted, MoerlError

COMMANDS = {
    "train": "train a policy: supervised or with reinforcement learning",
    "eval": "held-out evaluation of a checkpoint or a Hugging Face folder",
    "report": "write report.html of a run",
}
"""Subcommand -> one line of help; each is the module `moerl.commands.<name>`, imported only when it runs."""

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status (0 done, 1 failed, 2 bad input, 130 Ctrl-C)."""
    parser = argparse.ArgumentParser(prog="moerl", description="Reinforcement learning of MoE models on Megatron-Core.")
    parser.add_argument("--version", action="version", version=f"moerl {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    arguments = list(sys.argv[1:] if argv is None else argv)
    for name, help_line in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=help_line, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name in arguments[:1]:
            command = importlib.import_module(f"moerl.commands.{name}")
            subparser.description = command.HELP
            command.add_arguments(subparser)
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    warnings.filterwarnings("ignore", module=r"megatron\.")  # absent GPU libraries and deprecations of its own
    for noisy in ("megatron", "torch.distributed", "httpx", "antlr4"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    return _run(importlib.import_module(f"moerl.commands.{args.command}").run, args)


def _run(run: object, args: argparse.Namespace) -> int:
    try:
        return run(args)  # pyright: ignore[reportCallIssue]  every command module has run(args) -> int
    except (ConfigError, DataError) as error:
        _complain(f"moerl: {error}")
        return EXIT_USAGE
    except Interrupted as error:
        _complain(f"moerl: {error}")
        return EXIT_INTERRUPTED
    except MoerlError as error:
        _complain(f"moerl: {error}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        _complain("moerl: stopped at once; the last complete checkpoint is untouched, start the same command to go on")
        return EXIT_INTERRUPTED


def _complain(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
