"""An independent oracle in plain Python for the main presets: loss by hand, gradient by finite differences."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from moerl.algorithms.aggregation import sequence_weights
from moerl.algorithms.presets import PRESETS
from moerl.algorithms.types import LossInputs
from moerl.types import TokenWeights


@dataclass
class Sequence:
    now: list[float]
    old: list[float]
    ref: list[float]
    gamma: list[float]
    mask: list[bool]
    advantage: float

    @property
    def live(self) -> list[int]:
        return [t for t, on in enumerate(self.mask) if on]


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    return -min(ratio * advantage, max(low, min(ratio, high)) * advantage)


def gspo(s: Sequence, frozen: Sequence) -> float:
    ratio = math.exp(sum(s.now[t] - s.old[t] for t in s.live) / len(s.live))
    return clipped(ratio, s.advantage, 1 - 3e-4, 1 + 4e-4)


def grpo(s: Sequence, frozen: Sequence) -> float:
    total = 0.0
    for t in s.live:
        d = s.now[t] - s.ref[t]
        total += clipped(math.exp(s.now[t] - s.old[t]), s.advantage, 0.8, 1.2) + 0.04 * (math.exp(-d) - 1 + d)
    return total / len(s.live)


def dapo(s: Sequence, frozen: Sequence) -> float:
    return sum(clipped(math.exp(s.now[t] - s.old[t]), s.advantage, 0.8, 1.28) for t in s.live)


def geometric(s: Sequence, shift: Callable[[int], float]) -> float:
    total = 0.0
    for t in s.live:
        d = s.now[t] - s.old[t] + shift(t)
        total += min(d, 0.4) if s.advantage > 0 else max(d, -0.4)
    return -s.advantage * math.exp(total / len(s.live))


def gmpo(s: Sequence, frozen: Sequence) -> float:
    return geometric(s, lambda t: 0.0)


def rspo(s: Sequence, frozen: Sequence) -> float:
    return geometric(s, lambda t: math.log(max(s.gamma[t], 0.8)))


def cispo(s: Sequence, frozen: Sequence) -> float:
    return sum(-min(math.exp(frozen.now[t] - s.old[t]), 5.0) * s.advantage * s.now[t] for t in s.live)


ORACLES = {"gspo": gspo, "grpo": grpo, "dapo": dapo, "gmpo": gmpo, "cispo": cispo, "rspo": rspo}
PER_TOKEN = {"dapo", "cispo"}


def make_batch(seed: int, spread: float) -> list[Sequence]:
    rng = random.Random(seed)
    batch = []
    for _ in range(5):
        n = rng.randint(1, 6)
        old = [-rng.uniform(0.05, 3) for _ in range(n)]
        mask = [rng.random() < 0.8 for _ in range(n)]
        mask[rng.randrange(n)] = True
        batch.append(
            Sequence(
                now=[value + rng.gauss(0, spread) for value in old],
                old=old,
                ref=[value + rng.gauss(0, 0.3) for value in old],
                gamma=[rng.uniform(0.5, 1) for _ in range(n)],
                mask=mask,
                advantage=rng.choice([-1.3, -0.5, 0.7, 1.1]),
            )
        )
    return batch


def oracle_loss(name: str, batch: list[Sequence], frozen: list[Sequence]) -> float:
    total = sum(ORACLES[name](s, f) for s, f in zip(batch, frozen, strict=True))
    return total / (sum(len(s.live) for s in batch) if name in PER_TOKEN else len(batch))


def oracle_gradient(name: str, batch: list[Sequence], step: float = 1e-6) -> list[float]:
    gradient = []
    for i, s in enumerate(batch):
        for t in range(len(s.now)):
            sides = []
            for sign in (1, -1):
                moved = Sequence(s.now.copy(), s.old, s.ref, s.gamma, s.mask, s.advantage)
                moved.now[t] += sign * step
                sides.append(oracle_loss(name, [*batch[:i], moved, *batch[i + 1 :]], batch))
            gradient.append((sides[0] - sides[1]) / (2 * step))
    return gradient


def packed(batch: list[Sequence], aggregation: dict) -> LossInputs:
    def flat(values):
        return torch.tensor([v for row in values for v in row], dtype=torch.float64)

    lengths = torch.tensor([len(s.now) for s in batch])
    seq_ids = torch.repeat_interleave(torch.arange(len(batch)), lengths)
    weights = sequence_weights(aggregation, torch.tensor([len(s.live) for s in batch]), torch.zeros(len(batch)).long())
    return LossInputs(
        logprobs=flat(s.now for s in batch).requires_grad_(),
        rollout_logprobs=flat(s.old for s in batch),
        advantages=flat([s.advantage] * len(s.now) for s in batch),
        mask=torch.tensor([on for s in batch for on in s.mask]),
        weights=TokenWeights.shared(weights[seq_ids]),
        seq_ids=seq_ids,
        num_seqs=len(batch),
        optional={
            "old_logprobs": flat(s.old for s in batch),
            "ref_logprobs": flat(s.ref for s in batch),
            "router_shift": flat(s.gamma for s in batch),
        },
    )


@pytest.mark.parametrize("spread", [1e-4, 0.1, 0.7])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ORACLES)
def test_loss_and_gradient_equal_the_oracle(batch_v, name, seed, spread):
    batch = make_batch(seed, spread)
    values = batch_v.resolved(PRESETS[name].values)
    x = packed(batch, values["aggregation"])
    loss, _ = batch_v.objective(values)(x)
    (gradient,) = torch.autograd.grad(loss, x.logprobs)
    assert float(loss.detach()) == pytest.approx(oracle_loss(name, batch, batch), abs=1e-12)
    wanted = torch.tensor(oracle_gradient(name, batch), dtype=torch.float64)
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-8)
