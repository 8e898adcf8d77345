"""Composition of `moerl eval`: data, an engine and weights to judge; a learner only where a checkpoint is read."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from moerl.build_rollout import Data, RolloutSide, build_evaluator, build_rollout_side, load_data
from moerl.checkpoint import Checkpoint, CheckpointStore
from moerl.config.schema import RunConfig
from moerl.errors import CheckpointError
from moerl.evaluate import Evaluator
from moerl.metrics import to_floats
from moerl.protocols import RolloutEngine
from moerl.run_folder import CHECKPOINTS, model_id
from moerl.weight_sync.publisher import Publisher
from moerl.weight_sync.transports.in_process import InProcess, InProcessConfig


@dataclass(frozen=True)
class Evaluation:
    """An evaluation ready to run; a context manager that closes engines and verifiers."""

    evaluator: Evaluator
    subject: str
    """What is judged, for people."""
    stack: ExitStack

    def run(self) -> dict[str, float]:
        """Values of `eval/*`."""
        return to_floats(self.evaluator.run())

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close everything."""
        self.stack.close()


def build_evaluation(cfg: RunConfig, *, run_folder: Path | None, step: int | None) -> Evaluation:
    """Judge the checkpoint of `step` (None: the newest) of `run_folder`, or without one the folder `model.path`.

    Raises:
        CheckpointError: no such checkpoint, or it is damaged.
    """
    torch.set_num_threads(cfg.run.num_threads)
    with ExitStack() as stack:
        data = load_data(cfg, with_train=False)
        stack.callback(data.close)
        side, subject = engine_with_weights(cfg, data, run_folder=run_folder, step=step)
        stack.callback(side.close)
        return Evaluation(build_evaluator(cfg, data, side), subject, stack.pop_all())


def engine_with_weights(
    cfg: RunConfig, data: Data, *, run_folder: Path | None, step: int | None
) -> tuple[RolloutSide, str]:
    """The rollout side with the weights that `build_evaluation` judges, and what they are, for people.

    Raises:
        CheckpointError: no such checkpoint, or it is damaged.
    """
    checkpoint = None if run_folder is None else _checkpoint(cfg, run_folder, step)
    with ExitStack() as stack:
        side = build_rollout_side(cfg, data, load_weights=checkpoint is None)
        stack.callback(side.close)
        if checkpoint is not None:
            _publish_checkpoint(cfg, checkpoint, side.eval_engine)
        stack.pop_all()
    return side, cfg.model.path if checkpoint is None else str(checkpoint.folder)


def _checkpoint(cfg: RunConfig, run_folder: Path, step: int | None) -> Checkpoint:
    store = CheckpointStore(run_folder / CHECKPOINTS, keep=1, model_id=model_id(cfg.model.path))
    found = store.latest(on_corrupt=cfg.checkpoint.on_corrupt) if step is None else store.open(step)
    if found is None:
        raise CheckpointError(f"{run_folder} has no complete checkpoint yet; evaluate its model with --model")
    return found


def _publish_checkpoint(cfg: RunConfig, checkpoint: Checkpoint, engine: RolloutEngine) -> None:
    from moerl.mcore.policy import MegatronPolicy

    policy = MegatronPolicy.build(
        model=cfg.model,
        parallel=cfg.parallel,
        precision=cfg.precision,
        optim=cfg.optim,
        routing="none",
        router_shift=False,
        needs_reference=False,
        num_steps=cfg.run.num_steps,
        seed=cfg.run.seed,
    )
    policy.load(checkpoint.learner)
    publisher = Publisher([engine], InProcess(InProcessConfig()), cfg.weight_sync.bucket_bytes)
    asyncio.run(publisher.publish(policy.export(), policy.version))
