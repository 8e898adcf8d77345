"""The registry of rollout engines, request ids and seeds, and what the in-process engine asks of its sampler.

An engine is one class under `rollout/engines/` that keeps `moerl.protocols.RolloutEngine`:

    @engines.register("mine", MineConfig, injects=("sampler",))
    class MyEngine:
        def __init__(self, cfg: MineConfig, *, sampler: TextSampler) -> None: ...

`injects` names the keyword arguments beside the config. `build.py` hands over `sampler` (a `TextSampler`),
`completions` (prompt id -> the file's own token ids), `served_model` (a `ServedModel`, for engines whose model is in
other processes) and `sender` (what brings weights to those: see `moerl/weight_sync/transport.py`). `policy_version`, of
the weights that an engine starts with, is left at its default of 0 there; whoever makes an engine by hand may give it.

Capabilities are traits beside it: `returns_topk=True` promises that a completion carries `top_logprobs` where
`SamplingParams.top_logprobs` asks for them. What a configuration needs and the engine does not promise is refused when
the configuration is read. `check_model=f`: `f(config, folder)` raises ConfigError for a model that it cannot serve as
it is. `fp32_rounding=x`: how far the logprobs of its fp32 arithmetic may be off, where that is above the step-0
contract's tolerance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from moerl.registry import Registry
from moerl.types import FinishReason, SamplingParams, Support, TopLogprobs

engines: Registry[Any] = Registry("rollout engine", "moerl.rollout.engines")


class SampledText(Protocol):
    """One completion of a `TextSampler`."""

    @property
    def token_ids(self) -> np.ndarray:
        """[s] int32, the stop token included."""
        ...

    @property
    def logprobs(self) -> np.ndarray:
        """[s] float32."""
        ...

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        ...

    @property
    def routes(self) -> np.ndarray | None:
        """[p + s - 1, l, k]."""
        ...

    @property
    def support(self) -> Support | None:
        """[s] steps."""
        ...

    @property
    def top_logprobs(self) -> TopLogprobs | None:
        """[s] steps."""
        ...


class TextSampler(Protocol):
    """A model in this process that draws whole batches."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights, or raise MoerlError and keep the old ones."""
        ...

    def check_request(self, prompt: np.ndarray, params: SamplingParams) -> None:
        """Raise RolloutError for what `generate` could not serve."""
        ...

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        params: Sequence[SamplingParams],
        should_abort: Callable[[], bool] | None = None,
    ) -> Sequence[SampledText]:
        """One completion per prompt, in order; `should_abort`, asked between tokens, ends those that are not finished
        with what they have, at least one token.
        """
        ...


@dataclass(frozen=True, slots=True)
class RouteLayout:
    """Shape of a model's routes."""

    num_layers: int
    """All layers, as a server counts them."""
    moe_layers: tuple[int, ...]
    """Those that have a router; the only ones that are kept."""
    experts_per_token: int
    num_experts: int

    @property
    def dtype(self) -> type[np.generic]:
        """The smallest that holds every id, as `Completion.routed_experts` says."""
        return np.uint8 if self.num_experts <= 256 else np.int16


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What an engine of remote servers knows of the model and the run."""

    path: Path
    """Hugging Face folder."""
    run_folder: Path
    """For logs, and for weights on their way."""
    vocab_size: int
    layout: RouteLayout | None
    """None: no layer has experts."""
    wants_routes: bool
    """The algorithm replays the engine's routes."""
    longest_tokens: int = 0
    """Of a prompt and its answer, as the configuration bounds them."""


def request_id(prompt_id: str, index: int) -> str:
    """`<prompt_id>#<index>`."""
    return f"{prompt_id}#{index}"


def prompt_id_of(request: str) -> str:
    """What `request_id` put before the last `#`."""
    return request.rpartition("#")[0]


def sample_seed(run_seed: int, step: int, prompt_id: str, index: int) -> int:
    """Seed in 0..2**63-1 of one completion: equal on every machine and in every process, unlike `hash()`."""
    text = f"{run_seed}\x1f{step}\x1f{prompt_id}\x1f{index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
