"""RMSNorms of the models that train without TransformerEngine, and the one that megatron-core lacks with it too.

Each computes in the next wider type: float64 for a float32 model (why: `docs/decisions.md`, the step-0 contract).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moerl.mcore.parallel import Axis


def exact(x: Tensor) -> Tensor:
    """float32 -> float64; other types stay."""
    return x.double() if x.dtype == torch.float32 else x


class RMSNorm(torch.nn.Module):
    """RMSNorm in the next wider type, its weight marked for the sequence-parallel gradient sum (torch's wrapped one
    refuses it).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        """`hidden_size` is the width that is normalised: the head dimension for query and key norms."""
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue] megatron's mark

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and dtype."""
        return self._normed(x).to(x.dtype)

    def _normed(self, x: Tensor) -> Tensor:
        wide = x.double() if x.dtype == torch.float32 else x.float()
        return F.rms_norm(wide, (x.shape[-1],), self.weight.to(wide.dtype), self.eps)


class HeadNorm(RMSNorm):
    """Of each head's queries or keys, for `PackedAttention`, which goes on in float64 where the model is float32."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape; float64 for float32, else the same dtype."""
        return self._normed(x).to(exact(x).dtype)


class WideRMSNorm(torch.nn.Module):
    """Of queries or keys over all heads of a token at once (OLMoE, MiniMax-M2); megatron-core's spans one head.

    Tensor ranks hold some heads each, so the sum of squares is added up over the axis. The weight is whole on every
    rank: it is small, megatron adds the gradients of norms with these names up over the axis (a rank's is 0 outside of
    its heads), and a checkpoint needs no place for parts of it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float,
        *,
        heads: int,
        axis: Axis,
        stays_wide: bool,
        **_: Any,
    ) -> None:
        """`hidden_size` is one head's width, as megatron says it; `heads` are those of all ranks of the tensor axis.
        `stays_wide`: float64 of a float32 model is not rounded again, as `PackedAttention` goes on in it.
        """
        super().__init__()
        self.eps = eps
        self.heads, self._axis, self._stays_wide = heads, axis, stays_wide
        self.weight = torch.nn.Parameter(torch.ones(heads * hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., own heads, d] -> the same shape, and dtype unless it stays wide."""
        own, width = x.shape[-2:]
        wide = x.double() if x.dtype == torch.float32 else x.float()
        squares = wide.square().sum((-2, -1), keepdim=True)
        if self._axis.size > 1:  # added up going forward, and so are the gradients of all ranks going back
            squares = reduce_from_tensor_model_parallel_region(squares, group=self._axis.group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self._axis.group)
        # With more ranks than key heads, several ranks hold a copy of one head: squares count each copy.
        normed = wide * torch.rsqrt(squares / (own * self._axis.size * width) + self.eps)
        first = self._axis.rank * self.heads // self._axis.size
        weight = self.weight.view(self.heads, width)[first : first + own]
        return (normed * weight.to(wide.dtype)).to(exact(x).dtype if self._stays_wide else x.dtype)
