"""The oracle's advantages: from rewards to one number per token, each rule as its formula is written.

Rows of rewards are [c] components; NaN marks an answer that was not scored: out of every statistic, and 0 itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from oracle_numbers import Batch, Seq, held, sg

EPS = 1e-6
FLAT = 1e-9
Column = list[float]
Rule = Callable[[list[Column], list[int]], Column]
"""(rewards [n][c], groups [n]) -> one advantage per answer."""


def average(values: Column) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def spread(values: Column, ddof: int) -> float:
    m = average(values)
    return math.sqrt(math.fsum((v - m) ** 2 for v in values) / max(len(values) - ddof, 1))


def is_flat(values: Column) -> bool:
    return not values or max(values) - min(values) <= FLAT


def members(i: int, values: Column, groups: list[int]) -> list[int]:
    """Scored rows of row i's group, itself too."""
    return [j for j in range(len(values)) if groups[j] == groups[i] and math.isfinite(values[j])]


def standardised(
    values: Column, groups: list[int], center: str, scale: str, ddof: int = 0, eps: float = EPS, single: str = "zero"
) -> Column:
    """(R - center) / (scale + eps)."""
    scored = [i for i, v in enumerate(values) if math.isfinite(v)]
    everyone = [values[i] for i in scored]

    def centre(i: int) -> float:
        others = [values[j] for j in members(i, values, groups)]
        if center == "group_mean":
            return average(others)
        if center == "group_loo":
            rest = [values[j] for j in members(i, values, groups) if j != i]
            return average(rest) if rest else values[i]
        return average(everyone) if center == "batch_mean" else 0.0

    centred = {i: values[i] - centre(i) for i in scored}

    def width(i: int) -> float:
        if scale == "group_std":
            return spread([values[j] for j in members(i, values, groups)], ddof)
        return spread(everyone if scale == "batch_std_raw" else list(centred.values()), ddof)

    result = [0.0] * len(values)
    of_group = center.startswith("group") or scale == "group_std"
    for i in scored:
        own = [values[j] for j in members(i, values, groups)]
        if len(own) == 1 and single == "raw":
            result[i] = values[i]
        elif (of_group and is_flat(own)) or (center == "batch_mean" and is_flat(everyone)):
            result[i] = 0.0
        else:
            result[i] = centred[i] if scale == "none" else centred[i] / (width(i) + eps)
    return result


def plain(center: str, scale: str, ddof: int = 0, eps: float = EPS, single: str = "zero") -> Rule:
    def rule(rewards: list[Column], groups: list[int]) -> Column:
        return standardised([sum(row) for row in rewards], groups, center, scale, ddof, eps, single)

    return rule


def decoupled(weights: Column, *, batch_norm: bool = True) -> Rule:
    """GDPO: every component is normalised within its group, then their weighted sum over the batch."""

    def rule(rewards: list[Column], groups: list[int]) -> Column:
        scored = [all(map(math.isfinite, row)) for row in rewards]
        total = [0.0] * len(rewards)
        for k, weight in enumerate(weights):
            column = [row[k] if ok else math.nan for row, ok in zip(rewards, scored, strict=True)]
            for i, a in enumerate(standardised(column, groups, "group_mean", "group_std")):
                total[i] += weight * a
        if not batch_norm:
            return total
        seen = [a for a, ok in zip(total, scored, strict=True) if ok]
        if not seen or max(seen) - min(seen) <= 1e-9:
            return [0.0] * len(total)
        return [
            (a - average(seen)) / (spread(seen, 0) + EPS) if ok else 0.0 for a, ok in zip(total, scored, strict=True)
        ]

    return rule


def ranked(top: float, *, by_position: bool = False) -> Rule:
    """GOPO: top for the best, -top for the worst, evenly between; ties share the average rank."""

    def rule(rewards: list[Column], groups: list[int]) -> Column:
        values = [sum(row) for row in rewards]
        result = [0.0] * len(values)
        for i, value in enumerate(values):
            if not math.isfinite(value):
                continue
            group = members(i, values, groups)
            if is_flat([values[j] for j in group]):
                continue
            better = sum(values[j] > value for j in group)
            equal = [j for j in group if values[j] == value]
            place = better + (equal.index(i) if by_position else (len(equal) - 1) / 2)
            result[i] = top - 2 * top * place / (len(group) - 1)
        return result

    return rule


