"""Logprob of the sampled token and entropy from full logits: the definition that every faster version is held to."""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(
    logits: Tensor, token_ids: Tensor, temperature: Tensor | float, *, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies [...] of the tempered distribution, float32 or wider, both with gradient.

    Args:
        logits: [..., v] in any float dtype; upcast before anything is computed.
        token_ids: [...] int64.
        temperature: [...] or one number, above 0.
        allowed: [..., v] bool: the tokens that top-p or top-k left in the running; None is the whole vocabulary.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scale = torch.as_tensor(temperature, dtype=wide.dtype, device=wide.device)
    scaled = wide / (scale.unsqueeze(-1) if scale.ndim else scale)
    if allowed is not None:
        scaled = scaled.masked_fill(~allowed, -torch.inf)
    log_norm = scaled.logsumexp(-1)
    probs = (scaled - log_norm.unsqueeze(-1)).exp()
    finite = scaled if allowed is None else scaled.masked_fill(~allowed, 0.0)
    entropy = log_norm - (probs * finite).sum(-1)
    return scaled.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1) - log_norm, entropy
