"""Tokens a second of forward, backward and optimizer step: moerl's learner beside transformers, same model, same batch.

python tools/bench/learner.py                    the comparison, and a token's cost from 2^12 to 2^17 tokens a step
python tools/bench/learner.py --only compare --json figures.json

The model is a random Qwen3-MoE in a Hugging Face folder that both sides read. The batch has lengths as answers have:
log-normal, cut at a maximum. Sides of the comparison, one update each, of the same token loss, gradient clipping and
AdamW:

    padded     transformers, micro-batches of 8 sequences in the order they come, padded to the longest of each
    sorted     the same, sequences sorted by length first, which leaves little padding
    one        transformers, sequence by sequence: no padding at all, many small products
    moerl      `MegatronPolicy.update` on packs of at most so many tokens, with its metrics of routes and ratios

One process. On a CPU the time is that of the process (user and system, so that what else runs there counts little); on
a GPU, where both sides use bf16, it is the wall clock around a synchronised step. Ratios are of live tokens a second,
in one run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SIDES = ("padded", "sorted", "one", "moerl")
MODELS = {
    "small": {"hidden_size": 256, "layers": 4, "experts": 16, "width": 256, "vocab_size": 8192},
    "tiny": {"hidden_size": 128, "layers": 2, "experts": 16, "width": 128, "vocab_size": 4096},
    "gpu": {"hidden_size": 2048, "layers": 8, "experts": 64, "width": 768, "vocab_size": 151936},
}
Row = dict[str, Any]


def save_model(folder: Path, name: str) -> None:
    """Random weights, top-2 of the experts (top-8 on the large one), saved as fp32."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = dict(MODELS[name])
    torch.manual_seed(0)
    shape = {
        "vocab_size": sizes["vocab_size"],
        "hidden_size": sizes["hidden_size"],
        "intermediate_size": 2 * sizes["width"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": max(4, sizes["hidden_size"] // 64),
        "num_key_value_heads": 2,
        "head_dim": 64,
        "moe_intermediate_size": sizes["width"],
        "num_experts": sizes["experts"],
        "num_experts_per_tok": 8 if sizes["experts"] > 32 else 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "use_cache": False,
    }
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).save_pretrained(folder)


def lengths_of(tokens: int, longest: int) -> list[int]:
    """Log-normal, median a quarter of the longest over 1.4, sigma 0.8, cut; they sum to `tokens`."""
    import torch

    generator = torch.Generator().manual_seed(tokens)
    made: list[int] = []
    while sum(made) < tokens:
        drawn = math.exp(math.log(longest / 5.6) + 0.8 * float(torch.randn(1, generator=generator)))
        made.append(max(2, min(longest, int(drawn), tokens - sum(made))))
    return made


def sequences(lengths: list[int], vocab: int) -> list[Any]:
    """Random tokens."""
    import torch

    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]


def transformers_step(folder: Path, side: str, seqs: list[Any], dtype: str) -> Callable[[], float]:
    """One update by plain transformers; returns the loss."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=kind, attn_implementation="sdpa").train()
    model.to(device=device)  # pyright: ignore[reportCallIssue]  wrapped in a decorator that hides its signature
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    order = sorted(seqs, key=len) if side == "sorted" else list(seqs)
    size = 1 if side == "one" else 8
    groups = [order[start : start + size] for start in range(0, len(order), size)]
    total = sum(len(seq) - 1 for seq in seqs)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss_sum = 0.0
        for group in groups:
            width = max(len(seq) for seq in group)
            ids = torch.zeros(len(group), width, dtype=torch.int64)
            mask = torch.zeros(len(group), width, dtype=torch.int64)
            for row, seq in enumerate(group):
                ids[row, : len(seq)], mask[row, : len(seq)] = seq, 1
            ids, mask = ids.to(device), mask.to(device)
            arguments = {} if size == 1 else {"attention_mask": mask}
            logits = model(input_ids=ids, **arguments).logits[:, :-1]
            live = mask[:, 1:].bool()
            loss = torch.nn.functional.cross_entropy(logits[live].float(), ids[:, 1:][live], reduction="sum") / total
            loss.backward()
            loss_sum += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss_sum

    return step


class TokenNll:
    """The same loss for moerl: each token's share of the negative log-likelihood."""

    needs: frozenset[str] = frozenset()

    def __call__(self, x: Any) -> tuple[Any, dict[str, Any]]:
        """(loss, no metrics)."""
        import torch

        return -(x.weights.policy * torch.where(x.mask, x.logprobs, 0.0)).sum(), {}


