"""One side of the objective benchmark: moerl, TRL or verl, in the interpreter that has it. Prints one JSON a line.

Run by tools/bench/objective.py. TRL: `GRPOTrainer._compute_loss` and the experimental `GMPOTrainer._compute_loss`,
called on an object that has the attributes they read, with given log-probabilities; the concatenation of the model's
inputs is left out. verl: the functions of `core_algos` by `get_policy_loss_fn`. Their metrics are part of their
functions, and moerl's of its own. All make the truncated weights of DAPO+TIS themselves, the peers with two torch
calls.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("side", choices=("moerl", "trl", "verl"))
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--sizes", type=int, nargs="+", default=[16])
parser.add_argument("--layouts", nargs="+", default=["ln8192"])
parser.add_argument("--seconds", type=float, default=1.0)
parser.add_argument("--least", type=int, default=3)

Step = Callable[[Any], Any]
"""logprobs [b, s] (peers) or [t] (moerl), with gradient -> loss."""


def moerl_steps(batch: Any) -> dict[str, Step]:
    """Packed inputs, made once; the shares of the minibatch are made in every call."""
    import numpy as np
    import torch

    import moerl
    from moerl.algorithms.aggregation import build_aggregation
    from moerl.algorithms.types import LossInputs
    from moerl.types import TokenWeights

    count = len(batch.lengths)
    seq_ids = torch.repeat_interleave(torch.arange(count), batch.lengths)
    old, rollout = batch.old[batch.mask], batch.rollout[batch.mask]
    advantages, mask = batch.advantages[seq_ids], torch.ones(len(seq_ids), dtype=torch.bool)
    axes: dict[str, dict[str, Any]] = {
        "grpo": {"kl": {"place": "none"}},
        "gspo": {"trust": {"lo": 3e-3, "hi": 4e-3}},
        "gmpo": {},
        "cispo": {"trust": {"max": 1.28}},
        "dapo_tis": {"correction": {"name": "tis", "cap": 2.0}},
    }
    presets = {"dapo_tis": "dapo"}

    def step(method: Any) -> Step:
        weigh = build_aggregation(method.section.aggregation)

        def evaluate(logprobs: Any) -> Any:
            shares = weigh(batch.lengths, torch.arange(count)).float()
            weights = TokenWeights.shared(torch.from_numpy(np.repeat(shares.numpy(), batch.lengths.numpy())))
            inputs = LossInputs(
                logprobs=logprobs,
                rollout_logprobs=rollout,
                advantages=advantages,
                mask=mask,
                weights=weights,
                seq_ids=seq_ids,
                num_seqs=count,
                optional={"old_logprobs": old},
            )
            return method.objective(inputs)[0]

        return evaluate

    return {name: step(moerl.objective(presets.get(name, name), **given)) for name, given in axes.items()}


def trl_steps(batch: Any) -> dict[str, Step]:
    """TRL's own loss code on padded inputs."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import torch
    import trl.experimental.gmpo.gmpo_trainer as gmpo
    import trl.trainer.grpo_trainer as grpo

    class OnlyCompletions:
        """torch, with a `cat` that gives back the completion's part."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def cat(parts: Any, dim: int = 0) -> Any:
            return parts[1]

    grpo.torch = OnlyCompletions()  # pyright: ignore[reportAttributeAccessIssue]  the model's inputs are not timed
    gmpo.torch = OnlyCompletions()  # pyright: ignore[reportAttributeAccessIssue]
    long_mask = batch.mask.long()
    nothing = torch.zeros(len(batch.lengths), 0, dtype=torch.long)
    tokens = torch.tensor(float(batch.lengths.sum()))
    entropy = torch.zeros_like(batch.old)

    def step(name: str) -> Step:
        low, high = {"cispo": (0.2, 1.28)}.get(name, _bounds()[name])
        loss_type = {"cispo": "cispo", "dapo_tis": "dapo"}.get(name, "grpo")
        compute = gmpo.GMPOTrainer._compute_loss if name == "gmpo" else grpo.GRPOTrainer._compute_loss

        def evaluate(logprobs: Any) -> Any:
            trainer = _trainer(lambda *_, **__: (logprobs, entropy, None), name, loss_type, low, high)
            trainer.max_completion_length = batch.mask.shape[1]
            inputs = {
                "prompt_ids": nothing,
                "prompt_mask": nothing,
                "completion_ids": long_mask,
                "completion_mask": long_mask,
                "advantages": batch.advantages,
                "old_per_token_logps": batch.old,
                "num_items_in_batch": tokens,
            }
            if name == "dapo_tis":
                inputs["importance_sampling_ratio"] = (batch.old - batch.rollout).exp().clamp(max=2.0)
            return compute(trainer, None, inputs)

        return evaluate

    return {name: step(name) for name in _bounds()}


def _trainer(logps: Callable[..., Any], name: str, loss_type: str, low: float, high: float) -> Any:
    same = lambda values, *_, **__: values  # noqa: E731
    accelerator = SimpleNamespace(num_processes=1, reduce=same, gather=same, gather_for_metrics=same)
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=logps,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence" if name == "gspo" else "token",
        beta=0.0,
        epsilon_low=low,
        epsilon_high=high,
        loss_type=loss_type,
        args=SimpleNamespace(delta=None, steps_per_generation=1, use_bias_correction_kl=False),
        use_vllm=name == "dapo_tis",
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )


def verl_steps(batch: Any) -> dict[str, Step]:
    """verl's own loss code on padded inputs."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    advantages = batch.advantages[:, None] * batch.mask

    def step(name: str) -> Step:
        low, high = {"cispo": (1.0, 0.28)}.get(name, _bounds()[name])
        config = ActorConfig(
            strategy="fsdp", rollout_n=8, use_dynamic_bsz=True, clip_ratio_low=low, clip_ratio_high=high
        )
        function = get_policy_loss_fn({"gspo": "gspo", "gmpo": "geo_mean", "cispo": "cispo"}.get(name, "vanilla"))
        mode = "token-mean" if name in ("cispo", "dapo_tis") else "seq-mean-token-mean"

        def evaluate(logprobs: Any) -> Any:
            weights = (batch.old - batch.rollout).exp().clamp(max=2.0) if name == "dapo_tis" else None
            return function(batch.old, logprobs, advantages, batch.mask, mode, config, weights)[0]

        return evaluate

    return {name: step(name) for name in _bounds()}


