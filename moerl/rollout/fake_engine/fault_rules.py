"""Faults that a fake server commits: each for so many calls of an endpoint, and what it does to an answer."""

from __future__ import annotations

import base64
import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from moerl.errors import ConfigError

KINDS = {
    "status": "answer with `status` (400, 401, 500, 503 ...) and nothing done",
    "slow": "answer `seconds` late",
    "hang": "never answer",
    "drop": "close the connection before anything is done",
    "drop_after": "do it, then close the connection without an answer",
    "truncate": "send half of the body, then close",
    "chunked": "send the body without its length, in chunks",
    "endless": "send a body without its length that never stops, with `status`",
    "gzip": "compress the body, whatever was asked for",
    "no_json": "answer with a page of HTML and status 200",
    "duplicate": "answer with the last answer that was given to another request",
    "restart": "as a crash: drop every connection, be away for `seconds`, come back with the start's weights",
    "ignore": "overlook the request's `keys`, as an older server would",
    "drop_keys": "leave `keys` out of meta_info, as a router would",
    "short_routes": "leave out the last `count` rows of the routes (negative: too many)",
    "zero_routes": "fill the last `count` rows of the routes with zeros",
    "foreign_routes": "name an expert that the model does not have",
    "nan_logprobs": "one logprob is the word NaN",
    "null_logprobs": "one logprob is null",
    "few_logprobs": "one logprob is missing",
    "wrong_ids": "output_ids and output_token_logprobs disagree about one token",
    "wrong_prompt": "prompt_tokens is one too many",
    "wrong_rid": "the answer carries another request's id",
    "refuse": "a control endpoint says `success: false`",
    "forget": "a control endpoint says `success: true` and does nothing",
}
"""Kind -> what it does."""


@dataclass
class FaultRule:
    """One line of a schedule."""

    kind: str
    endpoint: str = "/generate"
    times: int = 1
    """Calls that it hits; -1 is all."""
    after: int = 0
    """Calls of the endpoint that pass before it."""
    every: int = 1
    """Of those that follow, each so many-th."""
    status: int = 500
    seconds: float = 1.0
    count: int = 1
    keys: tuple[str, ...] = ()
    seen: int = 0
    hits: int = 0

    def __post_init__(self) -> None:
        self.keys = tuple(self.keys)
        if self.kind not in KINDS:
            raise ConfigError(f"fault kind {self.kind!r} is none of {', '.join(KINDS)}")

    def strikes(self, endpoint: str) -> bool:
        """Count one call; whether this one is hit."""
        if endpoint != self.endpoint:
            return False
        self.seen += 1
        place = self.seen - self.after
        if place < 1 or self.hits == self.times or (place - 1) % self.every:
            return False
        self.hits += 1
        return True


def read_rules(values: Any) -> list[FaultRule]:
    """JSON -> rules.

    Raises:
        ConfigError: no list of objects, or an unknown field or kind.
    """
    known = {field.name for field in fields(FaultRule)} - {"seen", "hits"}
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ConfigError('faults must be a list of objects such as [{"kind": "status", "status": 503, "times": 2}]')
    for value in values:
        if unknown := sorted(set(value) - known):
            raise ConfigError(f"a fault has the unknown fields {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return [FaultRule(**value) for value in values]


def spoiled(answer: dict[str, Any], rules: Sequence[FaultRule], row_bytes: int) -> dict[str, Any]:
    """`answer` to `/generate` with what `rules` do to it; the original stays whole."""
    if not rules:
        return answer
    answer = copy.deepcopy(answer)
    for rule in rules:
        _spoil(answer, answer["meta_info"], rule, row_bytes)
    return answer


def _spoil(answer: dict[str, Any], meta: dict[str, Any], rule: FaultRule, row_bytes: int) -> None:
    logprobs = meta.get("output_token_logprobs") or []
    match rule.kind:
        case "drop_keys":
            for key in rule.keys:
                meta.pop(key, None)
        case "short_routes" | "zero_routes" | "foreign_routes" if "routed_experts" in meta:
            meta["routed_experts"] = _spoiled_routes(meta["routed_experts"], rule, row_bytes)
        case "nan_logprobs" if logprobs:
            logprobs[-1][0] = float("nan")
        case "null_logprobs" if logprobs:
            logprobs[-1][0] = None
        case "few_logprobs" if logprobs:
            logprobs.pop()
        case "wrong_ids" if answer["output_ids"]:
            answer["output_ids"][-1] ^= 1
        case "wrong_prompt":
            meta["prompt_tokens"] += 1
        case "wrong_rid":
            meta["id"] = f"{meta['id']}-of-another"
        case _:
            pass


def _spoiled_routes(text: str, rule: FaultRule, row_bytes: int) -> str:
    raw = base64.b64decode(text)
    if rule.kind == "foreign_routes":
        raw = raw[:-4] + (1 << 20).to_bytes(4, "little")
    elif rule.kind == "zero_routes":
        raw = raw[: -rule.count * row_bytes] + bytes(rule.count * row_bytes)
    elif rule.count > 0:
        raw = raw[: -rule.count * row_bytes]
    else:
        raw += raw[rule.count * row_bytes :]
    return base64.b64encode(raw).decode("ascii")
