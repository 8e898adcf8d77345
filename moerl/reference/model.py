"""The models of `reference/config.py` in plain torch, slow and readable: what the learner and the sampler are held to.

The module tree is that of Hugging Face, so `named_parameters()` are the Hugging Face names, gradients included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moerl.errors import CheckpointError, DataError
from moerl.reference.config import ReferenceConfig, RopeScaling, Yarn
from moerl.reference.loading import check_weights, read_weights
from moerl.reference.moe import MLP, MoE, linear, probs_of, wide


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
    router_probs: Tensor
    """[t, l, e] float32 or wider: the router's distribution over all experts."""


class ReferenceModel(nn.Module):
    """The whole model. Without dropout; attention is causal within each sequence."""

    def __init__(self, cfg: ReferenceConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = _Backbone(cfg)
        self.lm_head = None if cfg.tied_embeddings else linear(cfg.hidden_size, cfg.vocab_size)
        self.to(dtype)
        for module in self.modules():
            if isinstance(module, MoE):
                module.keep_wide()

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
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if "norm" in name:
                    tensor.fill_(1.0)
                else:
                    tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)
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
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            tensor.copy_(given[name])

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
                of that set (renormalised over it where the model renormalises), so gradient reaches the router.
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
        logits = wide(F.linear(hidden, head))
        if not records:
            tokens, cfg = token_ids.shape[0], self.cfg
            empty = token_ids.new_zeros(tokens, 0, cfg.experts_per_token, dtype=torch.int64)
            none = logits.new_zeros(tokens, 0, cfg.num_experts)
            return ModelOutput(logits, none, empty, empty, none)
        router_logits, chosen, own = (torch.stack(part, dim=1) for part in zip(*records, strict=True))
        return ModelOutput(logits, router_logits, chosen, own, probs_of(router_logits, self.cfg.router))

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

        parts = (out.logits, out.router_logits, out.routes, out.own_routes, out.router_probs)
        return ModelOutput(*(unpack(part) for part in parts))


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
            normed, feed_forward = layer.post_attention_layernorm(x), layer.feed_forward
            if isinstance(feed_forward, MoE):
                replay = None if routes is None else routes[:, len(records)]
                y, *record = feed_forward(normed, replay, has_route)
                records.append((record[0], record[1], record[2]))
            else:
                y = feed_forward(normed)
            x = x + y
        return self.norm(x), records


class _Layer(nn.Module):
    def __init__(self, cfg: ReferenceConfig, *, is_moe: bool) -> None:
        super().__init__()
        self.input_layernorm = _RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = _Attention(cfg)
        self.post_attention_layernorm = _RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self._home = cfg.names.home if is_moe else "mlp"
        self.add_module(self._home, MoE(cfg) if is_moe else MLP(cfg.hidden_size, cfg.dense_size))

    @property
    def feed_forward(self) -> nn.Module:
        """What stands behind attention, whatever its name."""
        return self.get_submodule(self._home)


class _Attention(nn.Module):
    def __init__(self, cfg: ReferenceConfig) -> None:
        super().__init__()
        self.head_dim = cfg.head_dim
        keys = cfg.num_kv_heads * cfg.head_dim
        self.q_proj = linear(cfg.hidden_size, cfg.num_heads * cfg.head_dim, bias=cfg.qkv_bias)
        self.k_proj = linear(cfg.hidden_size, keys, bias=cfg.qkv_bias)
        self.v_proj = linear(cfg.hidden_size, keys, bias=cfg.qkv_bias)
        self.o_proj = linear(cfg.num_heads * cfg.head_dim, cfg.hidden_size)
        self.has_norms = cfg.qk_norm
        if cfg.qk_norm:
            self.is_wide = cfg.wide_qk_norm
            heads, key_heads = (cfg.num_heads, cfg.num_kv_heads) if cfg.wide_qk_norm else (1, 1)
            self.q_norm = _RMSNorm(heads * cfg.head_dim, cfg.rms_norm_eps)
            self.k_norm = _RMSNorm(key_heads * cfg.head_dim, cfg.rms_norm_eps)

    def forward(self, x: Tensor, bounds: list[tuple[int, int]], rotary: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (proj(x).view(x.shape[0], -1, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.has_norms and self.is_wide:
            q, k = self.q_norm(q.flatten(1)).view(q.shape), self.k_norm(k.flatten(1)).view(k.shape)
        elif self.has_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = _rotate(q, rotary), _rotate(k, rotary)  # [t, heads, d]
        out = []
        for start, end in bounds:  # one sequence at a time: no token can see another sequence
            qs, ks, vs = (part[start:end].transpose(0, 1)[None] for part in (q, k, v))
            mixed = F.scaled_dot_product_attention(qs, ks, vs, is_causal=True, enable_gqa=True)
            out.append(mixed[0].transpose(0, 1).reshape(end - start, -1))
        return self.o_proj(torch.cat(out))


class _RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wider = wide(x)
        normed = wider * torch.rsqrt(wider.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def rotary_tables(cfg: ReferenceConfig, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [..., r] of the two-halves rotary embedding at `position_ids` [...], in `dtype`; r is the part of
    a head that is rotated.

    Angles are float32, as in transformers and megatron, whatever the dtype; only a float64 model has float64 ones.
    """
    wider = torch.float64 if dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, cfg.rotary_dim, 2, device=position_ids.device).to(wider) / cfg.rotary_dim
    frequencies = 1.0 / cfg.rope_theta**exponent
    size = 1.0
    if isinstance(cfg.rope_scaling, RopeScaling):
        frequencies = _stretched(frequencies, cfg.rope_scaling)
    elif cfg.rope_scaling is not None:
        frequencies, size = _yarn(frequencies, cfg.rope_scaling, cfg.rope_theta), cfg.rope_scaling.attention_factor
    angles = position_ids[..., None].to(wider) * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return (angles.cos() * size).to(dtype), (angles.sin() * size).to(dtype)


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's waves: how often one fits into the original length decides which part of it is kept."""
    often = scaling.original_length * frequencies / (2 * math.pi)
    kept = (often - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(frequencies: Tensor, scaling: Yarn, base: float) -> Tensor:
    """Pair i of a head's channels turns `original_length * frequencies[i] / (2 pi)` times within the original length;
    between the pairs with `beta_fast` and `beta_slow` turns the stretched share rises evenly from 0 to 1.
    """
    pairs = len(frequencies)
    bounds = [
        pairs * math.log(scaling.original_length / (2 * math.pi * turns), base)
        for turns in (scaling.beta_fast, scaling.beta_slow)
    ]
    if scaling.is_rounded:
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    first, last = max(bounds[0], 0), min(bounds[1], 2 * pairs - 1)
    place = torch.arange(pairs, device=frequencies.device).to(frequencies.dtype)
    stretched = ((place - first) / max(last - first, 1e-3)).clamp(0, 1)
    return frequencies * (1 - stretched + stretched / scaling.factor)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., d] with its leading part rotated by the tables [..., r]."""
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return turned if not kept.shape[-1] else torch.cat([turned, kept], dim=-1)


def _rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """x: [t, heads, d]."""
    cos, sin = (table[:, None] for table in rotary)
    return rotated(x, cos, sin)


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
