"""The records that pass between rooms (ARCHITECTURE.md, section 2).

Frozen; shapes in brackets; no dictionary crosses a door. Shape letters: b batch, s sequence, t packed tokens,
n sequences in a pack, l MoE layers, e experts, k experts per token.

Alignment, the same everywhere: index j of a [s] or [t] array speaks of token j of the whole sequence (prompt and
response). `logprobs[j]` is log p(token j | tokens before j); it is 0 for the first token of a sequence.
`routed_experts[j]` are the experts of the forward of token j, so the row that predicts token j is row j - 1; loss-side
routing arrays are shifted once, in the learner, so that there too index j speaks of the token that is predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
TrajectoryStatus = Literal["ok", "error", "too_long", "aborted"]


class ArrayRef(Protocol):
    """A handle to a large per-token array that is opened only by the rank that trains on it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Known without opening."""
        ...

    def open(self) -> np.ndarray:
        """The array itself."""
        ...


@dataclass(frozen=True, slots=True)
class LocalArray:
    """An `ArrayRef` whose array is in this process."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self.array.shape)

    def open(self) -> np.ndarray:
        """The array."""
        return self.array


@dataclass(frozen=True, slots=True)
class Support:
    """The tokens that top-p / top-k / min-p left in the running at each step; the learner normalises over them too."""

    ids: np.ndarray
    """[m] int32: the allowed token ids of all steps, one step after the other."""
    offsets: np.ndarray
    """[steps + 1] int64: step i owns `ids[offsets[i]:offsets[i + 1]]`; an empty step means the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The likeliest tokens of each step and their log-probabilities under the distribution that was sampled."""

    ids: np.ndarray
    """[s, k] int32, the likeliest first; -1 where fewer than k tokens were in the running, or nothing was sampled."""
    logprobs: np.ndarray
    """[s, k] float32; -inf where the id is -1."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task, tokenised."""

    prompt_id: str
    """Stable across runs: `<data set>/<row>`."""
    token_ids: np.ndarray
    """[s] int32, chat template applied."""
    answer: str | None
    """Gold answer, as the file has it."""
    dataset: str
    """Name of the data set it came from."""
    env: str = "single_turn"
    """Registered environment that plays it."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the row; `text` is the prompt as a person wrote it, `source` is `file:line`."""
    completion_ids: np.ndarray | None = None
    """[s] int32: the file's own completion (supervised training), end token included."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is drawn."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy (evaluation only)."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    """Of this one completion; the same seed, weights and prompt give the same tokens whatever else is in the batch."""
    return_routes: bool = True
    routes_from: int = 0
    """First row of routes that is missing; an engine may leave out those before it (`Completion.routes_from`)."""
    top_logprobs: int = 0
    """Likeliest tokens of each step to return with their log-probabilities; 0 is none."""

    @property
    def num_unsettled(self) -> int:
        """Last tokens of an aborted part to sample again: a stop string may begin there, each token a byte of it."""
        return max((len(stop.encode()) for stop in self.stop_strings), default=0)


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of an engine."""

    token_ids: np.ndarray
    """[s] int32, the stop token included where one was drawn."""
    logprobs: np.ndarray
    """[s] float32, of the distribution that was sampled (temperature, top-p and top-k inside); NaN where none was."""
    finish_reason: FinishReason
    policy_version: int
    """Of the last token."""
    routed_experts: ArrayRef | None = None
    """[p + s - 1 - routes_from, l, k] uint8 (int16 above 256 experts), p the prompt's length: every forward that ran,
    from row `routes_from` on; the last token has none."""
    support: Support | None = None
    """[s] steps; None where the whole vocabulary was in the running."""
    top_logprobs: TopLogprobs | None = None
    """[s] steps; None where none were asked for."""
    version_spans: tuple[tuple[int, int, int], ...] = ()
    """(start, end, policy version) over the tokens, all of them; empty: every token is of `policy_version`."""
    first_true_route: int = 0
    """Rows before it, from the prompt's first token on, were computed again by newer weights than sampled them."""
    routes_from: int = 0
    """Row of the whole text that is the first of `routed_experts`; at most `SamplingParams.routes_from`."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of several answers that a response states."""

    text: str
    """As an answer to the plain prompt would be."""
    weight: float
    """Probability of choosing it; those of a response sum to 1."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished episode: prompt and response tokens of all turns."""

    token_ids: np.ndarray
    """[s] int32."""
    loss_mask: np.ndarray
    """[s] bool: True where the policy chose the token."""
    rollout_logprobs: np.ndarray
    """[s] float32, 0 where the mask is False."""
    temperature: float
    finish_reason: FinishReason
    version_spans: tuple[tuple[int, int, int], ...]
    """(start, end, policy version) of every run of sampled tokens."""
    routed_experts: ArrayRef | None = None
    """[s, l, k]; rows without a route (at least the last) are False in `has_route`."""
    has_route: np.ndarray | None = None
    """[s] bool."""
    support: Support | None = None
    """[s] steps, empty ones outside the mask."""
    top_logprobs: TopLogprobs | None = None
    """[s] steps, ids -1 outside the mask."""
    response_text: str = ""
    status: TrajectoryStatus = "ok"
    error: str = ""
    """Why, where the status is not ok."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    """Raw value of every named reward."""
    reward: float = float("nan")
    """Weighted sum of the components: the task reward. NaN until scored, and for unscored trajectories."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the environment measured; the step's mean of each is `rollout/<name>`."""
    candidates: tuple[Candidate, ...] = ()
    """Answers to score in place of `response_text`, the reward being the weighted mean of theirs; none: the text."""

    @property
    def response_length(self) -> int:
        """Number of sampled tokens."""
        return int(self.loss_mask.sum())

    @property
    def is_scored(self) -> bool:
        """Whether there is a verdict on it; otherwise it is no sample."""
        return self.status == "ok" and bool(np.isfinite(self.reward))


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All episodes of one prompt."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """What is trained on: a trajectory's training fields and its credit."""

    sample_id: int
    """Position within the step."""
    group_id: int
    """Position of its group within the step."""
    prompt_id: str
    token_ids: np.ndarray
    """[s] int32."""
    loss_mask: np.ndarray
    """[s] bool, after sample filters (an overlong filter may have emptied it)."""
    rollout_logprobs: np.ndarray
    """[s] float32."""
    advantages: np.ndarray
    """[s] float32, 0 outside the mask."""
    reward: float
    """After shaping."""
    temperature: float
    routed_experts: ArrayRef | None = None
    has_route: np.ndarray | None = None
    support: Support | None = None
    top_logprobs: TopLogprobs | None = None
    components: np.ndarray | None = None
    """[c] float64: reward components as the credit rule saw them, NaN where the sample is in no statistic; what credit
    after the score pass is made of."""
    shaping: float = 0.0
    """Part of `reward` that is shaping."""
    response_length: int = 0
    """Sampled tokens, whatever the mask."""


