"""The oracle's terms, from their formulas: ratios, trust regions, corrections, token weights, KL.

Every function looks at one answer `s` and the tokens `on` that count, and is plain Python over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from oracle_numbers import Number, Seq, above, at_least, at_most, exp, held, sg, sigmoid

Losses = dict[int, Number]
Policy = Callable[[Seq, list[int]], Losses]
Verdict = dict[int, tuple[float, bool]]
Correct = Callable[[Seq, list[int]], Verdict]

# Ratios


def anchor_of(s: Seq, anchor: str) -> list[float]:
    return s.old if anchor == "old" else s.roll


def differences(s: Seq, on: list[int], anchor: str = "old", shift: float | None = None) -> Losses:
    """d_t, with the log of the floored router-shift factor where there is a floor."""
    base = anchor_of(s, anchor)
    return {t: s.now[t] - base[t] + (0.0 if shift is None else math.log(max(s.gamma[t], shift))) for t in on}


def mean(values: Losses) -> Number:
    return sum(values.values()) / len(values) if values else 0.0


# Trust regions: the loss of one token or answer from its ratio


def clipped(x: Number, a: float, low: float, high: float, *, dual: float = math.inf, delta: float = math.inf) -> Number:
    """-min(min(x, delta) A, clip(x) A), and not above dual |A| where A < 0."""
    free, bound = at_most(x, delta) * a, held(x, low, high) * a
    objective = free if free.real <= bound.real else bound
    if a < 0 and dual < math.inf and above(dual * a, objective):
        objective = dual * a
    return -objective


def token_clip(lo: float, hi: float, shift: float | None = None, **more: float) -> Policy:
    def policy(s: Seq, on: list[int]) -> Losses:
        d = differences(s, on, shift=shift)
        return {t: clipped(exp(held(d[t])), s.advantage[t], 1 - lo, 1 + hi, **more) for t in on}

    return policy


def gspo(lo: float, hi: float, shift: float | None = None) -> Policy:
    def policy(s: Seq, on: list[int]) -> Losses:
        ratio = exp(held(mean(differences(s, on, shift=shift))))
        return {t: clipped(ratio, s.advantage[t], 1 - lo, 1 + hi) for t in on}

    return policy


def gspo_token(lo: float, hi: float) -> Policy:
    """Value of the sequence's ratio, gradient of the token's own logprob; beyond the clamp none."""

    def policy(s: Seq, on: list[int]) -> Losses:
        log_ratio = sg(mean(differences(s, on)))
        own = {t: held(log_ratio + (s.now[t] - sg(s.now[t]))) for t in on}
        return {t: clipped(exp(own[t]), s.advantage[t], 1 - lo, 1 + hi) for t in on}

    return policy


def ctpo(lo: float, hi: float) -> Policy:
    """Value of the product of ratios up to the token, gradient of its own logprob; bounds grow as the root of t."""

    def policy(s: Seq, on: list[int]) -> Losses:
        d, result, total = differences(s, on), {}, 0.0
        for position, t in enumerate(on, start=1):
            total += sg(d[t])
            own = held(total + (s.now[t] - sg(s.now[t])))
            low, high = math.exp(-lo * math.sqrt(position)), math.exp(hi * math.sqrt(position))
            result[t] = clipped(exp(own), s.advantage[t], low, high)
        return result

    return policy


def minpro(cap: float) -> Policy:
    """-sg[min(r_t min over s < t of r_s, cap)] A lp."""

    def policy(s: Seq, on: list[int]) -> Losses:
        d, result, smallest = differences(s, on), {}, 0.0
        for position, t in enumerate(on):
            weight = min(math.exp(held(sg(d[t]) + smallest)), cap)
            result[t] = -weight * s.advantage[t] * s.now[t]
            smallest = sg(d[t]) if position == 0 else min(smallest, sg(d[t]))
        return result

    return policy


def gmpo(bound: float, *, before: float | None = None, after: float | None = None) -> Policy:
    """exp of the mean of log-ratios, each clipped on the side of A."""

    def policy(s: Seq, on: list[int]) -> Losses:
        d = {t: held(value) for t, value in differences(s, on, shift=before).items()}
        clip = {t: at_most(d[t], bound) if s.advantage[t] > 0 else at_least(d[t], -bound) for t in on}
        if after is not None:
            clip = {t: clip[t] + math.log(max(s.gamma[t], after)) for t in on}
        ratio = exp(held(mean(clip)))
        return {t: -s.advantage[t] * ratio for t in on}

    return policy


def unbounded(s: Seq, on: list[int]) -> Losses:
    return {t: -exp(held(d)) * s.advantage[t] for t, d in differences(s, on).items()}


def sapo(tau_pos: float, tau_neg: float) -> Policy:
    def policy(s: Seq, on: list[int]) -> Losses:
        result = {}
        for t, d in differences(s, on).items():
            tau = tau_pos if s.advantage[t] > 0 else tau_neg
            result[t] = -4 / tau * sigmoid(tau * (exp(held(d)) - 1)) * s.advantage[t]
        return result

    return policy


def sapo_one_sided(tau_pos: float, tau_neg: float) -> Policy:
    def policy(s: Seq, on: list[int]) -> Losses:
        result = {}
        for t, d in differences(s, on).items():
            r, a = exp(held(d)), s.advantage[t]
            gate = sigmoid((r - 1) / tau_pos) if a > 0 else sigmoid((1 - r) / tau_neg)
            result[t] = -gate * r * a
        return result

    return policy


def dcpo(eps_l: float, eps_h: float, top: float, dual: float) -> Policy:
    """Bounds from the old probability q; q that underflows gives 0.5 and `top`."""

    def policy(s: Seq, on: list[int]) -> Losses:
        result = {}
        for t, d in differences(s, on).items():
            q = math.exp(s.old[t])
            low, high = 0.5, top
            if q > 1e-300:
                low = 0.5 + 0.5 * math.sqrt(max(0.0, 1 - 4 * eps_l / q))
                high = min(top, 0.5 + 0.5 * math.sqrt(1 + 4 * eps_h / q))
            result[t] = clipped(exp(held(d)), s.advantage[t], low, high, dual=dual)
        return result

    return policy


def score(weight: Callable[[Seq, list[int]], dict[int, float]]) -> Policy:
    """-sg[weight] A lp."""

    def policy(s: Seq, on: list[int]) -> Losses:
        return {t: -w * s.advantage[t] * s.now[t] for t, w in weight(s, on).items()}

    return policy


def ones(s: Seq, on: list[int]) -> dict[int, float]:
    return dict.fromkeys(on, 1.0)


def capped(low: float, high: float, anchor: str = "old", *, mask: bool = False) -> Policy:
    """CISPO: the ratio within absolute bounds; in the unified form PPO's mask as well."""

    def weight(s: Seq, on: list[int]) -> dict[int, float]:
        result = {}
        for t, d in differences(s, on, anchor).items():
            r, a = sg(exp(held(sg(d)))), s.advantage[t]
            dropped = mask and ((a > 0 and above(r, high)) or (a < 0 and above(low, r)))
            result[t] = 0.0 if dropped else sg(held(r, low, high))
        return result

    return score(weight)


