"""What megatron's local layer spec lacks for packed sequences without TransformerEngine: attention and positions.

Core attention of the local spec refuses packed (THD) input, and its THD rotary embedding works sequence by sequence.
Here packed queries, keys and values are spread to right-padded [n, smax] once per call, so that plain causal attention
is exact (a query never sees what comes after it) and no [t, t] mask is built.

Of a float32 model, attention computes in float64 from the norms of queries and keys to the mixed values: most of what
two float32 forwards of one model differ by arises there and in the norms, and the built-in sampler computes alike
(`docs/decisions.md`, the step-0 contract).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from moerl.mcore.rows import RowPlan


@dataclasses.dataclass
class PackedLayout(PackedSeqParams):
    """Megatron's packed-sequence parameters, and the index maps of this room's attention."""

    angles: Tensor | None = None
    """[all_rows] int64: the position that each row of megatron's table of angles speaks of."""
    spread: Tensor | None = None
    """[n * qmax] int64: the row of each padded place of the queries (0 where there is none); None: no padding."""
    collect: Tensor | None = None
    """[m] int64: the padded place of each row."""
    spread_keys: Tensor | None = None
    """[n * smax] int64: the same of keys and values, in context order; None: as `spread`."""
    visible: Tensor | None = None
    """[n, 1, qmax, smax] bool: which keys a query sees; None: plainly causal."""
    num_seqs: int = 0
    groups: tuple[tuple[Tensor, int], ...] | None = None
    """Sequences of like length, attended to together: the row of each padded place, and how many there are. Of whole
    sequences only; `collect` then speaks of the places of all groups, one group after the other."""


LIKE_PAIRS = 128 * 128
"""Pairs of places by which padding may make a sequence dearer, where another call would cost more."""


def packed_layout(rows: RowPlan, *, use_te: bool) -> PackedLayout:
    """The layout of one micro-batch; made once per forward and shared by every layer."""
    assert not (use_te and rows.is_whole) or rows.cut.context_size == 1, "TransformerEngine would cut again"
    bounds = rows.cu_seqlens.long()
    longest = int(bounds.diff().max())
    # Rows that lengthen a sequence are its last: no token sees them. So they count as part of it, and the bounds of
    # the padded sequences are the only ones (with others, TransformerEngine would give up flash attention).
    padded: Any = None if rows.is_whole else rows.cu_seqlens
    layout = PackedLayout(
        qkv_format="thd",
        cu_seqlens_q=rows.cu_seqlens,
        cu_seqlens_kv=rows.cu_seqlens,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        num_seqs=len(bounds) - 1,
    )
    return layout if use_te else _with_maps(layout, rows, bounds)


def _with_maps(layout: PackedLayout, rows: RowPlan, bounds: Tensor) -> PackedLayout:
    # Megatron's rotation cuts the pack where these bounds say; `PackedRotaryEmbedding` gives every row its own angle,
    # so one cut is enough (TransformerEngine's fused rotation has no such angles and needs the true bounds).
    whole = rows.cu_seqlens.new_tensor([0, rows.num_rows])
    parts = 1 if rows.is_whole else rows.cut.context_size
    own, longest = bounds // parts, layout.max_seqlen_q // parts
    spread = collect = spread_keys = visible = None
    groups = None
    if layout.num_seqs * longest != len(rows.token) and rows.is_whole:
        groups, collect = _groups(own)
    elif layout.num_seqs * longest != len(rows.token):
        spread = _padded_places(own, longest)
        collect = rows.sequence * longest + torch.arange(len(rows.token), device=own.device) - own[rows.sequence]
    if not rows.is_whole:
        spread_keys = rows.row_of_place[_padded_places(bounds, layout.max_seqlen_q)]
        asking = rows.position if spread is None else rows.position[spread]
        keys = torch.arange(layout.max_seqlen_q, device=own.device)
        visible = keys <= asking.view(layout.num_seqs, 1, longest, 1)
    return dataclasses.replace(
        layout,
        cu_seqlens_q_padded=whole,
        cu_seqlens_kv_padded=whole,
        angles=_angles(rows),
        spread=spread,
        collect=collect,
        spread_keys=spread_keys,
        visible=visible,
        groups=groups,
    )


def _padded_places(bounds: Tensor, longest: int) -> Tensor:
    """[n * longest]: the row at each place of right-padded sequences, 0 where there is none."""
    return _places(bounds[:-1], bounds.diff(), longest)


def _places(starts: Tensor, lengths: Tensor, longest: int) -> Tensor:
    place = torch.arange(longest, device=starts.device)
    return torch.where(place < lengths[:, None], starts[:, None] + place, 0).flatten()


