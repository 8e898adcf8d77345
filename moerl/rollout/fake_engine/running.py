"""One request on a fake server: what it has sampled by which weights, by the clock and not by a tick per token."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moerl.rollout.fake_engine.model import FakeModel
from moerl.rollout.sglang.routes import encode_routes


@dataclass(eq=False)
class Running:
    """A live request. `settle(now)` brings its tokens up to date before anything changes."""

    rid: str
    prompt: list[int]
    body: dict[str, Any]
    model: FakeModel
    label: str
    data_rank: int
    cached_tokens: int = 0
    cached_label: str = ""
    """Weights that made the cached prefix."""
    started: float | None = None
    """None while it waits in the queue or the server is paused."""
    is_admitted: bool = False
    is_aborted: bool = False
    ends_on_resume: bool = False
    """It was aborted while it is held in its place."""
    num_retractions: int = 0
    created: float = field(default_factory=time.monotonic)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        cfg, sampling = self.model.cfg, self.body["sampling_params"]
        self.key = self.model.key(int(sampling.get("sampling_seed") or 0), len(self.prompt))
        room = max(cfg.context_length - len(self.prompt), 0)
        budget = sampling.get("max_new_tokens")
        budget = min(128 if budget is None else budget, room)
        end = self.model.answer_length(self.key, len(self.prompt))
        self.ends_itself = end <= budget and not sampling.get("ignore_eos")
        self.target = end if self.ends_itself else budget
        stops = sampling.get("stop") or []
        self.stops: list[str] = [stops] if isinstance(stops, str) else stops
        self._foreseen: tuple[str, int, str] | None = None
        """A label, and what `_stop` found by it."""
        self.spans: list[list[Any]] = []
        """[label, start, end] over output tokens."""
        self.row_labels: list[list[Any]] = [[self.cached_label, self.cached_tokens]] if self.cached_tokens else []
        """[label, row after its last], in order: by which weights each row was computed."""
        self.to_prefill = float(len(self.prompt) - self.cached_tokens)
        self.partial = 0.0
        self.rows_sent = 0
        """Of routes."""

    @property
    def count(self) -> int:
        """Tokens so far."""
        return self.spans[-1][2] if self.spans else 0

    @property
    def is_done(self) -> bool:
        """Nothing is left to sample."""
        return self.is_aborted or self.count >= self._stop()[0]

    def seconds_left(self) -> float:
        """Until it is done, if nothing changes."""
        cfg = self.model.cfg
        tokens = self._stop()[0] - self.count - self.partial
        return self.to_prefill * cfg.prefill_token_seconds + tokens * cfg.token_seconds

    def settle(self, now: float) -> None:
        """Sample what the time since the last call was enough for."""
        if self.started is None:
            return
        cfg = self.model.cfg
        spent, self.started = now - self.started, now
        if self.to_prefill:
            needed = self.to_prefill * cfg.prefill_token_seconds
            if spent < needed:
                self.to_prefill -= spent / cfg.prefill_token_seconds
                return
            spent, self.to_prefill = spent - needed, 0.0
            self._compute_rows(len(self.prompt) + self.count)
        left = self._stop()[0] - self.count
        if cfg.token_seconds:
            progress = self.partial + spent / cfg.token_seconds + 1e-9
            made = min(int(progress), left)
            self.partial = progress - made
        else:
            made = left
        if made:
            self._sample(made)

    def retract(self) -> None:
        """Its keys are forgotten; everything is computed again, by the weights of then."""
        if self.is_admitted:
            self.num_retractions += 1
            self.row_labels.clear()
            self.to_prefill = float(len(self.prompt) + self.count)

    def _stop(self) -> tuple[int, str]:
        """Tokens at the end, by the weights of now, and the stop string that those complete; "" where none does."""
        if not self.stops:
            return self.target, ""
        if self._foreseen is None or self._foreseen[0] != self.label:
            self._foreseen = (self.label, *self._first_stop())
        return self._foreseen[1:]

    def _first_stop(self) -> tuple[int, str]:
        text = ""
        longest = max(map(len, self.stops))
        for place, token in enumerate(self._sampled([*self.spans, [self.label, self.count, self.target]])[0]):
            added = self.model.text([token])
            text += added
            for stop in self.stops:
                if stop in text[-len(added) - longest :]:
                    return place + 1, stop
        return self.target, ""

    def _sample(self, made: int) -> None:
        start = self.count
        if self.spans and self.spans[-1][0] == self.label:
            self.spans[-1][2] += made
        else:
            self.spans.append([self.label, start, start + made])
        self._compute_rows(len(self.prompt) + self.count - 1)

    def _compute_rows(self, end: int) -> None:
        if self.row_labels and self.row_labels[-1][0] == self.label:
            self.row_labels[-1][1] = max(end, self.row_labels[-1][1])
        elif not self.row_labels or end > self.row_labels[-1][1]:
            self.row_labels.append([self.label, end])

    def answer(self, weight_version: str) -> dict[str, Any]:
        """What `/generate` says of it."""
        meta: dict[str, Any] = {"id": self.rid, "finish_reason": self._finish()}
        meta |= {"weight_version": weight_version, "e2e_latency": time.monotonic() - self.created}
        if self.is_aborted and not self.is_admitted:
            meta["completion_tokens"] = 0
            if self.body.get("return_logprob"):
                meta |= {"input_token_logprobs": [], "output_token_logprobs": []}
            return {"text": "", "output_ids": [], "meta_info": meta}
        ids, logprobs = self._sampled(self.spans)
        meta |= {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": len(ids),
            "cached_tokens": self.cached_tokens,
            "cached_tokens_details": None,
            "reasoning_tokens": 0,
            "dp_rank": self.data_rank if self.model.cfg.data_size > 1 else None,
            "num_retractions": self.num_retractions,
            "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in self.spans],
        }
        if self.spans:
            meta["weight_version"] = self.spans[-1][0]
        self._add_logprobs(meta, ids, logprobs)
        if self.body.get("return_routed_experts") and self.model.cfg.returns_routes:
            meta["routed_experts"] = encode_routes(self._routes(ids))
        return {"text": self._text(ids), "output_ids": ids, "meta_info": meta}

    def _text(self, ids: list[int]) -> str:
        """Up to the stop string that ended it."""
        text, stop = self.model.text(ids), "" if self.is_aborted else self._stop()[1]
        if not stop:
            return text
        place = text.index(stop)
        return text[: place + len(stop)] if self.body["sampling_params"].get("no_stop_trim") else text[:place]

    def _finish(self) -> dict[str, Any]:
        if self.is_aborted:
            words = "Aborted" if self.is_admitted else "Abort in waiting queue"
            return {"type": "abort", "message": words}
        if stop := self._stop()[1]:
            return {"type": "stop", "matched": stop}
        if self.ends_itself:
            return {"type": "stop", "matched": self._end_token()}
        return {"type": "length", "length": self.target}

    def _end_token(self) -> int:
        stops = self.body["sampling_params"].get("stop_token_ids")
        return stops[0] if stops else self.model.cfg.eos_token_id

    def _sampled(self, spans: list[list[Any]]) -> tuple[list[int], list[float]]:
        ids, logprobs = [], []
        for label, start, end in spans:
            drawn, likely = self.model.tokens(label, self.key, len(self.prompt) + start, end - start)
            ids += drawn.tolist()
            logprobs += likely.tolist()
        stops: set[int] = set(self.body["sampling_params"].get("stop_token_ids") or ())
        if stops:  # a drawn token must not end the answer before its time
            ids = [self._harmless(token, stops) for token in ids]
        if self.ends_itself and len(ids) == self.target and not self.is_aborted:
            ids[-1] = self._end_token()
        return ids, logprobs

    def _harmless(self, token: int, stops: set[int]) -> int:
        vocab = self.model.cfg.vocab_size
        while token in stops or token == self.model.cfg.eos_token_id:
            token = (token + 1) % vocab
        return token

    def _add_logprobs(self, meta: dict[str, Any], ids: list[int], logprobs: list[float]) -> None:
        body = self.body
        if not body.get("return_logprob"):
            return
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [[value, token, None] for value, token in zip(logprobs, ids, strict=True)]
        meta["output_token_logprobs_length"] = len(ids)
        if wanted := body.get("top_logprobs_num"):
            vocab = self.model.cfg.vocab_size
            meta["input_top_logprobs"] = []
            meta["output_top_logprobs"] = [
                [[value - rank, (token + rank) % vocab, None] for rank in range(wanted)]
                for value, token in zip(logprobs, ids, strict=True)
            ]
        if body.get("return_sampling_mask"):
            vocab = self.model.cfg.vocab_size
            meta["output_token_sampling_mask"] = [[token, (token + 1) % vocab] for token in ids]
            meta["output_token_sampling_logprobs"] = [value / 2 for value in logprobs]

    def _routes(self, ids: list[int]) -> np.ndarray:
        text = np.array([*self.prompt, *ids], dtype=np.int64)
        start = int(self.body.get("routed_experts_start_len") or 0)
        parts, done = [], 0
        for label, end in self.row_labels:
            parts.append(self.model.routes(label, text[done:end], done))
            done = max(done, end)
        rows = np.concatenate(parts) if parts else self.model.routes(self.label, text[:0], 0)
        found = rows[start : len(text) - 1]
        self.rows_sent = len(found)
        return found
