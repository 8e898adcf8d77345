"""The composition root: a checked configuration becomes wired rooms.

With `build_rollout.py` and `build_evaluation.py` the only code that knows every concrete class. Everything that can be
checked is checked before a learner or an engine is made.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moerl.actor_critic import ActorCritic
from moerl.algorithms.filtering import build_filters
from moerl.algorithms.objective import build_objective
from moerl.algorithms.types import CreditInputs
from moerl.build_credit import (
    MinibatchWeights,
    build_credit_rules,
    build_token_rules,
    counts_empty,
    credit_state,
    packs_pairs,
)
from moerl.build_ranks import build_records, following_side, leading_side
from moerl.build_rollout import Data, build_rollout_side, load_data, reward_weights
from moerl.build_servers import servers_elsewhere
from moerl.checkpoint import Checkpoint, CheckpointStore
from moerl.config.rollout_rules import releases_memory
from moerl.config.schema import RunConfig
from moerl.contract import StepZeroContract
from moerl.data.batch import build_step_batch
from moerl.data.packing import plan_packing
from moerl.finish import export_folder, export_weights
from moerl.loop import Rooms, Schedule
from moerl.mcore.critic import MegatronCritic
from moerl.mcore.policy import MegatronPolicy
from moerl.mcore.reduce import merge_over_ranks
from moerl.mcore.team import ProcessTeam
from moerl.metrics import Metrics
from moerl.models.hf_export import copied_files
from moerl.probe import RouteProbe
from moerl.protocols import Policy, Team
from moerl.rollout.engine import engines
from moerl.run_folder import CHECKPOINTS, config_id, find_checkpoint, folder_of, is_finished, lock, model_id, prepare
from moerl.share import SampleShare, trained_on
from moerl.telemetry.trace import Trace
from moerl.token_credit import TokenCredit
from moerl.types import MicroBatch, PackPlan, Sample, StepBatch
from moerl.world import Alone

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


def build_run(cfg: RunConfig, team: Team | None = None) -> Run | None:
    """Wire a training run of the ranks of `team` (None: one process); None where the run is complete already.

    Raises:
        MoerlError: whatever is wrong, before anything is trained or overwritten.
    """
    team = team or Alone()
    torch.set_num_threads(cfg.run.num_threads)
    with ExitStack() as stack:
        if team.is_leader:
            stack.enter_context(lock(folder_of(cfg)))
        store = CheckpointStore(
            folder_of(cfg) / CHECKPOINTS,
            keep=cfg.checkpoint.keep,
            model_id=model_id(cfg.model.path),
            config_id=config_id(cfg),
            in_background=cfg.checkpoint.async_save,
            team=team,
        )
        resume_from, is_done = _found(cfg, store, team)
        if is_done:
            return None
        data = None
        if team.is_leader:
            copied_files(Path(cfg.model.path))  # what exports would refuse in the end
            data = load_data(cfg)
            stack.callback(data.close)
        team.meet()  # what is wrong with the data is said before a model is built
        policy = _policy(cfg)
        if isinstance(team, ProcessTeam):
            team.split(policy.parallel.dp.rank)
        rooms, folder = _rooms(cfg, team, data, policy, (store, resume_from), stack)
        schedule = Schedule(
            cfg.run.num_steps,
            cfg.evaluation.interval_steps,
            cfg.checkpoint.interval_steps,
            cfg.checkpoint.export_interval_steps,
        )
        return Run(cfg, rooms, schedule, resume_from, folder, stack.pop_all())


def _found(cfg: RunConfig, store: CheckpointStore, team: Team) -> tuple[Checkpoint | None, bool]:
    """The leader looks for a checkpoint to go on from, and whether the run has ended; the others are told."""
    found, answer = None, None
    if team.is_leader:
        found = find_checkpoint(cfg, store)
        store.sweep()
        is_done = found is not None and found.step >= cfg.run.num_steps and is_finished(cfg)
        if is_done:
            logger.warning(
                "%s has done its %d steps; raise run.num_steps to train on, or start anew with run.resume=never",
                folder_of(cfg),
                found.step if found else 0,
            )
        answer = json.dumps([found.step if found else None, is_done]).encode()
    step, is_done = json.loads(team.spread(answer))
    if step is not None and found is None:
        found = store.open(step, is_checked=True)
    return found, is_done


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
        num_steps=cfg.algorithm.critic.policy_steps(cfg.run.num_steps),
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
    return ActorCritic(policy, critic, pretrain_steps=section.pretrain_steps, merge=_merge(policy))


def _contract(cfg: RunConfig) -> StepZeroContract:
    engine, engine_cfg = engines.resolve(cfg.rollout.engine, where="rollout.engine")
    precision = getattr(engine_cfg, "precision", "fp32")
    rounding = engine.traits.get("fp32_rounding", 0.0)
    return StepZeroContract(cfg.precision.params, precision, cfg.telemetry.contract_tolerance, rounding)


def _merge(policy: MegatronPolicy) -> Callable[[Metrics], Metrics]:
    return lambda metrics: merge_over_ranks(metrics, policy.parallel)


def _rooms(
    cfg: RunConfig,
    team: Team,
    data: Data | None,
    policy: MegatronPolicy,
    checkpoints: tuple[CheckpointStore, Checkpoint | None],
    stack: ExitStack,
) -> tuple[Rooms, Path]:
    """The rooms of this rank, and the run folder; `data` is the leader's, `stack` closes what is opened."""
    store, resume_from = checkpoints
    filters = build_filters(cfg.algorithm.filters)
    objective = build_objective(cfg.algorithm)
    memory = credit_state(cfg.algorithm)
    weights = reward_weights(cfg) if data is None else data.reward_weights
    rules = build_credit_rules(cfg.algorithm, filters, weights, memory)
    folder = folder_of(cfg)
    elsewhere = servers_elsewhere(cfg, team, stack)
    if data is not None:
        trace = Trace(folder, cfg.telemetry.trace_max_bytes)
        side = build_rollout_side(cfg, data, on_span=trace.group, elsewhere=elsewhere)
        stack.callback(side.close)
        prepare(cfg, resumes=resume_from is not None)
        records = build_records(cfg, folder, policy, resume_from, team, trace)
        around = leading_side(cfg, (data, side, filters), policy, rules, records, stack)
    else:
        records = build_records(cfg, folder, policy, resume_from, team)
        around = following_side(policy)
    share = SampleShare(team)
    token_rules = build_token_rules(cfg.algorithm, objective, replace(rules, advantages=_led(team, rules.advantages)))
    token_credit = TokenCredit(token_rules, policy.parallel.gather_over_data)
    packer = _Packer(cfg, policy, share)
    probe = RouteProbe(policy.observe, packer.probe_batches)
    num_data_ranks = policy.parallel.dp.size
    return Rooms(
        rollouts=around.rollouts,
        credit=around.credit,
        share=share.outline,
        pack=packer.pack,
        token_credit=token_credit,
        policy=_learner(cfg, policy),
        objective=objective,
        publish=_with_room(team, around.publish) if releases_memory(cfg) else around.publish,
        evaluator=around.evaluator,
        probe=probe,
        start_probe=lambda: probe.start(share.whole(around.draw_probe(), num_data_ranks)),
        contract=_contract(cfg),
        checkpoints=store,
        records=records,
        merge=_merge(policy),
        counts_empty=counts_empty(cfg.algorithm),
        states={**memory, "coefficients": token_credit} if token_credit.is_adaptive else memory,
        team=team,
        measure_engines=around.measure_engines,
        lend_memory=_lending(team, around.lend_memory) if releases_memory(cfg) else lambda: None,
        export=lambda step: export_weights(cfg, export_folder(folder, step), policy, is_leader=team.is_leader),
    ), folder


