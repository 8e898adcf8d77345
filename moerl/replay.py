"""A dumped batch through the oracle and through the learner: two independent ways to the same gradient.

The oracle is the plain-torch model of `reference/` with autograd all the way, full logits, one forward per micro-batch.
It shares the objective with the learner (that is held to its own closed forms) and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moerl.algorithms.logprobs import token_logprobs
from moerl.algorithms.objective import Objective
from moerl.algorithms.types import LossInputs
from moerl.errors import DataError
from moerl.reference.model import ModelOutput, ReferenceModel
from moerl.types import MicroBatch

PROBABILITY_FLOOR = 1e-8
"""Router probabilities are floored here before their log is taken (arXiv 2510.23027)."""


@dataclass(frozen=True)
class GradientGap:
    """How far two gradients of one tensor are apart."""

    name: str
    largest: float
    """Largest entry of the oracle's gradient."""
    difference: float
    """Largest absolute difference."""

    @property
    def relative(self) -> float:
        """Difference relative to the tensor's largest entry; 0 where both are 0, NaN where either gradient has one."""
        if self.largest:  # NaN is true
            return self.difference / self.largest
        return math.inf if self.difference > 0 else self.difference


def oracle_gradients(
    model: ReferenceModel, minibatch: Sequence[MicroBatch], objective: Objective, *, routing: str
) -> dict[str, Tensor]:
    """Gradient of the objective's sum over a scored minibatch, by Hugging Face name.

    Args:
        model: weights of before the update.
        minibatch: with what the score pass filled (`old_logprobs`, `old_routes`, ...).
        objective: of the run.
        routing: `none`, `R2`, `R3`; the frozen routers of `frozen_router*` still have a gradient here.
    """
    model.zero_grad(set_to_none=True)
    for micro in (micro for micro in minibatch if not micro.is_filler):
        loss, _ = objective(oracle_inputs(model, micro, objective.needs, routing=routing))
        loss.backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for name, p in model.hf_state().items()
    }


def oracle_inputs(model: ReferenceModel, micro: MicroBatch, needs: frozenset[str], *, routing: str) -> LossInputs:
    """`LossInputs` of one micro-batch by the plain model, with gradient to its weights."""
    routes, has_route = _replayed(micro, routing)
    out = model.forward_packed(micro.token_ids, micro.cu_seqlens, micro.position_ids, routes, has_route)
    logprobs, entropy = _scores(out, micro)
    current = logprobs.detach()

    def live(values: Tensor | None) -> Tensor:
        return current if values is None else torch.where(micro.mask, values, current)

    fields = {
        "old_logprobs": lambda: live(micro.old_logprobs),
        "ref_logprobs": lambda: live(micro.ref_logprobs),
        "teacher_logprobs": lambda: live(micro.teacher_logprobs),
        "entropy": lambda: entropy,
        "old_entropy": lambda: entropy.detach() if micro.old_entropy is None else micro.old_entropy,
        "router_shift": lambda: _router_shift(out, micro, routing),
        "rewards": lambda: micro.rewards,
        "group_ids": lambda: micro.group_ids,
        "topk_logprobs": lambda: _on_likeliest(micro, _top_logprobs(out, micro), current),
        "rollout_topk": lambda: _on_likeliest(micro, micro.rollout_top_logprobs, live(micro.rollout_logprobs)),
    }
    return LossInputs(
        logprobs=logprobs,
        rollout_logprobs=live(micro.rollout_logprobs),
        advantages=micro.advantages,
        mask=micro.mask,
        weights=micro.weights,
        seq_ids=micro.seq_ids,
        num_seqs=micro.num_seqs,
        constants=micro.constants,
        optional={name: fields[name]() for name in needs if name in fields},
    )


def oracle_values(model: ReferenceModel, weight: Tensor, bias: Tensor, micro: MicroBatch) -> Tensor:
    """Values [t] of the plain backbone under a linear head, `weight` [1, h] and `bias` [1], with gradient to all."""
    hidden = model.hidden_packed(micro.token_ids, micro.cu_seqlens, micro.position_ids)
    values = F.pad(F.linear(hidden[:-1], weight, bias)[:, 0], (1, 0))
    return torch.where(micro.position_ids == 0, 0.0, values)


def oracle_value_gradients(
    model: ReferenceModel, weight: Tensor, bias: Tensor, minibatch: Sequence[MicroBatch], *, clip: float | None
) -> dict[str, Tensor]:
    """Gradient of the value loss's sum over a credited minibatch, by Hugging Face name and `value_head.*`.

    Written out here without the learner's loss: half the larger of two squares, by each token's weight.
    """
    named = {**model.hf_state(), "value_head.weight": weight, "value_head.bias": bias}
    for parameter in named.values():
        parameter.grad = None
    for micro in (micro for micro in minibatch if not micro.is_filler):
        if micro.returns is None or micro.old_values is None:
            raise DataError("the batch has no returns; take one that the token credit has seen")
        values = oracle_values(model, weight, bias, micro)
        loss = (values - micro.returns) ** 2
        if clip is not None:
            near = torch.maximum(torch.minimum(values, micro.old_values + clip), micro.old_values - clip)
            loss = torch.maximum(loss, (near - micro.returns) ** 2)
        (0.5 * micro.weights.value * loss)[micro.mask].sum().backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named.items()}