def vespo(k_pos: float, lam_pos: float, k_neg: float, lam_neg: float, anchor: str, *, tis: float = 0.0) -> Policy:
    """W^k exp(lam (1 - W)) of the answer's product; with `tis` capped token weights are part of W."""

    def weight(s: Seq, on: list[int]) -> dict[int, float]:
        log_w = sum(sg(d) for d in differences(s, on, anchor).values())
        if tis:
            log_w += sum(math.log(min(math.exp(sg(held(s.old[t] - s.roll[t]))), tis)) for t in on)
        log_w = sg(held(log_w, math.log(1e-8)))
        result = {}
        for t in on:
            k, lam = (k_pos, lam_pos) if s.advantage[t] >= 0 else (k_neg, lam_neg)
            exponent = lam + k * log_w - lam * math.exp(log_w)
            result[t] = math.exp(exponent) if exponent > -740 else 0.0
        return result

    return score(weight)


def minirl(lo: float, hi: float, cap: float) -> Policy:
    """The mask by the ratio to the old policy, the weight by that to the rollout policy."""

    def weight(s: Seq, on: list[int]) -> dict[int, float]:
        result = {}
        for t, total in differences(s, on, "rollout").items():
            r, a = math.exp(sg(held(sg(s.now[t]) - s.old[t]))), s.advantage[t]
            dropped = (a > 0 and above(r, 1 + hi)) or (a < 0 and above(1 - lo, r))
            result[t] = 0.0 if dropped else min(math.exp(sg(held(sg(total)))), cap)
        return result

    return score(weight)