@dataclass(frozen=True, slots=True)
class PackPlan:
    """Which sample goes where: plain integers, made from lengths alone, the same on every rank."""

    assignment: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    """[minibatches over all epochs][data-parallel rank][micro-batch] -> sample ids in packing order; none: a filler."""

    def minibatch_samples(self, minibatch: int) -> list[int]:
        """All samples of one minibatch, over ranks and micro-batches, in plan order."""
        return [s for rank in self.assignment[minibatch] for micro in rank for s in micro]


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """Each token's share of the objective over the whole minibatch, by term; [t] float32, often one tensor for all."""

    policy: Tensor
    kl: Tensor
    entropy: Tensor
    value: Tensor
    nll: Tensor

    @classmethod
    def shared(cls, weight: Tensor) -> TokenWeights:
        """One tensor for every term."""
        return cls(weight, weight, weight, weight, weight)


@dataclass(frozen=True, slots=True)
class PackedSupport:
    """`Support` of a whole micro-batch."""

    ids: Tensor
    """[m] int64."""
    offsets: Tensor
    """[t + 1] int64; empty where the whole vocabulary is meant."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Whole sequences packed flat, for one forward and backward. Tensors are on the training device."""

    sample_ids: tuple[int, ...]
    """[n], in packing order."""
    token_ids: Tensor
    """[t] int64."""
    position_ids: Tensor
    """[t] int64, 0 at each sequence's start."""
    cu_seqlens: Tensor
    """[n + 1] int32."""
    seq_ids: Tensor
    """[t] int64: which of the n sequences a token belongs to."""
    group_ids: Tensor
    """[n] int64."""
    rewards: Tensor
    """[n] float32."""
    mask: Tensor
    """[t] bool."""
    rollout_logprobs: Tensor
    """[t] float32."""
    advantages: Tensor
    """[t] float32."""
    temperature: Tensor
    """[t] float32."""
    weights: TokenWeights
    routes: Tensor | None = None
    """[t, l, k] uint8 or int16, as in `Sample`: experts of the rollout, row j the forward of token j (not shifted)."""
    has_route: Tensor | None = None
    """[t] bool."""
    support: PackedSupport | None = None
    rollout_top_ids: Tensor | None = None
    """[t, k] int64: the engine's likeliest tokens at each step; -1 where there is none."""
    rollout_top_logprobs: Tensor | None = None
    """[t, k] float32: what the engine gave them; -inf where there is none."""
    old_logprobs: Tensor | None = None
    """[t] float32, filled by the score pass."""
    ref_logprobs: Tensor | None = None
    """[t] float32, filled by the score pass."""
    teacher_logprobs: Tensor | None = None
    """[t] float32, filled by the score pass."""
    old_values: Tensor | None = None
    """[t] float32, filled by the critic; entry j speaks of the state before token j."""
    returns: Tensor | None = None
    """[t] float32: what the critic is trained toward, filled by the token credit; 0 outside the mask."""
    old_entropy: Tensor | None = None
    """[t] float32, filled by the score pass where it is needed."""
    old_top_logprobs: Tensor | None = None
    """[t, k] float32: what the policy gave `rollout_top_ids` at the score pass; filled where they are there."""
    old_routes: Tensor | None = None
    """[t, l, k] uint8 or int16: the router's own top-k at the score pass (not shifted), whatever was replayed."""
    old_router_logprobs: Tensor | None = None
    """[t, l, k] float32: log q_old on `old_routes`, or on the replayed set; not shifted; for the router shift alone."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Scalars of the whole minibatch that some term reads."""

    @property
    def num_tokens(self) -> int:
        """t."""
        return int(self.token_ids.shape[0])

    @property
    def num_seqs(self) -> int:
        """n."""
        return len(self.sample_ids)

    @property
    def is_filler(self) -> bool:
        """Holds no sequence; it is run, as ranks need equally many micro-batches, and is in no loss or statistic."""
        return not self.sample_ids


