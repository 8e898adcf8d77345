"""Plain values between processes, JSON or bytes: torch's own object collectives pickle, and nothing is unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's `value` (what JSON can say) in rank order, on every rank of `group` (None: all)."""
    return [json.loads(text) for text in gather_bytes(json.dumps(value).encode(), group)]


def gather_bytes(mine: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Every rank's bytes in rank order, on every rank of `group` (None: all); a rank may have none."""
    device = torch.cuda.current_device()
    size = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(sizes, torch.tensor([len(mine)], device=device), group=group)
    counts = [int(one) for one in sizes]
    longest = max(counts)
    if not longest:
        return [b""] * size
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    if mine:
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return [bytes(part[:count].cpu().numpy()) for part, count in zip(parts, counts, strict=True)]
