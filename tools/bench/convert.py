"""Conversion of a synthetic Qwen3-MoE checkpoint, beside a plain copy of its bytes and transformers' load and save.

python tools/bench/convert.py                          1 and 4 GB, three rounds in turn
python tools/bench/convert.py --gigabytes 1 --rounds 1 --json figures.json

Sides, each in a process of its own, source files in the page cache, results flushed to the disk (fsync):

    copy           every file, byte for byte (shutil.copyfile)
    import         moerl convert import: Hugging Face -> sharded checkpoint, with SHA-256 of all that is written
    export         moerl convert export: back again, the source held against its SHA-256 as it is read
    transformers   from_pretrained in the type of the files, then save_pretrained

Conversions make one file more at a time than there are threads, as `moerl convert` does: one waits for the disk.
Extra memory is the rise of the process's peak resident set over what it had once its libraries were imported. The last
table multiplies the measured rate of one process for larger models; it is arithmetic, not a measurement.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("copy", "import", "export", "transformers")
LAYERS = {1: 1, 2: 2, 4: 3}
"""Of gigabytes, about."""
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "bos_token_id": 1,
    "decoder_sparse_step": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 4096,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32768,
}
"""Widths, experts and top-k of Qwen3-30B-A3B; fewer layers, and a quarter of its vocabulary."""
MODELS = {"30B": 61.1, "235B": 470.2, "671B": 1342.0}
"""Gigabytes in bf16."""
SHARD_BYTES = 1_000_000_000
Row = dict[str, Any]


def make_source(folder: Path, layers: int) -> None:
    """A checkpoint of random values in bf16, in shards with an index, as on the hub."""
    import torch

    from moerl.convert.building import planned_files
    from moerl.models.family import family_of
    from moerl.models.hf_export import shard_name, write_index
    from moerl.tensor_file import Described, TensorFileWriter

    folder.mkdir(parents=True)
    config = {**CONFIG, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    rules = family_of(config).weight_rules(config)
    shapes = {name: shape for rule in rules for name, shape in zip(rule.hf_names, rule.hf_shapes, strict=True)}
    tensors = [Described(name, torch.bfloat16, shapes[name]) for name in sorted(shapes)]
    count = len(planned_files(tensors, SHARD_BYTES, str)[1])
    files, _ = planned_files(tensors, SHARD_BYTES, lambda i: shard_name(i, count))
    noise = torch.randn(max(math.prod(shape) for shape in shapes.values()) + 4096).bfloat16()
    for file in files:
        with TensorFileWriter(folder / file.name, file.tensors) as writer:
            for i, tensor in enumerate(file.tensors):
                writer.add(noise[i % 4096 :][: math.prod(tensor.shape)].view(tensor.shape))
    write_index(folder, {t.name: f.name for f in files for t in f.tensors}, sum(f.num_bytes for f in files))


def work_of(side: str, source: Path, shards: Path, out: Path, threads: int) -> Callable[[], object]:
    """Import what a side needs; the returned call is what is measured."""
    if side == "copy":
        return lambda: copy(source, out)
    if side == "transformers":
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)

        def load_and_save() -> None:
            AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(out)
            flush(out)

        return load_and_save
    import torch

    from moerl.convert.exports import export_checkpoint
    from moerl.convert.imports import Options, import_checkpoint
    from moerl.convert.inspection import refuse_damage
    from moerl.convert.layouts import Layout
    from moerl.convert.places import find

    torch.set_num_threads(1)

    def convert() -> None:
        if side == "import":
            import_checkpoint(find(source), out, Layout(expert=8), Options(threads=threads + 1))
            return
        place = find(shards)
        refuse_damage(place, threads + 1, is_held_later=True)
        export_checkpoint(place, out, Options(threads=threads + 1, max_file_bytes=SHARD_BYTES, holds_sums=True))

    return convert


def copy(source: Path, out: Path) -> None:
    """Every file, flushed."""
    out.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, out / path.name)
    flush(out)


def flush(folder: Path) -> None:
    """To the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def resident(what: str) -> int:
    """`VmRSS` or `VmHWM` of this process, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def run_one(side: str, args: argparse.Namespace) -> Row:
    """Seconds and extra peak of one side, in this process."""
    work = work_of(side, args.source, args.shards, args.out, args.threads)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    return {"side": side, "seconds": seconds, "extra_mb": (resident("VmHWM") - before) / 1e6}


def measure(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """All sides in turn, round after round, for every size."""
    for gigabytes in args.gigabytes:
        source, shards = folder / f"source{gigabytes}", folder / f"shards{gigabytes}"
        make_source(source, LAYERS[gigabytes])
        _child("import", args, source, shards, shards)
        size = sum(path.stat().st_size for path in source.iterdir())
        for number in range(args.rounds):
            for side in SIDES:
                out = folder / "out"
                row = _child(side, args, source, shards, out)
                shutil.rmtree(out)
                print(f"  {size / 1e9:.2f} GB, round {number + 1}, {side}: {row['seconds']:.2f} s", file=sys.stderr)
                yield {**row, "gigabytes": gigabytes, "bytes": size}
        shutil.rmtree(source)
        shutil.rmtree(shards)


def _child(side: str, args: argparse.Namespace, source: Path, shards: Path, out: Path) -> Row:
    for path in (*source.iterdir(), *(shards.iterdir() if shards.is_dir() else ())):
        path.read_bytes()  # into the page cache
    command = [sys.executable, __file__, "--side", side, "--source", source, "--shards", shards, "--out", out]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(
        [*map(str, command), "--threads", str(args.threads)], env=env, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def table(rows: list[Row]) -> str:
    """Medians, and ratios to the copy and to transformers of the same run."""
    lines = [
        "| size | side | seconds | GB/s | times a copy | transformers takes | extra memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for gigabytes in dict.fromkeys(row["gigabytes"] for row in rows):
        own = [row for row in rows if row["gigabytes"] == gigabytes]
        seconds = {side: statistics.median(row["seconds"] for row in own if row["side"] == side) for side in SIDES}
        for side in SIDES:
            extra = max(row["extra_mb"] for row in own if row["side"] == side)
            size = own[0]["bytes"] / 1e9
            lines.append(
                f"| {size:.2f} GB | {side} | {seconds[side]:.2f} | {size / seconds[side]:.2f} | "
                f"{seconds[side] / seconds['copy']:.2f} | {seconds['transformers'] / seconds[side]:.2f} x | "
                f"{extra:.0f} MB |"
            )
    return "\n".join(lines)


def extrapolated(rows: list[Row]) -> str:
    """Minutes that an import takes on one node: the rate of one process times their number, at most the disk's."""
    largest = max(row["gigabytes"] for row in rows)
    own = [row for row in rows if row["gigabytes"] == largest and row["side"] == "import"]
    rate = statistics.median(row["bytes"] / row["seconds"] for row in own) / 1e9
    lines = ["| model | bf16 | processes | disk 1 GB/s | 3 GB/s | 10 GB/s |", "|---|---|---|---|---|---|"]
    for model, size in MODELS.items():
        for processes in (1, 4, 8):
            cells = " | ".join(f"{size / min(processes * rate, disk) / 60:.1f} min" for disk in (1.0, 3.0, 10.0))
            lines.append(f"| {model} | {size:.0f} GB | {processes} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=int, nargs="+", choices=tuple(LAYERS), default=[1, 4], help="default: 1 4")
    parser.add_argument("--rounds", type=int, default=3, help="medians are of them (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of every side (default 2)")
    parser.add_argument("--folder", type=Path, help="where to put the files (default: the system's temporary folder)")
    parser.add_argument("--json", type=Path, help="also write every figure there")
    for hidden in ("source", "shards", "out"):
        parser.add_argument(f"--{hidden}", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(run_one(args.side, args)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = list(measure(args, Path(folder)))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    print(f"{os.cpu_count()} cores, {args.threads} threads, medians of {args.rounds} rounds\n\n{table(rows)}")
    print(f"\nExtrapolated from the import above, one process taking {args.threads} cores:\n\n{extrapolated(rows)}")


if __name__ == "__main__":
    main()
