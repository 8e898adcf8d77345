"""Random batches for the oracle, and the same batches as the tensors that the product takes."""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace

import torch
from oracle_numbers import Batch, Seq

SPREADS = {"near": 2e-4, "calm": 0.05, "wild": 0.7, "extreme": 0.5, "edges": 0.0}
FAR = (25.0, 200.0, 1e4)
BOUNDS = (0.5, 0.8, 1.2, 1.24, 1.27, 1.272, 1.28, 1.5, 2.0, 3.0, 5.0, 10.0, 25.0)
"""Ratios at which some method changes its mind."""
GARBAGE = (math.nan, math.inf, -math.inf, 1e30, -1e4, 0.0)
LENGTHS = (1, 1, 2, 3, 4, 6)
PER_TOKEN = {
    "old_logprobs": "old",
    "rollout_logprobs": "roll",
    "ref_logprobs": "ref",
    "teacher_logprobs": "teacher",
    "router_shift": "gamma",
    "entropy": "entropy",
    "old_entropy": "entropy",
    "old_values": "values",
    "topk_logprobs": "top_now",
    "rollout_topk": "top_roll",
}
"""Name of a tensor, and of the list that it is."""


LISTS = tuple(f.name for f in fields(Seq) if f.name not in ("group", "rewards"))
"""Fields with one entry for each token."""


class Draw:
    """One source of random numbers, rounded as `dtype` rounds."""

    def __init__(self, seed: int | str, kind: str, dtype: torch.dtype) -> None:
        self.rng = random.Random(seed)
        self.kind = kind
        self.dtype = dtype

    def rounded(self, value: float) -> float:
        return float(torch.tensor(value, dtype=self.dtype))

    def step(self) -> float:
        """A difference of two logprobs."""
        if self.kind == "edges":
            bound = self.rng.choice((math.log(self.rng.choice(BOUNDS)), 0.4))
            return bound * self.rng.uniform(0.85, 1.15) * self.rng.choice((1, -1))
        if self.kind == "extreme" and self.rng.random() < 0.25:
            return self.rng.choice((1, -1)) * self.rng.choice(FAR)
        return self.rng.gauss(0, SPREADS[self.kind])

    def pair(self, value: float | None = None) -> tuple[float, float]:
        """(logprob, another one a step away), neither above 0; from `value` where that is given."""
        step = self.step()
        base = -self.rng.uniform(0.01, 4) if value is None else value
        if base + step > 0 and value is None:
            base -= step
        return self.rounded(base), self.rounded(min(base + step, -1e-3))


def make_batch(seed: int | str, kind: str, dtype: torch.dtype = torch.float64, *, garbage: bool = True) -> Batch:
    """Five to seven ragged answers in up to four groups, one of them without a live token where it falls so."""
    draw = Draw(seed, kind, dtype)
    return [_sequence(draw, garbage=garbage) for _ in range(draw.rng.randint(5, 7))]


def _sequence(draw: Draw, *, garbage: bool) -> Seq:
    rng = draw.rng
    n = rng.choice(LENGTHS)
    mask = [rng.random() < 0.8 for _ in range(n)]
    if rng.random() < 0.85:
        mask[rng.randrange(n)] = True
    old, now = zip(*(draw.pair() for _ in range(n)), strict=True)
    others = [[draw.pair(value)[1] for value in old] for _ in range(3)]
    advantage = draw.rounded(rng.choice((-1.3, -0.5, 0.0, 0.7, 1.1)))
    roll = others[0]
    tops = [_tops(draw, now[t], roll[t]) for t in range(n)]
    s = Seq(
        now=list(now),
        old=list(old),
        roll=roll,
        ref=others[1],
        teacher=others[2],
        gamma=[draw.rounded(rng.uniform(0.4, 1.0)) for _ in range(n)],
        entropy=[draw.rounded(rng.uniform(0.0, 3.0)) for _ in range(n)],
        values=[draw.rounded(rng.gauss(0.3, 0.5)) for _ in range(n)],
        top_now=[top[0] for top in tops],
        top_roll=[top[1] for top in tops],
        mask=mask,
        advantage=[advantage] * n,
        group=rng.choice((3, -7, 40, 41)),
        rewards=[rng.choice((-1.0, 0.0, 0.25, 1.0)), rng.choice((0.0, 0.5, 1.0))],
    )
    return _with_garbage(s, rng) if garbage else s


