"""`moerl convert`: checkpoints to and from Hugging Face, compared and inspected; bit for bit, without a GPU."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moerl.errors import ConfigError
from moerl.world import launched_world

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from torch import Tensor

    from moerl.convert.building import Built
    from moerl.convert.imports import Options
    from moerl.convert.places import Place

HELP = """Convert checkpoints of MoE models to and from Hugging Face, bit for bit, streaming, without a GPU.

  moerl convert import HF_DIR OUT --tensor 2 --expert 4     a Hugging Face folder -> a sharded Megatron checkpoint
  moerl convert export runs/demo-gspo OUT                   the newest checkpoint of a run -> a Hugging Face folder
  moerl convert export CHECKPOINT OUT --dtype bf16          also of a folder that `import` made
  moerl convert export CHECKPOINT OUT --dtype fp8-block     with FP8 blocks, as DeepSeek and Qwen publish them
  moerl convert verify HF_DIR CHECKPOINT                    every tensor bit by bit, then logits and routes
  moerl convert inspect PATH                                what it is: family, parameters, types, layout, checksums
  moerl convert --list                                      the families, what is covered, how it was verified

Values change only where --dtype asks for it; routers and their correction biases keep their type even then. A
conversion that was killed goes on where it was when the same command is started again. On several processes:
  torchrun --standalone --nproc-per-node 8 -m moerl convert import HF_DIR OUT
"""
DTYPES = ("keep", "bf16", "fp16", "fp32")
EXPORT_DTYPES = (*DTYPES, "fp8-block", "fp8-tensor")
AXES = ("tensor", "pipeline", "virtual-pipeline", "expert", "expert-tensor")
UNEVEN = ("first-stage-layers", "last-stage-layers")
SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `moerl convert`."""
    parser.add_argument("--list", action="store_true", help="print the model families and leave")
    parser.add_argument("--json", action="store_true", help="with --list: as JSON")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", help="what to do; each has its own --help")
    come = actions.add_parser("import", help="Hugging Face folder -> sharded Megatron checkpoint")
    come.add_argument("source", type=Path, metavar="HF_DIR", help="a Hugging Face folder, or any other form")
    come.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    for axis in AXES:
        come.add_argument(
            f"--{axis}", type=int, default=1, metavar="N", help=f"cut for parallel.{axis.replace('-', '_')}=N"
        )
    for end in UNEVEN:
        come.add_argument(f"--{end}", type=int, metavar="N", help=f"cut for parallel.{end.replace('-', '_')}=N")
    _add_writing(come, DTYPES, "2GB", "largest file of the checkpoint (default %(default)s)")
    go = actions.add_parser("export", help="checkpoint of a run, or sharded checkpoint -> Hugging Face folder")
    go.add_argument(
        "source", type=Path, metavar="CHECKPOINT", help="a run (its newest), a step of one, or a converted folder"
    )
    go.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    _add_writing(go, EXPORT_DTYPES, "5GB", "largest file of the folder (default %(default)s)")
    go.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="texts, one a line, on which --dtype fp8-tensor measures what goes into each layer",
    )
    same = actions.add_parser("verify", help="compare two models, whatever form each has")
    same.add_argument("first", type=Path, metavar="A", help="a model in any form")
    same.add_argument("second", type=Path, metavar="B", help="another")
    same.add_argument("--no-forward", action="store_true", help="tensors only; a forward takes both models in memory")
    same.add_argument("--tokens", type=int, default=64, help="random tokens of the forward (default %(default)s)")
    same.add_argument("--seed", type=int, default=0, help="of the tokens (default %(default)s)")
    same.add_argument(
        "--tolerance",
        type=float,
        default=3e-5,
        help="of logits, per 1 + the largest of all after the same token (default %(default)s)",
    )
    same.add_argument("--rows", type=int, default=20, help="differences to print (default %(default)s)")
    _add_reading(same)
    look = actions.add_parser("inspect", help="show a model without loading it")
    look.add_argument("path", type=Path, metavar="PATH", help="a model in any form")
    look.add_argument("--names", action="store_true", help="list every tensor, not one line for all layers and experts")
    _add_reading(look)
    for action in (same, look):
        action.add_argument("--json", action="store_true", dest="as_json", help="one JSON object on standard output")


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--settings", type=Path, metavar="HF_DIR", help="config.json and tokenizer of a run that lost its own"
    )
    parser.add_argument("--skip-checksums", action="store_true", help="do not hold files against their manifest first")
    parser.add_argument(
        "--allow-unmapped",
        action="append",
        type=pattern,
        default=[],
        metavar="PATTERN",
        help="regular expression of tensors to leave out",
    )
    parser.add_argument("--threads", type=int, default=min(8, 1 + (os.cpu_count() or 1)), help="default %(default)s")


