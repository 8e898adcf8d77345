"""The reference model's arithmetic arranged for speed: fused weights, a key/value cache, experts run in sorted order.

A row's result should not depend on its neighbours, to the last bit, so that sampling can be repeated in any batch.
Position j of every sequence sits at cache index j, prompts run with those of their own length, and two constants below
keep torch on kernels that treat every row alike (measured with MKL on one x86 machine). On an Intel Xeon the
last bits of few queries' scores follow the number of keys, which is that of the batch's longest row.

Norms, and attention from those of queries and keys to the mixed values, are in float64, as in the learner's own
(`local_spec`): most of what two float32 forwards differ by arises there. Measured in `docs/decisions.md`, the step-0
contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moerl.reference.config import PARTS, ReferenceConfig
from moerl.reference.model import rotary_tables, rotated
from moerl.reference.moe import choice_of, gates_of, scores_of
from moerl.reference.precision import fake_quantise

_MIN_ROWS = 4
"""A product of fewer rows takes another kernel, with other last bits; it is padded to this many."""
_ATTENTION = torch.float64
_LENGTH_STEP = 16
"""Keys are read in multiples of this, for the same reason."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, matrices transposed to [in, out] and contiguous; float32, the norms of queries and keys float64."""

    input_norm: Tensor
    qkv: Tensor
    """[h, (heads + 2 kv_heads) d]."""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    post_norm: Tensor
    router: Tensor | None
    """[h, e]; None for a layer without experts, which counts as one expert."""
    router_bias: Tensor | None
    """[e] float32, of sigmoid routers."""
    gate_up: Tensor
    """[e, h, 2 i]."""
    down: Tensor
    """[e, i, h]."""
    shared: tuple[Tensor, Tensor] | None
    """Gate and up, and down, of what runs for every token."""
    shared_gate: Tensor | None
    """[h, 1]."""


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole model, read-only: an update builds another one."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    """[h, v]."""

    @classmethod
    def build(cls, cfg: ReferenceConfig, weights: Mapping[str, Tensor], precision: str) -> DecoderWeights:
        """Fuse checked Hugging Face weights into fresh memory.

        Matrices, router and head included, go through `precision`; embedding and norms do not.
        """

        def matrix(*names: str) -> Tensor:
            rows = torch.cat([weights[name].detach().cpu() for name in names])
            return fake_quantise(rows, precision).t().contiguous()

        def vector(name: str) -> Tensor:
            return weights[name].detach().to("cpu", torch.float32, copy=True)

        def head_norm(name: str) -> Tensor | None:
            return vector(name).to(_ATTENTION) if cfg.qk_norm else None

        def mlp(home: str, parts: tuple[str, str, str] = PARTS) -> tuple[Tensor, Tensor]:
            gate, up, down = (f"{home}{part}.weight" for part in parts)
            return matrix(gate, up), matrix(down)

        def layer(index: int) -> LayerWeights:
            at = f"model.layers.{index}."
            is_moe = index in cfg.moe_layers
            home = f"{at}{cfg.names.home if is_moe else 'mlp'}."
            numbers = range(cfg.num_experts if is_moe else 0)
            experts = [mlp(f"{home}experts.{e}.", cfg.names.parts) for e in numbers] or [mlp(home)]
            shared = cfg.shared if is_moe else None
            biases = [vector(f"{at}self_attn.{part}_proj.bias") for part in ("qkv" if cfg.qkv_bias else "")]
            return LayerWeights(
                input_norm=vector(f"{at}input_layernorm.weight"),
                qkv=matrix(*(f"{at}self_attn.{part}_proj.weight" for part in "qkv")),
                qkv_bias=torch.cat(biases) if biases else None,
                q_norm=head_norm(f"{at}self_attn.q_norm.weight"),
                k_norm=head_norm(f"{at}self_attn.k_norm.weight"),
                output=matrix(f"{at}self_attn.o_proj.weight"),
                post_norm=vector(f"{at}post_attention_layernorm.weight"),
                router=matrix(f"{home}gate.weight") if is_moe else None,
                router_bias=vector(f"{home}{cfg.names.bias}") if is_moe and cfg.router.is_sigmoid else None,
                gate_up=torch.stack([gate_up for gate_up, _ in experts]),
                down=torch.stack([down for _, down in experts]),
                shared=None if shared is None else mlp(f"{home}{shared.name}."),
                shared_gate=None if shared is None or not shared.gate else matrix(f"{home}{shared.gate}.weight"),
            )

        head = "model.embed_tokens.weight" if cfg.tied_embeddings else "lm_head.weight"
        return cls(
            embedding=vector("model.embed_tokens.weight"),
            layers=tuple(layer(i) for i in range(cfg.num_layers)),
            norm=vector("model.norm.weight"),
            head=matrix(head),
        )


class KVCache:
    """Keys and values of every layer, [l, 2, b, kv_heads, capacity, d] float64; grows by doubling."""

    def __init__(self, store: Tensor) -> None:
        self._store = store
        self._rows = torch.arange(store.shape[2])[:, None]

    @classmethod
    def empty(cls, cfg: ReferenceConfig, rows: int, capacity: int) -> KVCache:
        """Zeros: what is masked must still be finite."""
        return cls(torch.zeros(cfg.num_layers, 2, rows, cfg.num_kv_heads, capacity, cfg.head_dim, dtype=_ATTENTION))

    def reserve(self, length: int) -> None:
        """Make room for positions below `length`."""
        have = self._store.shape[4]
        if length > have:
            more = max(length, 2 * have) - have
            self._store = F.pad(self._store, (0, 0, 0, more))

    def write(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """keys, values: [b, s, kv_heads, d] at positions [b, s]."""
        self._store[layer, 0][self._rows, :, positions] = keys
        self._store[layer, 1][self._rows, :, positions] = values

    def read(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Views [b, kv_heads, length, d]; what a row never wrote is finite, and the caller masks it."""
        return self._store[layer, 0, :, :, :length], self._store[layer, 1, :, :, :length]

    def take(self, rows: Tensor) -> KVCache:
        """A cache of rows `rows` [b'] only."""
        return KVCache(self._store.index_select(2, rows))

    @classmethod
    def stack(cls, parts: Sequence[KVCache], rows: Tensor, capacity: int) -> KVCache:
        """Rows `rows` [b'] (repeats allowed) of all `parts` one after the other, with room for `capacity` positions."""
        stores = [F.pad(part._store, (0, 0, 0, capacity - part._store.shape[4])) for part in parts]
        return cls(torch.cat(stores, dim=2).index_select(2, rows))


