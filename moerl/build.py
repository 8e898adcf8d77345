"""The composition root: a checked configuration becomes wired rooms.

With `build_rollout.py` and `build_evaluation.py` the only code that knows every concrete class. Everything that can be
checked is checked before a learner or an engine is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moerl.actor_critic import ActorCritic
from moerl.algorithms.filtering import build_filters
from moerl.algorithms.objective import build_objective
from moerl.build_credit import (
    MinibatchWeights,
    build_credit_rules,
    build_token_rules,
    counts_empty,
    credit_state,
    packs_pairs,
)
from moerl.build_rollout import (
    Data,
    RolloutSide,
    build_buffer,
    build_evaluator,
    build_rollout_side,
    load_data,
)
from moerl.checkpoint import Checkpoint, CheckpointStore
from moerl.config.load import as_dict
from moerl.config.schema import RunConfig
from moerl.contract import StepZeroContract
from moerl.credit import credit
from moerl.data.batch import build_step_batch
from moerl.data.dump import save_step_batch
from moerl.data.packing import plan_packing
from moerl.loop import Rooms, Schedule
from moerl.mcore.critic import MegatronCritic
from moerl.mcore.policy import MegatronPolicy
from moerl.metrics import Metrics, merge_into
from moerl.models.family import family_of
from moerl.models.flops import peak_flops
from moerl.models.hf_folder import read_config
from moerl.probe import RouteProbe
from moerl.protocols import Policy
from moerl.records import Records, RecordSettings
from moerl.run_folder import CHECKPOINTS, config_id, find_checkpoint, folder_of, is_finished, lock, model_id, prepare
from moerl.telemetry.profiler import ProfileWindow
from moerl.telemetry.progress import Progress
from moerl.telemetry.sinks import JsonlSink, LoadSink, PassRateSink, Sinks, WandbSink
from moerl.telemetry.timers import Timers
from moerl.token_credit import TokenCredit
from moerl.types import MicroBatch, RolloutGroup, Sample, StepBatch
from moerl.weight_sync.publisher import Publisher
from moerl.weight_sync.transport import transports

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """One run, ready to walk the loop."""

    cfg: RunConfig
    rooms: Rooms
    schedule: Schedule
    resume_from: Checkpoint | None
    folder: Path
    stack: ExitStack

    def close(self) -> None:
        """Close engines, verifiers and files."""
        self.stack.close()


def build_run(cfg: RunConfig) -> Run | None:
    """Wire a training run; None where the run is complete already.

    Raises:
        MoerlError: whatever is wrong, before anything is trained or overwritten.
    """
    torch.set_num_threads(cfg.run.num_threads)
    with ExitStack() as stack:
        stack.enter_context(lock(folder_of(cfg)))
        store = CheckpointStore(
            folder_of(cfg) / CHECKPOINTS,
            keep=cfg.checkpoint.keep,
            model_id=model_id(cfg.model.path),
            config_id=config_id(cfg),
            in_background=cfg.checkpoint.async_save,
        )
        resume_from = find_checkpoint(cfg, store)
        store.sweep()
        if resume_from is not None and resume_from.step >= cfg.run.num_steps and is_finished(cfg):
            logger.warning(
                "%s has done its %d steps; raise run.num_steps to train on, or start anew with run.resume=never",
                folder_of(cfg),
                resume_from.step,
            )
            return None
        data = load_data(cfg)
        stack.callback(data.close)
        policy = _policy(cfg)
        side = build_rollout_side(cfg, data)
        stack.callback(side.close)
        folder = prepare(cfg, resumes=resume_from is not None)
        records = _records(cfg, folder, policy, resume_from)
        rooms = _rooms(cfg, data=data, side=side, policy=policy, records=records, store=store, stack=stack)
        schedule = Schedule(cfg.run.num_steps, cfg.evaluation.interval_steps, cfg.checkpoint.interval_steps)
        return Run(cfg, rooms, schedule, resume_from, folder, stack.pop_all())


def _policy(cfg: RunConfig) -> MegatronPolicy:
    objective = build_objective(cfg.algorithm)
    return MegatronPolicy.build(
        model=cfg.model,
        parallel=cfg.parallel,
        precision=cfg.precision,
        optim=cfg.optim,
        routing=cfg.algorithm.routing,
        router_shift=cfg.algorithm.router_shift.enabled,
        needs_reference="ref_logprobs" in objective.needs or cfg.algorithm.kl.place == "reward",
        gamma_min=cfg.algorithm.router_shift.gamma_min,
        reference=cfg.algorithm.reference,
        teacher=cfg.algorithm.teacher.path,
        num_steps=cfg.run.num_steps - cfg.algorithm.critic.pretrain_steps,
        seed=cfg.run.seed,
    )


def _learner(cfg: RunConfig, policy: MegatronPolicy) -> Policy:
    """What the loop trains: the policy, with a critic beside it where the advantages need one."""
    section = cfg.algorithm.critic
    if section.init == "none":
        return policy
    critic = MegatronCritic.build(
        model=cfg.model,
        parallel=cfg.parallel,
        precision=cfg.precision,
        optim=cfg.optim,
        critic=section,
        num_steps=cfg.run.num_steps,
        seed=cfg.run.seed,
    )
    return ActorCritic(policy, critic, pretrain_steps=section.pretrain_steps)


def _rooms(
    cfg: RunConfig,
    *,
    data: Data,
    side: RolloutSide,
    policy: MegatronPolicy,
    records: Records,
    store: CheckpointStore,
    stack: ExitStack,
) -> Rooms:
    filters = build_filters(cfg.algorithm.filters)
    buffer, source = build_buffer(cfg, data, side, filters=filters, log_visits=records.visits)
    objective = build_objective(cfg.algorithm)
    memory = credit_state(cfg.algorithm)
    rules = build_credit_rules(cfg.algorithm, filters, data.reward_weights, memory)
    token_credit = TokenCredit(build_token_rules(cfg.algorithm, objective, rules), policy.parallel.gather_over_data)
    evaluator = build_evaluator(cfg, data, side)
    packer = _Packer(cfg, policy)
    probe = RouteProbe(policy.observe, packer.probe_batches)
    publish = stack.enter_context(_publishing(cfg, side, policy))

    def start_probe() -> None:
        prompts = [prompt for one in data.held_out for prompt in one.prompts][: cfg.telemetry.probe_prompts]
        if prompts:
            greedy = replace(evaluator.greedy, temperature=1.0)
            probe.start(evaluator.collect(prompts, step=0, group_size=1, params=greedy))

    def give_credit(groups: Sequence[RolloutGroup]) -> tuple[list[Sample], Metrics]:
        samples, metrics = credit(groups, rules)
        merge_into(metrics, data.scorer.take_metrics())
        return samples, merge_into(metrics, source.metrics())

    return Rooms(
        rollouts=buffer,
        credit=give_credit,
        pack=packer.pack,
        token_credit=token_credit,
        policy=_learner(cfg, policy),
        objective=objective,
        publish=publish,
        evaluator=evaluator,
        probe=probe,
        start_probe=start_probe,
        contract=StepZeroContract(
            cfg.precision.params, cfg.rollout.engine.get("precision", "fp32"), cfg.telemetry.contract_tolerance
        ),
        checkpoints=store,
        records=records,
        counts_empty=counts_empty(cfg.algorithm),
        states={**memory, "coefficients": token_credit} if token_credit.is_adaptive else memory,
    )


class _Packer:
    """Samples to this rank's tensors; the aggregation crosses here as a plain function."""

    def __init__(self, cfg: RunConfig, policy: MegatronPolicy) -> None:
        self._batch = cfg.batch
        self._seed = cfg.run.seed
        self._weights = MinibatchWeights(cfg.algorithm)
        self._has_pairs = packs_pairs(cfg.algorithm)
        self._policy = policy

    def pack(self, samples: Sequence[Sample], step: int) -> StepBatch:
        """The step's batch."""
        return self._build(
            samples,
            self._seed * 1_000_003 + step,
            (self._batch.num_minibatches, self._batch.num_epochs),
            atoms=[sample.group_id for sample in samples] if self._has_pairs else None,
        )

    def probe_batches(self, samples: Sequence[Sample]) -> Sequence[MicroBatch]:
        """The probe's micro-batches, always the same."""
        return self._build(samples, 0, (1, 1), atoms=None).minibatches[0]

    def _build(
        self, samples: Sequence[Sample], seed: int, cuts: tuple[int, int], *, atoms: Sequence[int] | None
    ) -> StepBatch:
        num_minibatches, num_epochs = cuts
        numbered = [replace(sample, sample_id=i) for i, sample in enumerate(samples)]
        plan = plan_packing(
            [len(s.token_ids) for s in numbered],
            [s.group_id for s in numbered],
            [int(s.loss_mask.sum()) for s in numbered],
            dp_size=self._policy.parallel.dp.size,
            num_minibatches=num_minibatches,
            num_epochs=num_epochs,
            max_tokens_per_microbatch=self._batch.max_tokens_per_microbatch,
            seed=seed,
            atoms=atoms,
            microbatch_multiple=self._policy.parallel.microbatch_multiple,
        )
        return build_step_batch(
            numbered,
            plan,
            dp_rank=self._policy.parallel.dp.rank,
            weigh=self._weights.policy,
            weigh_terms=self._weights.terms,
            device=self._policy.device,
            policy_version=self._policy.version,
        )


