"""Metrics of the policy term and of its correction."""

from __future__ import annotations

import torch
from torch import Tensor

from moerl.algorithms.elementwise import exp, total
from moerl.algorithms.mismatch import TokenCorrection
from moerl.algorithms.ratio import LOG_RATIO_LIMIT
from moerl.algorithms.sanitise import CleanInputs
from moerl.algorithms.segments import per_sequence, seq_lengths
from moerl.algorithms.types import TokenLoss
from moerl.metrics import Max, Mean, Metrics


def policy_metrics(clean: CleanInputs, *, log_ratio: Tensor, raw: Tensor, token: TokenLoss) -> Metrics:
    """The policy's metrics as means over live tokens; `raw` is the log-ratio before it was clamped."""
    x, live = clean.inputs, clean.live
    mean = _full_mean if clean.is_full else token_mean
    ratio = exp(log_ratio.detach()) if token.ratio is None else token.ratio
    seen = ratio if clean.is_full else torch.where(x.mask, ratio, -torch.inf)
    metrics: Metrics = {
        "pg/ratio_mean": mean(ratio, x.mask),
        "pg/ratio_max": Max(seen.amax() if len(ratio) else -torch.inf),
        # The same tensor came back from the clamp: nothing was beyond the limit.
        "pg/clamped": mean(raw.detach().abs() > LOG_RATIO_LIMIT, live) if raw is not log_ratio else _none_of(clean),
    }
    metrics.update({name: mean(values, live) for name, values in token.metrics.items()})
    if "old_logprobs" in x.optional:
        metrics["pg/kl_old"] = _kl_old(clean)
    if "entropy" in x.optional:
        metrics["pg/entropy"] = token_mean(x.entropy, live)
    return metrics


def sequence_metrics(
    clean: CleanInputs, *, log_ratio: Tensor, raw: Tensor, token: TokenLoss, lengths: Tensor
) -> Metrics:
    """The same from one value for each sequence, where every token is live."""
    x, count = clean.inputs, float(len(clean.live))
    ratio = exp(log_ratio.detach()) if token.ratio is None else token.ratio
    values = {"pg/ratio_mean": ratio, "pg/clamped": raw.detach().abs() > LOG_RATIO_LIMIT, **token.metrics}
    totals = torch.stack([v.detach().double() for v in values.values()]) @ lengths.double()
    metrics: Metrics = {name: Mean(made, count) for name, made in zip(values, totals.tolist(), strict=True)}
    metrics["pg/ratio_max"] = Max(float(torch.where(lengths > 0, ratio, -torch.inf).amax()))
    if "old_logprobs" in x.optional:
        metrics["pg/kl_old"] = _kl_old(clean)
    if "entropy" in x.optional:
        metrics["pg/entropy"] = _full_mean(x.entropy, x.mask)
    return metrics


def correction_metrics(clean: CleanInputs, corrected: TokenCorrection, *, is_whole: bool) -> Metrics:
    """Metrics of a correction; `is_whole`: every token is live and kept."""
    x, live = clean.inputs, clean.live
    if is_whole:
        seqs = float((seq_lengths(x.seq_ids, x.num_seqs) > 0).sum())
        return {
            **{name: _full_mean(values, live) for name, values in corrected.metrics.items()},
            "mm/reject": _none_of(clean),
            "mm/reject_seq": Mean(0.0, seqs),
            "mm/weight_mean": _full_mean(corrected.weight, live),
        }
    dropped = live & ~(x.mask & corrected.keep)
    tokens = per_sequence(live.to(x.logprobs.dtype), live, x.seq_ids, x.num_seqs)
    lost = per_sequence(dropped.to(x.logprobs.dtype), live, x.seq_ids, x.num_seqs)
    metrics: Metrics = {name: token_mean(values, live) for name, values in corrected.metrics.items()}
    metrics["mm/reject"] = token_mean(dropped, live)
    metrics["mm/reject_seq"] = token_mean((tokens > 0) & (lost == tokens), tokens > 0)
    metrics["mm/weight_mean"] = token_mean(corrected.weight, x.mask & corrected.keep)
    return metrics


def _full_mean(values: Tensor, mask: Tensor) -> Mean:
    """Mean over all tokens, for which `mask` is known to be True."""
    return Mean(total(values), float(len(values)))


def _kl_old(clean: CleanInputs) -> Mean:
    """k1 to the old policy over the live tokens."""
    if clean.is_full:
        return Mean(-clean.total_drift, float(len(clean.live)))
    return token_mean(clean.inputs.old_logprobs - clean.inputs.logprobs, clean.live)


def _none_of(clean: CleanInputs) -> Mean:
    """A fraction of the live tokens that is 0."""
    return Mean(0.0, float(len(clean.live)) if clean.is_full else clean.live.sum().double())


def token_mean(values: Tensor, mask: Tensor) -> Mean:
    """Mean over `mask` without leaving the device."""
    kept = torch.where(mask, values.detach().double(), 0.0)
    return Mean(kept.sum(), mask.sum().double())
