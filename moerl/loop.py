"""The training loop; the first file to read. Synchronous and asynchronous training are the same loop.

    Prompt --rollout--> RolloutGroup --credit--> Sample --pack--> StepBatch --score--> StepBatch --update--> Metrics
      ^                                                                 (+ token_credit)              |
      +------------------------------ publish: weights, version + 1 <---------------------------------+

Every arrow is one call of `_train_step`. Every process of a run walks this loop. Rank 0 alone has engines, verifiers
and files: on the others `take`, `credit`, the evaluator and the records do nothing, and `share` brings the samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from moerl.checkpoint import Checkpoint, CheckpointStore
from moerl.contract import StepZeroContract
from moerl.errors import EXIT_FAILED, Interrupted, MoerlError, NumericsError, PeerError, RolloutError
from moerl.evaluate import Evaluator
from moerl.metrics import Metrics, Sum, merge_into, to_floats
from moerl.probe import RouteProbe
from moerl.protocols import Policy, Rollouts, Stateful, Team
from moerl.records import Records
from moerl.stop import StopSignal
from moerl.token_credit import TokenCredit
from moerl.types import RolloutGroup, Sample, StepBatch
from moerl.world import Alone

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Schedule:
    """When the loop does what."""

    num_steps: int
    evaluate_every: int
    checkpoint_every: int
    export_every: int = 0

    def evaluates(self, step: int) -> bool:
        """Whether to evaluate after `step`."""
        return step == self.num_steps or bool(self.evaluate_every and step % self.evaluate_every == 0)

    def exports(self, step: int) -> bool:
        """Whether to write a Hugging Face folder after `step`."""
        return bool(self.export_every and step % self.export_every == 0)

    def saves(self, step: int) -> bool:
        """Whether to save after `step`."""
        return step == self.num_steps or bool(self.checkpoint_every and step % self.checkpoint_every == 0)


@dataclass(frozen=True)
class Rooms:
    """What the loop walks through; wired by `build.py`."""

    rollouts: Rollouts
    credit: Callable[[Sequence[RolloutGroup]], tuple[list[Sample], Metrics]]
    share: Callable[[Sequence[Sample]], list[Sample]]
    """The leader's samples, on every rank."""
    pack: Callable[[Sequence[Sample], int], StepBatch]
    """(samples, step) -> this rank's tensors."""
    token_credit: TokenCredit
    policy: Policy
    objective: Any
    publish: Callable[[], Metrics]
    """Send the policy's weights to the engines under its version."""
    evaluator: Evaluator
    probe: RouteProbe
    start_probe: Callable[[], None]
    contract: StepZeroContract
    checkpoints: CheckpointStore
    records: Records
    merge: Callable[[Metrics], Metrics] = lambda metrics: metrics
    """Metrics of every data-parallel rank's own samples, joined."""
    counts_empty: bool = False
    """Answers without a live token are packed too, for an aggregation that counts them."""
    states: Mapping[str, Stateful] = field(default_factory=dict)
    """What else a checkpoint holds: the memory of credit rules and of adaptive coefficients."""
    team: Team = field(default_factory=Alone)
    """The processes that walk the loop together."""
    measure_engines: Callable[[], Metrics] = dict
    """What engines count of their requests and servers, since the last call."""
    lend_memory: Callable[[], None] = lambda: None
    """Where engines share the learner's devices: they give their memory to it, until `publish` takes it back."""
    export: Callable[[int], None] = lambda step: None
    """Write the weights after a step as a Hugging Face folder."""


def train(rooms: Rooms, schedule: Schedule, resume_from: Checkpoint | None) -> None:
    """Run the remaining steps of a run.

    Raises:
        Interrupted: Ctrl-C or SIGTERM came; the state of the last finished step is saved.
        RolloutError: an evaluation failed; the step that it is of is saved, and a resumed run evaluates it first.
        NumericsError: a loss, gradient or weight was not finite; the batch is dumped, and nothing of the step is saved.
    """
    team, signals = rooms.team, StopSignal(is_leader=rooms.team.is_leader, has_launcher=rooms.team.size > 1)
    with signals as stop, rooms.records, rooms.checkpoints:
        first = _resume(rooms, resume_from) if resume_from else _start(rooms)
        for step in range(first, schedule.num_steps + 1):
            metrics = _train_step(rooms, step)
            failure = _evaluate(rooms, metrics) if schedule.evaluates(step) else None
            merge_into(metrics, rooms.measure_engines())
            rooms.records.step(step, metrics, lacks_evaluation=failure is not None)
            is_stopping = team.any(stop.requested)
            if schedule.saves(step) or is_stopping or failure is not None:
                _save(rooms, step)
            if schedule.exports(step):
                with rooms.records.phase("export"):
                    rooms.export(step)
            if failure is not None:
                _refuse(rooms, step, failure)
            if is_stopping and step < schedule.num_steps:
                rooms.checkpoints.wait()
                raise Interrupted(f"stopped after step {step} of {schedule.num_steps}; its state is saved")


