"""What a run writes down: one object that the loop tells what happens; it knows sinks, timers, progress and dumps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from moerl.algorithms.load_metrics import LoadTracker, expert_counts, load_shares
from moerl.metrics import Metrics, merge_into, to_floats
from moerl.protocols import MetricSink, Team
from moerl.telemetry.profiler import ProfileWindow
from moerl.telemetry.progress import Progress
from moerl.telemetry.sinks import LoadSink, Nowhere, PassRateSink, sample_record
from moerl.telemetry.timers import Timers
from moerl.telemetry.trace import Trace
from moerl.types import RolloutGroup, StepBatch
from moerl.world import Alone

LEARN_PHASES = ("score", "update")
GENERATION_SECONDS = "perf/generation_seconds"
"""Where generation does not end with the phase that waits for it: how long it took."""
EVALUATE_SECONDS = "perf/evaluate_seconds"
LEARN_FLOPS = "perf/learn_flops"
"""Of the learner's passes in these phases, all ranks together; recorded as `perf/tflops`."""


@dataclass(frozen=True)
class RecordSettings:
    """Where and how much."""

    folder: Path
    samples_per_step: int
    dump_batches: bool
    num_experts: int


@dataclass
class Records:
    """Context manager around the loop."""

    settings: RecordSettings
    sinks: MetricSink
    loads: LoadSink | Nowhere
    pass_rates: PassRateSink | Nowhere
    progress: Progress
    timers: Timers
    dump_batch: Callable[[Path, StepBatch, Mapping[str, Any]], object]
    team: Team = field(default_factory=Alone)
    sum_over_data: Callable[[Tensor], Tensor] = lambda counts: counts
    """A tensor of every data-parallel rank -> their sum."""
    tracker: LoadTracker = field(default_factory=LoadTracker)
    profile: ProfileWindow | None = None
    trace: Trace | None = None
    _step_started: float = 0.0
    _stack: ExitStack = field(default_factory=ExitStack)
    _extra: dict[str, float] = field(default_factory=dict)
    _load_metrics: Metrics = field(default_factory=dict)
    _unevaluated: dict[str, float] | None = None
    """The last record, where the evaluation that belongs in it failed."""
    _started: float = field(default_factory=time.monotonic)
    _seconds_before: float = 0.0

    def __enter__(self) -> Self:
        """Open the progress display; the files are open already."""
        self._stack.enter_context(self.progress)
        self._stack.callback(self.loads.close)
        self._stack.callback(self.pass_rates.close)
        self._stack.callback(self.sinks.close)
        if self.profile is not None:
            self._stack.callback(self.profile.close)
        if self.trace is not None:
            self._stack.callback(self.trace.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close display and files."""
        self._stack.close()

    @property
    def seconds(self) -> float:
        """Wall time of the run so far, over resumes."""
        return self._seconds_before + time.monotonic() - self._started

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase and show it."""
        self.team.phase(name)
        self.progress.phase(name)
        start = time.perf_counter()
        try:
            with self.timers(name), nullcontext() if self.profile is None else self.profile.phase(name):
                yield
        finally:
            if self.trace is not None:
                self.trace.phase(name, start, time.perf_counter())

    def begin(self, step: int) -> None:
        """A step starts."""
        self._step_started = time.perf_counter()
        if self.profile is not None:
            self.profile.begin(step)

    def message(self, text: str) -> None:
        """A line for the person."""
        self.progress.message(text)

    def extra(self, values: Mapping[str, float]) -> None:
        """More values for the record of the current step."""
        self._extra.update(values)

    def rollouts(self, step: int, groups: Sequence[RolloutGroup], metrics: Metrics) -> None:
        """Write a few of the step's rollouts, spread over the groups; count all its tokens, of dropped groups too."""
        values = to_floats(metrics)
        tokens, seconds = int(values.get("rollout/tokens", 0.0)), values.get(GENERATION_SECONDS)
        self.timers.count_tokens("rollout", tokens, phases=("rollout",), seconds=seconds)
        wanted = min(self.settings.samples_per_step, len(groups))
        chosen = [groups[i * len(groups) // wanted] for i in range(wanted)]
        self.sinks.log_samples(step, [sample_record(group.prompt, group.trajectories[0]) for group in chosen])

    def visits(self, step: int, visits: Sequence[tuple[str, int, int]]) -> None:
        """Write the step's rows of the pass-rate table: (prompt id, answers, passed)."""
        self.pass_rates.log(step, visits)

    def batch(self, step: int, batch: StepBatch) -> None:
        """Count the scored batch's tokens, its expert load, and dump it where asked."""
        self.timers.count_tokens("learn", batch.num_tokens, phases=LEARN_PHASES)
        load = expert_load(batch, self.settings.num_experts, self.sum_over_data)
        if load is not None:
            self.loads.log(step, load.tolist())
            merge_into(self._load_metrics, self.tracker.update(load))
        if self.settings.dump_batches:
            self.dump(step, batch, reason="telemetry.dump_batches")

    def dump(self, step: int, batch: StepBatch, *, reason: str) -> Path:
        """Write this rank's batch to `<run>/batches/step_N.npz` (`step_N.rank_R.npz`); returns the path."""
        rank = f".rank_{self.team.rank:05d}" if self.team.rank else ""
        path = self.settings.folder / "batches" / f"step_{step:06d}{rank}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.dump_batch(path, batch, {"step": step, "reason": reason})
        return path

    def step(self, step: int, metrics: Metrics, *, lacks_evaluation: bool = False) -> None:
        """Write the record of a step; one without the evaluation that belongs in it is remembered for `evaluated`."""
        if self.profile is not None:
            self.profile.end(step)
        merge_into(metrics, self._load_metrics)
        flops = metrics.pop(LEARN_FLOPS, None)
        if flops is not None:
            self.timers.count_flops(to_floats({LEARN_FLOPS: flops})[LEARN_FLOPS], phases=LEARN_PHASES)
        merge_into(metrics, self.timers.collect())
        values = to_floats(metrics) | self._extra
        self._load_metrics, self._extra = {}, {}
        self._unevaluated = values if lacks_evaluation else None
        self.sinks.log(step, values)
        self.progress.step(step, values)
        if self.trace is not None and step:
            self.trace.step(step, self._step_started, time.perf_counter())

    @property
    def lacks_evaluation(self) -> bool:
        """Whether the last record does."""
        return self._unevaluated is not None

    def evaluated(self, step: int, evaluation: Metrics) -> None:
        """Write the last record anew, that of `step`, with the evaluation that it lacked and how long that took."""
        assert self._unevaluated is not None
        seconds = {key: value for key, value in to_floats(self.timers.collect()).items() if key == EVALUATE_SECONDS}
        values = self._unevaluated | to_floats(evaluation) | seconds
        self._unevaluated = None
        self.sinks.log(step, values)
        self.progress.step(step, values)

    def state_dict(self) -> dict[str, Any]:
        """Seconds so far, the load tracker's memory, and a record that lacks its evaluation."""
        record = self._unevaluated and {
            name: value if math.isfinite(value) else None for name, value in self._unevaluated.items()
        }
        return {"seconds": self.seconds, "load": self.tracker.state_dict(), "unevaluated": record}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self._seconds_before = float(state["seconds"])
        self.tracker.load_state_dict(state["load"])
        record = state.get("unevaluated")
        self._unevaluated = record and {
            name: math.nan if value is None else float(value) for name, value in record.items()
        }


def expert_load(
    batch: StepBatch, num_experts: int, sum_over_data: Callable[[Tensor], Tensor] = lambda counts: counts
) -> np.ndarray | None:
    """Share of the live tokens' expert slots by layer and expert, [l, e]; None where no routes were taken.

    Counted once per sample (the first epoch), on the routers' own choice at the weights of the score pass. Token j
    counts the row that predicts it, j - 1.
    """
    parts = []
    for micro in (micro for minibatch in batch.minibatches[: batch.num_score_minibatches] for micro in minibatch):
        if micro.old_routes is None:
            return None
        predicts = micro.mask.roll(-1)  # row j - 1 predicts token j; a sequence's first token is never live
        parts.append(expert_counts(micro.old_routes, predicts, num_experts))
    if not parts:
        return None
    return load_shares(sum_over_data(torch.stack(parts).sum(0))).double().cpu().numpy()
