"""The routers' balancing bias (arXiv 2408.15664): moved by an explicit setting, after a step that happened, else never.

Megatron moves it while it finishes gradients, by a rate that is not 0 by default: before anyone knows whether the
gradient is finite, and also where gradients are only looked at. Here its own rule runs after the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias

from moerl.errors import ConfigError
from moerl.mcore.model import ModelSource
from moerl.mcore.parallel import ParallelState
from moerl.mcore.router_replay import ReplayRouter


def check_balancing(rate: float, routing: str, source: ModelSource) -> None:
    """Whether `model.router_bias_update_rate` = `rate` can be had.

    Raises:
        ConfigError: the routers have no bias, or they do not choose for themselves.
    """
    if rate == 0:
        return
    if not source.kwargs.get("moe_router_enable_expert_bias"):
        raise ConfigError(
            f"model.router_bias_update_rate is {rate}, but the routers of {source.folder} have no balancing bias; set 0"
        )
    if routing != "none":
        raise ConfigError(
            f"model.router_bias_update_rate is {rate} with algorithm.routing {routing!r}: loads would be those of "
            "recorded routes, or of routers that must not move; set it to 0, or algorithm.routing to none"
        )


def check_routers(source: ModelSource, routing: str, *, router_shift: bool) -> None:
    """Raises ConfigError where a setting speaks of routers and the network has none."""
    if source.moe_layers:
        return
    if routing != "none":
        raise ConfigError(f"algorithm.routing is {routing!r}, but {source.folder} has no experts; set it to none")
    if router_shift:
        raise ConfigError(f"algorithm.router_shift is on, but {source.folder} has no experts; switch it off")


class BiasBalancing:
    """Moves the bias of every router of the model by `rate` toward equal loads; at 0 nothing is counted or moved."""

    def __init__(self, chunks: Sequence[torch.nn.Module], rate: float, parallel: ParallelState) -> None:
        """Over this rank's `chunks`."""
        found = (module for chunk in chunks for module in chunk.modules())
        self._routers = [router for router in found if isinstance(router, ReplayRouter) and router.enable_expert_bias]
        self._rate = rate
        self._parallel = parallel
        for router in self._routers:
            router.frozen_expert_bias = True  # of megatron's own update

    def begin(self) -> None:
        """Count the loads of a minibatch from here."""
        for router in self._routers if self._rate else ():
            assert router.expert_bias is not None
            router.load = torch.zeros_like(router.expert_bias)

    @torch.no_grad()
    def step(self) -> None:
        """Move the biases by the loads since `begin`, over all ranks that saw other tokens; then count no more."""
        if not self._rate or not self._routers:
            return
        loads, biases = [router.load for router in self._routers], [router.expert_bias for router in self._routers]
        moved = get_updated_expert_bias(
            torch.stack([load for load in loads if load is not None]),
            torch.stack([bias for bias in biases if bias is not None]),
            self._rate,
            tp_dp_cp_group=self._parallel.tokens.group,
        )
        for router, bias in zip(self._routers, moved, strict=True):
            assert router.expert_bias is not None
            router.expert_bias.copy_(bias)
            router.load = None
