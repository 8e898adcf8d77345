"""Qwen3-MoE in plain torch, slow and readable: what the learner, the sampler and every gradient is held against.

The module tree is that of Hugging Face, so `named_parameters()` are the Hugging Face names, gradients included.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moerl.errors import CheckpointError, DataError
from moerl.reference.config import ReferenceConfig
from moerl.reference.loading import check_weights, read_weights


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """One forward; the leading axis is [t] (packed) or [b, s] (padded; zeros on padding). Both logits have gradient."""

    logits: Tensor
    """[t, v] float32 or wider."""
    router_logits: Tensor
    """[t, l, e] float32 or wider."""
    routes: Tensor
    """[t, l, k] int64: the experts that ran, replayed ones where there was a replay."""
    own_routes: Tensor
    """[t, l, k] int64: the router's own top-k, whatever was replayed; the best first."""


class ReferenceModel(nn.Module):
    """The whole model. Without dropout; attention is causal within each sequence."""

    def __init__(self, cfg: ReferenceConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = _Backbone(cfg)
        self.lm_head = None if cfg.tied_embeddings else _linear(cfg.hidden_size, cfg.vocab_size)
        self.to(dtype)

    @classmethod
    def from_pretrained(cls, folder: str | Path, dtype: torch.dtype = torch.float32) -> Self:
        """Config and weights of a Hugging Face folder.

        Raises:
            ConfigError: a model that is not implemented.
            CheckpointError: weights that are missing, left over or of another shape.
        """
        model = cls(ReferenceConfig.from_folder(folder), dtype)
        model.load_weights(read_weights(folder))
        return model

    @classmethod
    def random(cls, cfg: ReferenceConfig, *, seed: int, std: float = 0.02, dtype: torch.dtype = torch.float32) -> Self:
        """Fresh weights: normal with `std`, norms 1; the same on every machine for one `seed`."""
        model = cls(cfg, dtype)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.fill_(1.0)
                else:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        return model

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take every weight under its Hugging Face name; nothing changes unless all are there and fit.

        Raises:
            CheckpointError: as `check_weights`, or the same name twice.
        """
        given: dict[str, Tensor] = {}
        for name, tensor in weights:
            if name in given:
                raise CheckpointError(f"{name}: came twice in one set of weights")
            given[name] = tensor
        check_weights(self.cfg, given)
        for name, parameter in self.named_parameters():
            parameter.copy_(given[name])

    def hf_state(self) -> dict[str, nn.Parameter]:
        """Hugging Face name -> the live parameter (its `.grad` is the gradient under that name)."""
        return dict(self.named_parameters())

    def forward_packed(
        self,
        token_ids: Tensor,
        cu_seqlens: Tensor,
        position_ids: Tensor | None = None,
        routes: Tensor | None = None,
        has_route: Tensor | None = None,
    ) -> ModelOutput:
        """Forward of n sequences packed flat.

        Args:
            token_ids: [t] integer.
            cu_seqlens: [n + 1] integer, 0 first and t last.
            position_ids: [t] integer; None counts from 0 within each sequence.
            routes: [t, l, k] integer: experts to use instead of the router's own. Gates come from the current scores
                of that set (renormalised over it where the model has norm_topk_prob), so gradient reaches the router.
            has_route: [t] bool: where `routes` holds; None means everywhere.

        Raises:
            DataError: shapes that do not fit, or an expert that does not exist.
        """
        bounds = _check_bounds(cu_seqlens, int(token_ids.shape[0]))
        if position_ids is None:
            position_ids = torch.cat([torch.arange(b - a, device=token_ids.device) for a, b in bounds])
        if routes is not None:
            _check_routes(routes, has_route, int(token_ids.shape[0]), self.cfg)
            routes = routes.long()
        hidden, records = self.model(token_ids, bounds, position_ids, routes, has_route)
        head = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        logits = _wide(F.linear(hidden, head))
        if not records:
            tokens, cfg = token_ids.shape[0], self.cfg
            empty = token_ids.new_zeros(tokens, 0, cfg.experts_per_token, dtype=torch.int64)
            return ModelOutput(logits, logits.new_zeros(tokens, 0, cfg.num_experts), empty, empty)
        router_logits, chosen, own = (torch.stack(part, dim=1) for part in zip(*records, strict=True))
        return ModelOutput(logits, router_logits, chosen, own)

    def hidden_packed(self, token_ids: Tensor, cu_seqlens: Tensor, position_ids: Tensor) -> Tensor:
        """[t, h] after the last norm, own routes; what a value head stands on."""
        bounds = _check_bounds(cu_seqlens, int(token_ids.shape[0]))
        return self.model(token_ids, bounds, position_ids, None, None)[0]

    def forward(self, token_ids: Tensor, mask: Tensor | None = None) -> ModelOutput:
        """Forward of a padded batch: `token_ids` [b, s]; `mask` [b, s] bool, True on tokens (padding on any side)."""
        keep = torch.ones_like(token_ids, dtype=torch.bool) if mask is None else mask.bool()
        lengths = keep.sum(-1)
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
        out = self.forward_packed(token_ids[keep], cu_seqlens)

        def unpack(packed: Tensor) -> Tensor:
            padded = packed.new_zeros(*token_ids.shape, *packed.shape[1:])
            return padded.masked_scatter(keep.view(*keep.shape, *[1] * (packed.dim() - 1)), packed)

        return ModelOutput(unpack(out.logits), unpack(out.router_logits), unpack(out.routes), unpack(out.own_routes))


class _Backbone(nn.Module):
    def __init__(self, cfg: ReferenceConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(_Layer(cfg, is_moe=i in cfg.moe_layers) for i in range(cfg.num_layers))
        self.norm = _RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def forward(
        self,
        token_ids: Tensor,
        bounds: list[tuple[int, int]],
        position_ids: Tensor,
        routes: Tensor | None,
        has_route: Tensor | None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
        x = self.embed_tokens(token_ids)  # [t, h]
        rotary = rotary_tables(self.cfg, position_ids, x.dtype)
        records: list[tuple[Tensor, Tensor, Tensor]] = []
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            x = x + layer.self_attn(layer.input_layernorm(x), bounds, rotary)
            normed = layer.post_attention_layernorm(x)
            if isinstance(layer.mlp, _MoE):
                replay = None if routes is None else routes[:, len(records)]
                y, *record = layer.mlp(normed, replay, has_route)
                records.append((record[0], record[1], record[2]))
            else:
                y = layer.mlp(normed)
            x = x + y
        return self.norm(x), records


class _Layer(nn.Module):
    def __init__(self, cfg: ReferenceConfig, *, is_moe: bool) -> None:
        super().__init__()
        self.input_layernorm = _RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = _Attention(cfg)
        self.post_attention_layernorm = _RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = _MoE(cfg) if is_moe else _MLP(cfg.hidden_size, cfg.dense_size)


class _Attention(nn.Module):
    def __init__(self, cfg: ReferenceConfig) -> None:
        super().__init__()
        self.head_dim = cfg.head_dim
        self.q_proj = _linear(cfg.hidden_size, cfg.num_heads * cfg.head_dim)
        self.k_proj = _linear(cfg.hidden_size, cfg.num_kv_heads * cfg.head_dim)
        self.v_proj = _linear(cfg.hidden_size, cfg.num_kv_heads * cfg.head_dim)
        self.o_proj = _linear(cfg.num_heads * cfg.head_dim, cfg.hidden_size)
        self.q_norm = _RMSNorm(cfg.head_dim, cfg.rms_norm_eps)
        self.k_norm = _RMSNorm(cfg.head_dim, cfg.rms_norm_eps)

    def forward(self, x: Tensor, bounds: list[tuple[int, int]], rotary: tuple[Tensor, Tensor]) -> Tensor:
        tokens = x.shape[0]
        q = _rotate(self.q_norm(self.q_proj(x).view(tokens, -1, self.head_dim)), rotary)  # [t, heads, d]
        k = _rotate(self.k_norm(self.k_proj(x).view(tokens, -1, self.head_dim)), rotary)
        v = self.v_proj(x).view(tokens, -1, self.head_dim)
        out = []
        for start, end in bounds:  # one sequence at a time: no token can see another sequence
            qs, ks, vs = (part[start:end].transpose(0, 1)[None] for part in (q, k, v))
            mixed = F.scaled_dot_product_attention(qs, ks, vs, is_causal=True, enable_gqa=True)
            out.append(mixed[0].transpose(0, 1).reshape(end - start, -1))
        return self.o_proj(torch.cat(out))


class _MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = _linear(hidden, inner)
        self.up_proj = _linear(hidden, inner)
        self.down_proj = _linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _MoE(nn.Module):
    def __init__(self, cfg: ReferenceConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.gate = _linear(cfg.hidden_size, cfg.num_experts)
        self.experts = nn.ModuleList(_MLP(cfg.hidden_size, cfg.expert_size) for _ in range(cfg.num_experts))

    def forward(
        self, x: Tensor, replay: Tensor | None, has_route: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """-> output [t, h], router logits [t, e], experts used [t, k], router's own experts [t, k]."""
        router_logits = _wide(self.gate(x))
        scores = router_logits.softmax(-1)
        own = scores.topk(self.cfg.experts_per_token, dim=-1).indices
        chosen = own if replay is None else replay
        if replay is not None and has_route is not None:
            chosen = torch.where(has_route[:, None], replay, own)
        gates = scores.gather(-1, chosen)
        if self.cfg.norm_topk_prob:
            gates = gates / gates.sum(-1, keepdim=True)
        gates = gates.to(x.dtype)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == index)
            if len(token):
                y = y.index_add(0, token, expert(x[token]) * gates[token, slot, None])
        return y, router_logits, chosen, own


