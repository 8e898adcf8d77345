"""A completion of several requests: aborted ones are continued with their own tokens and the budget that is left."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from moerl.errors import RolloutError
from moerl.rollout.engine import RouteLayout
from moerl.rollout.sglang.routes import join_routes
from moerl.rollout.sglang.wire import Answer, WireRequest
from moerl.types import Completion, FinishReason, LocalArray, SamplingParams, Support, TopLogprobs


@dataclass
class Partial:
    """What a request has so far. Ids, logprobs, spans and routes always belong to the same tokens."""

    prompt: np.ndarray
    """[p] int32."""
    params: SamplingParams
    layout: RouteLayout | None = None
    """None: no routes are asked for."""
    context_length: int | None = None
    """Tokens of prompt and answer that the server can hold; None: not known."""
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_tokens = 0
        room = self.params.max_new_tokens
        if self.context_length is not None:
            room = min(room, self.context_length - len(self.prompt))
        self.budget = room
        """Tokens that may be sampled in all; 0 or less: the prompt fills the context, and nothing may be asked."""

    @property
    def left(self) -> int:
        """Tokens that may still be sampled."""
        return self.budget - self.num_tokens

    def request(self, rid: str, data_rank: int | None) -> WireRequest:
        """The next request: all tokens so far, the rest of the budget, the routes that are missing.

        Raises:
            RolloutError: no budget is left.
        """
        if self.left < 1:
            raise RolloutError(f"{self.num_tokens} of {self.budget} tokens are there; nothing is left to ask for")
        params = self.params
        if self.num_tokens or params.max_new_tokens != self.left:
            params = replace(params, max_new_tokens=self.left, seed=(params.seed + self.num_tokens) % 2**63)
        return WireRequest(rid, self._text(), params, None if self.layout is None else self._num_routed(), data_rank)

    def add(self, answer: Answer) -> None:
        """What a request brought; nothing where it was aborted before its first token."""
        if len(answer.token_ids):
            self.answers.append(answer)
            self.num_tokens += len(answer.token_ids)

    def completion(self, finish_reason: FinishReason, version: int) -> Completion:
        """All of it as one; `version` where no token was sampled."""
        if len(self.answers) == 1:
            return self._of_one(self.answers[0], finish_reason)
        spans = self._spans()
        return Completion(
            token_ids=self._joined([a.token_ids for a in self.answers], np.int32),
            logprobs=self._joined([a.logprobs for a in self.answers], np.float32),
            finish_reason=finish_reason,
            policy_version=spans[-1][2] if spans else version,
            routed_experts=self._routes(),
            support=self._support(),
            top_logprobs=self._top(),
            version_spans=spans,
            first_true_route=max((a.true_from for a in self.answers), default=0),
            routes_from=self.params.routes_from if self.layout is not None and self.answers else 0,
        )

    def _of_one(self, answer: Answer, finish_reason: FinishReason) -> Completion:
        """The same where one request brought everything, as most do."""
        return Completion(
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            finish_reason=finish_reason,
            policy_version=answer.spans[-1][2],
            routed_experts=self._routes(),
            support=answer.support,
            top_logprobs=answer.top_logprobs,
            version_spans=answer.spans,
            first_true_route=answer.true_from,
            routes_from=self.params.routes_from if self.layout is not None else 0,
        )

    def _text(self) -> np.ndarray:
        if not self.answers:
            return self.prompt
        return np.concatenate([self.prompt, *(a.token_ids for a in self.answers)]).astype(np.int32)

    def _num_routed(self) -> int:
        """Rows that are here or with who asks: those of all tokens but the last, once anything ran."""
        return len(self.prompt) + self.num_tokens - 1 if self.num_tokens else self.params.routes_from

    def _spans(self) -> tuple[tuple[int, int, int], ...]:
        spans: list[tuple[int, int, int]] = []
        done = 0
        for answer in self.answers:
            for start, end, version in answer.spans:
                if spans and spans[-1][2] == version:
                    spans[-1] = (spans[-1][0], done + end, version)
                else:
                    spans.append((done + start, done + end, version))
            done += len(answer.token_ids)
        return tuple(spans)

    def _routes(self) -> LocalArray | None:
        if self.layout is None or not self.answers:
            return None
        pieces, done = [], 0
        for answer in self.answers:
            if answer.routes is None:
                raise RolloutError("an answer with tokens came without routes")
            start = len(self.prompt) + done - 1 if done else self.params.routes_from
            pieces.append((start, answer.routes))
            done += len(answer.token_ids)
        return LocalArray(pieces[0][1] if len(pieces) == 1 else join_routes(pieces))

    def _support(self) -> Support | None:
        parts = [a.support for a in self.answers]
        if not parts or any(part is None for part in parts):
            return None
        known = [part for part in parts if part is not None]
        sizes = np.concatenate([np.diff(part.offsets) for part in known])
        offsets = np.concatenate([[0], sizes.cumsum()]).astype(np.int64)
        return Support(np.concatenate([part.ids for part in known]), offsets)

    def _top(self) -> TopLogprobs | None:
        known = [a.top_logprobs for a in self.answers if a.top_logprobs is not None]
        if not known:
            return None
        return TopLogprobs(np.concatenate([one.ids for one in known]), np.concatenate([one.logprobs for one in known]))

    def _joined(self, parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype=dtype)