def moerl_step(folder: Path, seqs: list[Any], args: argparse.Namespace) -> Callable[[], float]:
    """One update by moerl's learner; returns the loss."""
    import numpy as np

    from moerl.config.schema import ModelSection, OptimSection, ParallelSection, PrecisionSection
    from moerl.data.batch import build_step_batch
    from moerl.data.packing import plan_packing
    from moerl.mcore.policy import MegatronPolicy
    from moerl.metrics import to_floats
    from moerl.types import Sample

    policy = MegatronPolicy.build(
        model=ModelSection(path=str(folder)),
        parallel=ParallelSection(),
        precision=PrecisionSection(params=args.dtype),
        optim=OptimSection(lr=1e-6, clip_grad_norm=1.0),
        routing="none",
        router_shift=False,
        needs_reference=False,
        num_steps=1000,
        seed=0,
    )
    samples = [
        Sample(
            sample_id=i,
            group_id=i,
            prompt_id=f"p/{i}",
            token_ids=seq.numpy().astype(np.int32),
            loss_mask=np.arange(len(seq)) >= 1,
            rollout_logprobs=np.zeros(len(seq), dtype=np.float32),
            advantages=np.zeros(len(seq), dtype=np.float32),
            reward=0.0,
            temperature=1.0,
        )
        for i, seq in enumerate(seqs)
    ]
    live = [len(seq) - 1 for seq in seqs]
    plan = plan_packing(
        [len(seq) for seq in seqs],
        [sample.group_id for sample in samples],
        live,
        dp_size=1,
        num_minibatches=1,
        num_epochs=1,
        max_tokens_per_microbatch=args.pack,
        seed=0,
    )
    batch = build_step_batch(
        samples,
        plan,
        dp_rank=0,
        weigh=lambda counts, groups: np.full(len(counts), 1.0 / sum(live)),
        device=policy.device,
        policy_version=0,
    )
    return lambda: to_floats(policy.update(batch, TokenNll()))["loss"]


def run_one(args: argparse.Namespace) -> Row:
    """One side on one batch, in this process."""
    import torch

    from moerl.models.flops import forward_flops, peak_flops
    from moerl.models.qwen3_moe import Qwen3Moe

    torch.set_num_threads(args.threads)
    folder = Path(args.folder)
    hf = json.loads((folder / "config.json").read_text())
    lengths = lengths_of(args.tokens, args.longest)
    seqs = sequences(lengths, hf["vocab_size"])
    if args.one == "moerl":
        step = moerl_step(folder, seqs, args)
    else:
        step = transformers_step(folder, args.one, seqs, args.dtype)
    cuda = torch.cuda.is_available()
    first = step()
    seconds, wall = [], []
    for _ in range(args.repetitions):
        if cuda:
            torch.cuda.synchronize()
        start, began = time.process_time(), time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        wall.append(time.perf_counter() - began)
        seconds.append(wall[-1] if cuda else time.process_time() - start)
    flops = forward_flops(Qwen3Moe().transformer_kwargs(hf), lengths).training
    peak = peak_flops(torch.cuda.get_device_name(), args.dtype) if cuda else None
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "loss": first,
        "seconds": statistics.median(seconds),
        "min": min(seconds),
        "max": max(seconds),
        "wall": statistics.median(wall),
        "tflops": flops / min(seconds) / 1e12,
        "mfu": None if peak is None else flops / min(seconds) / peak,
        "peak_mb": torch.cuda.max_memory_allocated() / 2**20 if cuda else rss,
        "sequences": len(lengths),
        "slots": _slots(args.one, lengths),
    }


def _slots(side: str, lengths: list[int]) -> int:
    if side in ("moerl", "one"):
        return sum(lengths)
    order = sorted(lengths) if side == "sorted" else lengths
    groups = [order[start : start + 8] for start in range(0, len(order), 8)]
    return sum(len(group) * max(group) for group in groups)


