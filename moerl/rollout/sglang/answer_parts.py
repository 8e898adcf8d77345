"""Parts of an answer to `/generate`: versions, the tokens in the running, the likeliest tokens, where it stopped."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from moerl.rollout.sglang.faults import shown
from moerl.types import FinishReason, SamplingParams, Support, TopLogprobs

_MAX_ID, _MAX_DIGITS = 1 << 31, 18
"""Of a token; of a version."""

Bad = Callable[[str], NoReturn]
"""Raises with what is wrong."""


def read_spans(
    meta: Mapping[str, Any], count: int, labels: Mapping[str, int], needs_all: bool, bad: Bad
) -> tuple[tuple[int, int, int], ...]:
    """(start, end, policy version) of every run of tokens, from the labels that the server holds; () without tokens.

    Of an answer that lacks them the one label at its end is that of all tokens, unless several may have sampled them
    (`needs_all`).
    """
    if count == 0:
        return ()
    listed = meta.get("weight_versions")
    if listed is None and needs_all:
        bad(
            "no weight_versions, although requests go on over updates (rollout.engine.pause_mode): which policy "
            "sampled which token is not known; put no router before the server, or set pause_mode=abort"
        )
    if listed is None:
        label = meta.get("weight_version")
        if label is None:
            bad("no weight_version: which policy sampled these tokens is not known")
        return ((0, count, _version(label, labels, bad)),)
    spans: list[tuple[int, int, int]] = []
    for one in listed if isinstance(listed, list) else ():
        start, end = (one.get("start"), one.get("end")) if isinstance(one, dict) else (None, None)
        if type(start) is not int or type(end) is not int or start != (spans[-1][1] if spans else 0) or end < start:
            bad(f"weight_versions is {listed}, but its spans must follow one another from token 0")
        if end > start:
            spans.append((start, end, _version(one.get("version"), labels, bad)))
    if not spans or spans[-1][1] != count:
        bad(f"weight_versions is {listed}, which does not cover {count} tokens")
    last = meta.get("weight_version")
    if last is not None and _version(last, labels, bad) < spans[-1][2]:
        bad(f"weight_version is {last}, but the last token was sampled by {spans[-1][2]}")
    return tuple(spans)


def read_support(meta: Mapping[str, Any], ids: list[int], count: int, bad: Bad) -> Support:
    """The tokens in the running of each step; each step holds the one that was sampled."""
    masks = meta.get("output_token_sampling_mask")
    if not isinstance(masks, list) or len(masks) != count or not all(isinstance(mask, list) for mask in masks):
        bad(f"output_token_sampling_mask does not hold {count} lists of tokens")
    for place, mask in enumerate(masks):
        wrong = [token for token in mask if type(token) is not int or not 0 <= token < _MAX_ID]
        if wrong:
            bad(f"output_token_sampling_mask of token {place} holds {shown(repr(wrong[0]))}, which is no token id")
    outside = [place for place, mask in enumerate(masks) if ids[place] not in mask]
    if outside:
        bad(f"token {outside[0]} ({ids[outside[0]]}) is not among those in the running at its step")
    offsets = np.zeros(count + 1, dtype=np.int64)
    np.cumsum([len(mask) for mask in masks], out=offsets[1:])
    return Support(np.array([token for mask in masks for token in mask], dtype=np.int32), offsets)


def read_top(meta: Mapping[str, Any], count: int, wanted: int, bad: Bad) -> TopLogprobs:
    """The `wanted` likeliest tokens of each step."""
    steps = meta.get("output_top_logprobs")
    if count and (not isinstance(steps, list) or len(steps) != count):
        bad(f"no output_top_logprobs of {count} tokens: the server ignored top_logprobs_num")
    ids = np.full((count, wanted), -1, dtype=np.int32)
    logprobs = np.full((count, wanted), -np.inf, dtype=np.float32)
    for place, step in enumerate(steps[:count] if isinstance(steps, list) else ()):
        if step is not None and not isinstance(step, list):
            bad(f"output_top_logprobs of token {place} is {shown(repr(step))}, but must be a list")
        for rank, entry in enumerate((step or [])[:wanted]):
            logprobs[place, rank], ids[place, rank] = _top_entry(entry, rank, place, bad)
    return TopLogprobs(ids, logprobs)


def asked_stops(params: SamplingParams) -> dict[str, Any]:
    """Keys of `sampling_params` for stop strings.

    SGLang looks for them in the last tokens alone: one more than it would write the longest of them with, or than a
    match of `stop_regex` has characters. A policy may spell one with a token for every byte. So a pattern that matches
    nothing goes with them, as long as that.
    """
    if not params.stop_strings:
        return {}
    return {"stop": list(params.stop_strings), "stop_regex": rf"[^\s\S]{{{params.num_unsettled}}}"}


def check_stop_strings(answer: Mapping[str, Any], finish: FinishReason, params: SamplingParams, bad: Bad) -> None:
    """That no stop string was run over, and none was obeyed that nobody asked for.

    The server's text is that of this request's tokens: not of its prompt, nor of the parts before it. It ends with the
    stop string that ended it. A blank at its very start is not looked at (some tokenizers leave the first one out, and
    SGLang then does not see it), nor is an abort: its last forward looks at no stop, and it is gone on from.
    """
    matched = answer["meta_info"]["finish_reason"].get("matched")
    if finish == "stop" and isinstance(matched, str):
        if matched not in params.stop_strings:
            bad(f"it stopped at the text {shown(repr(matched))}, but was to stop at {list(params.stop_strings)}")
        return
    if not params.stop_strings or finish == "abort":
        return
    text = answer.get("text")
    if not isinstance(text, str):
        bad(f"no text: whether the server ignored stop={list(params.stop_strings)} cannot be seen without it")
    for stop in params.stop_strings:
        if text.find(stop, int(stop[0].isspace())) >= 0:
            bad(f"stop string {stop!r} stands in its text, but it ended by {finish}: the server ignored stop")


def _top_entry(entry: Any, rank: int, place: int, bad: Bad) -> tuple[float, int]:
    value, token = entry[:2] if isinstance(entry, list) and len(entry) >= 2 else (math.nan, -1)
    number = float(value) if type(value) in (float, int) else math.nan
    if math.isnan(number) or type(token) is not int or not 0 <= token < _MAX_ID:
        bad(f"top logprob {rank} of token {place} is {shown(repr(entry))}, but must be [logprob, token id, ...]")
    return number, token


def _version(label: Any, labels: Mapping[str, int], bad: Bad) -> int:
    text = str(label)
    if text in labels:
        return labels[text]
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        came = f"weight version {shown(text)!r} is none that was published from here"
        bad(f"{came}; start the server anew, or publish first")
    return int(text)
