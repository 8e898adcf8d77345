"""Every method as the oracle knows it: a formula and the numbers of its paper, by the name that moerl gives it.

The numbers are written here a second time, on purpose: a preset that drifts from its paper disagrees with this table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import oracle_terms as terms
from oracle_numbers import Batch, Number, Seq, derivative
from oracle_shares import Shares, group_dpo

BUDGET = 16
TOKEN_MEAN, SEQ_MEAN, SEQ_SUM = Shares("token_mean"), Shares("seq_mean_token_mean"), Shares("seq_mean_token_sum")
PROMPT_MEAN, ONE_EACH = Shares("prompt_mean"), Shares("seq_sum_token_mean")
DR = Shares("fixed_denominator", budget=BUDGET)
Per = Callable[[Seq, int], Number]


@dataclass(frozen=True)
class Method:
    """L = sum v m k w rho l + beta sum vk m KL - alpha sum ve m H + mu NLL over the right answers + kappa teacher."""

    policy: terms.Policy
    share: Shares
    correct: terms.Correct | None = None
    normalized: bool = False
    """Weights divided by their mean over the kept tokens of the batch."""
    rho: Per | None = None
    top_entropy: float = 0.0
    kl: Per | None = None
    beta: float = 0.0
    kl_share: Shares | None = None
    alpha: float = 0.0
    entropy_share: Shares | None = None
    mu: float = 0.0
    kappa: float = 0.0
    reads_roll: bool = False
    constant: bool = False
    """One advantage per answer."""
    pairs: Callable[[Batch], Number] | None = None

    @property
    def needs_roll(self) -> bool:
        return self.reads_roll or self.correct is not None


def loss(method: Method, batch: Batch) -> Number:
    if method.pairs is not None:
        return method.pairs(batch)
    total: Number = 0.0
    rho = token_weight(method, batch)
    verdicts = [
        {t: (1.0, True) for t in on} if method.correct is None else method.correct(s, on)
        for s, on in ((s, s.usable(reads_roll=method.needs_roll)) for s in batch)
    ]
    kept = [w for verdict in verdicts for w, k in verdict.values() if k]
    mean_weight = sum(kept) / len(kept) if method.normalized and kept else 1.0
    for s, verdict, v in zip(batch, verdicts, method.share(batch), strict=True):
        losses = method.policy(s, list(verdict))
        total += v * sum(w / mean_weight * rho(s, t) * losses[t] for t, (w, k) in verdict.items() if k)
    return total + regularisers(method, batch)


def token_weight(method: Method, batch: Batch) -> Per:
    if method.top_entropy:
        known = sorted((s.entropy[t] for s in batch for t in range(len(s.mask)) if s.mask[t]), reverse=True)
        threshold = known[max(1, math.ceil(method.top_entropy * len(known) - 1e-9)) - 1] if known else math.inf
        return lambda s, t: float(s.entropy[t] >= threshold)
    return method.rho or (lambda s, t: 1.0)


def regularisers(method: Method, batch: Batch) -> Number:
    total: Number = 0.0
    good = [replace(s, mask=s.mask if s.reward > 0 else [False] * len(s.mask)) for s in batch]
    shares = zip(
        batch,
        (method.kl_share or method.share)(batch),
        (method.entropy_share or method.share)(batch),
        TOKEN_MEAN(good),
        strict=True,
    )
    for s, v_kl, v_entropy, v_good in shares:
        for t in s.live():
            if method.kl is not None:
                total += method.beta * v_kl * method.kl(s, t)
            if method.kappa:
                total += method.kappa * v_kl * terms.kl("k3")(s.now[t] - s.teacher[t])
            total -= method.alpha * v_entropy * s.entropy[t]
            total += method.mu * v_good * -s.now[t]
    return total


def gradient(method: Method, batch: Batch) -> list[list[float]]:
    return derivative(lambda moved: loss(method, moved), batch)


def k3(beta: float) -> dict:
    return {"kl": terms.plain_kl("k3"), "beta": beta}


def rare_counts_more(s: Seq, t: int) -> float:
    return 1 - math.exp(min(s.ref[t], 0.0))


def likely_counts_more(s: Seq, t: int) -> float:
    return 0.3 * math.exp(s.old[t]) + 0.7


PLAIN = terms.token_clip(0.2, 0.2)
LOPTI = terms.token_clip(0.2, 0.24, dual=10.0)
CAPPED = terms.capped(0.0, 5.0)
TO_ROLLOUT = terms.capped(0.0, 5.0, "rollout")
GMPO = terms.gmpo(0.4)
TIS = terms.tis("token", 2.0)
COUNTED = Shares("seq_mean_token_mean", count_empty=True)


def dppo(divergence: Callable[[Seq, int], float], delta: float) -> Method:
    return Method(terms.dppo(divergence, delta), DR, reads_roll=True)


METHODS: dict[str, Method] = {
    "sft": Method(terms.score(terms.ones), TOKEN_MEAN),
    "reinforce": Method(terms.score(terms.ones), SEQ_SUM),
    "rloo": Method(terms.score(terms.ones), SEQ_SUM),
    "grpo": Method(PLAIN, SEQ_MEAN, **k3(0.04)),
    "two_grpo": Method(PLAIN, SEQ_MEAN),
    "dr_grpo": Method(PLAIN, DR),
    "dr_grpo_batch_norm": Method(PLAIN, SEQ_MEAN),
    "dr_grpo_ref_weighted": Method(PLAIN, DR, rho=rare_counts_more, **k3(0.04)),
    "reinforce_pp": Method(PLAIN, TOKEN_MEAN),
    "reinforce_pp_baseline": Method(PLAIN, TOKEN_MEAN, kl=terms.plain_kl("k2"), beta=0.01),
    "reinforce_pp_loo": Method(PLAIN, SEQ_MEAN, **k3(0.04)),
    "reinforce_rej": Method(PLAIN, SEQ_MEAN),
    "raft_pp": Method(PLAIN, SEQ_MEAN),
    "ppo": Method(PLAIN, TOKEN_MEAN),
    "vapo": Method(terms.token_clip(0.2, 0.28), TOKEN_MEAN, mu=0.1),
    "dapo": Method(terms.token_clip(0.2, 0.28), TOKEN_MEAN),
    "clip_dapo": Method(PLAIN, TOKEN_MEAN),
    "dapo_unclipped": Method(terms.unbounded, TOKEN_MEAN),
    "gspo": Method(terms.gspo(3e-4, 4e-4), SEQ_MEAN, constant=True),
    "gspo_token": Method(terms.gspo_token(3e-4, 4e-4), SEQ_MEAN),
    "luspo": Method(terms.gspo(2e-3, 2.5e-3), SEQ_SUM, constant=True),
    "gmpo": Method(GMPO, SEQ_MEAN, constant=True),
    "rspo": Method(terms.gmpo(0.4, before=0.8), SEQ_MEAN, constant=True),
    "grpo_rs": Method(terms.token_clip(0.2, 0.2, shift=0.8), SEQ_MEAN, **k3(0.04)),
    "gspo_rs": Method(terms.gspo(3e-4, 4e-4, shift=0.8), SEQ_MEAN, constant=True),
    "gmpo_rs_v1": Method(terms.gmpo(0.4, after=0.8), SEQ_MEAN, constant=True),
    "cispo": Method(CAPPED, TOKEN_MEAN),
    "cispo_min_clip": Method(terms.token_clip(0.2, 0.28), TOKEN_MEAN),
    "scalerl": Method(TO_ROLLOUT, PROMPT_MEAN, reads_roll=True),
    "scalerl_loss": Method(TO_ROLLOUT, PROMPT_MEAN, reads_roll=True),
    "sapo": Method(terms.sapo(1.0, 1.05), SEQ_MEAN),
    "vespo": Method(terms.vespo(2.0, 3.0, 3.0, 2.0, "rollout"), TOKEN_MEAN, reads_roll=True, constant=True),
    "dppo_tv": dppo(terms.binary_tv, 0.15),
    "dppo_kl": dppo(terms.binary_kl, 0.05),
    "dppo_topk_tv": dppo(terms.top_k_tv, 0.15),
    "dppo_topk_kl": dppo(terms.top_k_kl, 0.05),
    "minirl": Method(terms.minirl(0.2, 0.27, 5.0), SEQ_SUM, reads_roll=True),
    "dcpo": Method(terms.dcpo(0.16, 0.2, 10.0, 10.0), ONE_EACH),
    "lite_ppo": Method(PLAIN, TOKEN_MEAN),
    "olmo3": Method(terms.token_clip(0.2, 0.272), TOKEN_MEAN, TIS),
    "icepop": Method(PLAIN, SEQ_MEAN, terms.band("token", 0.5, 5.0)),
    "cisco": Method(PLAIN, SEQ_MEAN, TIS, **k3(0.04)),
    "gopo": Method(PLAIN, SEQ_MEAN, **k3(0.04)),
    "gdpo": Method(PLAIN, SEQ_MEAN),
    "lopti": Method(LOPTI, TOKEN_MEAN, **k3(0.001)),
    "ar_lopti": Method(LOPTI, TOKEN_MEAN, rho=likely_counts_more, **k3(0.001)),
    "group_dpo": Method(PLAIN, PROMPT_MEAN, pairs=lambda batch: group_dpo(batch, 0.1)),
    "ctpo": Method(terms.ctpo(0.025, 0.05), SEQ_MEAN),
    "minpro": Method(terms.minpro(5.0), PROMPT_MEAN),
    "trm": Method(PLAIN, SEQ_MEAN, terms.trm(0.05)),
    "vaco": Method(PLAIN, SEQ_MEAN, terms.vaco(0.1)),
    "trl/grpo": Method(PLAIN, COUNTED),
    "trl/dr_grpo": Method(PLAIN, Shares("fixed_denominator", budget=BUDGET, count_empty=True)),
    "trl/dapo": Method(terms.token_clip(0.2, 0.28), TOKEN_MEAN),
    "trl/gspo": Method(terms.gspo(3e-4, 4e-4), COUNTED, constant=True),
    "trl/cispo": Method(CAPPED, TOKEN_MEAN),
    "verl/grpo": Method(terms.token_clip(0.2, 0.2, dual=3.0), TOKEN_MEAN),
    "verl/dr_grpo": Method(terms.token_clip(0.2, 0.2, dual=3.0), DR),
    "verl/gspo": Method(terms.gspo_token(3e-4, 4e-4), SEQ_MEAN),
    "verl/cispo": Method(terms.capped(0.8, 1.2), TOKEN_MEAN),
    "slime/grpo": Method(PLAIN, SEQ_MEAN),
    "slime/gspo": Method(terms.gspo(3e-4, 4e-4), SEQ_MEAN, constant=True),
    "slime/cispo": Method(terms.capped(0.8, 1.2), TOKEN_MEAN),
}

Axes = dict
"""Axes of the algorithm section, laid over the defaults."""
CLIP = {"trust": {"name": "clip"}, "aggregation": {"name": "token_mean"}}
GSPO_WIDE = {"trust": {"name": "clip", "lo": 0.1, "hi": 0.1}, "level": "seq_geo"}
GMPO_AXES = {"trust": {"name": "log_clip"}, "level": "geo_clip"}
SCORE = {"form": "score", "aggregation": {"name": "token_mean"}}
VESPO_OLD = {**SCORE, "level": "seq_prod", "trust": {"name": "gamma_kernel"}}
WIDE = terms.gspo(0.1, 0.1)

CORRECTIONS: dict[str, tuple[Axes, terms.Correct]] = {
    "tis token": ({"name": "tis"}, TIS),
    "tis seq": ({"name": "tis", "level": "seq", "cap": 3.0}, terms.tis("seq", 3.0)),
    "tis geo": ({"name": "tis", "level": "geo"}, terms.tis("geo", 2.0)),
    "tis geo_mean": ({"name": "tis", "w_reduce": "geo_mean"}, terms.tis("token", 2.0, geo_mean=True)),
    "mis token": ({"name": "mis"}, terms.band("token", 0.0, 2.0)),
    "mis seq": ({"name": "mis", "level": "seq", "min": 0.5}, terms.band("seq", 0.5, 2.0)),
    "mis geo": ({"name": "mis", "level": "geo", "min": 0.8, "max": 1.3}, terms.band("geo", 0.8, 1.3)),
    "mis one": ({"name": "mis", "weight": "one"}, terms.band("token", 0.0, 2.0, weighs=False)),
    "icepop": ({"name": "icepop"}, terms.band("token", 0.5, 5.0)),
    "seq_mask_tis": ({"name": "seq_mask_tis", "min": 0.7, "max": 1.4}, terms.seq_mask_tis(2.0, 0.7, 1.4)),
    "opsm": ({"name": "opsm", "delta": 0.2}, terms.opsm(0.2)),
    "rs token k1": ({"name": "rs", "stat": "token", "estimator": "k1"}, terms.reject("token", "k1", 0.0)),
    "rs seq_sum k1": ({"name": "rs", "stat": "seq_sum", "estimator": "k1"}, terms.reject("seq_sum", "k1", 0.0)),
    "rs seq_max k1": ({"name": "rs", "stat": "seq_max", "estimator": "k1"}, terms.reject("seq_max", "k1", 0.0)),
    "rs seq_mean k2": (
        {"name": "rs", "stat": "seq_mean", "estimator": "k2", "threshold": 0.1},
        terms.reject("seq_mean", "k2", 0.1),
    ),
    "rs seq_max k3": (
        {"name": "rs", "stat": "seq_max", "estimator": "k3", "threshold": 0.2},
        terms.reject("seq_max", "k3", 0.2),
    ),
    "rs token k3": ({"name": "rs", "stat": "token"}, terms.reject("token", "k3", 0.05)),
    "rs seq_mean k3": ({"name": "rs"}, terms.reject("seq_mean", "k3", 0.05)),
    "rs current": ({"name": "rs", "stat": "seq_max", "threshold": 0.2, "policy": "current"}, terms.trm(0.2)),
    "vaco": ({"name": "vaco", "bound": 0.2}, terms.vaco(0.2)),
}
"""Arguments of a correction, and what it is."""

ONE_WEIGHT = ("tis seq", "tis geo", "tis geo_mean", "mis seq", "mis geo", "opsm", "rs", "vaco")
"""Those that a geometric mean takes."""


def _corrected() -> dict[str, tuple[Axes, Method]]:
    cases = {}
    for name, (node, correct) in CORRECTIONS.items():
        cases[f"{name} on clip"] = ({**CLIP, "correction": node}, Method(PLAIN, TOKEN_MEAN, correct))
        cases[f"{name} on gspo"] = (
            {**GSPO_WIDE, "correction": node},
            Method(WIDE, SEQ_MEAN, correct, constant=True),
        )
        if name.startswith(ONE_WEIGHT):
            cases[f"{name} on gmpo"] = (
                {**GMPO_AXES, "correction": node},
                Method(GMPO, SEQ_MEAN, correct, constant=True),
            )
        if node["name"] in ("tis", "mis", "icepop", "seq_mask_tis"):
            cases[f"{name} normalized"] = (
                {**CLIP, "correction": {**node, "batch_normalize": True}},
                Method(PLAIN, TOKEN_MEAN, correct, normalized=True),
            )
    return cases


def _kls() -> dict[str, tuple[Axes, Method]]:
    cases = {}
    for k in ("k1", "k2", "k3"):
        forms: dict[str, tuple[Axes, Per]] = {
            "straight": ({"straight_through": True}, terms.straight_kl(k)),
            "importance": ({"importance": True}, terms.importance_kl(k)),
        }
        if k != "k1":
            forms["plain"] = ({}, terms.plain_kl(k))
        for form, (node, per) in forms.items():
            axes = {**CLIP, "kl": {"place": "loss", "estimator": k, "coefficient": 0.3, **node}}
            cases[f"{form} {k}"] = (axes, Method(PLAIN, TOKEN_MEAN, kl=per, beta=0.3))
    return cases


def _aggregations() -> dict[str, tuple[Axes, Method]]:
    nodes: list[tuple[Axes, Shares]] = [
        ({}, Shares(name)) for name in ("token_sum", "prompt_mean", "seq_sum_token_mean")
    ]
    nodes += [({}, Shares("token_mean"))]
    for name in ("seq_mean_token_mean", "seq_mean_token_sum"):
        nodes += [({}, Shares(name)), ({"count_empty": True}, Shares(name, count_empty=True))]
    dr = {"tokens": 7}
    nodes += [(dr, Shares("fixed_denominator", 7))]
    nodes += [({**dr, "per_sequence": False}, Shares("fixed_denominator", 7, per_sequence=False))]
    cases = {}
    for node, share in nodes:
        axes = {"trust": {"name": "clip"}, "aggregation": {"name": share.name, **node}}
        cases[" ".join([share.name, *node])] = (axes, Method(PLAIN, share))
    return cases


def _token(**more: object) -> Axes:
    return {"trust": {"name": "clip", **more}, "aggregation": {"name": "token_mean"}}


def _mask(**node: object) -> Axes:
    return {**SCORE, "anchor": "rollout", "trust": {"name": "div_mask", **node}}


def _shift(stage: str) -> Axes:
    return {"router_shift": {"enabled": True, "stage": stage, "gamma_min": 0.7}}


DIV = Shares("token_mean")
TEACHER = {"teacher": {"path": "teacher", "place": "kl", "coefficient": 0.2}}
ENTROPY = {"entropy": {"place": "loss", "coefficient": 0.1}}

CASES: dict[str, tuple[Axes, Method]] = {
    **_corrected(),
    **_kls(),
    **_aggregations(),
    "delta": (_token(delta=1.5), Method(terms.token_clip(0.2, 0.2, delta=1.5), TOKEN_MEAN)),
    "dual": (_token(dual_c=1.5), Method(terms.token_clip(0.2, 0.2, dual=1.5), TOKEN_MEAN)),
    "delta and dual": (
        _token(delta=3.0, dual_c=2.0),
        Method(terms.token_clip(0.2, 0.2, delta=3.0, dual=2.0), TOKEN_MEAN),
    ),
    "one-sided gate": (
        {"trust": {"name": "soft_gate", "form": "one_sided", "tau_pos": 0.7}},
        Method(terms.sapo_one_sided(0.7, 1.05), SEQ_MEAN),
    ),
    "unified mask": (
        {**SCORE, "trust": {"name": "is_clip", "min": 0.8, "max": 1.2, "mask": True}},
        Method(terms.capped(0.8, 1.2, mask=True), TOKEN_MEAN),
    ),
    "vespo to the old policy": (VESPO_OLD, Method(terms.vespo(2, 3, 3, 2, "old"), TOKEN_MEAN, constant=True)),
    "vespo with tis": (
        {**VESPO_OLD, "correction": {"name": "tis"}},
        Method(terms.vespo(2, 3, 3, 2, "old", tis=2.0), TOKEN_MEAN, reads_roll=True, constant=True),
    ),
    "sampled divergence": (
        _mask(kind="sampled_kl", delta=0.05),
        Method(terms.dppo(terms.sampled_kl, 0.05), DIV, reads_roll=True),
    ),
    "two-sided mask": (
        _mask(delta=0.05, one_sided=False, cap=2.0),
        Method(terms.dppo(terms.binary_tv, 0.05, 2.0, both=True), DIV, reads_roll=True),
    ),
    "two tokens of an answer": (
        _mask(kind="binary_kl", delta=0.01, token_rank=2),
        Method(terms.dppo(terms.binary_kl, 0.01, rank=2), DIV, reads_roll=True),
    ),
    "rejection to the rollout policy": (
        {**SCORE, "anchor": "rollout", "trust": {"name": "is_clip"}, "correction": {"name": "rs"}},
        Method(TO_ROLLOUT, TOKEN_MEAN, terms.reject("seq_mean", "k3", 0.05), reads_roll=True),
    ),
    "likely tokens": (
        {**CLIP, "token_weight": {"name": "prob_reweight"}},
        Method(PLAIN, TOKEN_MEAN, rho=likely_counts_more),
    ),
    "surprising tokens": (
        {**CLIP, "token_weight": {"name": "one_minus_ref_prob"}},
        Method(PLAIN, TOKEN_MEAN, rho=rare_counts_more),
    ),
    "uncertain tokens": (
        {**CLIP, "token_weight": {"name": "top_entropy", "q": 0.4}},
        Method(PLAIN, TOKEN_MEAN, top_entropy=0.4),
    ),
    "weights and corrections": (
        {**CLIP, "token_weight": {"name": "prob_reweight"}, "correction": {"name": "icepop"}},
        Method(PLAIN, TOKEN_MEAN, terms.band("token", 0.5, 5.0), rho=likely_counts_more),
    ),
    "entropy": ({**CLIP, **ENTROPY}, Method(PLAIN, TOKEN_MEAN, alpha=0.1)),
    "teacher": ({**CLIP, **TEACHER}, Method(PLAIN, TOKEN_MEAN, kappa=0.2)),
    "right answers": ({**CLIP, "positive_nll": {"coefficient": 0.3}}, Method(PLAIN, TOKEN_MEAN, mu=0.3)),
    "terms apart": (
        {
            **CLIP,
            **ENTROPY,
            "kl": {"place": "loss", "estimator": "k2", "coefficient": 0.5},
            "term_aggregation": {"kl": {"name": "seq_mean_token_mean"}, "entropy": {"name": "seq_mean_token_sum"}},
        },
        Method(
            PLAIN,
            TOKEN_MEAN,
            kl=terms.plain_kl("k2"),
            beta=0.5,
            kl_share=SEQ_MEAN,
            alpha=0.1,
            entropy_share=SEQ_SUM,
        ),
    ),
    "shift before the clip of an answer": (
        {**GSPO_WIDE, **_shift("before_clip")},
        Method(terms.gspo(0.1, 0.1, shift=0.7), SEQ_MEAN, constant=True),
    ),
    "shift after the clip of tokens": (
        {**GMPO_AXES, **_shift("after_clip")},
        Method(terms.gmpo(0.4, after=0.7), SEQ_MEAN, constant=True),
    ),
}
"""Axes that no preset has, each with its formula; laid over the schema's defaults."""

COVERED = {
    "trust": {"none", "clip", "log_clip", "soft_gate", "dyn_clip", "is_clip", "gamma_kernel", "div_mask", "ratio_mask"}
    | {"position_clip"},
    "correction": {"none", "tis", "mis", "icepop", "seq_mask_tis", "opsm", "rs", "vaco"},
    "token_weight": {"one", "prob_reweight", "one_minus_ref_prob", "top_entropy"},
    "schedule": {"joint", "lopti"},
    "objective": {"policy_gradient", "group_dpo"},
}
"""Parts of the policy term that a formula of this folder defines."""
