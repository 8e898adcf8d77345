"""`/generate` on the wire: the request from token ids and `SamplingParams`, and its answer, read to the last number.

An answer is believed only where everything that it says twice agrees. What a server was asked for and left out is an
error at the first answer: SGLang ignores an unknown option without a word, and routers strip some.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from moerl.errors import RolloutError
from moerl.rollout.engine import RouteLayout
from moerl.rollout.sglang.answer_parts import asked_stops, check_stop_strings, read_spans, read_support, read_top
from moerl.rollout.sglang.faults import ServerError, shown
from moerl.rollout.sglang.routes import decode_routes
from moerl.types import FinishReason, SamplingParams, Support, TopLogprobs

MAX_MASK_TOKENS = 4096
"""SGLang's `--sampling-mask-max-tokens`: at most so many tokens in the running where top-p or top-k is on."""

_FINISH: dict[Any, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_HIGHEST_LOGPROB = 1e-3
"""Above 0 by rounding alone."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known of every answer of a run."""

    layout: RouteLayout | None = None
    """None: the model has no routes, or nobody asks for them."""
    vocab_size: int | None = None
    labels: Mapping[str, int] = field(default_factory=dict)
    """Policy version of labels that are no number, such as the one that a server was started with."""
    needs_spans: bool = False
    """Requests go on over updates: without `weight_versions` old tokens would count as the newest policy's."""


@dataclass(frozen=True, slots=True)
class WireRequest:
    """One request of one attempt."""

    rid: str
    """No rid may begin with another: a server aborts by prefix."""
    token_ids: np.ndarray
    """[p] int32."""
    params: SamplingParams
    routes_from: int | None = None
    """First row of routes to return, in 0..p; None: no routes."""
    data_rank: int | None = None
    """Rank of attention data parallelism that is to serve it."""

    @property
    def is_truncated(self) -> bool:
        """Whether top-p or top-k changes the distribution that is sampled."""
        return self.params.temperature > 0 and (self.params.top_p < 1 or self.params.top_k > 0)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request brought."""

    token_ids: np.ndarray
    """[s] int32."""
    logprobs: np.ndarray
    """[s] float32, of the distribution that was sampled."""
    finish_reason: FinishReason
    spans: tuple[tuple[int, int, int], ...]
    """(start, end, policy version), together [0, s)."""
    routes: np.ndarray | None
    """[p + s - 1 - routes_from, l, k]; None where none were asked for, or nothing ran."""
    true_from: int
    """First row (of the whole text) that the sampling policy made; newer weights recomputed those before it."""
    support: Support | None
    top_logprobs: TopLogprobs | None
    cached_tokens: int
    """Prompt tokens whose keys were there already."""
    num_retractions: int
    num_dropped: int
    """Tokens of an aborted request that are not in `token_ids` and are sampled anew: their logprobs or routes did not
    come, or a stop string may stand in them."""

    def settled(self, request: WireRequest) -> Answer:
        """An abort as it is to be gone on from. The forward that ends a request looks at no stop: the end token may be
        its last one, and of stop strings the next request sees its own tokens alone.
        """
        count, params = len(self.token_ids), request.params
        if self.finish_reason != "abort" or not count:
            return self
        if int(self.token_ids[-1]) in params.stop_token_ids:
            return replace(self, finish_reason="stop")
        return self._first(max(0, count - params.num_unsettled), request) if params.stop_strings else self

    def _first(self, count: int, request: WireRequest) -> Answer:
        """Of the first `count` tokens."""
        rows = len(request.token_ids) + count - 1
        support, top = self.support, self.top_logprobs
        return replace(
            self,
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[:count],
            spans=tuple((start, min(end, count), version) for start, end, version in self.spans if start < count),
            routes=None if self.routes is None else self.routes[: max(0, rows - (request.routes_from or 0))],
            true_from=min(self.true_from, rows),
            support=support and Support(support.ids[: support.offsets[count]], support.offsets[: count + 1]),
            top_logprobs=top and TopLogprobs(top.ids[:count], top.logprobs[:count]),
            num_dropped=self.num_dropped + len(self.token_ids) - count,
        )


def check_params(params: SamplingParams, prompt_length: int) -> None:
    """What no server is asked for.

    Raises:
        RolloutError: an empty prompt, no budget, or sampling whose logprobs SGLang cannot give.
    """
    if prompt_length < 1:
        raise RolloutError("the prompt has no tokens; check its row")
    if params.max_new_tokens < 1:
        raise RolloutError(f"max_new_tokens is {params.max_new_tokens}; a request needs room for at least 1 token")
    if not 0 <= params.routes_from <= prompt_length:
        raise RolloutError(
            f"routes_from is {params.routes_from}, but must be a row of the prompt's {prompt_length} tokens, or the "
            f"one after them"
        )
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise RolloutError(f"temperature is {params.temperature!r}, but must be 0 or a finite number above it")
    if params.temperature == 0:
        return
    if params.top_k > MAX_MASK_TOKENS:
        raise RolloutError(
            f"top_k is {params.top_k}, but SGLang tells the tokens in the running for at most {MAX_MASK_TOKENS}, and "
            "without them the logprob of what was sampled is not known; lower it, or set it to 0"
        )
    if params.top_logprobs and (params.top_p < 1 or params.top_k > 0):
        raise RolloutError(
            f"top_logprobs={params.top_logprobs} with top_p={params.top_p:g}, top_k={params.top_k}: SGLang's likeliest "
            "tokens are those before truncation, not those that were sampled from; set top_p=1 and top_k=0"
        )


def payload(request: WireRequest) -> dict[str, Any]:
    """The JSON body. Everything that changes what is sampled is said, so that no default of a server counts.

    Raises:
        RolloutError: see `check_params`.
    """
    params = request.params
    check_params(params, len(request.token_ids))
    greedy = params.temperature == 0
    top_k = params.top_k or (MAX_MASK_TOKENS if request.is_truncated else -1)
    sampling: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": 1.0 if greedy else params.top_p,
        "top_k": -1 if greedy else top_k,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "sampling_seed": params.seed,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if params.stop_token_ids:
        sampling["stop_token_ids"] = list(params.stop_token_ids)
    sampling |= asked_stops(params)
    body: dict[str, Any] = {
        "rid": request.rid,
        "input_ids": request.token_ids.tolist(),
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
    }
    if params.top_logprobs:
        body["top_logprobs_num"] = params.top_logprobs
    if request.is_truncated:
        body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
    if request.routes_from is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.routes_from}
    if request.data_rank is not None:
        body["routed_dp_rank"] = request.data_rank
    return body


def read_answer(answer: Any, request: WireRequest, expected: Expected, *, server: str = "") -> Answer:
    """Check everything and keep what belongs to tokens.

    Args:
        answer: parsed JSON.
        request: what was asked.
        expected: what is known of every answer.
        server: for messages.

    Raises:
        ServerError: kind `bad_answer`, with the request and what is wrong; `broken`, `busy` or `refused` where the
            server ended the request for a fault of its own, as the status in its finish reason says.
    """
    return _Reader(answer, request, expected, server).read()


class _Reader:
    """One answer. The finish reason is read first, since an abort excuses what else would be missing."""

    def __init__(self, answer: Any, request: WireRequest, expected: Expected, server: str) -> None:
        self._request = request
        self._expected = expected
        self._server = server
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        if not isinstance(meta, dict):
            self._bad(f"no meta_info in {shown(str(answer))[:120]}")
        self._answer: dict[str, Any] = answer
        self._meta: dict[str, Any] = meta
        self._finish: FinishReason = self._read_finish()

    def read(self) -> Answer:
        if self._meta.get("id") != self._request.rid:
            self._bad(f"the answer is that of request {shown(str(self._meta.get('id')))}")
        rank, wanted = self._meta.get("dp_rank"), self._request.data_rank
        if wanted is not None and rank not in (None, wanted):
            self._bad(f"it ran on data-parallel rank {shown(str(rank))}, but was sent to {wanted} (routed_dp_rank)")
        ids = self._read_ids()
        try:
            logprobs = self._read_logprobs(ids)
            routes = self._read_routes(len(ids))
        except ServerError:
            if self._finish != "abort" or not self._is_stripped():
                raise
            return self._without_tokens(len(ids))
        spans = read_spans(self._meta, len(ids), self._expected.labels, self._expected.needs_spans, self._bad)
        retractions = self._count("num_retractions")
        prompt = len(self._request.token_ids)
        is_recomputed = retractions > 0 and len(spans) > 1
        answer = Answer(
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=self._finish,
            spans=spans,
            routes=routes,
            true_from=prompt + max(start for start, _, _ in spans) - 1 if is_recomputed else 0,
            support=self._read_support(len(ids)),
            top_logprobs=self._read_top(len(ids)),
            cached_tokens=self._count("cached_tokens"),
            num_retractions=retractions,
            num_dropped=0,
        )
        return answer.settled(self._request)

    def _count(self, name: str) -> int:
        value = self._meta.get(name)
        if value is not None and (type(value) is not int or value < 0):
            self._bad(f"{name} is {shown(repr(value))}, but must be a number of 0 or more")
        return value or 0

    def _read_finish(self) -> FinishReason:
        reason = self._meta.get("finish_reason")
        kind = _FINISH.get(reason.get("type")) if isinstance(reason, dict) else None
        if not isinstance(reason, dict) or kind is None:
            self._bad(f"finish_reason is {shown(str(reason))}, but must be of type stop, length or abort")
        status = reason.get("status_code")
        if kind == "abort" and isinstance(status, int) and status >= 400:
            fault = "refused" if status < 500 and status != 429 else "busy" if status in (429, 503) else "broken"
            words = shown(str(reason.get("message")))
            raise ServerError(
                fault,
                self._server,
                "/generate",
                f"request {self._request.rid} was ended with status {status}: {words}",
                "see the server's log",
            )
        return kind

    def _read_ids(self) -> np.ndarray:
        values = self._answer.get("output_ids")
        if not isinstance(values, list) or not set(map(type, values)) <= {int}:
            self._bad("output_ids is no list of token ids")
        params, count = self._request.params, len(values)
        if count == 0 and self._finish != "abort":
            self._bad(f"no tokens, although it ended by {self._finish}")
        if count > params.max_new_tokens:
            self._bad(f"{count} tokens, although max_new_tokens is {params.max_new_tokens}: the server ignored it")
        said = self._meta.get("completion_tokens", count if self._finish == "abort" else None)
        if said != count:
            self._bad(f"completion_tokens is {said}, but output_ids holds {count}")
        prompt = self._meta.get("prompt_tokens", len(self._request.token_ids) if self._finish == "abort" else None)
        if prompt != len(self._request.token_ids):
            self._bad(
                f"prompt_tokens is {prompt}, but {len(self._request.token_ids)} were sent: the prompt was changed"
            )
        if count and not 0 <= min(values) <= max(values) < (self._expected.vocab_size or 1 << 31):
            self._bad(f"output_ids holds ids from {min(values)} to {max(values)}, beyond the vocabulary")
        self._check_stop(values)
        return np.array(values, dtype=np.int32)

    def _check_stop(self, values: list[int]) -> None:
        stops = self._request.params.stop_token_ids
        if stops and not set(stops).isdisjoint(values[:-1]):
            early = next(value for value in values if value in stops)
            self._bad(f"stop token {early} stands before the end: the server ignored stop_token_ids")
        matched = self._meta["finish_reason"].get("matched")
        if self._finish == "stop" and type(matched) is int and values[-1] != matched:
            self._bad(f"it stopped at token {matched}, but the last of output_ids is {values[-1]}")
        check_stop_strings(self._answer, self._finish, self._request.params, self._bad)

    def _read_logprobs(self, ids: np.ndarray) -> np.ndarray:
        triples = self._meta.get("output_token_logprobs")
        if triples is None and len(ids):
            self._bad("no output_token_logprobs: the server or a router before it ignored return_logprob")
        triples = triples or []
        is_list = isinstance(triples, list) and set(map(type, triples)) <= {list}
        if not is_list or min(map(len, triples), default=2) < 2:
            self._bad("output_token_logprobs is no list of [logprob, token id, text]")
        if len(triples) != len(ids):
            self._bad(f"{len(triples)} logprobs for {len(ids)} tokens")
        values, named, *_ = map(list, zip(*triples, strict=False)) if triples else ([], [])
        if named != self._answer["output_ids"]:
            place = next(i for i, (a, b) in enumerate(zip(named, ids.tolist(), strict=True)) if a != b)
            self._bad(
                f"token {place} is {ids[place]} in output_ids and {named[place]} in output_token_logprobs: ids were "
                "changed on the way"
            )
        if self._request.is_truncated:
            values = self._meta.get("output_token_sampling_logprobs")
            if not isinstance(values, list) or len(values) != len(ids):
                self._bad(
                    "no output_token_sampling_logprobs of every token: the server ignored return_sampling_mask, and "
                    "without it the logprob of what top-p and top-k sampled is not known; set top_p=1 and top_k=0"
                )
        return self._finite(values)

    def _finite(self, values: list[Any]) -> np.ndarray:
        """[s] float32 of numbers that are log-probabilities."""
        try:
            found = np.array(values, dtype=np.float64)
        except (TypeError, ValueError):
            found = np.array([value if isinstance(value, float | int) else math.nan for value in values])
        highest = found.max(initial=-math.inf)
        if not (highest <= 0 and found.min(initial=0.0) > -math.inf):  # NaN is neither
            right = np.isfinite(found) & (found <= _HIGHEST_LOGPROB)
            if not right.all():
                place = int(right.argmin())
                self._bad(f"logprob {place} is {values[place]!r}, but each must be a finite number of at most 0")
            found = np.minimum(found, 0.0)
        return found.astype(np.float32)

    def _read_routes(self, count: int) -> np.ndarray | None:
        start, layout = self._request.routes_from, self._expected.layout
        if start is None or layout is None:
            return None
        rows = len(self._request.token_ids) + count - 1 - start
        text = self._meta.get("routed_experts")
        if text is None:
            if count == 0:
                return None
            self._bad(
                "no routed_experts: start the server with --enable-return-routed-experts, and put no router before it "
                "(they strip return_routed_experts)"
            )
        try:
            return decode_routes(text, layout, rows=rows, start=start)
        except RolloutError as error:
            self._bad(str(error))

    def _read_support(self, count: int) -> Support | None:
        if not self._request.is_truncated:
            return None
        return read_support(self._meta, self._answer["output_ids"], count, self._bad)

    def _read_top(self, count: int) -> TopLogprobs | None:
        wanted = self._request.params.top_logprobs
        return read_top(self._meta, count, wanted, self._bad) if wanted else None

    def _is_stripped(self) -> bool:
        """Whether logprobs or routes are absent or fewer, as of a request that was aborted in the queue."""
        ids, triples = self._answer["output_ids"], self._meta.get("output_token_logprobs")
        if not isinstance(triples, list) or len(triples) < len(ids):
            return True
        if self._request.is_truncated and not isinstance(self._meta.get("output_token_sampling_logprobs"), list):
            return True
        return self._request.routes_from is not None and self._meta.get("routed_experts") is None

    def _without_tokens(self, count: int) -> Answer:
        """Of an abort whose parts do not go together: the tokens are sampled anew, by whoever resumes."""
        nothing = np.zeros(0, dtype=np.float32)
        return Answer(nothing.astype(np.int32), nothing, "abort", (), None, 0, None, None, 0, 0, count)

    def _bad(self, what: str) -> NoReturn:
        raise ServerError(
            "bad_answer",
            self._server,
            "/generate",
            f"request {self._request.rid}: {what}",
            "it is not trained on; check the server's version and what stands between it and here",
        )
