"""Batched sampling on the reference model: the heart of the `local` rollout engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moerl.errors import CheckpointError, RolloutError
from moerl.reference.config import ReferenceConfig
from moerl.reference.decoder import Decoder, DecoderWeights, KVCache
from moerl.reference.draw import DrawRules, draw, has_limits, likeliest, uniforms_of
from moerl.reference.loading import check_weights, read_weights
from moerl.reference.precision import check_precision
from moerl.types import FinishReason, SamplingParams, Support, TopLogprobs

COMPACT_BELOW = 0.8
"""Finished rows are dropped from the batch once fewer than this share is live (a copy of the cache each time)."""
MAX_PREFILL_TOKENS = 32768
"""Prompt tokens that one prefill takes."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One completion, without the prompt."""

    token_ids: np.ndarray
    """[s] int32, the stop token included."""
    logprobs: np.ndarray
    """[s] float32 of the distribution that was sampled; 0 for greedy (a point mass)."""
    finish_reason: FinishReason
    routes: np.ndarray | None
    """[p + s - 1, l, k] uint8, int16 above 256 experts; None where not asked for."""
    support: Support | None
    """[s] steps; None where top-p and top-k are off."""
    top_logprobs: TopLogprobs | None
    """[s] steps; None where none were asked for."""