@dataclass(frozen=True, slots=True)
class _Pass:
    """What all layers of one pass share."""

    positions: Tensor
    """[b, s]."""
    rotary: tuple[Tensor, Tensor]
    """[b, s, 1, d] each."""
    cache: KVCache
    bias: Tensor | None
    """[b, 1, 1, length] of one token per row: -inf on keys that the row has not; None for prompts."""


class Decoder:
    """Runs `DecoderWeights` over a cache. Call inside `torch.inference_mode`."""

    def __init__(self, cfg: ReferenceConfig, weights: DecoderWeights) -> None:
        self.cfg = cfg
        self.weights = weights

    def prefill(self, token_ids: Tensor) -> tuple[Tensor, Tensor, KVCache]:
        """Prompts of one length [b, s] int64 -> logits of the last token [b, v], routes [b, s, l, k], the cache."""
        rows, width = token_ids.shape
        cache = KVCache.empty(self.cfg, rows, width)
        positions = torch.arange(width).expand(rows, width)
        x, routes = self._run(token_ids, self._pass(positions, cache, None))
        return self._logits(x[:, -1]), routes, cache

    def step(self, token_ids: Tensor, positions: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """One token [b] per row at its position [b] -> logits [b, v], routes [b, l, k]."""
        length = -(-(int(positions.max()) + 1) // _LENGTH_STEP) * _LENGTH_STEP
        cache.reserve(length)
        unseen = torch.arange(length) > positions[:, None]
        bias = torch.zeros(unseen.shape, dtype=_ATTENTION).masked_fill_(unseen, float("-inf"))[:, None, None]
        x, routes = self._run(token_ids[:, None], self._pass(positions[:, None], cache, bias))
        return self._logits(x[:, 0]), routes[:, 0]

    def _pass(self, positions: Tensor, cache: KVCache, bias: Tensor | None) -> _Pass:
        cos, sin = rotary_tables(self.cfg, positions, torch.float32)
        return _Pass(positions, (cos[:, :, None], sin[:, :, None]), cache, bias)

    def _logits(self, x: Tensor) -> Tensor:
        return _product(self._norm(x, self.weights.norm), self.weights.head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide, size = x.double(), (x.shape[-1],)
        return F.rms_norm(wide, size, weight.double(), self.cfg.rms_norm_eps).to(x.dtype)

    def _run(self, token_ids: Tensor, at: _Pass) -> tuple[Tensor, Tensor]:
        rows, width = token_ids.shape
        x = self.weights.embedding[token_ids]  # [b, s, h]
        routes = []
        for index, layer in enumerate(self.weights.layers):
            x = x + self._attend(self._norm(x, layer.input_norm), index, at)
            y, experts = self._experts(self._norm(x, layer.post_norm).view(rows * width, -1), layer)
            x = x + y.view(x.shape)
            if experts is not None:
                routes.append(experts)
        if not routes:
            return x, torch.empty(rows, width, 0, self.cfg.experts_per_token, dtype=torch.int64)
        return x, torch.stack(routes, dim=1).view(rows, width, len(routes), -1)

    def _attend(self, x: Tensor, index: int, at: _Pass) -> Tensor:
        """x [b, s, h] -> [b, s, h]; writes this layer's keys and values."""
        cfg, layer = self.cfg, self.weights.layers[index]
        rows, width, _ = x.shape
        heads, kv_heads = cfg.num_heads, cfg.num_kv_heads
        qkv = _product(x.view(rows * width, -1), layer.qkv)
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias
        q, k, v = qkv.to(_ATTENTION).view(rows, width, -1, cfg.head_dim).split([heads, kv_heads, kv_heads], dim=2)
        if layer.q_norm is not None and layer.k_norm is not None:
            if cfg.wide_qk_norm:
                q, k = (self._norm(y.flatten(2), w).view(y.shape) for y, w in ((q, layer.q_norm), (k, layer.k_norm)))
            else:
                q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        q, k = rotated(torch.cat([q, k], dim=2), *at.rotary).split([heads, kv_heads], dim=2)
        at.cache.write(index, k, v, at.positions)
        if at.bias is None:  # prompts: every key is of this very pass
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        else:
            keys, values = at.cache.read(index, at.bias.shape[-1])
            grouped = q.view(rows, kv_heads, heads // kv_heads, cfg.head_dim)
            scores = grouped @ keys.transpose(-1, -2) * cfg.head_dim**-0.5 + at.bias
            mixed = scores.softmax(-1) @ values
        return _product(mixed.reshape(rows * width, -1).to(x.dtype), layer.output).view(rows, width, -1)

    def _experts(self, x: Tensor, layer: LayerWeights) -> tuple[Tensor, Tensor | None]:
        """x [t, h] -> output [t, h], experts [t, k] (None for a layer without)."""
        if layer.router is None:
            return _mlp(x, layer.gate_up[0], layer.down[0]), None
        scores = scores_of(_product(x, layer.router), self.cfg.router)
        experts = choice_of(scores, layer.router_bias, self.cfg.router, self.cfg.experts_per_token)
        gates = gates_of(scores, experts, self.cfg.router)
        slots = experts.flatten()
        order = slots.argsort(stable=True)
        tokens = order // self.cfg.experts_per_token
        counts = torch.bincount(slots, minlength=self.cfg.num_experts).tolist()
        outputs = [
            _mlp(part, layer.gate_up[expert], layer.down[expert])
            for expert, part in enumerate(x[tokens].split(counts))
            if len(part)
        ]
        weighted = torch.cat(outputs) * gates.flatten()[order, None]
        back = torch.empty_like(weighted)
        back[order] = weighted
        y = back.view(len(x), -1, x.shape[-1]).sum(1)
        if layer.shared is not None:
            same = _mlp(x, *layer.shared)
            y = y + (same if layer.shared_gate is None else same * _product(x, layer.shared_gate).sigmoid())
        return y, experts


def _mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = _product(x, gate_up).chunk(2, dim=-1)
    return _product(F.silu(gate) * up, down)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, in] @ weight [in, out], each row the same whatever n is."""
    rows = x.shape[0]
    if rows >= _MIN_ROWS:
        return x @ weight
    return (F.pad(x, (0, 0, 0, _MIN_ROWS - rows)) @ weight)[:rows]