class _RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = _wide(x)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def rotary_tables(cfg: ReferenceConfig, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [..., d] of the two-halves rotary embedding at `position_ids` [...], in `dtype`.

    Angles are float32, as in transformers and megatron, whatever the dtype; only a float64 model has float64 ones.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, cfg.head_dim, 2, device=position_ids.device).to(wide) / cfg.head_dim
    angles = position_ids[..., None].to(wide) * (1.0 / cfg.rope_theta**exponent)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """x: [t, heads, d]."""
    cos, sin = (table[:, None] for table in rotary)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _linear(size_in: int, size_out: int) -> nn.Linear:
    return nn.Linear(size_in, size_out, bias=False)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _check_bounds(cu_seqlens: Tensor, tokens: int) -> list[tuple[int, int]]:
    cuts = [int(cut) for cut in cu_seqlens.tolist()]
    if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != tokens or any(a >= b for a, b in itertools.pairwise(cuts)):
        raise DataError(f"cu_seqlens {cuts} does not cut {tokens} tokens into whole, non-empty sequences")
    return list(itertools.pairwise(cuts))


def _check_routes(routes: Tensor, has_route: Tensor | None, tokens: int, cfg: ReferenceConfig) -> None:
    shape = (tokens, len(cfg.moe_layers), cfg.experts_per_token)
    if tuple(routes.shape) != shape:
        raise DataError(f"replayed routes have shape {tuple(routes.shape)}, this batch and model need {shape}")
    live = routes if has_route is None else routes[has_route]
    if live.numel() and not 0 <= int(live.min()) <= int(live.max()) < cfg.num_experts:
        raise DataError(
            f"replayed routes name experts {int(live.min())} to {int(live.max())}, "
            f"the model has 0 to {cfg.num_experts - 1}"
        )