def in_a_process(side: str, tokens: int, args: argparse.Namespace) -> Row:
    """`run_one` in a process of its own."""
    command = [sys.executable, __file__, "--one", side, "--folder", args.folder, "--dtype", args.dtype]
    for name in ("threads", "repetitions", "longest", "pack"):
        command += [f"--{name}", str(getattr(args, name))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(
        [*command, "--tokens", str(tokens)], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode != 0:
        raise SystemExit(f"{side} at {tokens} tokens stopped with status {done.returncode}: {done.stderr[-1500:]}")
    return {"side": side, "tokens": tokens, **json.loads(done.stdout.splitlines()[-1])}


def compare(args: argparse.Namespace) -> list[Row]:
    """All sides on one batch."""
    rows = [in_a_process(side, args.tokens, args) for side in SIDES]
    own = rows[-1]
    lines = [
        "| side | tokens | sequences | slots/token | s per step [min-max] | wall s | tokens/s | TFLOP/s | peak MB "
        "| moerl / side |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['side']} | {row['tokens']:,} | {row['sequences']} | {row['slots'] / row['tokens']:.2f} "
            f"| {row['seconds']:.3g} [{row['min']:.3g}-{row['max']:.3g}] | {row['wall']:.3g} "
            f"| {row['tokens'] / row['min']:,.0f} | {row['tflops']:.4g}{_share(row)} | {row['peak_mb']:,.0f} "
            f"| {row['min'] / own['min']:.2f} x |"
        )
    print("\n" + "\n".join(lines))
    for row in rows:
        if abs(row["loss"] - own["loss"]) > 1e-3 * abs(own["loss"]):
            raise SystemExit(f"{row['side']} has loss {row['loss']}, moerl {own['loss']}: not the same work")
    return rows


def _share(row: Row) -> str:
    return "" if row["mfu"] is None else f" ({100 * row['mfu']:.1f} % of peak)"


def curve(args: argparse.Namespace) -> list[Row]:
    """moerl alone, from 2^12 to 2^17 tokens a step in packs of one size."""
    rows = [in_a_process("moerl", 2**power, args) for power in args.powers]
    lines = ["| tokens a step | us a token [min-max] | to the first | TFLOP/s | peak MB |", "|---|---|---|---|---|"]
    for row in rows:
        cost, first = row["min"] / row["tokens"], rows[0]["min"] / rows[0]["tokens"]
        lines.append(
            f"| {row['tokens']:,} | {1e6 * cost:.1f} [{1e6 * cost:.1f}-{1e6 * row['max'] / row['tokens']:.1f}] "
            f"| {cost / first:.2f} x | {row['tflops']:.4g}{_share(row)} | {row['peak_mb']:,.0f} |"
        )
    print("\n" + "\n".join(lines))
    return rows


def main() -> int:
    """Compare, then the curve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["compare", "curve"], help="one of the two tables (default: both)")
    parser.add_argument("--model", choices=MODELS, help="small on a CPU, gpu on a GPU unless given")
    parser.add_argument("--curve-model", choices=MODELS, help="tiny on a CPU, gpu on a GPU unless given")
    parser.add_argument("--tokens", type=int, default=8192, help="of the comparison (default %(default)s)")
    parser.add_argument(
        "--powers", type=int, nargs="+", default=[12, 13, 14, 15, 16, 17], help="log2 of the curve's tokens"
    )
    parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest (default %(default)s)")
    parser.add_argument("--pack", type=int, default=4096, help="batch.max_tokens_per_microbatch (default %(default)s)")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="fp32 on a CPU, bf16 on a GPU unless given")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default %(default)s)")
    parser.add_argument("--repetitions", type=int, default=2, help="updates that are timed (default %(default)s)")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    parser.add_argument("--one", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path[:0] = [str(HERE), str(ROOT)]
    import torch
    from objective import machine

    cuda = torch.cuda.is_available()
    args.dtype = args.dtype or ("bf16" if cuda else "fp32")
    if args.one:
        print(json.dumps(run_one(args)))
        return 0
    print(f"{machine()}; {torch.cuda.get_device_name() if cuda else 'no GPU'}; {args.dtype}")
    found: dict[str, list[Row]] = {}
    models = {
        "compare": args.model or ("gpu" if cuda else "small"),
        "curve": args.curve_model or ("gpu" if cuda else "tiny"),
    }
    for name, work in {"compare": compare, "curve": curve}.items():
        if args.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                args.folder = folder
                save_model(Path(folder), models[name])
                found[name] = work(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
