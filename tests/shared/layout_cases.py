"""The factors of the layout tests, and which of their combinations run: layout x method x routing x router."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import tiny_models

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4": {},
    "ep4": {"expert": 4},
    "tp2_ep2_dp2": {"tensor": 2, "expert": 2},
    "pp2_ep2_dp2": {"pipeline": 2, "expert": 2},
    "tp2_pp2": {"tensor": 2, "pipeline": 2},
    "tp2_ep2_pp2": {"tensor": 2, "expert": 2, "pipeline": 2},
    "pp2_vpp2_dp2": {"pipeline": 2, "virtual_pipeline": 2},
    "cp2_dp2": {"context": 2, "context_cut": "zigzag"},
    "cp4_ep2": {"context": 4, "expert": 2, "context_cut": "whole"},
    "cp2_tp2_ep2": {"context": 2, "tensor": 2, "expert": 2, "context_cut": "zigzag"},
    "cp2_pp2": {"context": 2, "pipeline": 2, "context_cut": "whole"},
    "etp2_ep2": {"expert": 2, "expert_tensor": 2},
    "tp2_etp2_dp2": {"tensor": 2, "expert_tensor": 2},
}
OTHER_CUT = {
    f"{name}_{other}": {**sizes, "context_cut": other}
    for name, sizes in LAYOUTS.items()
    for other in ("zigzag", "whole")
    if "context" in sizes and sizes["context_cut"] != other
}
"""Each layout with a context axis again, its packs cut the other way."""
EVERY_LAYOUT = {**LAYOUTS, **OTHER_CUT}
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gspo": {},
    "gmpo": {},
    "rspo": {},
    "dapo": {"correction": {"name": "tis"}},
    "ppo": {},
}
"""Preset -> changes to it."""
ROUTINGS = ("none", "R2", "R3")
ROUTERS = ("softmax", "dense_first", "sigmoid", "shared", "latent")
"""Keys of `tiny_models.KINDS`."""
SUPPORTED = {"latent": 20, "fused": 20}
"""Router -> tokens that were in the running where an answer's token was sampled; all of the vocabulary elsewhere."""

OF_A_LAYOUT = {"data/padding_fraction"}
"""Metrics that are not the same in every layout."""
WIDE = {"mm/chi2_seq": 2e-4}
"""Squares of exponentials of summed log-ratios: their last digits are those of the sum, times the value."""


class Case(NamedTuple):
    """One combination."""

    layout: str
    method: str
    routing: str
    router: str


FACTORS = (tuple(EVERY_LAYOUT), tuple(METHODS), ROUTINGS, ROUTERS)


def quick_cases() -> list[Case]:
    """Every layout with every routing, every method with every routing, every router with every routing.

    The router follows from method and routing, so that few single-process runs are needed to compare with.
    """
    methods = list(METHODS)
    cases = []
    for turn, layout in enumerate(LAYOUTS):
        for i, routing in enumerate(ROUTINGS):
            method = (turn + 2 * i) % len(methods)
            cases.append(Case(layout, methods[method], routing, ROUTERS[(method + i) % len(ROUTERS)]))
    return cases


def pairwise_cases() -> list[Case]:
    """Few cases in which every two values of every two factors meet: each next case meets the most new pairs."""
    every = [Case(*values) for values in itertools.product(*FACTORS)]
    missing = {pair for case in every for pair in pairs_of(case)}
    chosen = []
    while missing:
        best = max(every, key=lambda case: len(missing & pairs_of(case)))
        chosen.append(best)
        missing -= pairs_of(best)
    return sorted(chosen, key=lambda case: (list(EVERY_LAYOUT).index(case.layout), case))


def pairs_of(case: Case) -> frozenset[tuple[tuple[str, str], ...]]:
    """The pairs of (factor, value) that a case meets."""
    return frozenset(itertools.combinations(zip(Case._fields, case, strict=True), 2))


SGD, AUX, EVEN = "sgd", "aux", "even"
"""Optimizers beside Adam: plain, and Adam with the balancing loss on. That is a mean over micro-batches and data ranks,
so `EVEN` has answers of one length, which make the same micro-batches on one data rank, two and four.
"""


DRAWN_ANEW = {("gspo", "R3", "dense_first", SGD): 1}
"""Cases with other samples than the rest -> number of the draw. With the first one a token came within 3e-9 of another
expert's probability in its second step, and which of the two it took was rounding."""


def case(model: str, method: str, routing: str, optimizer: str, router: str = "dense_first") -> dict[str, Any]:
    """What `learner_worker.py` is told of one case; `model` is a folder with a model of the kind `router`."""
    kind = tiny_models.KINDS[router]
    shape = {"layers": kind.layers, "experts": kind.experts, "topk": kind.topk, "vocab": 54}
    if router in SUPPORTED:
        shape["support"] = SUPPORTED[router]
    return {
        "name": f"{method}.{routing}.{router}.{optimizer}",
        "preset": method,
        "algorithm": METHODS[method],
        "routing": routing,
        "model": model,
        "optimizer": "sgd" if optimizer == SGD else "adam",
        "model_options": {"aux_loss_coefficient": 0.02} if optimizer in (AUX, EVEN) else {},
        "lr": 0.02 if optimizer == SGD else 2e-4,
        "shape": shape,
        "draw": DRAWN_ANEW.get((method, routing, router, optimizer), 0),
        **({"lengths": (20,) * 16, "budget": 40, "steps": 1} if optimizer == EVEN else {}),
    }