@dataclass(frozen=True, slots=True)
class StepBatch:
    """This rank's share of one step: `minibatches[i]` is one optimizer step, made of micro-batches."""

    minibatches: tuple[tuple[MicroBatch, ...], ...]
    num_score_minibatches: int
    """The first so many minibatches are the first epoch: together they hold every sample once."""
    policy_version: int
    num_samples: int
    num_tokens: int
    """Tokens of one epoch, prompts included, all ranks."""
    num_live_tokens: int
    """Tokens with mask True of one epoch, all ranks."""


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """A piece of a weight update, bounded in bytes."""

    version: int
    tensors: Sequence[tuple[str, Tensor]]
    """(Hugging Face name, tensor)."""
    is_last: bool
    checksum: str | None
    """Of this bucket's names, dtypes, shapes and bytes; None where it is read in the memory where it was made."""


@dataclass(frozen=True, slots=True)
class RouterStats:
    """What the routers of one pass saw, for metrics; live tokens only, index j speaks of the token predicted."""

    own_routes: Tensor
    """[t, l, k] int64: the router's own top-k, whatever was replayed."""
    log_probs: Tensor | None = None
    """[t, l, e] float32: log q over all experts; None where only the sets were kept."""


def join_sampled(batch: MicroBatch, top_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """[t, k + 1]: a policy's logprobs on the engine's likeliest tokens [t, k] and on the sampled token [t].

    -inf where there is no such token, and in the last column where the sampled one is among the k already.
    """
    assert batch.rollout_top_ids is not None
    top = top_logprobs.masked_fill(batch.rollout_top_ids < 0, -torch.inf)
    is_among = (batch.rollout_top_ids == batch.token_ids[:, None]).any(-1)
    return torch.cat([top, logprobs.masked_fill(is_among, -torch.inf)[:, None]], -1)