def _groups(bounds: Tensor) -> tuple[tuple[tuple[Tensor, int], ...], Tensor]:
    """Groups of sequences of like length, and for each row its place in the padded groups, one after the other."""
    lengths = bounds.diff()
    order = lengths.argsort(descending=True, stable=True)
    groups, collect, done = [], torch.empty(int(bounds[-1]), dtype=torch.int64, device=bounds.device), 0
    for first, last in _cuts([int(length) for length in lengths[order].tolist()]):
        members = order[first:last]
        longest = int(lengths[members[0]])
        places = _places(bounds[members], lengths[members], longest)
        live = (torch.arange(longest, device=bounds.device) < lengths[members, None]).flatten()
        collect[places[live]] = done + torch.nonzero(live)[:, 0]
        groups.append((places, last - first))
        done += len(places)
    return tuple(groups), collect


def _cuts(lengths: list[int]) -> list[tuple[int, int]]:
    """Of descending lengths: (first, last) of each group, whose members are not much dearer padded to its longest."""
    cuts, first = [], 0
    for index, length in enumerate(lengths):
        longest = lengths[first]
        if longest**2 - length**2 > max(0.35 * longest**2, LIKE_PAIRS):
            cuts.append((first, index))
            first = index
    return [*cuts, (first, len(lengths))]


def _angles(rows: RowPlan) -> Tensor:
    """Positions such that megatron's rotation, which takes the whole pack as one sequence and this rank's two chunks of
    it, finds those of this rank's rows there.
    """
    size, rank = rows.cut.context_size, rows.cut.context_rank
    if size == 1:
        return rows.position
    first, second = rows.position.chunk(2)
    angles = rows.position.new_zeros(2 * size, len(first))
    angles[rank], angles[2 * size - 1 - rank] = first, second
    return angles.flatten()


