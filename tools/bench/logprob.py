"""Peak memory and time of log-probabilities and entropies from hidden states, beside the materialised form.

python tools/bench/logprob.py                          vocabularies of 32k and 152k, on the GPU where CUDA is there
python tools/bench/logprob.py --json figures.json      and every figure in a file

Forward and backward of the weighted sum of log-probabilities, gradients to hidden states and output weights. Sides:

    logits     hidden @ weight.T -> log_softmax -> gather, all of [tokens, vocab] in memory
    entropy    the same and the entropy -sum p log p of every token, without gradient, as RL trainers report it
    moerl      mcore/vocab_parallel.py: tile by tile, always with the entropy

On the CPU time is that of the process (user and system, so that what else runs there counts little) and the peak is
the rise of the resident set beyond weights and their gradients; on a GPU time is the wall clock between
synchronisations and the peak is the allocator's. Every side runs in a process of its own, in turn. All ratios are
to `logits` of the same run.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SIDES = ("logits", "entropy", "moerl")
Row = dict[str, Any]


def make(side: str, args: argparse.Namespace) -> Callable[[], float]:
    """The work of one side; each call returns the sum of the logprobs, by which sides are compared."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, generator=generator).to(device, dtype).requires_grad_()
    weight = (0.05 * torch.randn(args.vocab, args.hidden, generator=generator)).to(device, dtype).requires_grad_()
    targets = torch.randint(0, args.vocab, (args.tokens,), generator=generator).to(device)
    share = torch.randn(args.tokens, generator=generator).to(device)
    temperature = torch.ones(args.tokens, device=device)

    def materialised() -> torch.Tensor:
        logq = torch.log_softmax((hidden @ weight.t()).float(), -1)
        if side == "entropy":
            with torch.no_grad():
                (logq.exp() * logq).sum(-1).neg_()
        return logq.gather(-1, targets[:, None])[:, 0]

    def tiled() -> torch.Tensor:
        from moerl.mcore.vocab_parallel import HeadSettings, linear_logprobs

        head = HeadSettings(in_float32=args.head == "fp32")
        return linear_logprobs(hidden, weight, targets, temperature, head=head)[0]

    def step() -> float:
        hidden.grad = weight.grad = None
        logprobs = tiled() if side == "moerl" else materialised()
        (share * logprobs).sum().backward()
        return float(logprobs.detach().double().sum())

    return step


def run_one(side: str, args: argparse.Namespace) -> Row:
    """Times and extra peak of one side, in this process."""
    import torch

    torch.set_num_threads(args.threads)
    step = make(side, args)
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        total = step()
        extra = torch.cuda.max_memory_allocated() - before
        return {"sum": total, "extra_mb": extra / 2**20, **_times(step, _cuda_clock, args.repetitions)}
    total = step()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    times = _times(step, time.process_time, args.repetitions)
    return {"sum": total, "extra_mb": _status("VmHWM") - before, **times}


def _status(key: str) -> float:
    """MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024


def _cuda_clock() -> float:
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def _times(step: Callable[[], float], clock: Callable[[], float], repetitions: int) -> dict[str, float]:
    seconds, wall = [], []
    for _ in range(repetitions):
        start, began = clock(), time.perf_counter()
        step()
        seconds.append(clock() - start)
        wall.append(time.perf_counter() - began)
    return {
        "seconds": statistics.median(seconds),
        "min": min(seconds),
        "max": max(seconds),
        "wall": statistics.median(wall),
    }


def table(rows: list[Row]) -> str:
    """One line for each vocabulary and side."""
    lines = [
        "| vocabulary | hidden | tokens | side | seconds [min-max] | wall s | extra peak MB | time / logits "
        "| peak / logits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        base = next(r for r in rows if r["side"] == "logits" and _shape(r) == _shape(row))
        time_, peak = row["min"] / base["min"], row["extra_mb"] / max(base["extra_mb"], 1e-9)
        lines.append(
            f"| {row['vocab']:,} | {row['hidden']} | {row['tokens']:,} | {row['side']} | {row['seconds']:.3g} "
            f"[{row['min']:.3g}-{row['max']:.3g}] | {row['wall']:.3g} | {row['extra_mb']:,.0f} | {time_:.2f} x "
            f"| {100 * peak:.1f} % |"
        )
    return "\n".join(lines)


def _shape(row: Row) -> tuple[int, int, int]:
    return row["vocab"], row["hidden"], row["tokens"]


def main() -> int:
    """Every side at every vocabulary, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabs", type=int, nargs="+", default=[32_000, 151_936], help="default: 32000 151936")
    parser.add_argument("--hidden", type=int, nargs="+", default=[256], help="widths (default: 256)")
    parser.add_argument("--tokens", type=int, default=2048, help="rows of hidden states (default %(default)s)")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="fp32 on a CPU, bf16 on a GPU unless given")
    parser.add_argument("--head", choices=["params", "fp32"], default="params", help="precision.head of moerl's side")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default %(default)s)")
    parser.add_argument("--repetitions", type=int, default=3, help="forward and backward, timed (default %(default)s)")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    parser.add_argument("--one", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--vocab", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path[:0] = [str(HERE), str(ROOT)]
    import torch
    from objective import machine

    args.dtype = args.dtype or ("bf16" if torch.cuda.is_available() else "fp32")
    if args.one:
        args.hidden = args.hidden[0]
        print(json.dumps(run_one(args.one, args)))
        return 0
    print(f"{machine()}; {torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU'}; {args.dtype}")
    rows: list[Row] = []
    for vocab in args.vocabs:
        for hidden in args.hidden:
            shape = {"vocab": vocab, "hidden": hidden, "tokens": args.tokens}
            rows += [{**shape, "side": side, **_in_a_process(side, args, shape)} for side in SIDES]
    print(f"\n{table(rows)}")
    for row in rows:
        base = next(r for r in rows if r["side"] == "logits" and _shape(r) == _shape(row))
        if abs(row["sum"] - base["sum"]) > 1e-3 * abs(base["sum"]):
            print(f"{row['side']} at {_shape(row)}: the logprobs sum to {row['sum']}, not {base['sum']}")
            return 1
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


def _in_a_process(side: str, args: argparse.Namespace, shape: dict[str, int]) -> Row:
    command = [sys.executable, __file__, "--one", side, "--dtype", args.dtype, "--head", args.head]
    command += ["--threads", str(args.threads), "--repetitions", str(args.repetitions)]
    for name, value in shape.items():
        command += [f"--{name}", str(value)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{side} at {shape} stopped with status {done.returncode}: {done.stderr[-1000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