@contextlib.contextmanager
def _publishing(cfg: RunConfig, side: RolloutSide, policy: MegatronPolicy) -> Iterator[Any]:
    plugin, transport_cfg = transports.resolve(cfg.weight_sync.transport, where="weight_sync.transport")
    transport = plugin.target(transport_cfg)
    hf = read_config(cfg.model.path)
    names = {name for rule in family_of(hf, cfg.model.family).weight_rules(hf) for name in rule.hf_names}
    publisher = Publisher(side.engines, transport, cfg.weight_sync.bucket_bytes, expected_names=names)
    with asyncio.Runner() as runner, contextlib.closing(transport):

        def publish() -> Metrics:
            if policy.version == publisher.version:
                return {}  # the engines have these weights
            return runner.run(publisher.publish(policy.export(), policy.version))

        yield publish


def _peak(params: str) -> float | None:
    """Of this rank's device; None where it is not known."""
    return peak_flops(torch.cuda.get_device_name(), params) if torch.cuda.is_available() else None


def _records(cfg: RunConfig, folder: Path, policy: MegatronPolicy, resume_from: Checkpoint | None) -> Records:
    first = resume_from.step + 1 if resume_from else 0
    sinks: list[Any] = [JsonlSink(folder, resume_step=first)]
    if cfg.telemetry.wandb.enabled:
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
        loads=LoadSink(folder, resume_step=first),
        pass_rates=PassRateSink(folder, resume_step=first),
        progress=Progress(cfg.run.num_steps, max(first, 1), cfg.telemetry.progress),
        timers=Timers(num_devices=policy.parallel.world_size, peak_flops=_peak(cfg.precision.params)),
        dump_batch=save_step_batch,
        profile=ProfileWindow(
            folder,
            rank=policy.parallel.rank,
            start_step=cfg.telemetry.profile.start_step,
            num_steps=cfg.telemetry.profile.num_steps,
        ),
    )