def _tops(draw: Draw, now: float, roll: float) -> tuple[list[float], list[float]]:
    """Two other tokens and the sampled one, or one other, the sampled one and a column that is not there."""
    shares = [draw.rng.uniform(0.1, 0.45) for _ in range(4)]
    other = [_share(draw, value, shares[2 * i]) for i, value in enumerate((now, roll))]
    second = [_share(draw, value, shares[2 * i + 1]) for i, value in enumerate((now, roll))]
    if draw.rng.random() < 0.5:
        return [other[0], second[0], now], [other[1], second[1], roll]
    return [other[0], now, -math.inf], [other[1], roll, -math.inf]


def _share(draw: Draw, logprob: float, share: float) -> float:
    """Logprob of a token that has this share of what is left."""
    return draw.rounded(math.log(share * -math.expm1(logprob)))


def _with_garbage(s: Seq, rng: random.Random) -> Seq:
    """Anything at all where nothing is live."""
    changed = {}
    for name in (
        "now",
        "old",
        "roll",
        "ref",
        "teacher",
        "gamma",
        "entropy",
        "values",
        "top_now",
        "top_roll",
        "advantage",
    ):
        values = list(getattr(s, name))
        for t, on in enumerate(s.mask):
            if not on:
                filler = rng.choice(GARBAGE)
                values[t] = [filler] * 3 if name.startswith("top") else filler
        changed[name] = values
    return replace(s, **changed)


def joined(batch: Batch) -> Seq:
    """All answers as one."""
    return replace(batch[0], **{name: [value for s in batch for value in getattr(s, name)] for name in LISTS})


def per_token_advantages(batch: Batch, seed: int) -> Batch:
    """With an advantage for every token, multiples of an eighth."""
    rng = random.Random(seed)
    return [replace(s, advantage=[rng.randint(-12, 12) / 8 for _ in s.mask]) for s in batch]


def with_faults(batch: Batch, seed: int) -> Batch:
    """Some live tokens that the engine reported nothing for, and some that the policy gives no probability."""
    rng = random.Random(seed)
    result = []
    for s in batch:
        roll, now = list(s.roll), list(s.now)
        for t, on in enumerate(s.mask):
            if on and rng.random() < 0.2:
                roll[t] = rng.choice((math.nan, -math.inf, math.inf))
            if on and rng.random() < 0.1:
                now[t] = -math.inf
        result.append(replace(s, roll=roll, now=now))
    return result


def flat(batch: Batch, name: str, dtype: torch.dtype) -> torch.Tensor:
    """[t]: the lists of one name, one after another."""
    return torch.tensor([value for s in batch for value in getattr(s, name)], dtype=dtype)


def tensors(batch: Batch, dtype: torch.dtype, *, skip: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """The batch packed, for a call of `moerl.objective(...)`; `skip` names what to leave out."""
    lengths = torch.tensor([len(s.mask) for s in batch])
    given = {
        "logprobs": flat(batch, "now", dtype),
        "mask": flat(batch, "mask", torch.bool),
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        "advantages": flat(batch, "advantage", dtype),
        "rewards": torch.tensor([s.rewards for s in batch], dtype=torch.float64),
        "group_ids": torch.tensor([s.group for s in batch]),
        **{name: flat(batch, source, dtype) for name, source in PER_TOKEN.items()},
    }
    return {name: value for name, value in given.items() if name not in skip}
