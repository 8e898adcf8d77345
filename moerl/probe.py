"""Route drift on a fixed probe: the policy's own answers at step 0, run through the router again after every step.

`route_probe/*` compares the routes before and after one step's updates, `route_long/*` those of step 0 and now. Since
the tokens never change, nothing but the weights moves these numbers.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moerl.algorithms.route_metrics import route_metrics
from moerl.metrics import Metrics, merge_into
from moerl.types import MicroBatch, RolloutGroup, RouterStats, Sample

MAX_LOG_PROBS = 4_000_000
"""Router log-probabilities (tokens x layers x experts) of step 0 that are kept, in memory and in every checkpoint."""

Observe = Callable[[Sequence[MicroBatch]], list[RouterStats]]
Pack = Callable[[Sequence[Sample]], Sequence[MicroBatch]]


class RouteProbe:
    """Fixed sequences and what the routers said of them at step 0 and at the last step."""

    def __init__(self, observe: Observe, pack: Pack) -> None:
        """`observe` runs the learner forward only; `pack` makes micro-batches of samples and keeps their ids."""
        self._observe = observe
        self._pack = pack
        self._samples: list[Sample] = []
        self._first: RouterStats | None = None
        self._last: RouterStats | None = None

    def start(self, samples: Sequence[Sample]) -> None:
        """Fix the probe's sequences (`probe_samples`; the same on every rank) and take the routes of step 0.

        The first sequence goes alone ahead, since its layers and experts say how many of the others fit.
        """
        self._samples = list(samples[:1])
        if self._samples:
            first = self._routes()
            self._samples = list(samples[: _fitting(samples, first)])
            self._first = self._last = self._routes() if len(self._samples) > 1 else first

    def measure(self) -> Metrics:
        """Metrics of the pairs (last step, now) and (step 0, now); {} where there is no probe."""
        if self._first is None or self._last is None:
            return {}
        now = self._routes()
        metrics = _compare(self._last, now, "route_probe")
        merge_into(metrics, _compare(self._first, now, "route_long"))
        self._last = now
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Sequences and the routes of step 0; those of the last step come from the restored weights."""
        if self._first is None or self._first.log_probs is None:
            return {}
        return {
            "tokens": [s.token_ids.tolist() for s in self._samples],
            "masks": [s.loss_mask.astype(int).tolist() for s in self._samples],
            "first_routes": _to_text(self._first.own_routes),
            "first_log_probs": _to_text(self._first.log_probs),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; call it after the learner's weights are restored."""
        if not state:
            return
        self._samples = [
            _probe_sample(i, np.asarray(tokens, dtype=np.int32), np.asarray(mask, dtype=bool))
            for i, (tokens, mask) in enumerate(zip(state["tokens"], state["masks"], strict=True))
        ]
        self._last = self._routes()
        device = self._last.own_routes.device
        self._first = RouterStats(
            _to_tensor(state["first_routes"], device), _to_tensor(state["first_log_probs"], device)
        )

    def _routes(self) -> RouterStats:
        """Token by token in the order of the samples, however they were packed: a resumed run may pack otherwise."""
        micro_batches = self._pack(self._samples)
        parts = self._observe(micro_batches)
        order = torch.cat([_owners(micro) for micro in micro_batches]).argsort(stable=True)
        return RouterStats(_cat([p.own_routes for p in parts])[order], _cat([p.log_probs for p in parts])[order])


def probe_samples(groups: Sequence[RolloutGroup]) -> list[Sample]:
    """The probe's sequences, of answers that may have any reward."""
    trajectories = [t for group in groups for t in group.trajectories if t.status == "ok" and t.loss_mask.any()]
    return [_probe_sample(i, t.token_ids, t.loss_mask) for i, t in enumerate(trajectories)]


def _fitting(samples: Sequence[Sample], seen: RouterStats) -> int:
    """How many samples, from the first on and at least one, stay within `MAX_LOG_PROBS` numbers."""
    layers, experts = (seen.log_probs.shape[1:]) if seen.log_probs is not None else seen.own_routes.shape[1:]
    live = np.cumsum([int(sample.loss_mask.sum()) for sample in samples])
    return max(1, int((live * layers * experts <= MAX_LOG_PROBS).sum()))


def _to_text(tensor: Tensor) -> dict[str, Any]:
    """Exact and compact in JSON: the bytes, compressed, in base 64."""
    array = tensor.cpu().numpy()
    data = base64.b64encode(zlib.compress(array.tobytes(), level=1)).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def _to_tensor(text: Mapping[str, Any], device: torch.device) -> Tensor:
    raw = zlib.decompress(base64.b64decode(text["data"]))
    array = np.frombuffer(raw, dtype=np.dtype(text["dtype"])).reshape(text["shape"])
    return torch.from_numpy(array.copy()).to(device)


def _owners(micro: MicroBatch) -> Tensor:
    """Sample id of every live token."""
    ids = torch.tensor(micro.sample_ids, dtype=torch.int64, device=micro.mask.device)
    return ids[micro.seq_ids[micro.mask]]


def _cat(parts: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([part for part in parts if part is not None])


def _compare(before: RouterStats, after: RouterStats, prefix: str) -> Metrics:
    mask = torch.ones(after.own_routes.shape[0], dtype=torch.bool, device=after.own_routes.device)
    return route_metrics(
        before.own_routes, after.own_routes, mask, prefix=prefix, a_logq=before.log_probs, b_logq=after.log_probs
    )


def _probe_sample(index: int, token_ids: np.ndarray, mask: np.ndarray) -> Sample:
    zeros = np.zeros(len(token_ids), dtype=np.float32)
    return Sample(index, index, f"probe/{index}", token_ids, mask, zeros, zeros, 0.0, 1.0)
