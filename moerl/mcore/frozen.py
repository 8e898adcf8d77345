"""Weights of the policy's shape that no optimizer moves: reference and teacher. They score in the policy's network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from moerl.errors import ConfigError

REFERENCE, TEACHER = "ref_logprobs", "teacher_logprobs"
"""The fields of a micro-batch that their logprobs fill."""


class FrozenWeights:
    """A second set of values for the live tensors of a model."""

    def __init__(self, live: Mapping[str, Tensor], *, in_float32: bool = False) -> None:
        """A copy of what `live` holds now; `live` are the tensors of the network, by name.

        `in_float32` keeps the copy in float32, as an average that moves by small steps needs: each step would be
        rounded away in bfloat16. It costs twice the memory then, and a cast copy while the network computes with it.
        """
        self._live = live
        self.values: dict[str, Tensor] = {}
        for name, tensor in live.items():
            is_wide = in_float32 and tensor.is_floating_point()
            self.values[name] = tensor.detach().to(torch.float32 if is_wide else tensor.dtype, copy=True)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The network computes with these weights."""
        own = {name: tensor.data for name, tensor in self._live.items()}
        try:
            for name, tensor in self._live.items():
                tensor.data = self.values[name].to(tensor.dtype)
            yield
        finally:
            for name, tensor in self._live.items():
                tensor.data = own[name]

    @torch.no_grad()
    def follow(self, ema: float) -> None:
        """Become ema * these + (1 - ema) * the live ones; 0 is a plain copy, bit for bit."""
        for name, tensor in self._live.items():
            if ema and tensor.is_floating_point():
                self.values[name].lerp_(tensor.to(self.values[name].dtype), 1.0 - ema)
            else:
                self.values[name].copy_(tensor)


def chosen(frozen: Mapping[str, FrozenWeights], name: str) -> FrozenWeights:
    """The weights whose logprobs are `name`.

    Raises:
        ConfigError: the policy was built without them.
    """
    if name not in frozen:
        raise ConfigError(
            f"{name} are needed, but the policy was built with needs_reference=False or without a teacher"
        )
    return frozen[name]
