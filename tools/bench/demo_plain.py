"""The demo's step with transformers alone: the baseline of tools/bench/demo.py. Prints one JSON line a step.

`generate` for all answers, an exact match for the reward, a forward for the old logprobs, then minibatches of forward,
backward, clipping and Adam with GRPO's clipped ratio: padded tensors, the experts as transformers runs them by default.
It records no routes and no metrics.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass
class Clock:
    """Seconds by phase of one step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def boxed(text: str) -> str | None:
    """What stands in the last box."""
    _, found, rest = text.rpartition("\\boxed{")
    return rest.split("}")[0] if found and "}" in rest else None


def logprobs_of(model: torch.nn.Module, tokens: Tensor, attention: Tensor, width: int) -> Tensor:
    """[b, width]: log-probabilities of the last `width` tokens."""
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=tokens, attention_mask=attention, position_ids=positions).logits[:, -width - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, tokens[:, -width:, None]).squeeze(-1)


def advantages_of(rewards: Tensor, group_size: int) -> Tensor:
    """GRPO's, [b]."""
    groups = rewards.view(-1, group_size)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, correction=0, keepdim=True) + 1e-6)).flatten()


def one_step(args: argparse.Namespace, parts: tuple, rows: list[dict[str, str]]) -> tuple[dict[str, float], int, float]:
    """(seconds by phase, sampled tokens, mean reward) of one step on the prompts `rows`."""
    model, tokenizer, optimizer = parts
    clock = Clock()
    with clock.phase("rollout"):
        prompts = [row["prompt"] for row in rows for _ in range(args.group_size)]
        if tokenizer.chat_template:
            prompts = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
                )
                for text in prompts
            ]
        encoded = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        model.eval()
        with torch.no_grad():
            tokens = model.generate(
                input_ids=encoded["input_ids"],
                attention_mask=encoded["attention_mask"],
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=args.max_new_tokens,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        model.train()
        answers = tokens[:, encoded["input_ids"].shape[1] :]
        ended = (answers == tokenizer.eos_token_id).cumsum(1)
        mask = (ended == 0) | ((ended == 1) & (answers == tokenizer.eos_token_id))
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        gold = [row["answer"] for row in rows for _ in range(args.group_size)]
        rewards = torch.tensor([float(boxed(text) == answer) for text, answer in zip(texts, gold, strict=True)])
    attention = torch.cat([encoded["attention_mask"], mask.long()], 1)
    width = answers.shape[1]
    with clock.phase("score"), torch.no_grad():
        old = logprobs_of(model, tokens, attention, width)
    advantages = advantages_of(rewards, args.group_size)
    with clock.phase("update"):
        for part in torch.arange(len(tokens)).chunk(args.minibatches):
            ratio = (logprobs_of(model, tokens[part], attention[part], width) - old[part]).exp()
            credit = advantages[part, None]
            surrogate = torch.minimum(ratio * credit, ratio.clamp(0.8, 1.2) * credit)
            share = mask[part] / mask[part].sum(1, keepdim=True) / len(part)
            optimizer.zero_grad()
            (-(surrogate * share).sum()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return clock.seconds, int(mask.sum()), float(rewards.mean())


def main() -> int:
    """Some steps; one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=44)
    parser.add_argument("--lr", type=float, default=1.5e-4)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    parts = (model, tokenizer, torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.95)))
    rows = [json.loads(line) for line in args.data.read_text().splitlines()]
    for step in range(args.steps):
        chosen = rows[step * args.prompts : (step + 1) * args.prompts]
        start = time.perf_counter()
        seconds, tokens, reward = one_step(args, parts, chosen)
        about = {"step_seconds": time.perf_counter() - start, "tokens": tokens, "reward": reward}
        sys.stdout.write(json.dumps({**{f"{name}_seconds": value for name, value in seconds.items()}, **about}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