# DPPO


def binary_tv(s: Seq, t: int) -> float:
    return abs(math.exp(sg(s.now[t])) - math.exp(s.roll[t]))


def binary_kl(s: Seq, t: int) -> float:
    p, b = math.exp(sg(s.now[t])), math.exp(s.roll[t])
    others_p, others_b = max(1 - p, 1e-8), max(1 - b, 1e-8)
    return b * (s.roll[t] - sg(s.now[t])) + others_b * math.log(others_b / others_p)


def sampled_kl(s: Seq, t: int) -> float:
    return math.exp(sg(s.now[t])) * (sg(s.now[t]) - s.roll[t])


def top_k(s: Seq, t: int, kind: str) -> float:
    p, b = [math.exp(x) for x in s.top_now[t]], [math.exp(x) for x in s.top_roll[t]]
    others_p, others_b = max(1 - sum(p), 1e-8), max(1 - sum(b), 1e-8)
    if kind == "tv":
        return 0.5 * (sum(abs(x - y) for x, y in zip(p, b, strict=True)) + abs(others_p - others_b))
    logs = zip(s.top_now[t], s.top_roll[t], b, strict=True)
    return sum(y * (lr - ln) for ln, lr, y in logs if y > 0) + others_b * math.log(others_b / others_p)


def top_k_tv(s: Seq, t: int) -> float:
    return top_k(s, t, "tv")


def top_k_kl(s: Seq, t: int) -> float:
    return top_k(s, t, "kl")


def dppo(
    divergence: Callable[[Seq, int], float], delta: float, cap: float = 10.0, *, both: bool = False, rank: int = 0
) -> Policy:
    def weight(s: Seq, on: list[int]) -> dict[int, float]:
        found = {t: divergence(s, t) for t in on}
        largest = sorted(on, key=lambda t: (-found[t], t))[:rank] if rank else on
        result = {}
        for t, total in differences(s, on, "rollout").items():
            a = s.advantage[t]
            away = (a > 0 and sg(total) > 0) or (a < 0 and sg(total) < 0)
            dropped = t in largest and above(found[t], delta) and (away or (both and a != 0))
            result[t] = 0.0 if dropped else min(math.exp(sg(held(sg(total)))), cap)
        return result

    return score(weight)


# Corrections


def mismatch(s: Seq, on: list[int], level: str) -> dict[int, float]:
    """log u at the level, clamped."""
    c = {t: s.old[t] - s.roll[t] for t in on}
    whole = sum(c.values()) if level == "seq" else sum(c.values()) / max(len(c), 1)
    return {t: sg(held(c[t] if level == "token" else whole)) for t in on}


def tis(level: str, cap: float, *, geo_mean: bool = False) -> Correct:
    def correct(s: Seq, on: list[int]) -> Verdict:
        w = {t: min(math.exp(u), cap) for t, u in mismatch(s, on, level).items()}
        if geo_mean and on:
            w = dict.fromkeys(on, math.exp(sum(math.log(x) for x in w.values()) / len(w)))
        return {t: (w[t], True) for t in on}

    return correct