class PackedAttention(MegatronModule):
    """Causal self-attention over packed sequences, by torch's scaled_dot_product_attention.

    Where the context axis cuts sequences, each rank asks with its own rows and gathers everyone's keys and values.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        """The arguments of megatron's core attentions; what is not named here does not apply to this one."""
        super().__init__(config=config)
        head_dim = config.kv_channels
        assert head_dim is not None
        self.layer_number = layer_number
        self.scale = softmax_scale or 1.0 / math.sqrt(head_dim)
        self._groups = pg_collection
        window: Any = config.window_size
        layers: Any = config.window_attn_skip_freq
        is_windowed = is_layer_window_attention(window, layers, layer_number)
        self.window = window[0] + 1 if is_windowed else None
        """Tokens that a query sees, its own included; None: all before it."""
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // self._groups.tp.size()
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            # Unlike megatron's own: without the mark its gradient would count on one tensor rank only in the norm.
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedLayout,
        **_: Any,
    ) -> Tensor:
        """[m, heads, d] each (fewer heads in key and value under grouped queries) -> [m, heads * d].

        Values may have a width of their own, which is then that of the result.
        """
        layout, dtype = packed_seq_params, value.dtype
        if layout.groups is not None:
            assert layout.collect is not None
            parts = []
            for places, count in layout.groups:
                asking, keys, values = (self._spread(x, places, count) for x in (query, key, value))
                parts.append(self._attend(asking, keys, values, None))
            return torch.cat(parts).index_select(0, layout.collect)
        if layout.spread_keys is not None:
            both = torch.cat([key, value], -1)
            widths = [key.shape[-1], value.shape[-1]]
            key, value = gather_from_sequence_parallel_region(both, group=self._groups.cp).split(widths, -1)
            value = value.to(dtype)  # keys may be wider
        query = self._spread(query, layout.spread, layout.num_seqs)
        places = layout.spread if layout.spread_keys is None else layout.spread_keys
        key, value = (self._spread(x, places, layout.num_seqs) for x in (key, value))
        out = self._attend(query, key, value, layout.visible)
        return out if layout.collect is None else out.index_select(0, layout.collect)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
        """[n, heads, longest, d] each -> [n * longest, heads * d]; None of `visible`: plainly causal.

        The kernels that build no [longest, longest] want one width, so what is narrower is filled up with zeros.
        """
        length, wanted = query.shape[2], value.shape[-1]
        visible = self._windowed(query, visible)
        if self.softmax_offset is not None:
            query, key, value, visible = self._with_sink(query, key, value, visible)
        width = max(query.shape[-1], wanted)
        query, key, value = (_widened(x, width) for x in (query, key, value))
        dropout = self.config.attention_dropout if self.training else 0.0
        mixed = functools.partial(
            F.scaled_dot_product_attention,
            attn_mask=visible,
            is_causal=visible is None,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
            dropout_p=dropout,
        )
        if dropout or value.dtype != torch.float32:  # with dropout nothing is computed twice
            out = mixed(query.to(value.dtype), key.to(value.dtype), value)
        else:
            out = _ExactForward.apply(mixed, query, key, value)
        return out[:, :, -length:, :wanted].transpose(1, 2).flatten(0, 1).flatten(1)

    def _windowed(self, query: Tensor, visible: Tensor | None) -> Tensor | None:
        """Without the keys that are `window` or more tokens back: those that a query so much earlier sees too."""
        if self.window is None:
            return visible
        if visible is None:
            places = torch.arange(query.shape[2], device=query.device)
            visible = places <= places[:, None]
        return visible & ~F.pad(visible[..., self.window :], (0, min(self.window, visible.shape[-1])))

    def _with_sink(
        self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """One key more, first, with value 0 and each head's learnt logit: it takes probability and gives nothing.

        Queries and keys get one column more, in which that key alone is not 0, so that any kernel computes it, and the
        logit's gradient. Where no mask says what is visible, a query more, first, keeps the causal order.
        """
        assert self.softmax_offset is not None
        n, heads, length, _ = query.shape
        logit = (self.softmax_offset / self.scale).to(query.dtype).view(1, heads, 1, 1).expand(n, heads, length, 1)
        query = torch.cat([query, logit], -1)
        sink = F.pad(key.new_ones(n, key.shape[1], 1, 1), (key.shape[-1], 0))
        key, value = torch.cat([sink, F.pad(key, (0, 1))], 2), F.pad(value, (0, 0, 1, 0))
        if visible is None:
            return F.pad(query, (0, 0, 1, 0)), key, value, None
        return query, key, value, F.pad(visible, (1, 0), value=True)

    @staticmethod
    def _spread(packed: Tensor, places: Tensor | None, num_seqs: int) -> Tensor:
        """[rows, heads, d] -> [n, heads, longest, d]."""
        if places is not None:
            packed = packed.index_select(0, places)
        return packed.unflatten(0, (num_seqs, -1)).transpose(1, 2)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The sinks, where there are any."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._groups.tp,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


class _ExactForward(torch.autograd.Function):
    """A function computed in float64, and once more in float32 for its gradient: that needs no more digits than the
    products around it have, and torch's float64 kernel takes four times as long going back.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Of float32 and float64 tensors, a float32 one."""
        ctx.function, ctx.dtypes = function, [x.dtype for x in tensors]
        ctx.save_for_backward(*(x.float() for x in tensors))
        return function(*(x.double() for x in tensors)).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """As torch's own of the function in float32."""
        tensors = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.function(*tensors)
        found = torch.autograd.grad(out, tensors, grads[0])
        return None, *(grad.to(dtype) for grad, dtype in zip(found, ctx.dtypes, strict=True))


def _widened(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


class PackedAngles(torch.nn.Module):
    """Angles by row; stands in the place of megatron's embedding, plain or YaRN."""

    def __init__(self, inner: Any) -> None:
        """`inner`: megatron's."""
        super().__init__()
        self.inner = inner
        self.angles: Tensor | None = None
        if isinstance(inner, YarnRotaryEmbedding):  # tables for fused kernels
            inner.register_buffer("cos_cached", None, persistent=False)
            inner.register_buffer("sin_cached", None, persistent=False)

    def get_rotary_seq_len(self, *args: Any) -> int:
        """As in core; remembers the positions for the `forward` that follows."""
        layout = next(argument for argument in args if isinstance(argument, PackedLayout))
        self.angles = layout.angles
        return int(layout.max_seqlen_q)

    def forward(self, max_seq_len: int, *, packed_seq: bool, **_: Any) -> Tensor | tuple[Tensor, float]:
        """[all_rows, 1, 1, d] angles; of YaRN also the factor on cosines and sines."""
        assert packed_seq
        assert self.angles is not None
        if isinstance(self.inner, YarnRotaryEmbedding):
            table, scale = self.inner.get_emb(max_seq_len)
            return table.index_select(0, self.angles), float(scale)
        return self.inner.get_emb(max_seq_len).index_select(0, self.angles)


class PackedRotaryEmbedding(RotaryEmbedding):
    """Angles by row, so that one rotation serves all sequences.

    Megatron's THD rotation takes angles of the pack's total length as exact positions; given angles by position it
    would rotate sequence after sequence, each with its own copy, which costs more than the rest of attention on small
    models.
    """

    angles: Tensor | None = None

    def get_rotary_seq_len(self, *args: Any, packed_seq_params: PackedLayout | None = None, **kwargs: Any) -> int:
        """As in core; remembers the positions for the `forward` that follows."""
        layout = packed_seq_params or next(a for a in args if isinstance(a, PackedLayout))
        self.angles = layout.angles
        return int(layout.max_seqlen_q)

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """[all_rows, 1, 1, d] angles."""
        assert packed_seq
        assert self.angles is not None
        return self.get_emb(max_seq_len, offset).index_select(0, self.angles)