def _bounds() -> dict[str, tuple[float, float]]:
    from objective_batches import BOUNDS

    return BOUNDS


def _once(evaluate: Step, leaf: Any) -> None:
    evaluate(leaf).backward()


def main() -> int:
    """Measure every method on every batch."""
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import torch
    from objective_batches import copy_time, make_batch, measure

    torch.set_num_threads(args.threads)
    makers = {"moerl": moerl_steps, "trl": trl_steps, "verl": verl_steps}
    for size in args.sizes:
        for layout in args.layouts:
            batch = make_batch(2**size, layout)
            steps = makers[args.side](batch)
            packed = args.side == "moerl"
            extra = {"copy": copy_time(2**size)} if packed else {}
            leaf = (batch.logprobs[batch.mask] if packed else batch.logprobs.clone()).requires_grad_()
            for name, evaluate in steps.items():
                once, reset = partial(_once, evaluate, leaf), partial(setattr, leaf, "grad", None)
                figures = measure(once, reset, seconds=args.seconds, least=args.least)
                assert leaf.grad is not None
                gradient = leaf.grad if packed else leaf.grad[batch.mask]
                product = float(gradient.double() @ batch.probe[batch.mask].double())
                about = {"side": args.side, "threads": args.threads, "size": size, "layout": layout, "method": name}
                sys.stdout.write(json.dumps({**about, **figures, **extra, "product": product}) + "\n")
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
