"""Print a dumped `StepBatch` as text: `python tools/inspect_batch.py PATH [--tokenizer FOLDER] [--sample N]`.

    python tools/inspect_batch.py runs/demo-gspo/batches/step_000003.npz --tokenizer configs/demo/policy --sample 5

A run writes its batches with telemetry.dump_batches=true. Exit status 1 where the file cannot be read.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator

from torch import Tensor

from moerl.data.chat import ChatTokenizer
from moerl.data.dump import load_extra, load_step_batch
from moerl.errors import DataError, MoerlError
from moerl.types import MicroBatch, StepBatch

HEADER = (
    f"{'pos':>6} {'token':>8} {'mask':>4} {'advantage':>10} {'weight':>11} {'old':>9} {'rollout':>9} {'ref':>9}  text"
)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a .npz that moerl dumped")
    parser.add_argument("--tokenizer", help="Hugging Face folder; shows tokens as text")
    parser.add_argument("--sample", type=int, help="show one sample only, by its id within the step")
    options = parser.parse_args(arguments)
    try:
        batch = load_step_batch(options.path)
        tokenizer = ChatTokenizer(options.tokenizer) if options.tokenizer else None
        lines = list(_describe(batch, options.sample, tokenizer))
        extra = load_extra(options.path)
    except MoerlError as error:
        print(error, file=sys.stderr)
        return 1
    print(
        f"{batch.num_samples} samples, {batch.num_tokens} tokens, {batch.num_live_tokens} live, policy version "
        f"{batch.policy_version}, {len(batch.minibatches)} minibatches ({batch.num_score_minibatches} in the first "
        f"epoch)"
    )
    if extra:
        print(json.dumps(extra, sort_keys=True))
    print("\n".join(lines))
    return 0


def _describe(batch: StepBatch, wanted: int | None, tokenizer: ChatTokenizer | None) -> Iterator[str]:
    known = sorted({s for minibatch in batch.minibatches for micro in minibatch for s in micro.sample_ids})
    if wanted is not None and wanted not in known:
        raise DataError(f"the batch has no sample {wanted}; it has {', '.join(map(str, known))}")
    for i, j, micro in _micro_batches(batch, only_first_epoch=wanted is not None):
        for n, sample in enumerate(micro.sample_ids):
            if wanted in (None, sample):
                yield f"\nminibatch {i}, micro-batch {j}: {_title(micro, n)}"
                yield HEADER
                yield from _tokens(micro, n, tokenizer)


def _micro_batches(batch: StepBatch, *, only_first_epoch: bool) -> Iterator[tuple[int, int, MicroBatch]]:
    count = batch.num_score_minibatches if only_first_epoch else len(batch.minibatches)
    for i, minibatch in enumerate(batch.minibatches[:count]):
        for j, micro in enumerate(minibatch):
            yield i, j, micro


def _title(micro: MicroBatch, n: int) -> str:
    length = int(micro.cu_seqlens[n + 1] - micro.cu_seqlens[n])
    parts = [f"sample {micro.sample_ids[n]} of group {int(micro.group_ids[n])}", f"{length} tokens"]
    parts += [f"reward {float(micro.rewards[n]):g}", "routes" if micro.routes is not None else "no routes"]
    parts += [f"{name} {value:g}" for name, value in micro.constants.items()]
    return ", ".join(parts)


def _tokens(micro: MicroBatch, n: int, tokenizer: ChatTokenizer | None) -> Iterator[str]:
    start, end = int(micro.cu_seqlens[n]), int(micro.cu_seqlens[n + 1])
    for t in range(start, end):
        token = int(micro.token_ids[t])
        numbers = [
            f"{float(micro.advantages[t]):>10.4f}",
            f"{float(micro.weights.policy[t]):>11.4e}",
            *(_logprob(column, t) for column in (micro.old_logprobs, micro.rollout_logprobs, micro.ref_logprobs)),
        ]
        text = repr(tokenizer.token_text(token)) if tokenizer else ""
        mark = "x" if bool(micro.mask[t]) else "."
        yield f"{t - start:>6} {token:>8} {mark:>4} {' '.join(numbers)}  {text}".rstrip()


def _logprob(column: Tensor | None, t: int) -> str:
    return f"{'-':>9}" if column is None else f"{float(column[t]):>9.4f}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # `... | head` has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123  the interpreter flushes it at exit
        sys.exit(1)
