"""An episode being played: takes an engine's completions, checks each against the protocol, becomes a `Trajectory`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moerl.errors import RolloutError
from moerl.types import (
    ArrayRef,
    Completion,
    FinishReason,
    SamplingParams,
    Support,
    TopLogprobs,
    Trajectory,
    TrajectoryStatus,
)


@dataclass(frozen=True, slots=True)
class JoinedRoutes:
    """An `ArrayRef`: row ranges of several others, then rows of zeros up to `length`; opened only where it is read."""

    parts: tuple[tuple[ArrayRef, int, int], ...]
    """(array, first row, row after the last)."""
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        """[length, l, k]."""
        return (self.length, *self.parts[0][0].shape[1:])

    def open(self) -> np.ndarray:
        """The rows, copied."""
        opened = [ref.open()[start:end] for ref, start, end in self.parts]
        joined = np.zeros(self.shape, dtype=opened[0].dtype)
        rows = np.concatenate(opened)
        joined[: len(rows)] = rows
        return joined


class Episode:
    """Prompt, sampled tokens and what was put between turns, so far. A completion continues the whole of `token_ids`.

    Sampled ids are kept as they came: nothing is decoded and encoded again. Tokens of `add_context` are in no loss and
    have logprob 0; their routes, and that of the last sampled token before them, come with the next completion, which
    is asked for rows from `num_routed` on.
    """

    def __init__(self, prompt_ids: np.ndarray, *, temperature: float, wants_routes: bool) -> None:
        self.token_ids = np.asarray(prompt_ids, dtype=np.int32)
        """[s], all of the episode."""
        self._prompt_length = len(self.token_ids)
        self._temperature = temperature
        self._wants_routes = wants_routes
        self._logprobs = [np.zeros(self._prompt_length, dtype=np.float32)]
        self._mask = [np.zeros(self._prompt_length, dtype=bool)]
        self._spans: list[tuple[int, int, int]] = []
        self._route_parts: list[tuple[ArrayRef, int, int]] = []
        self._num_routed = 0
        self._recomputed: list[tuple[int, int]] = []
        """Rows that newer weights made again: not those of the policy that sampled."""
        self._has_all_routes = wants_routes
        self._support_sizes = [np.zeros(self._prompt_length, dtype=np.int64)]
        self._support_ids: list[np.ndarray] = []
        self._top: list[TopLogprobs] = []

    @property
    def num_added(self) -> int:
        """Tokens after the prompt, sampled or not."""
        return len(self.token_ids) - self._prompt_length

    @property
    def num_routed(self) -> int:
        """Rows of routes that are here: of all tokens up to the last one that was sampled, without it."""
        return self._num_routed

    def add_context(self, token_ids: np.ndarray) -> None:
        """Append tokens [s] that the policy did not choose, such as what a tool answered."""
        tokens = np.asarray(token_ids, dtype=np.int32)
        self.token_ids = np.concatenate([self.token_ids, tokens])
        self._mask.append(np.zeros(len(tokens), dtype=bool))
        self._logprobs.append(np.zeros(len(tokens), dtype=np.float32))
        self._support_sizes.append(np.zeros(len(tokens), dtype=np.int64))
        if self._top:
            self._top.append(_no_top(len(tokens), self._top[0].ids.shape[1]))

    def add(self, completion: Completion, params: SamplingParams, request_id: str) -> None:
        """Append what the engine answered to `params`.

        Raises:
            RolloutError: no tokens (unless aborted), more than asked for, or another number of logprobs, top logprobs,
                support steps or route rows than the tokens make; names the request.
        """
        tokens = np.asarray(completion.token_ids, dtype=np.int32)
        count, before = len(tokens), len(self.token_ids)
        if count == 0 and completion.finish_reason != "abort":
            raise RolloutError(f"request {request_id}: the engine answered with no tokens ({completion.finish_reason})")
        if count > params.max_new_tokens:
            raise RolloutError(
                f"request {request_id}: {count} tokens came, {params.max_new_tokens} at most were asked for"
            )
        if completion.logprobs.shape != (count,):
            raise RolloutError(
                f"request {request_id}: logprobs of shape {completion.logprobs.shape} for {count} tokens; "
                "the engine must return one per sampled token"
            )
        self._add_routes(completion, before, count, request_id)
        self._add_support(completion.support, count, request_id)
        if params.top_logprobs and (count or completion.top_logprobs is not None):
            self._add_top(completion.top_logprobs, (count, params.top_logprobs), request_id)
        self.token_ids = np.concatenate([self.token_ids, tokens])
        self._logprobs.append(np.asarray(completion.logprobs, dtype=np.float32))
        self._mask.append(np.ones(count, dtype=bool))
        if count:
            self._add_spans(completion, before, count, request_id)

    def finish(
        self,
        *,
        text: str,
        finish_reason: FinishReason,
        status: TrajectoryStatus = "ok",
        error: str = "",
        metrics: Mapping[str, float] | None = None,
    ) -> Trajectory:
        """The trajectory, not scored."""
        length = len(self.token_ids)
        routes, has_route = None, None
        if self._has_all_routes and self._route_parts:
            routes = JoinedRoutes(tuple(self._route_parts), length)
            has_route = np.arange(length) < self._num_routed
            for start, end in self._recomputed:
                has_route[start:end] = False
        support = None
        if self._support_ids:
            offsets = np.concatenate([[0], np.concatenate(self._support_sizes).cumsum()]).astype(np.int64)
            support = Support(np.concatenate(self._support_ids).astype(np.int32), offsets)
        return Trajectory(
            token_ids=self.token_ids,
            loss_mask=np.concatenate(self._mask),
            rollout_logprobs=np.concatenate(self._logprobs),
            temperature=self._temperature,
            finish_reason=finish_reason,
            version_spans=tuple(self._spans),
            routed_experts=routes,
            has_route=has_route,
            support=support,
            top_logprobs=self._joined_top(),
            response_text=text,
            status=status,
            error=error,
            metrics=dict(metrics or {}),
        )

    def _add_routes(self, completion: Completion, before: int, count: int, request_id: str) -> None:
        """The last sampled token never runs, so `before + count - 1` rows; rows that are here already stay."""
        if not self._wants_routes or completion.routed_experts is None:
            self._has_all_routes = self._has_all_routes and count == 0
            return
        end, start = before + count - 1, completion.routes_from
        found = completion.routed_experts.shape
        if len(found) != 3 or found[0] != end - start:
            from_row = f" from row {start}" if start else ""
            raise RolloutError(
                f"request {request_id}: routes of shape {found}{from_row}; {before} tokens in and {count} out make "
                f"{end - start} rows [rows, layers, experts per token], since the last token is never run"
            )
        if not 0 <= start <= self._num_routed:
            raise RolloutError(
                f"request {request_id}: routes begin at row {start}, but rows from {self._num_routed} on were asked "
                "for; the engine must return every row that is missing"
            )
        self._route_parts.append((completion.routed_experts, self._num_routed - start, end - start))
        if completion.first_true_route > self._num_routed:
            self._recomputed.append((self._num_routed, completion.first_true_route))
        self._num_routed = max(self._num_routed, end)

    def _add_support(self, support: Support | None, count: int, request_id: str) -> None:
        if support is None:
            self._support_sizes.append(np.zeros(count, dtype=np.int64))
            return
        if len(support.offsets) != count + 1 or support.offsets[-1] != len(support.ids):
            raise RolloutError(
                f"request {request_id}: support offsets of length {len(support.offsets)} ending in "
                f"{support.offsets[-1:]} for {count} tokens and {len(support.ids)} ids"
            )
        self._support_sizes.append(np.diff(support.offsets))
        self._support_ids.append(support.ids)

    def _add_top(self, top: TopLogprobs | None, expected: tuple[int, int], request_id: str) -> None:
        found = None if top is None else (top.ids.shape, top.logprobs.shape)
        if top is None or found != (expected, expected):
            raise RolloutError(
                f"request {request_id}: top logprobs of shape {found} for {expected[0]} tokens and "
                f"{expected[1]} asked for; the engine must return [tokens, asked for] ids and logprobs"
            )
        self._top.append(top)

    def _joined_top(self) -> TopLogprobs | None:
        if not self._top:
            return None
        parts = [_no_top(self._prompt_length, self._top[0].ids.shape[1]), *self._top]
        ids = np.concatenate([one.ids for one in parts]).astype(np.int32)
        return TopLogprobs(ids, np.concatenate([one.logprobs for one in parts]).astype(np.float32))

    def _add_spans(self, completion: Completion, before: int, count: int, request_id: str) -> None:
        spans = completion.version_spans or ((0, count, completion.policy_version),)
        ends = [0, *(end for _, end, _ in spans)]
        if ends[-1] != count or any(start != end for (start, _, _), end in zip(spans, ends, strict=False)):
            raise RolloutError(f"request {request_id}: version spans {spans} do not cover its {count} tokens")
        for start, end, version in spans:
            self._add_span(before + start, before + end, version)

    def _add_span(self, start: int, end: int, version: int) -> None:
        if self._spans and self._spans[-1][1:] == (start, version):
            start = self._spans.pop()[0]
        self._spans.append((start, end, version))


def _no_top(count: int, k: int) -> TopLogprobs:
    """Of tokens that nobody sampled."""
    return TopLogprobs(np.full((count, k), -1, dtype=np.int32), np.full((count, k), -np.inf, dtype=np.float32))
