"""An engine of lower precision: its routes drift from the learner's, and replay takes some of the drift back."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from moerl.reference.config import ReferenceConfig
from moerl.reference.model import ReferenceModel
from moerl.reference.precision import PRECISIONS
from moerl.reference.sampling import Sampler
from moerl.types import SamplingParams

SHAPE = {
    "model_type": "qwen3_moe",
    "vocab_size": 38,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "rope_theta": 10000.0,
}


def prompts_of(count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 38, int(rng.integers(1, 21))).astype(np.int32) for _ in range(count)]


@dataclass(frozen=True)
class Mismatch:
    slots: float
    """Share of expert slots in which engine and plain model differ."""
    k3: float
    """mean(exp(d) - 1 - d) of d = log p(plain) - log p(engine)."""
    k3_replayed: float
    """The same, the plain model using the engine's experts."""


def mismatch(model: ReferenceModel, precision: str) -> Mismatch:
    """An engine of `precision` against the fp32 plain model, at the same weights, on the engine's own tokens."""
    sampler = Sampler(model.cfg, precision=precision)
    sampler.load_weights(model.hf_state().items())
    prompts = prompts_of(64)
    outs = sampler.generate(prompts, [SamplingParams(32, seed=i) for i in range(64)])
    rows = [torch.tensor(np.concatenate([p, o.token_ids])).long() for p, o in zip(prompts, outs, strict=True)]
    ids, cuts = torch.cat(rows), torch.tensor([0, *np.cumsum([len(row) for row in rows])])
    routes = torch.cat([F.pad(torch.from_numpy(o.routes).long(), (0, 0, 0, 0, 0, 1)) for o in outs])
    has_route = torch.ones(len(ids), dtype=torch.bool)
    has_route[cuts[1:] - 1] = False
    sampled = torch.cat([torch.arange(len(row)) >= len(p) for row, p in zip(rows, prompts, strict=True)])
    theirs = torch.tensor(np.concatenate([o.logprobs for o in outs])).double()
    with torch.no_grad():
        free = model.forward_packed(ids, cuts)
        replayed = model.forward_packed(ids, cuts, routes=routes, has_route=has_route)
    shared = (free.routes[has_route][..., :, None] == routes[has_route][..., None, :]).any(-1)

    def k3(logits: torch.Tensor) -> float:
        own = logits.double().log_softmax(-1).roll(1, 0).gather(-1, ids[:, None])[sampled, 0]
        return float(((own - theirs).exp() - 1 - (own - theirs)).mean())

    return Mismatch(1 - float(shared.double().mean()), k3(free.logits), k3(replayed.logits))


def test_routes_and_logprobs_drift_as_precision_falls_and_replay_takes_some_of_it_back():
    """Slots that differ: fp32 0 < bf16 < int8 < fp8 < int4. The engine's routes lower k3 at bf16, int8 and fp8."""
    model = ReferenceModel.random(ReferenceConfig.from_dict(SHAPE), seed=0, std=0.2)
    seen = {precision: mismatch(model, precision) for precision in PRECISIONS}
    slots = [one.slots for one in seen.values()]
    assert slots[0] == 0
    assert all(a < b for a, b in itertools.pairwise(slots)), slots
    assert seen["fp32"].k3 < 1e-10
    for precision in ("bf16", "int8", "fp8"):
        assert seen[precision].k3_replayed < seen[precision].k3, (precision, seen[precision])
