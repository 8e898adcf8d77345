"""Routes in and routes out: one tap per MoE router, driven by one `RouteController` per model.

Megatron's own switchboard is a class-level list shared by every model in the process and a FIFO for recomputation; both
are wrong as soon as there are two models, or a schedule whose backward order differs from its forward order. Here every
router owns a `RouterTap` (a `RouterReplay`, the object that megatron's routing asks for its top-k), and the controller
keeps what a micro-batch replays in the hook that its backward pass fires, so recomputation replays that micro-batch's
routes in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from moerl.errors import DataError
from moerl.mcore.parallel import ParallelState
from moerl.mcore.rows import RowPlan
from moerl.types import MicroBatch


class RouterTap(RouterReplay):
    """What one router replays now, and what it saw in the last observed forward."""

    def __init__(self) -> None:
        # Not calling super().__init__: it would append to the list that all models of the process share.
        self.layer_number: int | None = None
        self.target: Tensor | None = None
        """[rows, k] int64 experts to use; None: the router's own choice."""
        self.has_target: Tensor | None = None
        """[rows] bool; None: every row has one."""
        self.filler: Tensor | None = None
        """[rows] bool: rows without a token, which no balancing loss or bias may count; None: the pack has none."""
        self.is_empty = False
        """No row of the whole pack, over all ranks that share it, has a token."""
        self.is_observing = False
        self.own: Tensor | None = None
        """[rows, k] int64: the router's own choice of the last observed forward."""
        self.logits: Tensor | None = None
        """[rows, e] of the last observed forward, detached."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Top-k of `scores` [rows, e] -> values and indices [rows, k]; gradient flows through the values."""
        assert default_compute_topk is not None
        if self.target is not None and self.has_target is None and not self.is_observing:
            return scores.gather(1, self.target), self.target
        # Megatron sorts the top-k only while gradients are on; the order decides the last bit of the softmax over it,
        # so a scoring pass would differ from the training pass on the same weights.
        with torch.enable_grad():
            values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.is_observing:
            self.own = own
        if self.target is None:
            return values, own
        chosen = self.target if self.has_target is None else torch.where(self.has_target[:, None], self.target, own)
        return scores.gather(1, chosen), chosen


class ReplayRouter(TopKRouter):
    """Megatron's top-k router with a tap on its logits and its choice."""

    def __init__(self, config: Any, pg_collection: Any = None, is_mtp_layer: bool = False) -> None:
        """As megatron's; `moe_enable_routing_replay` stays off, the tap is this router's own."""
        super().__init__(config=config, pg_collection=pg_collection, is_mtp_layer=is_mtp_layer)
        self.router_replay = RouterTap()
        self.load: Tensor | None = None
        """[e] rows that each expert got since counting began, where the balancing bias moves (see balancing.py)."""

    def gating(self, input: Tensor) -> Tensor:
        """Logits [s, b, e] float32 of `input` [s, b, h].

        Of a float32 weight torch makes the product: megatron's is TransformerEngine's wherever that is installed, which
        rounds such factors to TF32, so that routes would differ from an exact engine's. It also takes factors of one
        type alone, and a router that is wider than what comes in is not narrowed for it.
        """
        if self.weight.dtype is not torch.float32:
            return super().gating(input)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight, bias)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts for `logits` [s, b, e]."""
        if self.router_replay.is_observing:
            self.router_replay.logits = logits.detach().flatten(0, -2)
        return super().routing(logits, padding_mask=self.router_replay.filler)

    def _apply_aux_loss(self, probs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The balancing loss of a pack without a token is 0; megatron's formula would divide by their number."""
        return probs if self.router_replay.is_empty else super()._apply_aux_loss(probs, *args, **kwargs)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count loads; once per micro-batch, as recomputation runs with gradients and what it repeats without."""
        if self.load is None or not torch.is_grad_enabled():
            return
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask[:, None]
        self.load += routing_map.detach().sum(0)


@dataclass(frozen=True)
class Observation:
    """What the local MoE layers of one micro-batch's forward saw."""

    own_routes: Tensor
    """[t, l, k] int64: the routers' own top-k."""
    log_probs: Tensor
    """[t, l, e] float32: log q over all experts."""
    selection: Tensor
    """[t, l, e] float32: what the top-k was taken of (scores, with the balancing bias where there is one). Experts of a
    group that lost stand as far below the k-th as their group stands below the last that won."""


Keep = Callable[[MicroBatch, Observation, tuple[int, ...]], dict[str, Tensor]]
"""What a pass keeps of one micro-batch's observation, whose layers are those at the given positions among all MoE
layers: tensors [x, layers, ...] by name, with a size that has no axis of experts if it is to be kept for long. Every
stage calls it on its own layers, or on none, and has to get the same names."""


def nothing_seen(num_tokens: int, sizes: tuple[int, int], device: torch.device) -> Observation:
    """By no layer; `sizes`: experts, and experts per token."""
    num_experts, topk = sizes
    none = torch.empty(num_tokens, 0, num_experts, device=device)
    return Observation(torch.empty(num_tokens, 0, topk, dtype=torch.int64, device=device), none, none)


def compact(routes: Tensor, num_experts: int) -> Tensor:
    """Expert ids in the smallest format that holds all `num_experts`: uint8, or int16."""
    return routes.to(torch.uint8 if num_experts <= 256 else torch.int16)


