"""The demo's step by TRL's GRPOTrainer, for tools/bench/demo.py. Prints one JSON line a step; needs trl and datasets.

"rollout" is TRL's generating and scoring, one recompute of the old logprobs included (`score` cannot be told apart);
"update" is forward and backward; the rest of a step is clipping, Adam, loader and logging.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from demo_plain import boxed
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Timed(GRPOTrainer):
    """Notes the seconds of its two large parts."""

    rollout_seconds = 0.0
    update_seconds = 0.0
    tokens = 0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        start = time.perf_counter()
        made = super()._generate_and_score_completions(inputs)
        self.rollout_seconds += time.perf_counter() - start
        self.tokens += int(made["completion_mask"].sum())
        return made

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        start, before = time.perf_counter(), self.rollout_seconds
        loss = super().training_step(*args, **kwargs)
        self.update_seconds += time.perf_counter() - start - (self.rollout_seconds - before)
        return loss


class Print(TrainerCallback):
    """One line every `minibatches` optimizer steps."""

    def __init__(self, minibatches: int) -> None:
        self.minibatches = minibatches
        self.trainer: Any = None
        self.start = time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print what the step took."""
        if state.global_step % self.minibatches:
            return
        trainer = self.trainer
        line = {
            "rollout_seconds": trainer.rollout_seconds,
            "update_seconds": trainer.update_seconds,
            "step_seconds": time.perf_counter() - self.start,
            "tokens": trainer.tokens,
        }
        sys.stdout.write(json.dumps(line) + "\n")
        trainer.rollout_seconds = trainer.update_seconds = 0.0
        trainer.tokens = 0
        self.start = time.perf_counter()


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Exact match of the box."""
    return [float(boxed(text) == gold) for text, gold in zip(completions, answer, strict=True)]


def main() -> int:
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind in (("--model", Path), ("--data", Path)):
        parser.add_argument(name, type=kind, required=True)
    for name, default in (("--steps", 10), ("--threads", 1), ("--prompts", 32), ("--group-size", 8)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=44)
    parser.add_argument("--lr", type=float, default=1.5e-4)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = [json.loads(line) for line in args.data.read_text().splitlines()]
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=args.prompts * args.group_size // args.minibatches,
        steps_per_generation=args.minibatches,
        num_generations=args.group_size,
        max_completion_length=args.max_new_tokens,
        max_steps=args.minibatches * args.steps,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        loss_type="grpo",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    printer = Print(args.minibatches)
    printer.trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[printer],
    )
    printer.trainer.train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
