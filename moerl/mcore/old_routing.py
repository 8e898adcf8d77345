"""What the score pass saw of the routers, sample by sample, until the last minibatch is compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from moerl.errors import DataError
from moerl.mcore.moe_stats import predicting_rows
from moerl.mcore.router_replay import Observation, compact
from moerl.types import MicroBatch, RouterStats, StepBatch


class OldRouting:
    """Log q over all experts is large: it is kept on the host, of the live tokens of the last minibatch alone, of this
    stage's layers, and only on ranks that tell metrics.
    """

    def __init__(self, *, keeps_numbers: bool) -> None:
        """Empty, as after `clear`; without numbers it knows which samples it saw, which all ranks must agree on."""
        self._keeps_numbers = keeps_numbers
        self._wanted: dict[int, Tensor] = {}
        """Sample -> its rows, counted from its first and ascending, that predict a live token of the last minibatch."""
        self._samples: dict[int, dict[tuple[int, ...], RouterStats]] = {}
        """Sample -> layers -> what they did in the wanted rows, on the host."""

    def clear(self) -> None:
        """Forget the step before."""
        self._wanted.clear()
        self._samples.clear()

    def expect(self, batch: StepBatch) -> None:
        """The score pass of `batch` begins: its last minibatch says what to keep."""
        self.clear()
        for micro in batch.minibatches[-1]:
            rows, bounds = _rows_of(micro)
            for i, sample in enumerate(micro.sample_ids):
                seen_so_far = self._wanted.get(sample, rows[:0])
                self._wanted[sample] = torch.cat([seen_so_far, rows[bounds[i]]]).unique()

    def keep(self, batch: MicroBatch, seen: Observation, layers: tuple[int, ...]) -> None:
        """Of one micro-batch of the score pass, copies of what will be needed."""
        starts = batch.cu_seqlens.tolist()
        samples = [(i, sample) for i, sample in enumerate(batch.sample_ids) if sample in self._wanted]
        for _, sample in samples:
            self._samples.setdefault(sample, {})
        if not samples or not self._keeps_numbers:
            return
        counts = [len(self._wanted[sample]) for _, sample in samples]
        rows = torch.cat([self._wanted[sample] + starts[i] for i, sample in samples]).to(batch.mask.device)
        # Indexing copies, so that nothing of the pass lives on; one transfer for the micro-batch, cut on the host.
        routes = compact(seen.own_routes[rows], seen.log_probs.shape[-1]).cpu().split(counts)
        log_probs = seen.log_probs[rows].cpu().split(counts)
        for (_, sample), *numbers in zip(samples, routes, log_probs, strict=True):
            self._samples[sample][layers] = RouterStats(*numbers)

    def covers(self, minibatch: Sequence[MicroBatch]) -> bool:
        """Whether every sample was kept; the same on every rank, as fillers go by what the score pass filled."""
        if all(batch.is_filler for batch in minibatch):
            return all(batch.old_routes is not None for batch in minibatch)
        return all(sample in self._samples for batch in minibatch for sample in batch.sample_ids)

    def of(self, batch: MicroBatch, now: Observation, layers: tuple[int, ...]) -> RouterStats | None:
        """Of the live tokens of one micro-batch, on its device; None where this rank keeps no numbers.

        `now` are the same layers on the same tokens, of which there is none in a filler.

        Raises:
            DataError: a token is live that was not when the batch was scored.
        """
        if not self._keeps_numbers:
            return None
        if batch.is_filler:
            return RouterStats(now.own_routes, now.log_probs)
        rows, bounds = _rows_of(batch)
        routes, log_probs, device = [], [], batch.mask.device
        for i, sample in enumerate(batch.sample_ids):
            kept = self._samples[sample][layers]
            at = self._places(sample, rows[bounds[i]]).to(device)
            assert kept.log_probs is not None
            routes.append(kept.own_routes.to(device)[at])
            log_probs.append(kept.log_probs.to(device)[at])
        return RouterStats(torch.cat(routes), torch.cat(log_probs))

    def _places(self, sample: int, rows: Tensor) -> Tensor:
        """Where `rows` of a sample are among the kept: tokens may have been masked since, but none unmasked."""
        wanted = self._wanted[sample]
        if not torch.isin(rows, wanted).all():
            raise DataError(
                f"sample {sample} of the last minibatch has {len(rows)} live tokens, some of them masked when the "
                f"batch was scored ({len(wanted)} were live then); a mask may only lose tokens after score: score the "
                "batch again"
            )
        return torch.searchsorted(wanted, rows)


def _rows_of(batch: MicroBatch) -> tuple[Tensor, list[slice]]:
    """Rows that predict a live token, each counted from the start of its sequence; and where each sequence's are. On
    the host.
    """
    rows = predicting_rows(batch).cpu()
    starts = batch.cu_seqlens.long().cpu()
    cuts = torch.searchsorted(rows, starts)
    owners = torch.repeat_interleave(starts[:-1], cuts.diff())
    return rows - owners, [slice(a, b) for a, b in pairwise(cuts.tolist())]
