"""What a rank brings to the loop beside the learner. Part of `build.py`.

Rank 0 leads: it samples, scores, evaluates and writes. The others have the same rooms, empty, and take part in what all
ranks do together: the export of weights, the sums of expert loads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moerl.algorithms.filtering import Filters
from moerl.build_buffer import build_buffer
from moerl.build_rollout import Data, RolloutSide, build_evaluator
from moerl.build_weights import build_precision, build_publisher
from moerl.checkpoint import Checkpoint
from moerl.config.load import as_dict
from moerl.config.schema import RunConfig
from moerl.credit import CreditRules, credit
from moerl.data.dump import save_step_batch
from moerl.evaluate import Evaluator
from moerl.mcore.policy import MegatronPolicy
from moerl.metrics import Metrics, merge_into
from moerl.models.flops import peak_flops
from moerl.probe import probe_samples
from moerl.protocols import Measured, Rollouts, Team
from moerl.records import Records, RecordSettings
from moerl.telemetry.profiler import ProfileWindow
from moerl.telemetry.progress import Progress
from moerl.telemetry.sinks import JsonlSink, LoadSink, Nowhere, PassRateSink, Sinks, WandbSink
from moerl.telemetry.timers import Timers
from moerl.telemetry.trace import Trace
from moerl.types import RolloutGroup, Sample, SamplingParams
from moerl.weight_sync.transport import transports


@dataclass(frozen=True)
class Side:
    """The rooms of one rank around its learner."""

    rollouts: Rollouts
    credit: Callable[[Sequence[RolloutGroup]], tuple[list[Sample], Metrics]]
    evaluator: Evaluator
    draw_probe: Callable[[], list[Sample]]
    """Answers at the weights that were published last."""
    publish: Callable[[], Metrics]
    measure_engines: Callable[[], Metrics] = dict
    lend_memory: Callable[[], None] = lambda: None


def leading_side(
    cfg: RunConfig,
    parts: tuple[Data, RolloutSide, Filters],
    policy: MegatronPolicy,
    rules: CreditRules,
    records: Records,
    stack: ExitStack,
) -> Side:
    """Of rank 0; `stack` closes what it opens."""
    data, side, filters = parts
    trace = records.trace
    buffered = build_buffer(
        cfg,
        data,
        side,
        filters=filters,
        log_visits=records.visits,
        on_span=None if trace is None else trace.group,
    )
    evaluator = build_evaluator(cfg, data, side)

    def give_credit(groups: Sequence[RolloutGroup]) -> tuple[list[Sample], Metrics]:
        samples, metrics = credit(groups, rules)
        merge_into(metrics, data.scorer.take_metrics())
        return samples, merge_into(metrics, buffered.source.metrics())

    def draw_probe() -> list[Sample]:
        prompts = [prompt for one in data.held_out for prompt in one.prompts][: cfg.telemetry.probe_prompts]
        if not prompts or not policy.num_experts:
            return []
        greedy = replace(evaluator.greedy, temperature=1.0)
        return probe_samples(evaluator.collect(prompts, step=0, group_size=1, params=greedy))

    send = stack.enter_context(_publishing(cfg, side, policy))

    is_lent = [False]

    def lend_memory() -> None:
        for engine in side.engines:
            side.collector.run(engine.set_memory(released=True))
        is_lent[0] = True

    def publish() -> Metrics:
        if is_lent[0]:  # that of the weights; the cache's comes once the weights are there
            for engine in side.engines:
                side.collector.run(engine.set_memory(released=False))
            is_lent[0] = False
        metrics = send()
        buffered.published(policy.version)
        return metrics

    def measure_engines() -> Metrics:
        found: Metrics = {}
        for engine in side.engines:
            if isinstance(engine, Measured):
                merge_into(found, engine.take_metrics())
        return found

    return Side(buffered.rollouts, give_credit, evaluator, draw_probe, publish, measure_engines, lend_memory)


def following_side(policy: MegatronPolicy) -> Side:
    """Of every other rank."""
    published: list[int] = []

    def publish() -> Metrics:
        if published[-1:] != [policy.version]:
            for _ in policy.export():
                pass  # every rank takes part in putting each weight together; rank 0 alone sends it
            published[:] = [policy.version]
        return {}

    def collect(*_: Any, **__: Any) -> list[RolloutGroup]:
        return []

    nothing = SamplingParams(max_new_tokens=1)
    evaluator = Evaluator(sets=(), collect=collect, greedy=nothing, sampled=nothing, num_samples=0, pass_at=())
    return Side(NoRollouts(), lambda _: ([], {}), evaluator, list, publish)


class NoRollouts:
    """Keeps `Rollouts` where nothing is sampled."""

    def take(self, step: int, version: int) -> tuple[list[RolloutGroup], Metrics]:
        """Nothing."""
        del step, version
        return [], {}

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the leader's goes into a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Not read."""


@contextlib.contextmanager
def _publishing(cfg: RunConfig, side: RolloutSide, policy: MegatronPolicy) -> Iterator[Callable[[], Metrics]]:
    plugin, transport_cfg = transports.resolve(cfg.weight_sync.transport, where="weight_sync.transport")
    transport = plugin.target(transport_cfg)
    precision = build_precision(cfg)
    publisher = build_publisher(cfg, side.engines, transport, precision)
    thread = side.thread

    def publish() -> Metrics:
        if policy.version == publisher.version:
            return {}  # the engines have these weights
        weights = precision.apply(policy.export())
        if thread is None:
            return side.collector.run(publisher.publish(weights, policy.version))
        return thread.run_fed(lambda fed: publisher.publish(fed, policy.version), weights)

    with contextlib.closing(transport):
        yield publish


def _peak(params: str) -> float | None:
    """Of this rank's device; None where it is not known."""
    return peak_flops(torch.cuda.get_device_name(), params) if torch.cuda.is_available() else None


def build_records(
    cfg: RunConfig,
    folder: Path,
    policy: MegatronPolicy,
    resume_from: Checkpoint | None,
    team: Team,
    trace: Trace | None = None,
) -> Records:
    """What a run writes down; nothing on ranks that do not lead, save the batch of a step that failed."""
    first = resume_from.step + 1 if resume_from else 0
    sinks: list[Any] = []
    if team.is_leader:
        sinks.append(JsonlSink(folder, resume_step=first))
    if team.is_leader and cfg.telemetry.wandb.enabled:
        wandb = cfg.telemetry.wandb
        sinks.append(
            WandbSink(
                folder,
                run_name=cfg.run.name,
                config=as_dict(cfg),
                project=wandb.project,
                entity=wandb.entity,
                mode=wandb.mode,
            )
        )
    return Records(
        settings=RecordSettings(
            folder, cfg.telemetry.samples_per_step, cfg.telemetry.dump_batches, num_experts=policy.num_experts
        ),
        sinks=Sinks(sinks),
        loads=LoadSink(folder, resume_step=first) if team.is_leader else Nowhere(),
        pass_rates=PassRateSink(folder, resume_step=first) if team.is_leader else Nowhere(),
        progress=Progress(cfg.run.num_steps, max(first, 1), cfg.telemetry.progress if team.is_leader else "off"),
        timers=Timers(num_devices=policy.parallel.world_size, peak_flops=_peak(cfg.precision.params)),
        dump_batch=save_step_batch,
        profile=ProfileWindow(
            folder,
            rank=policy.parallel.rank,
            start_step=cfg.telemetry.profile.start_step,
            num_steps=cfg.telemetry.profile.num_steps,
        ),
        trace=trace,
        team=team,
        sum_over_data=policy.parallel.sum_over_data,
    )
