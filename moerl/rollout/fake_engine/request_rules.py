"""Which requests to `/generate` SGLang answers with 400, as far as moerl's client could cause one."""

from __future__ import annotations

from typing import Any

from moerl.rollout.fake_engine.server_state import ServerState

_SAMPLING_KEYS = """max_new_tokens temperature top_p top_k min_p stop stop_token_ids stop_regex ignore_eos
min_new_tokens frequency_penalty presence_penalty repetition_penalty n skip_special_tokens
spaces_between_special_tokens no_stop_trim sampling_seed json_schema regex ebnf
structural_tag custom_params logit_bias"""
SAMPLING_KEYS = frozenset(_SAMPLING_KEYS.split())
"""Any other is a 400; an unknown key beside them is not read at all."""

_MAX_MASK = 4096


def refusal(body: dict[str, Any], state: ServerState) -> str | None:
    """What is wrong with the request, or None."""
    prompt, sampling = body.get("input_ids"), body.setdefault("sampling_params", {})
    body.setdefault("rid", f"fake-{state.counts['/generate']}")
    for find in (_prompt, _options, _sampling):
        if (words := find(body, prompt, sampling, state)) is not None:
            return words
    return None


def _prompt(body: dict[str, Any], prompt: Any, sampling: dict[str, Any], state: ServerState) -> str | None:
    del sampling
    cfg = state.cfg
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
        return "input_ids must be one list of token ids (this server serves no batch)"
    if not 0 <= min(prompt) <= max(prompt) < cfg.vocab_size:
        return f"The input_ids {prompt[:8]} contain values outside the vocabulary of {cfg.vocab_size}."
    if len(prompt) >= cfg.context_length:
        return (
            f"The input ({len(prompt)} tokens) is longer than the model's context length ({cfg.context_length} tokens)."
        )
    if body["rid"] in state.running:
        return f"Duplicate request ID detected: {body['rid']}"
    return None


def _options(body: dict[str, Any], prompt: Any, sampling: dict[str, Any], state: ServerState) -> str | None:
    del sampling
    start = body.get("routed_experts_start_len") or 0
    if not 0 <= start <= len(prompt):
        return f"routed_experts_start_len {start} must be in [0, {len(prompt)}]"
    rank = body.get("routed_dp_rank")
    if rank is not None and not 0 <= rank < state.cfg.data_size:
        return f"routed_dp_rank={rank} out of range [0, {state.cfg.data_size})"
    if body.get("stream"):
        return "this server does not stream"
    return None


def _sampling(body: dict[str, Any], prompt: Any, sampling: dict[str, Any], state: ServerState) -> str | None:
    del prompt, state
    if unknown := sorted(set(sampling) - SAMPLING_KEYS):
        return f"Unexpected keyword argument {unknown[0]!r} in sampling_params"
    if sampling.get("n", 1) != 1:
        return "this server draws one answer a request"
    budget = sampling.get("max_new_tokens", 1)
    if budget is not None and budget < 0:
        return f"max_new_tokens must be at least 0, got {budget}."
    top_k = sampling.get("top_k", -1)
    if body.get("return_sampling_mask") and not 1 <= top_k <= _MAX_MASK:
        return (
            f"return_sampling_mask requires top_k=1 for greedy sampling or finite 1 < top_k <= {_MAX_MASK}; got "
            f"top_k={top_k}. Lower top_k or increase --sampling-mask-max-tokens."
        )
    return None