def _lending(team: Team, lend: Callable[[], None]) -> Callable[[], None]:
    """No rank begins to learn before the leader's engines have let go."""

    def lend_memory() -> None:
        lend()
        team.meet()

    return lend_memory


def _with_room(team: Team, publish: Callable[[], Metrics]) -> Callable[[], Metrics]:
    """Before servers take their memory again, every rank gives back what its allocator keeps for later.

    What learning took at its peak would stay with this process, and SGLang dies where it finds no room.
    """

    def publish_with_room() -> Metrics:
        torch.cuda.empty_cache()
        team.meet()
        return publish()

    return publish_with_room


Advantages = Callable[[CreditInputs], tuple[Tensor, Metrics]]


def _led(team: Team, rule: Advantages) -> Advantages:
    """`rule` as the leader applies it, on every rank: its memory of prompts is the leader's."""
    if team.size == 1:
        return rule

    def advantages(inputs: CreditInputs) -> tuple[Tensor, Metrics]:
        made = rule(inputs)[0].double().numpy().tobytes() if team.is_leader else None
        return torch.frombuffer(bytearray(team.spread(made)), dtype=torch.float64), {}

    return advantages


class _Packer:
    """Samples to this rank's tensors; the aggregation crosses here as a plain function."""

    def __init__(self, cfg: RunConfig, policy: MegatronPolicy, share: SampleShare) -> None:
        self._share = share
        self._batch = cfg.batch
        self._seed = cfg.run.seed
        self._weights = MinibatchWeights(cfg.algorithm)
        self._has_pairs = packs_pairs(cfg.algorithm)
        self._policy = policy

    def pack(self, samples: Sequence[Sample], step: int) -> StepBatch:
        """The step's batch; `samples` may be outlines, and their arrays come where they are trained on."""
        numbered = [replace(sample, sample_id=i) for i, sample in enumerate(samples)]
        parallel = self._policy.parallel
        plan = plan_packing(
            *_sizes(numbered),
            dp_size=parallel.dp.size,
            num_minibatches=self._batch.num_minibatches,
            num_epochs=self._batch.num_epochs,
            max_tokens_per_microbatch=self._batch.max_tokens_per_microbatch,
            seed=self._seed * 1_000_003 + step,
            atoms=[sample.group_id for sample in samples] if self._has_pairs else None,
            microbatch_multiple=parallel.microbatch_multiple,
        )
        return self._build(self._share.deliver(numbered, trained_on(plan)), plan, parallel.dp.rank)

    def probe_batches(self, samples: Sequence[Sample]) -> Sequence[MicroBatch]:
        """The probe's micro-batches, always the same: every data-parallel rank looks at all of them."""
        plan = plan_packing(
            *_sizes(samples),
            dp_size=1,
            num_minibatches=1,
            num_epochs=1,
            max_tokens_per_microbatch=self._batch.max_tokens_per_microbatch,
            seed=0,
            microbatch_multiple=self._policy.parallel.microbatch_multiple,
        )
        return self._build(samples, plan, 0).minibatches[0]

    def _build(self, samples: Sequence[Sample], plan: PackPlan, data_rank: int) -> StepBatch:
        return build_step_batch(
            samples,
            plan,
            dp_rank=data_rank,
            weigh=self._weights.policy,
            weigh_terms=self._weights.terms,
            device=self._policy.device,
            policy_version=self._policy.version,
        )


def _sizes(samples: Sequence[Sample]) -> tuple[list[int], list[int], list[int]]:
    """Lengths, groups and live lengths: what a plan is made of."""
    return (
        [len(sample.token_ids) for sample in samples],
        [sample.group_id for sample in samples],
        [int(sample.loss_mask.sum()) for sample in samples],
    )