class Sampler:
    """Draws completions.

    Promise: the same weights, prompts and parameters in the same order give the same result, bit for bit. A request in
    another batch keeps its random numbers, and its logits up to the last bits of float32 (where `decoder` measured, all
    of them): a token changes only where a draw or a router's top-k falls within that rounding of a border.
    """

    def __init__(
        self,
        model: str | Path | ReferenceConfig,
        *,
        precision: str = "fp32",
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """Loads the weights of a folder; a config alone needs `load_weights` before it can generate.

        Args:
            model: Hugging Face folder, or config.
            precision: one of `precision.PRECISIONS`; all but fp32 make the engine disagree with the learner on purpose.
            decode: token ids to text; only stop strings need it.
        """
        check_precision(precision)
        self.cfg = model if isinstance(model, ReferenceConfig) else ReferenceConfig.from_folder(model)
        self._precision = precision
        self._decode = decode
        self._decoder: Decoder | None = None
        if not isinstance(model, ReferenceConfig):
            self.load_weights(read_weights(model))

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take a whole new set under Hugging Face names; the old one serves until the new one is built and checked.

        Raises:
            CheckpointError: a name missing, unknown or twice, or a tensor of another shape; the old weights stay.
        """
        given: dict[str, Tensor] = {}
        for name, tensor in weights:
            if name in given:
                raise CheckpointError(f"{name}: came twice in one set of weights")
            given[name] = tensor
        check_weights(self.cfg, given)
        self._decoder = Decoder(self.cfg, DecoderWeights.build(self.cfg, given, self._precision))

    def check_request(self, prompt: np.ndarray, params: SamplingParams) -> None:
        """Refuse what cannot be sampled.

        Raises:
            RolloutError: names the field, the value and what is allowed.
        """
        ids = np.asarray(prompt)
        if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
            raise RolloutError(f"prompt of shape {ids.shape} and dtype {ids.dtype}: it must be one or more integer ids")
        if ids.min() < 0 or ids.max() >= self.cfg.vocab_size:
            raise RolloutError(
                f"prompt ids reach from {ids.min()} to {ids.max()}; allowed: 0 to {self.cfg.vocab_size - 1}"
            )
        checks = (
            ("max_new_tokens", params.max_new_tokens >= 1, "1 or more"),
            ("temperature", 0 <= params.temperature < float("inf"), "0 (greedy) or a positive number"),
            ("top_p", 0 < params.top_p <= 1, "above 0, up to 1"),
            ("top_k", params.top_k >= 0, "0 (off) or more"),
            ("top_logprobs", params.top_logprobs >= 0, "0 (none) or more"),
            ("seed", 0 <= params.seed < 2**128, "0 to 2**128 - 1"),
        )
        for field, fine, allowed in checks:
            if not fine:
                raise RolloutError(f"{field}={getattr(params, field)} cannot be sampled with; allowed: {allowed}")
        if params.stop_strings and self._decode is None:
            raise RolloutError(f"stop_strings={params.stop_strings} need a tokenizer; pass decode= to the sampler")
        if "" in params.stop_strings:
            raise RolloutError("stop_strings holds an empty string, which every text ends with; remove it")

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[np.ndarray],
        params: Sequence[SamplingParams],
        should_abort: Callable[[], bool] | None = None,
    ) -> list[SampledTokens]:
        """One completion per prompt, in order.

        Args:
            prompts: [p] integer arrays; equal prompts are run once and share the work.
            params: of each prompt.
            should_abort: asked between tokens, from the first on; True ends what is not finished with `abort`.

        Raises:
            RolloutError: no weights yet, a request that cannot be sampled, or logits that are not finite.
        """
        if self._decoder is None:
            raise RolloutError("the sampler has no weights yet; publish some before generating")
        for prompt, one in zip(prompts, params, strict=True):
            self.check_request(prompt, one)
        if not prompts:
            return []
        return _Batch(self._decoder, prompts, params, self._decode).run(should_abort or _never)


_NO_IDS = np.zeros(0, dtype=np.int64)


class _Row:
    """What one request has got so far."""

    def __init__(self, params: SamplingParams, prompt_length: int, vocab_size: int) -> None:
        self.params = params
        self.prompt_length = prompt_length
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.support: list[np.ndarray] | None = [] if has_limits(params, vocab_size) else None
        self.top: list[tuple[np.ndarray, np.ndarray]] = []
        self.finish: FinishReason | None = None
        self._stops = frozenset(params.stop_token_ids)
        # A character takes at most four byte tokens, so a stop string that the newest token ends lies within these.
        self._window = 4 * max((len(s) for s in params.stop_strings), default=0) + 8

    def add(self, token: int, logprob: float, decode: Callable[[Sequence[int]], str] | None) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self._stops:
            self.finish = "stop"
        elif self.params.stop_strings and decode is not None:
            text = decode(self.tokens[-self._window :])
            if any(stop in text for stop in self.params.stop_strings):
                self.finish = "stop"
        if self.finish is None and len(self.tokens) == self.params.max_new_tokens:
            self.finish = "length"

    def abort(self) -> None:
        """End here, unless it has ended."""
        if self.finish is None:
            self.finish = "abort"
            kept = max(0, len(self.tokens) - self.params.num_unsettled)
            for each in (self.tokens, self.logprobs, self.support or [], self.top):
                del each[kept:]

    def result(self, routes: np.ndarray | None) -> SampledTokens:
        assert self.finish is not None
        support = None
        if self.support is not None:
            offsets = np.cumsum([0, *(len(ids) for ids in self.support)], dtype=np.int64)
            support = Support(np.concatenate([_NO_IDS, *self.support]).astype(np.int32), offsets)
        if routes is not None:
            routes = routes[: self.prompt_length + len(self.tokens) - 1].copy()
        tokens, logprobs = np.array(self.tokens, dtype=np.int32), np.array(self.logprobs, dtype=np.float32)
        top = None
        if self.top:
            ids, values = zip(*self.top, strict=True)
            top = TopLogprobs(np.stack(ids).astype(np.int32), np.stack(values).astype(np.float32))
        return SampledTokens(tokens, logprobs, self.finish, routes, support, top)


class _Batch:
    """One call of `generate`. `live` maps rows of the cache to requests."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[np.ndarray],
        params: Sequence[SamplingParams],
        decode: Callable[[Sequence[int]], str] | None,
    ) -> None:
        cfg = decoder.cfg
        self.decoder = decoder
        self.decode = decode
        self.prompts = prompts
        self.rows = [_Row(p, len(ids), cfg.vocab_size) for ids, p in zip(prompts, params, strict=True)]
        self.rules = DrawRules.of(params, cfg.vocab_size)
        self.num_top = max(p.top_logprobs for p in params)
        self.steps = max(p.max_new_tokens for p in params)
        self.uniforms = torch.zeros(len(params), self.steps, dtype=torch.float64)
        for row, p in enumerate(params):
            if p.temperature > 0:
                self.uniforms[row, : p.max_new_tokens] = torch.from_numpy(uniforms_of(p.seed, p.max_new_tokens))
        width = max(len(ids) + p.max_new_tokens for ids, p in zip(prompts, params, strict=True)) - 1
        wants = any(p.return_routes for p in params) and bool(cfg.moe_layers)
        shape = (len(params), width, len(cfg.moe_layers), cfg.experts_per_token)
        dtype = torch.uint8 if cfg.num_experts <= 256 else torch.int16
        self.routes = torch.zeros(shape, dtype=dtype) if wants else None

    def run(self, should_abort: Callable[[], bool]) -> list[SampledTokens]:
        logits, cache = self._prefill()
        live = torch.arange(len(self.rows))
        positions = torch.tensor([len(ids) for ids in self.prompts])
        for step in range(self.steps):
            tokens = self._draw(logits, live, step)
            going = torch.tensor([self.rows[i].finish is None for i in live.tolist()])
            if not going.any():
                break
            if should_abort():
                self._abort()
                break
            if going.sum() < COMPACT_BELOW * len(live):
                keep = going.nonzero()[:, 0]
                live, tokens, positions, cache = live[keep], tokens[keep], positions[keep], cache.take(keep)
            logits, routes = self.decoder.step(tokens, positions, cache)
            if self.routes is not None:
                inside = positions < self.routes.shape[1]  # a finished row may run on past its budget
                self.routes[live[inside], positions[inside]] = routes[inside].to(self.routes.dtype)
            positions = positions + 1
        return [self._result(index, row) for index, row in enumerate(self.rows)]

    def _abort(self) -> None:
        for row in self.rows:
            row.abort()

    def _prefill(self) -> tuple[Tensor, KVCache]:
        """Every distinct prompt once, together with those of its length; its cache row is repeated for each request."""
        keys = [np.ascontiguousarray(ids, dtype=np.int64).tobytes() for ids in self.prompts]
        distinct = sorted(dict.fromkeys(keys), key=len)
        home = {key: row for row, key in enumerate(distinct)}
        source = torch.tensor([home[key] for key in keys])
        logits: list[Tensor] = []
        caches: list[KVCache] = []
        first = 0
        for chunk in _chunks([np.frombuffer(key, dtype=np.int64) for key in distinct]):
            last_logits, routes, cache = self.decoder.prefill(torch.from_numpy(chunk))
            logits.append(last_logits)
            caches.append(cache)
            if self.routes is not None:
                mine = ((source >= first) & (source < first + len(chunk))).nonzero()[:, 0]
                self.routes[mine, : chunk.shape[1]] = routes[source[mine] - first].to(self.routes.dtype)
            first += len(chunk)
        capacity = max(len(ids) for ids in self.prompts) + min(self.steps, 64)
        return torch.cat(logits)[source], KVCache.stack(caches, source, capacity)

    def _draw(self, logits: Tensor, live: Tensor, step: int) -> Tensor:
        if not torch.isfinite(logits).all():
            raise RolloutError("logits are not finite: the published weights are damaged, or training has diverged")
        tokens, logprobs, allowed = draw(logits, self.uniforms[live, step], self.rules.rows(live))
        top = likeliest(logits, self.rules.rows(live), allowed, self.num_top) if self.num_top else None
        numbers = zip(live.tolist(), tokens.tolist(), logprobs.tolist(), strict=True)
        for place, (index, token, logprob) in enumerate(numbers):
            row = self.rows[index]
            if row.finish is not None:
                continue
            if row.support is not None and allowed is not None:
                row.support.append(allowed[place].nonzero()[:, 0].numpy())
            if top is not None and row.params.top_logprobs:
                ids, values = (part[place, : row.params.top_logprobs].numpy() for part in top)
                row.top.append((ids, values))
            row.add(token, logprob, self.decode)
        return tokens

    def _result(self, index: int, row: _Row) -> SampledTokens:
        wants = self.routes is not None and row.params.return_routes
        return row.result(self.routes[index].numpy() if wants and self.routes is not None else None)


def _never() -> bool:
    return False


def _chunks(prompts: list[np.ndarray]) -> list[np.ndarray]:
    """Prompts, sorted by length, as [b, s] arrays of one length with at most `MAX_PREFILL_TOKENS` (or one prompt)."""
    chunks = []
    for length, same in itertools.groupby(prompts, key=len):
        rows = np.stack(list(same))
        size = max(1, MAX_PREFILL_TOKENS // length)
        chunks += [rows[start : start + size] for start in range(0, len(rows), size)]
    return chunks
