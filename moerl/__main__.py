"""`moerl` and `python -m moerl`: one line per subcommand. What a subcommand does is in `moerl/commands/`."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Sequence

from moerl import __version__
from moerl.errors import (
    DISK_ERRORS,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    ConfigError,
    MoerlError,
    PeerError,
    exit_status,
)
from moerl.world import launched_world, let_the_first_speak

COMMANDS = {
    "train": "train a policy: supervised or with reinforcement learning",
    "eval": "held-out evaluation of a checkpoint or a Hugging Face folder",
    "report": "write report.html of a run",
    "convert": "convert checkpoints to and from Hugging Face, verify and inspect them",
    "fake-engine": "serve SGLang's API without a model, for tests",
    "objective": "evaluate policy-optimisation methods on a dumped batch, or list them",
}
"""Subcommand -> one line of help; each is the module `moerl.commands.<name>` (`_` for `-`), imported when it runs."""

IN_SEVERAL_PROCESSES = frozenset({"train", "convert"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status (0 done, 1 failed, 2 bad input, 130 Ctrl-C)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in COMMANDS:
        _overview().parse_args(arguments[:1])
        raise AssertionError("argparse exits on everything that is no command")
    try:
        world = launched_world()
    except ConfigError as error:
        _complain(f"moerl: {error}")
        return EXIT_USAGE
    if not world.is_alone and arguments[0] not in IN_SEVERAL_PROCESSES:
        let_the_first_speak(world)
        if not world.local_rank:
            _complain(f"moerl: `moerl {arguments[0]}` runs in one process; start it without a launcher")
        return EXIT_USAGE
    command = importlib.import_module("moerl.commands." + arguments[0].replace("-", "_"))
    parser = argparse.ArgumentParser(
        f"moerl {arguments[0]}", description=command.HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_arguments(parser)
    args = parse(parser, arguments[1:])
    level = logging.ERROR if world.rank else logging.INFO  # rank 0 speaks for all
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    warnings.filterwarnings("ignore", module=r"megatron\.")  # absent GPU libraries and deprecations of its own
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # what megatron calls
    for noisy in ("megatron", "torch.utils.cpp_extension", "torch.distributed", "httpx", "antlr4"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    return _run(command.run, args)


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments of a subcommand: `key=value` may stand after an option, but for those that have subcommands."""
    if parser._subparsers is not None:
        return parser.parse_args(arguments)
    return parser.parse_intermixed_args(arguments)


def _overview() -> argparse.ArgumentParser:
    """What `moerl --help` shows."""
    parser = argparse.ArgumentParser(prog="moerl", description="Reinforcement learning of MoE models on Megatron-Core.")
    parser.add_argument("--version", action="version", version=f"moerl {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, help_line in COMMANDS.items():
        subparsers.add_parser(name, help=help_line)
    parser.epilog = "`moerl COMMAND --help` says more of each."
    return parser


def _run(run: object, args: argparse.Namespace) -> int:
    try:
        return run(args)  # pyright: ignore[reportCallIssue]  every command module has run(args) -> int
    except PeerError as error:
        return error.status
    except MoerlError as error:
        _complain(f"moerl: {error}")
        return exit_status(error)
    except BrokenPipeError:  # `moerl ... | head` has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123  the interpreter flushes it at exit
        return EXIT_FAILED
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        _complain(f"moerl: {error.filename or 'the disk'} cannot be written or read ({error.strerror})")
        return EXIT_FAILED
    except KeyboardInterrupt:
        logging.getLogger("asyncio").disabled = True  # tasks that were cut off need not say so as the process ends
        _complain("moerl: stopped at once; the last complete checkpoint is untouched, start the same command to go on")
        return EXIT_INTERRUPTED


def _complain(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
