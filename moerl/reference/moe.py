"""Routers and experts of the plain model: scores, choice, weights, and what runs for every token beside them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moerl.reference.config import PARTS, ReferenceConfig, RouterConfig

EXPERTS_PER_GROUP = 2
"""Best scores that add up to the score of a group."""


def scores_of(logits: Tensor, cfg: RouterConfig) -> Tensor:
    """[..., e] what a token's weights are taken of, from the router's logits."""
    return logits.sigmoid() if cfg.is_sigmoid else logits.softmax(-1)


def probs_of(logits: Tensor, cfg: RouterConfig) -> Tensor:
    """[..., e] the router's distribution over all experts: the scores, over their sum."""
    scores = scores_of(logits, cfg)
    return scores / scores.sum(-1, keepdim=True) if cfg.is_sigmoid else scores


def choice_of(scores: Tensor, bias: Tensor | None, cfg: RouterConfig, topk: int) -> Tensor:
    """[..., k] int64: the experts with the largest scores, the best first.

    The bias counts here and nowhere else, and experts of groups that lost are out of the running.
    """
    ranking = scores if bias is None else scores + bias
    if cfg.groups_per_token < cfg.num_groups:
        groups = ranking.unflatten(-1, (cfg.num_groups, -1))
        best = groups.topk(EXPERTS_PER_GROUP, dim=-1).values.sum(-1).topk(cfg.groups_per_token, dim=-1).indices
        lost = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
        ranking = groups.masked_fill(lost[..., None], -torch.inf).flatten(-2)
    return ranking.topk(topk, dim=-1).indices


def gates_of(scores: Tensor, chosen: Tensor, cfg: RouterConfig) -> Tensor:
    """[..., k] weights of the chosen experts, by their scores; the choice may be anyone's."""
    gates = scores.gather(-1, chosen)
    if cfg.is_normalised:
        gates = gates / gates.sum(-1, keepdim=True)
    return gates * cfg.factor


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int, parts: tuple[str, str, str] = PARTS) -> None:
        super().__init__()
        gate, up, down = parts
        self._parts = parts
        self.add_module(gate, linear(hidden, inner))
        self.add_module(up, linear(hidden, inner))
        self.add_module(down, linear(inner, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """[t, h] -> [t, h]."""
        gate, up, down = (self.get_submodule(name) for name in self._parts)
        return down(F.silu(gate(x)) * up(x))


class Gate(nn.Module):
    """A router: logits of every expert."""

    def __init__(self, cfg: ReferenceConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(cfg.num_experts, cfg.hidden_size))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        self.is_sigmoid = cfg.router.is_sigmoid

    def forward(self, x: Tensor) -> Tensor:
        """[t, h] -> [t, e]; sigmoid routers multiply in float32 whatever the model's dtype."""
        if not self.is_sigmoid:
            return wide(F.linear(x, self.weight))
        return F.linear(wide(x), wide(self.weight))


class MoE(nn.Module):
    """Routed experts, and a shared one where the model has it."""

    def __init__(self, cfg: ReferenceConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.gate = Gate(cfg)
        if cfg.router.is_sigmoid:
            home, name = self._bias_place()
            home.register_buffer(name, torch.zeros(cfg.num_experts))
        made = (MLP(cfg.hidden_size, cfg.expert_size, cfg.names.parts) for _ in range(cfg.num_experts))
        self.experts = nn.ModuleList(made)
        if cfg.shared is not None:
            self.add_module(cfg.shared.name, MLP(cfg.hidden_size, cfg.shared.size))
            if cfg.shared.gate:
                self.add_module(cfg.shared.gate, linear(cfg.hidden_size, 1))

    def _bias_place(self) -> tuple[nn.Module, str]:
        home, _, name = self.cfg.names.bias.rpartition(".")
        return self.get_submodule(home), name

    @property
    def bias(self) -> Tensor | None:
        """[e] of sigmoid routers, which is no parameter."""
        home, name = self._bias_place()
        return home.get_buffer(name) if self.cfg.router.is_sigmoid else None

    def keep_wide(self) -> None:
        """The bias again in float32 (float64 in a float64 model): bfloat16 would make other choices of it."""
        bias = self.bias
        if bias is not None:
            home, name = self._bias_place()
            home.register_buffer(name, wide(bias))

    def forward(
        self, x: Tensor, replay: Tensor | None, has_route: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """-> output [t, h], router logits [t, e], experts used [t, k], router's own experts [t, k]."""
        router_logits = self.gate(x)
        scores = scores_of(router_logits, self.cfg.router)
        own = choice_of(scores, self.bias, self.cfg.router, self.cfg.experts_per_token)
        chosen = own if replay is None else replay
        if replay is not None and has_route is not None:
            chosen = torch.where(has_route[:, None], replay, own)
        gates = gates_of(scores, chosen, self.cfg.router).to(x.dtype)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == index)
            if len(token):
                y = y.index_add(0, token, expert(x[token]) * gates[token, slot, None])
        shared = self.cfg.shared
        if shared is not None:
            same = self.get_submodule(shared.name)(x)
            y = y + (same * self.get_submodule(shared.gate)(x).sigmoid() if shared.gate else same)
        return y, router_logits, chosen, own


def linear(size_in: int, size_out: int, *, bias: bool = False) -> nn.Linear:
    """Without a bias unless asked."""
    return nn.Linear(size_in, size_out, bias=bias)


def wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x if x.dtype == torch.float64 else x.float()
