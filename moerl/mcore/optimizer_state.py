"""The state of megatron's optimizers by model parameter, whichever of them holds it.

Plain: whole moments beside every parameter, and a float32 main weight beside a bfloat16 one. Distributed: the same of
a flat range of the parameter, another one on each data-parallel rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

MAIN = "main_param"
_NOT_MOMENTS = ("step", "master_param")
_OFFLOADED_COPY = "master_param"


@dataclass(frozen=True)
class ParameterState:
    """What an optimizer keeps of one parameter on this rank."""

    parameter: Tensor
    """Of the model."""
    main: Tensor
    """What the optimizer moves: the parameter, a float32 copy, or a range of one of them."""
    start: int | None
    """Where in the flattened parameter the tensors begin; None: they are whole."""
    tensors: dict[str, Tensor]
    """Moments by the optimizer's names, and `main_param` where that is not the parameter itself; live."""


def parameter_states(inner: Any) -> Iterator[ParameterState]:
    """Every parameter that `inner`, megatron's optimizer, moves on this rank."""
    for member in _members(inner):
        torch_optimizer = member.optimizer
        for parameter, main, start in _owned(member):
            kept = torch_optimizer.state.get(main, {})
            moments = {name: value for name, value in kept.items() if _is_moment(name, value)}
            if main.dtype != parameter.dtype:
                moments[MAIN] = main
            yield ParameterState(parameter, main, start, moments)


def num_updates(inner: Any) -> int:
    """Updates that Adam's bias correction has counted; 0 before the first, and for an optimizer that counts none."""
    counts = set()
    for member in _members(inner):
        torch_optimizer = member.optimizer
        groups = [group for group in torch_optimizer.param_groups if group["params"]]  # in an empty one nobody counts
        counts |= {int(group["step"]) for group in groups if "step" in group}
        counts |= {int(state["step"]) for state in torch_optimizer.state.values() if "step" in state}
    assert len(counts) <= 1, f"parameters were updated {sorted(counts)} times: no common count"
    return counts.pop() if counts else 0


def prepare(inner: Any, updates: int) -> None:
    """Make the state as it is after `updates`, its tensors not filled yet; with 0 there is none."""
    for member in _members(inner):
        torch_optimizer = member.optimizer
        torch_optimizer.state.clear()
        if not updates:
            continue
        if isinstance(torch_optimizer, HybridDeviceOptimizer):
            torch_optimizer.dummy_step()  # moves weights, which are filled after
        elif member.init_state_fn is not None:
            member.init_state_fn(torch_optimizer, member.config)
        _set_count(torch_optimizer, updates)


def finish(inner: Any) -> None:
    """After the tensors of `parameter_states` were filled: bring copies elsewhere in step with them."""
    offloaded = [member.optimizer for member in _members(inner) if isinstance(member.optimizer, HybridDeviceOptimizer)]
    for main, state in itertools.chain.from_iterable(optimizer.state.items() for optimizer in offloaded):
        if _OFFLOADED_COPY in state:
            state[_OFFLOADED_COPY].data.copy_(main.data)


def _members(inner: Any) -> list[Any]:
    """Dense and expert parameters have an optimizer each; one that moves nothing has no torch optimizer."""
    members: list[Any] = list(inner.chained_optimizers) if isinstance(inner, ChainedOptimizer) else [inner]
    return [member for member in members if not member.is_stub_optimizer]


def _owned(member: Any) -> Iterator[tuple[Tensor, Tensor, int | None]]:
    """(model parameter, what torch's optimizer moves, where in the flattened parameter that begins)."""
    groups = member.optimizer.param_groups
    if isinstance(member, DistributedOptimizer):
        # Not by `model_param_group_index_map`: with parameters of two types its order is not that of the groups.
        for group, wide, narrow in zip(groups, member.model_fp32_groups, member.model_float16_groups, strict=True):
            for parameter, main in zip([*wide, *narrow], group["params"], strict=True):
                yield parameter, main, member._get_model_param_range_map(parameter)["param"].start
    elif isinstance(member, Float16OptimizerWithFloat16Params):
        for models, mains in zip(member.float16_groups, member.fp32_from_float16_groups, strict=True):
            yield from ((model, main, None) for model, main in zip(models, mains, strict=True))
        for models in member.fp32_from_fp32_groups:
            yield from ((model, model, None) for model in models)
    else:
        for group in groups:
            yield from ((parameter, parameter, None) for parameter in group["params"])


def _is_moment(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and name not in _NOT_MOMENTS


def _set_count(torch_optimizer: Any, updates: int) -> None:
    """Torch counts by parameter, TransformerEngine's and apex's Adam by group."""
    if isinstance(torch_optimizer, HybridDeviceOptimizer) or type(torch_optimizer).__module__.startswith("torch."):
        for state in torch_optimizer.state.values():
            state["step"] = torch.tensor(float(updates)) if "step" not in state else state["step"].fill_(updates)
    else:
        for group in torch_optimizer.param_groups:
            group["step"] = updates
