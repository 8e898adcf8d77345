"""Forward and backward of five objectives, beside TRL's and verl's own loss code on the same arrays in the same run.

python tools/bench/objective.py                                            moerl alone
python tools/bench/objective.py --peer-python /path/to/venv/bin/python     with what that environment has of the peers

The environment of the peers is a throwaway one, with a CPU torch of the same version:

    python -m venv peers && peers/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.24.0 datasets accelerate
    peers/bin/pip install --no-deps verl==0.9.1 ray tensordict orjson pyvers cloudpickle hydra-core codetiming pandas \
        omegaconf antlr4-python3-runtime==4.9.3 jsonschema msgpack protobuf attrs referencing rpds-py \
        jsonschema-specifications importlib_metadata zipp pytz requests

A peer that is not there is skipped with a line. moerl's batches are packed; the peers' functions take padded ones.
Ragged batches therefore hold padding for them alone: the padding-free ones (`eq1024`) compare code with code. Ratios
are of the fastest repetitions, which a busy machine disturbs least; the last column is to a plain copy of the bytes
to be moved.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from objective_batches import METHODS, lengths  # noqa: E402

PEERS = {"trl": "import trl.trainer.grpo_trainer", "verl": "import verl.trainer.ppo.core_algos"}
Row = dict[str, Any]


def why_absent(python: str, side: str) -> str | None:
    """The last line of the error with which `python` cannot import a peer; None where it can."""
    if side == "moerl":
        return None
    done = subprocess.run([python, "-c", PEERS[side]], capture_output=True, text=True, check=False)
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else (lines[-1] if lines else f"exit status {done.returncode}")


def run_side(python: str, side: str, threads: int, args: argparse.Namespace, layout: str, size: int) -> list[Row]:
    """Every method of one side on one batch, in a process of its own."""
    command = [python, str(HERE / "objective_sides.py"), side, "--threads", str(threads), "--sizes", str(size)]
    command += ["--layouts", layout, "--seconds", str(args.seconds), "--least", str(args.least)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        sys.stderr.write(f"{side} at 2^{size} {layout}: stopped with status {done.returncode} ({last})\n")
    return rows


def table(rows: list[Row], threads: int) -> str:
    """Milliseconds and extra peak MB by batch and method, and the ratios to the best peer."""
    lines = [
        f"{threads} thread(s); ms, median [min-max], and extra peak MB",
        "",
        "| live tokens | layout | method | moerl | TRL | verl | speed: best peer / moerl | memory: moerl / best peer "
        "| moerl / copy |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    found = {(r["size"], r["layout"], r["method"], r["side"]): r for r in rows if r["threads"] == threads}
    for size, layout in dict.fromkeys((key[0], key[1]) for key in found):
        for method in METHODS:
            sides = {side: found.get((size, layout, method, side)) for side in ("moerl", "trl", "verl")}
            cells = [_cell(sides[side]) for side in sides]
            own = sides["moerl"]
            cells += [*_ratios(sides), "-" if own is None else f"{own['min'] / own['copy']:.1f} x"]
            lines.append(f"| 2^{size} | {layout} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{row['ms']:.3g} [{row['min']:.3g}-{row['max']:.3g}], {row['extra_mb']:.0f}"


def _ratios(sides: dict[str, Row | None]) -> tuple[str, str]:
    own = sides["moerl"]
    peers = [row for side, row in sides.items() if row is not None and side != "moerl"]
    if own is None or not peers:
        return "-", "-"
    speed = min(row["min"] for row in peers) / own["min"]
    memory = own["extra_mb"] / max(min(row["extra_mb"] for row in peers), 1e-9)
    return f"{speed:.1f} x", f"{memory:.2f} x"


def merged(rounds: list[Row]) -> list[Row]:
    """One row of all rounds of the same measurement: extremes of the extremes, the median of the medians."""
    laws = {"ms": statistics.median, "min": min, "max": max, "reps": sum, "extra_mb": min, "copy": min}
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rounds:
        found.setdefault(tuple(row[key] for key in ("side", "threads", "size", "layout", "method")), []).append(row)
    return [
        {**rows[0], **{key: law([row[key] for row in rows]) for key, law in laws.items() if key in rows[0]}}
        for rows in found.values()
    ]


def disagreements(rows: list[Row]) -> list[str]:
    """Methods whose gradients are not the same on two sides, by their product with a fixed direction."""
    found = []
    own = {(r["size"], r["layout"], r["method"]): r["product"] for r in rows if r["side"] == "moerl"}
    for row in rows:
        mine = own.get((row["size"], row["layout"], row["method"]))
        if mine is not None and abs(row["product"] - mine) > 1e-3 * max(abs(mine), 1e-4):
            found.append(f"{row['side']} {row['method']} 2^{row['size']} {row['layout']}: {row['product']} for {mine}")
    return found


def machine() -> str:
    """One line about the processor and the versions here."""
    import torch

    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    load = os.getloadavg()[0]
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{model}, {os.cpu_count()} cores, load {load:.1f}; {versions}"


def main() -> int:
    """Run all sides in turn and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter of the peers' environment")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 18, 20], help="log2 of the live tokens, 16 to 22")
    parser.add_argument("--layouts", nargs="+", default=["ln8192", "eq1024"], help="of lengths (default: both)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of torch (default: 1 2)")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each figure")
    parser.add_argument("--least", type=int, default=3, help="repetitions at least")
    parser.add_argument("--rounds", type=int, default=1, help="how often all sides run in turn")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    args = parser.parse_args()
    pythons = {"moerl": sys.executable} | ({side: args.peer_python for side in PEERS} if args.peer_python else {})
    print(machine())
    absent = {side: why_absent(python, side) for side, python in pythons.items()}
    for side in PEERS:
        if side not in pythons or absent[side]:
            print(f"{side}: skipped ({absent.get(side) or 'no --peer-python'})")
    sides = {side: python for side, python in pythons.items() if not absent[side]}
    rows: list[Row] = []
    for threads in args.threads:
        for size, layout in itertools.product(args.sizes, args.layouts):
            turns = [pair for _ in range(args.rounds) for pair in sides.items()]
            rows += merged(
                [row for side, python in turns for row in run_side(python, side, threads, args, layout, size)]
            )
        print(f"\n{table(rows, threads)}")
    for layout, size in itertools.product(args.layouts, args.sizes):
        counts = lengths(2**size, layout)
        slots = len(counts) * max(counts) / 2**size
        print(f"2^{size} {layout}: {len(counts)} sequences, {slots:.1f} slots a token")
    for line in disagreements(rows):
        print(f"gradients differ: {line}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