def compare_gradients(oracle: Mapping[str, Tensor], learner: Mapping[str, Tensor]) -> list[GradientGap]:
    """The gap of every tensor, those with a NaN first, then the widest.

    Raises:
        DataError: the two do not have the same names and shapes.
    """
    if oracle.keys() != learner.keys():
        odd = sorted(oracle.keys() ^ learner.keys())
        raise DataError(f"oracle and learner have not the same tensors: {', '.join(odd[:5])}; is it the same model?")
    gaps = []
    for name, grad in oracle.items():
        if grad.shape != learner[name].shape:
            raise DataError(
                f"the gradient of {name} is {[*grad.shape]} by the oracle and {[*learner[name].shape]} by the learner; "
                "is it the same model?"
            )
        gaps.append(GradientGap(name, float(grad.abs().max()), float((grad - learner[name]).abs().max())))
    return sorted(gaps, key=lambda gap: (not math.isnan(gap.relative), -gap.relative))


def _replayed(micro: MicroBatch, routing: str) -> tuple[Tensor | None, Tensor | None]:
    if routing == "R3":
        return None if micro.routes is None else micro.routes.long(), micro.has_route
    if routing != "R2" or micro.old_routes is None:
        return None, None
    return micro.old_routes.long(), None


def _scores(out: ModelOutput, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies [t]: token j from the logits of row j - 1; 0 for the first token of each sequence."""
    allowed = _allowed(out, micro)
    allowed = None if allowed is None else allowed[1:]
    shifted = token_logprobs(out.logits[:-1], micro.token_ids[1:], micro.temperature[1:], allowed=allowed)
    is_first = micro.position_ids == 0
    logprobs, entropy = (torch.where(is_first, 0.0, F.pad(values, (1, 0))) for values in shifted)
    return logprobs, entropy


def _allowed(out: ModelOutput, micro: MicroBatch) -> Tensor | None:
    """[t, v] bool: what was in the running for token j; None: everything everywhere."""
    if micro.support is None:
        return None
    allowed = torch.ones(out.logits.shape, dtype=torch.bool)
    for row, (start, end) in enumerate(zip(micro.support.offsets[:-1], micro.support.offsets[1:], strict=True)):
        if end > start:
            allowed[row] = False
            allowed[row, micro.support.ids[start:end]] = True
    return allowed


def _top_logprobs(out: ModelOutput, micro: MicroBatch) -> Tensor | None:
    """[t, k] by the whole softmax, token j from row j - 1."""
    if micro.rollout_top_ids is None:
        return None
    scaled = out.logits.detach() / micro.temperature.roll(-1)[:, None]
    allowed = _allowed(out, micro)
    if allowed is not None:
        scaled = scaled.masked_fill(~allowed.roll(-1, 0), -torch.inf)
    return scaled.log_softmax(-1).roll(1, 0).gather(-1, micro.rollout_top_ids.clamp(min=0))


def _on_likeliest(micro: MicroBatch, top: Tensor | None, sampled: Tensor) -> Tensor:
    """[t, k + 1]: the engine's likeliest tokens, and the sampled one where it is none of them."""
    ids = micro.rollout_top_ids
    if ids is None or top is None:
        raise DataError("the batch has no top logprobs of the engine; dump one of a run whose objective reads them")
    once = torch.where((ids == micro.token_ids[:, None]).any(-1), -torch.inf, sampled)
    return torch.cat([torch.where(ids < 0, -torch.inf, top), once[:, None]], -1)


def _router_shift(out: ModelOutput, micro: MicroBatch, routing: str) -> Tensor:
    """Raw gamma [t]: exp of minus the mean deviation over layers and the experts active under the old policy."""
    if micro.old_routes is None or micro.old_router_logprobs is None:
        raise DataError("the batch was not scored for the router shift; dump it after the score pass")
    active = micro.old_routes.long()
    if routing == "R3" and micro.routes is not None:
        has_route = torch.ones_like(micro.mask) if micro.has_route is None else micro.has_route
        active = torch.where(has_route[:, None, None], micro.routes.long(), active)
    new = out.router_probs.detach().clamp(min=PROBABILITY_FLOOR).log().gather(-1, active)
    old = micro.old_router_logprobs.clamp(min=torch.tensor(PROBABILITY_FLOOR).log().item())
    gamma = (-(new - old).abs().mean((-1, -2))).exp()
    return torch.where(micro.position_ids == 0, 1.0, gamma.roll(1))