class RouteController:
    """The taps of one model (pipeline chunk), by MoE layer."""

    def __init__(self, model: torch.nn.Module, *, moe_layers: tuple[int, ...], parallel: ParallelState) -> None:
        """Find the taps; `moe_layers` are the numbers (from 1) of all MoE layers, in the order of `routes[:, i]`."""
        self._parallel = parallel
        self._num_layers = len(moe_layers)
        self._routers: dict[int, ReplayRouter] = {}
        for module in model.modules():
            if isinstance(module, ReplayRouter):
                assert module.layer_number is not None
                self._routers[module.layer_number] = module
        self._index = {number: moe_layers.index(number) for number in self._routers}
        self._dispatchers = [module.token_dispatcher for module in model.modules() if isinstance(module, MoELayer)]

    @property
    def layers(self) -> tuple[int, ...]:
        """Positions, among all MoE layers, of the ones that this model holds."""
        return tuple(self._index[number] for number in sorted(self._routers))

    def begin(
        self, rows: RowPlan, routes: Tensor | None, has_route: Tensor | None, *, observe: bool
    ) -> Callable[[], None]:
        """Before a micro-batch's forward: what to replay ([t, l, k] over all MoE layers; None: own choice).

        Returns:
            A function for that micro-batch's backward pass: it replays the same routes in recomputation, observing
            nothing.
        """
        own = self._parallel.router_rows(len(rows.token))
        filler = rows.is_filler[own] if rows.has_filler else None
        targets: dict[int, Tensor | None] = dict.fromkeys(self._routers)
        present = None
        if routes is not None and self._routers:
            self._check(routes)
            num_experts = next(iter(self._routers.values())).config.num_moe_experts
            assert num_experts is not None
            carried, has = rows.replayed(routes, has_route, num_experts)
            targets = {number: carried[own, self._index[number]] for number in self._routers}
            present = None if has is None or bool(has.all()) else has[own]

        def arm(observing: bool) -> None:
            for number, router in self._routers.items():
                tap = router.router_replay
                target = targets[number]  # as small as it came, until this micro-batch's turn
                tap.target = None if target is None else target.long()
                tap.has_target, tap.is_observing = present, observing
                tap.filler, tap.is_empty = filler, not rows.num_tokens

        arm(observe)
        return lambda: arm(False)

    def _check(self, routes: Tensor) -> None:
        if routes.shape[1] != self._num_layers:
            raise DataError(
                f"routes to replay have {routes.shape[1]} layers, but the model has {self._num_layers} MoE layers; "
                "the rollout engine runs another model"
            )
        for router in self._routers.values():
            if routes.shape[2] != router.topk:
                raise DataError(
                    f"routes to replay name {routes.shape[2]} experts a token, but the model routes to {router.topk}; "
                    "the rollout engine runs another model"
                )

    def observed(self, rows: RowPlan) -> Observation | None:
        """What the last observed forward saw, by token, stacked over this model's MoE layers; None without any."""
        if not self._routers:
            return None
        routers = [self._routers[number] for number in sorted(self._routers)]
        taps = [router.router_replay for router in routers]
        logits, own = (
            rows.by_token(self._parallel.gather_rows(torch.stack([_present(one) for one in seen], 1)))
            for seen in ([tap.logits for tap in taps], [tap.own for tap in taps])
        )
        logits = logits.float()
        if routers[0].score_function == "softmax":
            log_probs = torch.log_softmax(logits, -1)
            selection = log_probs.exp()
        else:
            scores = scores_of(logits, routers[0].score_function)
            log_probs = (scores / scores.sum(-1, keepdim=True)).clamp_min(1e-30).log()
            biases = [router.expert_bias for router in routers]
            selection = scores if biases[0] is None else scores + torch.stack([_present(b) for b in biases]).float()
        limits = (routers[0].config.moe_router_num_groups, routers[0].config.moe_router_group_topk)
        if limits[0] and limits[1]:
            selection = below_lost_groups(selection, own, limits[0], limits[1])
        return Observation(own, log_probs, selection)

    def release(self) -> None:
        """Forget targets and observations (they are large); routers choose for themselves again.

        Dispatchers keep what they sent last, with its graph. Through the graph's C++ part, where no garbage collector
        looks, that would hold the model, its DDP and all process groups for ever.
        """
        for router in self._routers.values():
            tap = router.router_replay
            tap.target = tap.has_target = tap.filler = tap.own = tap.logits = None
            tap.is_observing = tap.is_empty = False
        for dispatcher in self._dispatchers:
            kept = [name for name, value in vars(dispatcher).items() if isinstance(value, Tensor) and value.grad_fn]
            vars(dispatcher).update(dict.fromkeys(kept))


def scores_of(logits: Tensor, function: str) -> Tensor:
    """What the weights of a token's experts are taken of: `sigmoid` or `sqrtsoftplus` of the logits."""
    return torch.sigmoid(logits) if function == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()


def below_lost_groups(selection: Tensor, own: Tensor, num_groups: int, groups_per_token: int) -> Tensor:
    """`selection` [..., e] under group limits: an expert was out of reach by as much as its group was.

    Args:
        selection: [..., e] scores with the balancing bias.
        own: [..., k] the choice.
        num_groups: equal runs of experts.
        groups_per_token: groups that win, by the sum of their k / groups_per_token best scores.
    """
    groups = selection.unflatten(-1, (num_groups, -1))
    totals = groups.topk(own.shape[-1] // groups_per_token, dim=-1).values.sum(-1)
    last = totals.topk(groups_per_token, dim=-1).values[..., -1:]
    kth = selection.gather(-1, own).amin(-1, keepdim=True)
    standing = torch.where((totals >= last)[..., None], groups, (kth - (last - totals))[..., None])
    return standing.flatten(-2)


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