def best_worst(rewards: list[Column], groups: list[int]) -> Column:
    """+1 for the first best of a group, -1 for its first worst."""
    values = [sum(row) for row in rewards]
    result = [0.0] * len(values)
    for i, value in enumerate(values):
        if not math.isfinite(value):
            continue
        group = members(i, values, groups)
        own = [values[j] for j in group]
        if is_flat(own):
            continue
        if i == next(j for j in group if values[j] == max(own)):
            result[i] = 1.0
        if i == next(j for j in group if values[j] == min(own)):
            result[i] = -1.0
    return result


@dataclass
class Memory:
    """DCPO's smoothing: every reward that each prompt ever had, visit after visit."""

    visits: dict[int, list[Column]] = field(default_factory=dict)

    def __call__(self, rewards: list[Column], groups: list[int]) -> Column:
        values = [sum(row) for row in rewards]
        result = [0.0] * len(values)
        for group in dict.fromkeys(groups):
            rows = [i for i in range(len(values)) if groups[i] == group and math.isfinite(values[i])]
            if not rows:
                continue
            self.visits.setdefault(group, []).append([values[i] for i in rows])
            past = self.visits[group]
            j = len(past)
            everything = [v for visit in past for v in visit]
            for i in rows:
                new, total = (self._standard(values[i], seen) for seen in (past[-1], everything))
                by_new, by_total = ((j - 1) * new + total) / j, (new + (j - 1) * total) / j
                result[i] = by_new if abs(by_new) < abs(by_total) else by_total
        return result

    @staticmethod
    def _standard(value: float, seen: Column) -> float:
        std = spread(seen, 0)
        return 0.0 if std < FLAT else (value - average(seen)) / (std + EPS)


def first_visit(rewards: list[Column], groups: list[int]) -> Column:
    return Memory()(rewards, groups)


# Rewards of tokens, and what is done to tokens


def k1(s: Seq, t: int, other: list[float]) -> float:
    """log old - log other, clamped."""
    return sg(held(s.old[t] - other[t]))


def whitened(rows: list[Column], batch: Batch, ddof: int = 0, eps: float = 1e-8) -> list[Column]:
    """Mean 0 and std 1 over all live tokens of the batch."""
    seen = [a for s, row in zip(batch, rows, strict=True) for a, on in zip(row, s.mask, strict=True) if on]
    m, width = average(seen), spread(seen, ddof)
    return [[(a - m) / (width + eps) for a in row] for row in rows]


def gae(rewards: Column, values: Column, on: list[int], lam: float, gamma: float) -> dict[int, float]:
    """A_t = sum over later live tokens k of (gamma lam)^(k - t) delta_k, as the sum that it is."""
    delta = {}
    for place, t in enumerate(on):
        after = values[on[place + 1]] if place + 1 < len(on) else 0.0
        delta[t] = rewards[t] + gamma * after - values[t]
    return {t: math.fsum((gamma * lam) ** p * delta[k] for p, k in enumerate(on[place:])) for place, t in enumerate(on)}


@dataclass(frozen=True)
class Credit:
    """How a method makes advantages of tokens."""

    rule: Rule | None = None
    """None: GAE on the old values."""
    kl: float = 0.0
    """Coefficient of k1 to the reference in the reward."""
    per_token: bool = False
    """Of that KL: each token's return has its own, rather than the answer's reward the sum."""
    whiten: bool = False
    limit: float = math.inf
    lam: Callable[[int], float] = lambda n: 0.95
    critic_lam: float | None = None
    gamma: float = 1.0
    entropy: float = 0.0
    teacher: float = 0.0

    def token_rewards(self, s: Seq) -> Column:
        return [
            -self.kl * k1(s, t, s.ref) + (self.entropy * s.entropy[t] if self.rule is None else 0.0) if on else 0.0
            for t, on in enumerate(s.mask)
        ]

    def paid(self, s: Seq) -> Column:
        """With the answer's reward on its last live token."""
        rewards = self.token_rewards(s)
        on = [t for t, live in enumerate(s.mask) if live]
        if on:
            rewards[on[-1]] += s.reward
        return rewards

    def returns(self, s: Seq) -> dict[int, float]:
        """Targets of the critic."""
        on = [t for t, live in enumerate(s.mask) if live]
        lam = self.lam(len(on)) if self.critic_lam is None else self.critic_lam
        return {t: a + s.values[t] for t, a in gae(self.paid(s), s.values, on, lam, self.gamma).items()}

    def __call__(self, batch: Batch) -> list[Column]:
        """Advantages, one list for each answer; 0 outside the mask."""
        rows = self._of_values(batch) if self.rule is None else self._of_rewards(batch, self.rule)
        for s, row in zip(batch, rows, strict=True):
            for t, on in enumerate(s.mask):
                if not on:
                    continue
                row[t] -= self.teacher * k1(s, t, s.teacher) if self.teacher else 0.0
                row[t] += self.entropy * s.entropy[t] if self.rule is not None else 0.0
        rows = whitened(rows, batch) if self.whiten else rows
        return [
            [a if on else 0.0 for a, on in zip(row, s.mask, strict=True)] for s, row in zip(batch, rows, strict=True)
        ]

    def _of_values(self, batch: Batch) -> list[Column]:
        rows = []
        for s in batch:
            on = [t for t, live in enumerate(s.mask) if live]
            found = gae(self.paid(s), s.values, on, self.lam(len(on)), self.gamma)
            rows.append([found.get(t, 0.0) for t in range(len(s.mask))])
        return rows

    def _of_rewards(self, batch: Batch, rule: Rule) -> list[Column]:
        rewards = [list(s.rewards) for s in batch]
        tokens = [self.token_rewards(s) for s in batch]
        if self.kl and not self.per_token:
            rewards = [[*row, math.fsum(own)] for row, own in zip(rewards, tokens, strict=True)]
        found = [max(-self.limit, min(a, self.limit)) for a in rule(rewards, [s.group for s in batch])]
        if not self.per_token:
            return [[a] * len(s.mask) for a, s in zip(found, batch, strict=True)]
        return [[a + math.fsum(own[t:]) for t in range(len(own))] for a, own in zip(found, tokens, strict=True)]


