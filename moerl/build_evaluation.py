"""Composition of `moerl eval`: data, an engine and weights to judge; a learner only where a checkpoint is read."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from moerl.build_rollout import Data, RolloutSide, build_evaluator, build_rollout_side, exported_weights, load_data
from moerl.build_weights import build_precision, build_publisher
from moerl.checkpoint import Checkpoint, CheckpointStore
from moerl.config.schema import RunConfig
from moerl.errors import CheckpointError
from moerl.evaluate import Evaluator
from moerl.metrics import to_floats
from moerl.protocols import Policy, RolloutEngine
from moerl.rollout.engine import engines
from moerl.run_folder import CHECKPOINTS, folder_of, lock, model_id
from moerl.weight_sync.transport import transports


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
        ConfigError: servers that a run trains with.
    """
    torch.set_num_threads(cfg.run.num_threads)
    with ExitStack() as stack:
        data = load_data(cfg, with_train=False)
        stack.callback(data.close)
        side, subject = engine_with_weights(cfg, data, stack, run_folder=run_folder, step=step)
        return Evaluation(build_evaluator(cfg, data, side), subject, stack.pop_all())


def engine_with_weights(
    cfg: RunConfig, data: Data, stack: ExitStack, *, run_folder: Path | None, step: int | None
) -> tuple[RolloutSide, str]:
    """The rollout side with the weights that `build_evaluation` judges, and what they are, for people.

    `stack` closes it.

    Raises:
        CheckpointError: no such checkpoint, or it is damaged.
        ConfigError: servers that a run trains with.
    """
    checkpoint = None if run_folder is None else _checkpoint(cfg, run_folder, step)
    is_served = "sender" in engines.get(cfg.rollout.engine["name"]).traits["injects"]
    is_attached = is_served and cfg.rollout.engine.get("servers") is None
    if is_attached:  # they would get other weights in the middle of training
        stack.enter_context(lock(run_folder or folder_of(cfg)))
    place = stack.enter_context(_place(cfg)) if is_served else None
    side = build_rollout_side(cfg, data, load_weights=checkpoint is None, place=place)
    stack.callback(side.close)
    if checkpoint is not None:
        policy = _learner_of(cfg, checkpoint)
        _publish(cfg, side.eval_engine, policy.export(), policy.version)
    elif is_attached:  # what they were started with is not known
        _publish(cfg, side.eval_engine, exported_weights(cfg), 0)
    return side, cfg.model.path if checkpoint is None else str(checkpoint.folder)


@contextmanager
def _place(cfg: RunConfig) -> Iterator[Path]:
    """A folder that servers can read, apart from those of runs; it goes at the end."""
    parent = Path(cfg.weight_sync.folder or cfg.run.output_dir)
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="evaluation-", dir=parent) as folder:
        yield Path(folder)


def _checkpoint(cfg: RunConfig, run_folder: Path, step: int | None) -> Checkpoint:
    store = CheckpointStore(run_folder / CHECKPOINTS, keep=1, model_id=model_id(cfg.model.path))
    found = store.latest(on_corrupt=cfg.checkpoint.on_corrupt) if step is None else store.open(step)
    if found is None:
        raise CheckpointError(f"{run_folder} has no complete checkpoint yet; evaluate its model with --model")
    return found


def _learner_of(cfg: RunConfig, checkpoint: Checkpoint) -> Policy:
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
    return policy


def _publish(cfg: RunConfig, engine: RolloutEngine, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
    """As a run does, in its precision and by its transport."""
    plugin, transport_cfg = transports.resolve(cfg.weight_sync.transport, where="weight_sync.transport")
    precision = build_precision(cfg)
    with closing(plugin.target(transport_cfg)) as transport:
        publisher = build_publisher(cfg, [engine], transport, precision)
        asyncio.run(publisher.publish(precision.apply(weights), version))
