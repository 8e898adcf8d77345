"""RMSNorm of queries or keys over all heads of a token at once (OLMoE, MiniMax-M2); megatron-core's spans one head.

Tensor ranks hold some heads each, so the sum of squares is added up over the axis. The weight is whole on every rank:
it is small, megatron adds the gradients of norms with these names up over the axis (a rank's is 0 outside of its
heads), and a checkpoint needs no place for parts of it.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moerl.mcore.parallel import Axis


class WideRMSNorm(torch.nn.Module):
    """In float32 whatever the model's type."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, heads: int, axis: Axis, **_: Any
    ) -> None:
        """`hidden_size` is one head's width, as megatron says it; `heads` are those of all ranks of the tensor axis."""
        super().__init__()
        self.eps = eps
        self.heads, self._axis = heads, axis
        self.weight = torch.nn.Parameter(torch.ones(heads * hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., own heads, d] -> the same shape and dtype."""
        own, width = x.shape[-2:]
        wide = x.float()
        squares = wide.square().sum((-2, -1), keepdim=True)
        if self._axis.size > 1:  # added up going forward, and so are the gradients of all ranks going back
            squares = reduce_from_tensor_model_parallel_region(squares, group=self._axis.group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self._axis.group)
        # With more ranks than key heads, several ranks hold a copy of one head: squares count each copy.
        normed = wide * torch.rsqrt(squares / (own * self._axis.size * width) + self.eps)
        first = self._axis.rank * self.heads // self._axis.size
        weight = self.weight.view(self.heads, width)[first : first + own]
        return (normed * weight.float()).to(x.dtype)