def _train_step(rooms: Rooms, step: int) -> Metrics:
    records = rooms.records
    rooms.team.begin(step)
    records.begin(step)
    with records.phase("rollout"):
        groups, metrics = rooms.rollouts.take(step, rooms.policy.version)
    records.rollouts(step, groups, metrics)
    samples, new = rooms.credit(groups)
    merge_into(metrics, new)
    samples = rooms.share(samples)
    live = [sample for sample in samples if rooms.counts_empty or sample.loss_mask.any()]
    if not any(sample.loss_mask.any() for sample in live):
        logger.warning("step %d: no token to train on (every group was filtered or masked); the weights stay", step)
        return merge_into(metrics, {"optim/skipped_steps": Sum(1.0)})
    rooms.lend_memory()
    with records.phase("pack"):
        batch = rooms.pack(live, step)
    with records.phase("score"):
        batch, new = rooms.policy.score(batch, rooms.objective.needs | rooms.token_credit.needs)
        merge_into(metrics, new)
        batch, new = rooms.token_credit(batch, live, samples)
    merge_into(metrics, rooms.merge(new))
    records.batch(step, batch)
    try:
        with records.phase("update"):
            merge_into(metrics, rooms.policy.update(batch, rooms.objective))
    except NumericsError as error:
        path = records.dump(step, batch, reason=str(error))
        raise NumericsError(f"step {step}: {error}; nothing of this step was saved; its batch is in {path}") from error
    rooms.token_credit.adapt(metrics)
    if rooms.policy.version == 1:  # the run's first update, whichever step had the first token to train on
        records.extra(rooms.contract.check(to_floats(metrics)))
    with records.phase("publish"):
        merge_into(metrics, rooms.publish())
    with records.phase("probe"):
        merge_into(metrics, rooms.probe.measure())
    return metrics


def _evaluate(rooms: Rooms, metrics: Metrics) -> MoerlError | None:
    """Add `eval/*` to `metrics`, or return what failed, on every rank: the step must not be lost for it."""
    failure: MoerlError | None = None
    with rooms.records.phase("evaluate"):
        try:
            merge_into(metrics, rooms.evaluator.run())
        except MoerlError as error:
            logger.warning("the evaluation failed; what is trained is saved before the run ends")
            failure = error
    if rooms.team.any(failure is not None):
        return failure or PeerError(EXIT_FAILED)
    return None


def _refuse(rooms: Rooms, step: int, failure: MoerlError) -> NoReturn:
    """End a run whose evaluation failed, once its state is on the disk."""
    rooms.checkpoints.wait()
    if isinstance(failure, PeerError):
        rooms.team.meet()  # ends this rank as soon as the one that failed has said why
        raise failure
    raise RolloutError(
        f"{failure}. Step {step} is trained and saved, and lacks its evaluation alone: the same command evaluates it "
        "and goes on (evaluation.*, reward.max_error_fraction and the timeouts may be changed)"
    ) from failure


def _start(rooms: Rooms) -> int:
    """A fresh run: publish the weights, evaluate the policy as it came, fix the probe; returns the first step."""
    with rooms.records.phase("publish"):
        metrics = rooms.publish()
    with rooms.records.phase("evaluate"):
        merge_into(metrics, rooms.evaluator.run())
    rooms.start_probe()
    rooms.records.step(0, merge_into(metrics, rooms.measure_engines()))
    return 1


def _resume(rooms: Rooms, checkpoint: Checkpoint) -> int:
    """Restore everything of `checkpoint`; returns the first step to do."""
    state = checkpoint.loop_state()
    rooms.policy.load(checkpoint.learner)
    rooms.rollouts.load_state_dict(state["rollouts"])
    rooms.records.load_state_dict(state["records"])
    for name, part in rooms.states.items():
        part.load_state_dict(state["states"][name])
    rooms.publish()
    rooms.probe.load_state_dict(state["probe"])
    rooms.records.message(f"going on from step {checkpoint.step} ({checkpoint.folder})")
    if rooms.records.lacks_evaluation:
        metrics: Metrics = {}
        failure = _evaluate(rooms, metrics)
        if failure is not None:
            _refuse(rooms, checkpoint.step, failure)
        rooms.records.evaluated(checkpoint.step, metrics)
        _save(rooms, checkpoint.step)
    return checkpoint.step + 1


def _save(rooms: Rooms, step: int) -> None:
    state: Mapping[str, Any] = {
        "step": step,
        "rollouts": rooms.rollouts.state_dict(),
        "records": rooms.records.state_dict(),
        "probe": rooms.probe.state_dict(),
        "states": {name: part.state_dict() for name, part in rooms.states.items()},
    }
    with rooms.records.phase("checkpoint"):
        rooms.checkpoints.save(step, rooms.policy, state)