GROUP = Credit(plain("group_mean", "group_std"))
CENTRED = Credit(plain("group_mean", "none"))
RAW = Credit(plain("none", "none"))
BATCH = Credit(plain("batch_mean", "batch_std_raw"))
SCALED = Credit(plain("group_mean", "batch_std_centered"))
TRL = Credit(plain("group_mean", "group_std", 1, 1e-4))
VERL = Credit(plain("group_mean", "group_std", 1, EPS, "raw"))
SLIME = Credit(plain("group_mean", "group_std", 1))
BY_NAME: dict[Credit, list[str]] = {
    GROUP: [
        "grpo",
        "two_grpo",
        "dapo",
        "clip_dapo",
        "dapo_unclipped",
        "gspo",
        "gspo_token",
        "luspo",
        "gmpo",
        "rspo",
        "grpo_rs",
        "gspo_rs",
        "gmpo_rs_v1",
        "cispo",
        "sapo",
        "vespo",
        "icepop",
        "trm",
        "vaco",
        "cisco",
        "lopti",
        "ar_lopti",
        "ctpo",
        "minpro",
    ],
    CENTRED: [
        "dr_grpo",
        "dr_grpo_ref_weighted",
        "dppo_tv",
        "dppo_kl",
        "dppo_topk_tv",
        "dppo_topk_kl",
        "minirl",
        "olmo3",
    ],
    RAW: ["sft", "reinforce", "reinforce_rej", "raft_pp"],
    BATCH: ["dr_grpo_batch_norm", "cispo_min_clip"],
    SCALED: ["scalerl", "scalerl_loss", "reinforce_pp_baseline"],
    TRL: ["trl/grpo", "trl/dapo", "trl/gspo", "trl/cispo"],
    VERL: ["verl/grpo", "verl/gspo", "verl/cispo"],
    SLIME: ["slime/grpo", "slime/gspo", "slime/cispo"],
}
CREDITS: dict[str, Credit] = {
    **{name: credit for credit, names in BY_NAME.items() for name in names},
    "reinforce_pp_loo": Credit(plain("group_loo", "none")),
    "rloo": Credit(plain("group_loo", "none"), kl=0.03),
    "lite_ppo": Credit(plain("group_mean", "batch_std_raw")),
    "reinforce_pp": Credit(plain("none", "none"), kl=0.01, per_token=True, whiten=True),
    "gopo": Credit(ranked(2.0)),
    "gdpo": Credit(decoupled([1.0, 1.0])),
    "dcpo": Credit(first_visit),
    "group_dpo": Credit(best_worst),
    "ppo": Credit(kl=0.01, whiten=True),
    "vapo": Credit(whiten=True, lam=lambda n: max(0.0, 1 - 1 / (0.05 * n)) if n else 0.0, critic_lam=1.0),
    "trl/dr_grpo": Credit(plain("group_mean", "none")),
    "verl/dr_grpo": Credit(plain("group_mean", "none", single="raw")),
}
