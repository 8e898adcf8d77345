"""Show a checkpoint without loading a model: `python tools/inspect_checkpoint.py PATH [--names] [--json]`.

PATH is a checkpoint (`step_000010`), or a run or its `checkpoints`, of which the newest is shown. Every checksum is
verified first; the exit status is 1 where something is damaged.

    python tools/inspect_checkpoint.py runs/demo-gspo
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moerl.convert.inspection import kind_of
from moerl.convert.places import STEP_NAME, newest_step
from moerl.convert.show import console, count_table, told_axes
from moerl.errors import CheckpointError, MoerlError
from moerl.manifest import MANIFEST, check_file, read_manifest
from moerl.shards import ShardReader, has_shards


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="a checkpoint, a run, or the checkpoints of a run")
    parser.add_argument("--names", action="store_true", help="list every tensor, not one line for all layers")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.add_argument("--skip-checksums", action="store_true", help="read descriptions only, of a huge checkpoint")
    options = parser.parse_args(arguments)
    try:
        found = inspect(newest(options.path), verify=not options.skip_checksums)
    except MoerlError as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        show(found, console(), every_name=options.names)
    return 1 if found["damage"] else 0


def newest(path: Path) -> Path:
    """The checkpoint that `path` means.

    Raises:
        CheckpointError: there is none.
    """
    found = newest_step(path)
    if found is None:
        raise CheckpointError(f"{path} is no checkpoint (step_000010), and no run or folder that holds one")
    return found


def inspect(folder: Path, *, verify: bool) -> dict[str, Any]:
    """Everything that is known of a checkpoint, as plain JSON; what is wrong with it under `damage`.

    Raises:
        CheckpointError: it has no manifest that could be trusted.
    """
    name = STEP_NAME.fullmatch(folder.name)
    assert name is not None
    manifest = read_manifest(folder / MANIFEST, int(name[1]))
    damage = list(_damaged(folder, manifest["files"])) if verify else []
    checked = "damaged" if damage else "verified" if verify else "skipped"
    found: dict[str, Any] = {"folder": str(folder), "checksums": checked, "damage": damage}
    found |= {key: manifest[key] for key in ("format", "step", "model_id", "config_id")}
    found["files"] = {file: entry["bytes"] for file, entry in manifest["files"].items()}
    found["models"] = {}
    for model, part in (("policy", folder / "learner"), ("critic", folder / "learner" / "critic")):
        if not damage and has_shards(part):
            found["models"][model] = _model(part, damage)
    return found


def _damaged(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for file, entry in files.items():
        try:
            check_file(folder / file, entry)
        except CheckpointError as error:
            yield str(error)


def _model(folder: Path, damage: list[str]) -> dict[str, Any]:
    with ShardReader(folder) as reader:
        tensors, kinds, state = {}, Counter(), Counter()
        for name, entry in sorted(reader.entries.items()):
            dtype = str(entry.dtype).removeprefix("torch.")
            tensors[name] = {"shape": list(entry.shape), "dtype": dtype, "parts": len(entry.parts)}
            covered = sum(math.prod(part.size) for part in entry.parts)
            if covered != entry.numel:
                damage.append(f"{folder}: the parts of {name} hold {covered} of its {entry.numel} elements")
            part, _, rest = name.partition("/")
            if part == "weights":
                kinds[kind_of(rest)] += entry.numel
            state[part if part != "optimizer" else f"optimizer {rest.split('/')[0]}"] += entry.num_bytes
        first = reader.ranks[0]
        return {
            "ranks": len(reader.ranks),
            "layout": first["layout"],
            "counters": first["counters"],
            "optimizer_updates": first["optimizer_updates"],
            "parameters": sum(kinds.values()),
            "parameters_by_kind": dict(kinds.most_common()),
            "bytes": dict(state.most_common()),
            "tensors": tensors,
        }


def show(found: Mapping[str, Any], console: Console, *, every_name: bool) -> None:
    """Print it as tables."""
    console.print(f"[bold]{found['folder']}[/bold]: step {found['step']}, format {found['format']}", highlight=False)
    configuration = found["config_id"][:16] or "unknown"
    console.print(f"model {found['model_id'][:16]}, configuration {configuration}", highlight=False)
    for model, part in found["models"].items():
        axes = told_axes(part["layout"])
        console.print(
            f"\n[bold]{model}[/bold]: {part['parameters']:,} parameters, written by {_ranks(part['ranks'])} "
            f"({axes or 'no axis above 1'}), {part['optimizer_updates']} optimizer updates, {part['counters']}",
            highlight=False,
        )
        console.print(count_table(("kind", "parameters"), part["parameters_by_kind"]))
        console.print(count_table(("state", "bytes"), part["bytes"]))
        console.print(_tensors(part["tensors"], every_name=every_name))
    console.print(count_table(("file", "bytes"), found["files"]))
    console.print(f"checksums: {found['checksums']}, {len(found['files'])} files", highlight=False)
    for line in found["damage"]:
        console.print(f"[red]damaged[/red]: {line}", highlight=False)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _tensors(tensors: Mapping[str, Mapping[str, Any]], *, every_name: bool) -> Table:
    """Weights and reference by name; the optimizer's tensors are shaped like them."""
    table = Table("shape", "dtype")
    table.add_column("alike", justify="right")
    table.add_column("tensor", overflow="fold")
    alike = Counter()
    for name, tensor in tensors.items():
        if not name.startswith("optimizer/"):
            plain = name.removeprefix("weights/")
            shown = plain if every_name else re.sub(r"\.layers\.\d+\.", ".layers.*.", plain)
            alike[shown, "x".join(map(str, tensor["shape"])), tensor["dtype"]] += 1
    for row, count in alike.items():
        table.add_row(*row[1:], str(count), row[0])
    return table


if __name__ == "__main__":
    sys.exit(main())