def _add_writing(parser: argparse.ArgumentParser, dtypes: Sequence[str], size: str, size_help: str) -> None:
    parser.add_argument("--dtype", choices=dtypes, default="keep", help="of the weights (default %(default)s)")
    parser.add_argument(
        "--max-shard-size",
        type=num_bytes,
        default=num_bytes(size),
        metavar="SIZE",
        help=size_help.replace("%(default)s", size),
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT, once its successor is whole")
    _add_reading(parser)


def num_bytes(text: str) -> int:
    """`5GB`, `500MiB` or a plain number of bytes.

    Raises:
        argparse.ArgumentTypeError: neither.
    """
    unit = next((unit for unit in SIZE_UNITS if text.endswith(unit)), "")
    number = text.removesuffix(unit).strip()
    try:
        size = round(float(number) * SIZE_UNITS.get(unit, 1))
    except (ValueError, OverflowError):  # the latter of `inf`
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 5GB, 500MiB or a number of bytes")
    return size


def pattern(text: str) -> str:
    """A regular expression.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no regular expression ({error}); write a backslash before a character that stands for itself"
        ) from error
    return text


def run(args: argparse.Namespace) -> int:
    """Do it; the exit status is 1 where models differ or a file is damaged."""
    if args.list:
        _list(as_json=args.json)
        return 0
    if args.action is None:
        raise ConfigError("moerl convert needs an action: import, export, verify or inspect (see --help), or --list")
    if args.threads < 1:
        raise ConfigError(f"--threads is {args.threads}; it must be at least 1")
    import torch

    torch.set_num_threads(1)  # files are the unit of work
    actions = {"import": _convert, "export": _convert, "verify": _verify, "inspect": _inspect}
    return actions[args.action](args)


def _find(path: Path, args: argparse.Namespace, settings: Path | None) -> Place:
    from moerl.convert.inspection import refuse_damage
    from moerl.convert.places import find

    place = find(path, settings=settings)
    if not args.skip_checksums and args.action != "inspect":
        refuse_damage(place, args.threads, is_held_later=args.action != "verify", world=launched_world())
    return place


def _find_both(args: argparse.Namespace) -> list[Place]:
    """`--settings` goes to those that have none of their own."""
    from moerl.convert.places import has_settings

    paths = (args.first, args.second)
    if args.settings is not None and all(has_settings(path) for path in paths):
        raise ConfigError(
            f"--settings is for checkpoints of runs; {args.first} and {args.second} both have their own config.json, "
            "leave it out"
        )
    return [_find(path, args, None if has_settings(path) else args.settings) for path in paths]


def _options(args: argparse.Namespace) -> Options:
    from moerl.convert.imports import Options
    from moerl.convert.precision import FP8_BLOCK, FP8_TENSOR, REST_OF_FP8, WORDS

    return Options(
        dtype=REST_OF_FP8 if args.dtype in (FP8_BLOCK, FP8_TENSOR) else WORDS[args.dtype],
        fp8_blocks=args.dtype == FP8_BLOCK,
        allowed=tuple(args.allow_unmapped),
        max_file_bytes=args.max_shard_size,
        threads=args.threads,
        overwrite=args.overwrite,
        holds_sums=not args.skip_checksums,
    )


def _convert(args: argparse.Namespace) -> int:
    from moerl.convert.exports import export_checkpoint
    from moerl.convert.fp8_tensors import export_fp8_tensors
    from moerl.convert.imports import import_checkpoint
    from moerl.convert.layouts import Layout
    from moerl.convert.precision import FP8_TENSOR
    from moerl.convert.show import ByteProgress

    world = launched_world()
    place = _find(args.source, args, args.settings)
    with ByteProgress(f"{args.action} {args.out}", is_silent=bool(world.rank)) as show:
        if args.action == "import":
            sizes = {axis.replace("-", "_"): getattr(args, axis.replace("-", "_")) for axis in (*AXES, *UNEVEN)}
            built = import_checkpoint(place, args.out, Layout(**sizes), _options(args), world=world, show=show)
        elif args.dtype == FP8_TENSOR:
            built = export_fp8_tensors(place, args.out, _options(args), _texts(place, args), show=show)
        else:
            built = export_checkpoint(place, args.out, _options(args), world=world, show=show)
    if built is not None:
        _tell(args.out, built)
    return 0


def _texts(place: Place, args: argparse.Namespace) -> list[Tensor]:
    """What --dtype fp8-tensor measures inputs on."""
    from moerl.convert.fp8_tensors import calibration_tokens

    if not launched_world().is_alone:
        raise ConfigError("--dtype fp8-tensor runs the model in one process; start it without a launcher")
    if args.calibration is None:
        raise ConfigError(
            "--dtype fp8-tensor has one scale for all inputs of a layer, which is measured on text; name a file of "
            "texts like those that the model will see, one a line, with --calibration, or use --dtype fp8-block"
        )
    return calibration_tokens(args.calibration, place.settings)


def _tell(out: Path, built: Built) -> None:
    rate = built.num_bytes / max(built.seconds, 1e-9) / 1e9
    resumed = f", {built.num_resumed} of them from an earlier start" if built.num_resumed else ""
    size = f"{built.num_bytes / 1e9:.3f} GB in {len(built.sums)} files{resumed}"
    print_line(f"{out}: {size}, {built.seconds:.1f} s, {rate:.2f} GB/s")
    for name, count in built.not_finite.items():
        print_line(f"warning: {name} has {count} values that are not finite; they were written as they are")
    for warning in built.warnings:
        print_line(f"warning: {warning}")


def _verify(args: argparse.Namespace) -> int:
    from moerl.convert.compare import compare_forwards, compare_weights
    from moerl.convert.show import ByteProgress, comparison_table

    if not launched_world().is_alone:
        raise ConfigError("moerl convert verify runs in one process; start it without a launcher")
    (first, second), allowed = _find_both(args), tuple(args.allow_unmapped)
    with ByteProgress("compare") as show:
        verdict = compare_weights(first, second, threads=args.threads, show=show, allowed=allowed)
    forward = None
    if not args.no_forward:
        forward = compare_forwards(first, second, num_tokens=args.tokens, seed=args.seed, allowed=allowed)
    is_equal = not verdict.differences
    said = [] if forward is None else forward.differences(args.tolerance)
    agrees = not said
    if args.as_json:
        import dataclasses

        found = {**dataclasses.asdict(verdict), "forward": None if forward is None else dataclasses.asdict(forward)}
        print_line(json.dumps({**found, "equal": is_equal, "forward_agrees": agrees}))
        return 0 if is_equal and agrees else 1
    if verdict.differences or said:
        _console().print(comparison_table(verdict, args.rows, said))
    outcome = "equal, bit for bit" if is_equal else _differ(len(verdict.differences))
    carried = f" ({verdict.num_carried} of them carried, not trained)" if verdict.num_carried else ""
    print_line(f"{verdict.num_tensors} tensors{carried}, {verdict.num_bytes / 1e9:.3f} GB: {outcome}")
    for path, names in verdict.left_out.items():
        print_line(f"{path}: {len(names)} tensors are not part of the model, such as {names[0]}")
    if forward is not None:
        print_line(
            f"forward of {args.tokens} random tokens ({forward.by[0]} and {forward.by[1]}): of {forward.num_logits} "
            f"logits the furthest apart are those of token {forward.gap.token} after position {forward.gap.position}: "
            f"{forward.told()}, allowed {args.tolerance:g}; {forward.routes_differing} of {forward.num_routes} routes "
            "differ"
        )
    return 0 if is_equal and agrees else 1


def _differ(count: int) -> str:
    return "1 differs" if count == 1 else f"{count} differ"


def _inspect(args: argparse.Namespace) -> int:
    from moerl.convert.inspection import inspect_model
    from moerl.convert.show import show_model

    if not launched_world().is_alone:
        raise ConfigError("moerl convert inspect runs in one process; start it without a launcher")
    place, allowed = _find(args.path, args, args.settings), tuple(args.allow_unmapped)
    found = inspect_model(place, verify=not args.skip_checksums, threads=args.threads, allowed=allowed)
    if args.as_json:
        print_line(json.dumps(found, indent=1))
    else:
        show_model(found, _console(), every_name=args.names)
    return 1 if found["damage"] else 0


def _list(*, as_json: bool) -> None:
    from moerl.convert.show import families_table, family_rows

    rows: list[dict[str, Any]] = family_rows()
    if as_json:
        print_line(json.dumps(rows, indent=1))
    else:
        _console().print(families_table(rows))


def _console() -> Console:
    from moerl.convert.show import console

    return console()


def print_line(text: str) -> None:
    """To standard output."""
    sys.stdout.write(text + "\n")
