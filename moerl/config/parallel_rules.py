"""Rules of the learner's layout and number formats that need no arithmetic of ranks. Part of `rules.py`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from moerl.config.schema import RunConfig


def fp8(cfg: RunConfig) -> Iterator[str]:
    """Without Transformer Engine a dense megatron model silently trains in full precision; with it, none was seen."""
    if cfg.precision.fp8 != "none":
        yield f"precision.fp8={cfg.precision.fp8}: this version trains in fp32 or bf16; set precision.fp8=none"


def dispatcher(cfg: RunConfig) -> Iterator[str]:
    """Megatron's allgather takes equal shares of one length; DeepEP is a CUDA library that moves tokens over ranks."""
    axes = cfg.parallel
    if axes.dispatcher == "allgather" and axes.pipeline > 1:
        yield (
            f"parallel.dispatcher=allgather with parallel.pipeline={axes.pipeline}: packs differ in length, so stages "
            "tell one another how long what they send is (variable_seq_lengths), which megatron refuses with "
            "allgather; set parallel.dispatcher=alltoall"
        )
    if axes.dispatcher == "allgather" and axes.expert * axes.expert_tensor > axes.tensor:
        yield (
            "parallel.dispatcher=allgather gathers equal shares, which only the ranks of the tensor axis have: "
            f"parallel.expert x parallel.expert_tensor = {axes.expert} x {axes.expert_tensor} must be at most "
            f"parallel.tensor, {axes.tensor}; set parallel.dispatcher=alltoall"
        )
    if axes.dispatcher != "flex":
        return
    if importlib.util.find_spec("deep_ep") is None:
        yield (
            "parallel.dispatcher=flex needs the library deep_ep and a GPU, and deep_ep is not installed here: set "
            "parallel.dispatcher=alltoall"
        )
    if axes.tensor * axes.expert == 1:
        yield (
            "parallel.dispatcher=flex moves tokens between ranks, but parallel.tensor x parallel.expert is 1: set "
            "parallel.dispatcher=alltoall"
        )


def frozen_balance(cfg: RunConfig) -> Iterator[str]:
    """A router that does not train cannot be balanced."""
    value = cfg.model.aux_loss_coefficient
    if value > 0 and cfg.algorithm.routing == "frozen_router":
        yield (
            f"model.aux_loss_coefficient is {value} with algorithm.routing=frozen_router: the balancing loss would "
            "move the hidden states instead of the routers; set it to 0"
        )


def context_dropout(cfg: RunConfig) -> Iterator[str]:
    """Megatron gives data- and context-parallel ranks one random state."""
    largest = max(cfg.model.attention_dropout, cfg.model.hidden_dropout)
    if largest > 0 and cfg.parallel.context > 1:
        yield (
            f"parallel.context is {cfg.parallel.context} with dropout {largest}: the ranks of the context axis share "
            "one random state, so that the parts of a sequence would be masked alike; set model.attention_dropout "
            "and model.hidden_dropout to 0"
        )


RULES = (fp8, dispatcher, frozen_balance, context_dropout)