def band(level: str, low: float, high: float, *, weighs: bool = True) -> Correct:
    """MIS and IcePop: the ratio inside the band, or the bare indicator."""

    def correct(s: Seq, on: list[int]) -> Verdict:
        result = {}
        for t, log_u in mismatch(s, on, level).items():
            u = math.exp(log_u)
            inside = not above(u, high) and not above(low, u)
            result[t] = (u if weighs else 1.0, inside)
        return result

    return correct


def seq_mask_tis(cap: float, low: float, high: float) -> Correct:
    def correct(s: Seq, on: list[int]) -> Verdict:
        inside = band("geo", low, high)(s, on)
        return {t: (min(math.exp(u), cap), inside[t][1]) for t, u in mismatch(s, on, "token").items()}

    return correct


def opsm(delta: float) -> Correct:
    def correct(s: Seq, on: list[int]) -> Verdict:
        distance = sum(s.roll[t] - sg(s.now[t]) for t in on) / max(len(on), 1)
        far = above(distance, delta)
        return {t: (1.0, not (s.advantage[t] < 0 and far)) for t in on}

    return correct


def reject(stat: str, estimator: str, threshold: float, low: float = 0.5, high: float = 2.0) -> Correct:
    """TRM: token, sum, mean or maximum of k1, k2, k3 of c; k1 has two bounds, on u = exp(c)."""
    reduce = {"seq_sum": sum, "seq_mean": lambda v: sum(v) / len(v), "seq_max": max}

    def correct(s: Seq, on: list[int]) -> Verdict:
        c = mismatch(s, on, "token")
        if estimator == "k1":
            highs, lows = c, {t: -x for t, x in c.items()}
        else:
            highs = {t: x * x / 2 if estimator == "k2" else math.exp(x) - 1 - x for t, x in c.items()}
            lows = None
        result = {}
        for t in on:
            up = highs[t] if stat == "token" else reduce[stat](list(highs.values()))
            if lows is None:
                kept = not above(up, threshold)
            else:
                down = lows[t] if stat == "token" else reduce[stat](list(lows.values()))
                kept = not above(up, math.log(high)) and not above(down, -math.log(low))
            result[t] = (1.0, kept)
        return result

    return correct


def trm(threshold: float) -> Correct:
    """Answers of which some token's k3 of the ratio of the current policy to the rollout policy is too large."""

    def correct(s: Seq, on: list[int]) -> Verdict:
        gaps = [sg(held(sg(s.now[t]) - s.roll[t])) for t in on]
        far = bool(on) and above(max(math.exp(x) - 1 - x for x in gaps), threshold)
        return dict.fromkeys(on, (1.0, not far))

    return correct


def vaco(bound: float) -> Correct:
    def correct(s: Seq, on: list[int]) -> Verdict:
        c = mismatch(s, on, "token")
        far = bool(on) and above(sum(abs(math.exp(x) - 1) for x in c.values()) / len(on), bound)
        return {t: (1.0, not (far and s.advantage[t] * c[t] > 0)) for t in on}

    return correct


# KL


def kl(estimator: str) -> Callable[[Number], Number]:
    """k1 = D, k2 = D^2 / 2, k3 = exp(-D) - 1 + D, of a D that is clamped."""
    forms: dict[str, Callable[[Number], Number]] = {
        "k1": lambda d: d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: exp(-d) - 1 + d,
    }
    return lambda d: forms[estimator](held(d))


def plain_kl(estimator: str) -> Callable[[Seq, int], Number]:
    return lambda s, t: kl(estimator)(s.now[t] - s.ref[t])


def straight_kl(estimator: str) -> Callable[[Seq, int], Number]:
    """Value of the estimator, gradient of k2."""

    def term(s: Seq, t: int) -> Number:
        k2 = kl("k2")(s.now[t] - s.ref[t])
        return k2 - sg(k2) + sg(kl(estimator)(s.now[t] - s.ref[t]))

    return term


def importance_kl(estimator: str) -> Callable[[Seq, int], Number]:
    return lambda s, t: exp(held(s.now[t] - s.old[t])) * kl(estimator)(s.now[t] - s.ref[t])
