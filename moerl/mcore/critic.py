"""The critic: the policy's network with one output per token in place of the vocabulary, and an optimizer of its own.

Index j of a value speaks of the state before token j, as `logprobs[j]` does: it comes from the hidden state of token
j - 1 and is 0 at the first token of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from moerl.algorithms.values import value_loss
from moerl.config.schema import CriticSection, ModelSection, OptimSection, ParallelSection, PrecisionSection
from moerl.errors import ConfigError
from moerl.mcore import checkpoint
from moerl.mcore.inputs import fill_step
from moerl.mcore.model import (
    PackedGPTModel,
    build_chunks,
    read_same_shape,
    read_source,
    transformer_config,
    unwrap,
)
from moerl.mcore.optim import Optimizer, minibatch_of, wrap_chunks
from moerl.mcore.parallel import ParallelState, initialize_parallel
from moerl.mcore.reduce import merge_over_ranks
from moerl.mcore.rows import Predictions
from moerl.mcore.step import MicroResult, StepRunner, TokenScores, own_routes
from moerl.mcore.value_head import linear_values
from moerl.mcore.weights import WeightMap
from moerl.metrics import Last, Metrics, Sum, masked_mean, merge_into
from moerl.models.family import refuse_unproven
from moerl.shards import has_shards
from moerl.types import MicroBatch, StepBatch

HEAD = "value_head"
CHECKPOINT_FOLDER = "critic"
"""Of the critic's files, inside the learner's folder of a checkpoint."""


class ValueModel(PackedGPTModel):
    """The backbone with a linear value head; its last stage returns [2 + k, t]: values, then zeros."""

    def __init__(self, **arguments: Any) -> None:
        """As GPTModel; the vocabulary's output layer is dropped. The head starts at 0, so every value does."""
        super().__init__(**{**arguments, "share_embeddings_and_output_weights": False})
        if self.post_process:
            self.output_layer = None
            self.value_head = torch.nn.Linear(self.config.hidden_size, 1, dtype=self.config.params_dtype)
            torch.nn.init.zeros_(self.value_head.weight)
            torch.nn.init.zeros_(self.value_head.bias)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Without what GPTModel does about its output layer, which is not there."""
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)

    def score_hidden(self, *, hidden_states: Tensor, context: Predictions, **_: Any) -> Tensor:
        """`hidden_states` [m, 1, h]. The head is whole on every tensor rank, and so is its gradient."""
        hidden = hidden_states
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        values = linear_values(hidden[:, 0], self.value_head.weight, self.value_head.bias)[:, None]
        further = 1 if context.top_ids is None else 1 + context.top_ids.shape[1]
        return F.pad(self.scores_of_tokens(values, context), (0, 0, 0, further))


class MegatronCritic:
    """Values of tokens, and their training; the second model of a process beside `MegatronPolicy`."""

    def __init__(
        self,
        weights: WeightMap,
        head: Mapping[str, Tensor],
        runner: StepRunner,
        optimizer: Optimizer,
        settings: CriticSection,
        hidden_size: int,
    ) -> None:
        """Wire parts; use `build`."""
        self.version = 0
        """Completed updates: the step of its learning-rate schedule."""
        self._weights = weights
        self._local = {**weights.local, **head}
        self.head = dict(head)
        """The value head of this rank, if it has the last stage; live."""
        self._hidden_size = hidden_size
        self._runner = runner
        self._optimizer = optimizer
        self._clip = settings.value_clip

    @classmethod
    def build(
        cls,
        *,
        model: ModelSection,
        parallel: ParallelSection,
        precision: PrecisionSection,
        optim: OptimSection,
        critic: CriticSection,
        num_steps: int,
        seed: int,
    ) -> MegatronCritic:
        """Build the network of `model` with a value head and fill it as `critic.init` says; nothing is frozen.

        Raises:
            ConfigError: a value or combination that cannot run.
            CheckpointError: weights that do not fill the backbone, or a critic of another model.
        """
        source = read_source(model)
        refuse_unproven(source.family)
        layout = initialize_parallel(parallel, seed)
        config = transformer_config(source, section=model, precision=precision, parallel=layout)
        chunks = build_chunks(source, config, layout, ValueModel)
        is_stored = model.init == "weights"
        weights = WeightMap(source, chunks, layout, has_head=False, routers_as_stored=is_stored)
        head = {
            f"{HEAD}.{name}": tensor
            for chunk in chunks
            if unwrap(chunk).post_process
            for name, tensor in unwrap(chunk).get_submodule(HEAD).named_parameters()
        }
        _initialize(critic, model, weights, {**weights.local, **head}, chunks, layout, seed)
        wrapped = wrap_chunks(chunks, config, optim, overlap=layout.overlaps_grad_reduce)
        optimizer = Optimizer(_optim(optim, critic), wrapped, layout, num_steps=num_steps)
        runner = StepRunner(wrapped, layout, source.kwargs, has_head=False)
        return cls(weights, head, runner, optimizer, critic, config.hidden_size)

    @property
    def parallel(self) -> ParallelState:
        """The layout, the policy's too."""
        return self._runner.parallel

    # Scoring

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """[t] float32 each, at the current weights, without gradient."""
        results = self._runner.forward(micro_batches, own_routes)
        return [result.logprobs for result in results]

    def score(self, batch: StepBatch) -> StepBatch:
        """Fill `old_values` of every epoch at the weights before the first minibatch."""
        first_epoch = [micro for mini in batch.minibatches[: batch.num_score_minibatches] for micro in mini]
        filled = [{"old_values": values} for values in self.values(first_epoch)]
        return fill_step(batch, first_epoch, filled)

    # Updating

    def update(self, batch: StepBatch) -> Metrics:
        """One optimizer step per minibatch toward `returns`, with the loss clipped around `old_values`.

        Returns:
            `critic/loss`, `critic/clip_fraction`, `critic/grad_norm`, `critic/lr`, `critic/value_mean`,
            `critic/return_mean`, and `critic/explained_variance` of the values before the update:
            1 - Var(returns - values) / Var(returns) over the step's live tokens; absent where returns do not vary.

        Raises:
            NumericsError: a loss or gradient norm that is not finite; earlier minibatches of the step were applied.
        """
        metrics = self._fit(batch)
        for index, minibatch in enumerate(batch.minibatches):
            with minibatch_of("critic", index, len(batch.minibatches)):
                merge_into(metrics, self._update_minibatch(minibatch))
        self.version += 1
        merge_into(metrics, {"perf/learn_flops": Sum(self._runner.take_flops())})
        return merge_over_ranks(metrics, self.parallel)

    def _fit(self, batch: StepBatch) -> Metrics:
        """How well the old values explain the returns."""
        metrics: Metrics = {}
        moments = torch.zeros(5, dtype=torch.float64, device=batch.minibatches[0][0].token_ids.device)
        for micro in (micro for mini in batch.minibatches[: batch.num_score_minibatches] for micro in mini):
            returns, values = _targets(micro)
            target, error = returns[micro.mask].double(), (returns - values)[micro.mask].double()
            sums = [target.sum(), target.square().sum(), error.sum(), error.square().sum(), micro.mask.sum().double()]
            moments += torch.stack(sums)
            merge_into(metrics, {"critic/value_mean": masked_mean(values.double(), micro.mask)})
            merge_into(metrics, {"critic/return_mean": masked_mean(returns.double(), micro.mask)})
        target, target_square, error, error_square, count = self.parallel.sum_over_data(moments).tolist()
        spread = target_square - target * target / max(count, 1.0)
        if spread > 1e-12 * target_square:
            unexplained = error_square - error * error / max(count, 1.0)
            metrics["critic/explained_variance"] = Last(1.0 - unexplained / spread)
        return metrics

    def _update_minibatch(self, minibatch: Sequence[MicroBatch]) -> Metrics:
        self._optimizer.zero_grad()
        results = self._accumulate(minibatch)
        metrics: Metrics = {}
        for result in results:
            merge_into(metrics, result.metrics)
        live = torch.stack([batch.mask.any() for batch in minibatch]).any()
        if self.parallel.all_true(~live):  # momentum alone must not move the weights
            return merge_into(metrics, {"critic/skipped_minibatches": Sum(1.0 / self.parallel.dp.size)})
        losses = [result.loss for result in results if result.loss is not None]
        stepped = self._optimizer.step(losses, self.version)
        return merge_into(metrics, {name.replace("optim/", "critic/"): value for name, value in stepped.items()})

    def _accumulate(self, minibatch: Sequence[MicroBatch]) -> list[MicroResult]:
        return self._runner.forward_backward(minibatch, self._loss, own_routes)

    def _loss(self, batch: MicroBatch, scores: TokenScores) -> tuple[Tensor, Metrics]:
        returns, old_values = _targets(batch)
        losses, is_clipped = value_loss(scores.logprobs, old_values, returns, clip=self._clip)
        losses = torch.where(batch.mask, losses, 0.0)
        metrics: Metrics = {
            "critic/loss": masked_mean(losses.detach().double(), batch.mask),
            "critic/clip_fraction": masked_mean(is_clipped.double(), batch.mask),
        }
        return (batch.weights.value * losses).sum(), metrics

    def gradients(self, minibatch: Sequence[MicroBatch]) -> dict[str, Tensor]:
        """Gradient of the value loss over `minibatch`, by Hugging Face name and `value_head.*`; nothing is stepped."""
        self._optimizer.zero_grad()
        self._accumulate(minibatch)
        self._optimizer.complete_gradients()
        found = {name: grad.clone() for name, grad in self._weights.export(self._weights.gradients())}
        head = {name: tensor.main_grad.clone() for name, tensor in self.head.items()}  # pyright: ignore[reportAttributeAccessIssue]
        found.update(self._on_every_stage(head, torch.float32))
        self._optimizer.zero_grad()
        return found

    # State

    def export(self) -> dict[str, Tensor]:
        """Copies of every weight: the backbone under Hugging Face names, the head under `value_head.*`."""
        weights = {name: tensor.clone() for name, tensor in self._weights.export()}
        head = {name: tensor.detach().clone() for name, tensor in self.head.items()}
        return weights | self._on_every_stage(head, next(iter(self._weights.parameters().values())).dtype)

    def _on_every_stage(self, head: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """What the last stage holds of the head, on all."""
        axis = self.parallel.pp
        if axis.size == 1:
            return head
        shapes = {f"{HEAD}.weight": (1, self._hidden_size), f"{HEAD}.bias": (1,)}
        device = torch.cuda.current_device()
        found = {n: head.get(n, torch.empty(s, dtype=dtype, device=device)) for n, s in shapes.items()}
        for tensor in found.values():
            dist.broadcast(tensor, src=dist.get_process_group_ranks(axis.group)[-1], group=axis.group)
        return found

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """Copy weights, optimizer, version and RNGs of this rank; the work writes them into `<folder>/critic`."""
        target = folder / CHECKPOINT_FOLDER
        counters = {"version": self.version}
        work = checkpoint.begin_save(target, weights=self._local, optimizer=self._optimizer, counters=counters)

        def write() -> None:
            target.mkdir(exist_ok=True)
            work()

        return write

    def save(self, folder: Path) -> None:
        """Write into `<folder>/critic` at once."""
        self.begin_save(folder)()

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, bit for bit under the same layout.

        Raises:
            CheckpointError: missing, damaged, or written by another model; nothing was changed then.
        """
        target = folder / CHECKPOINT_FOLDER
        counters = checkpoint.load_state(target, weights=self._local, optimizer=self._optimizer)
        self.version = int(counters["version"])


def _initialize(
    critic: CriticSection,
    model: ModelSection,
    weights: WeightMap,
    local: dict[str, Tensor],
    chunks: Sequence[torch.nn.Module],
    layout: ParallelState,
    seed: int,
) -> None:
    if critic.init == "policy":
        if model.init == "random":
            weights.initialize(seed)
        else:
            weights.load_hf()
        return
    folder = Path(critic.init)
    if (folder / "config.json").is_file():
        weights.load_hf(read_same_shape(model, read_source(model), folder, field="algorithm.critic.init"))
        return
    for inner in (folder, folder / CHECKPOINT_FOLDER, folder / "learner" / CHECKPOINT_FOLDER):
        if has_shards(inner):
            checkpoint.load_weights(inner, weights=local, chunks=chunks, parallel=layout)
            return
    raise ConfigError(
        f"algorithm.critic.init is {critic.init!r}, which is neither 'policy', nor a Hugging Face folder "
        "(config.json), nor a checkpoint of a run with a critic (step_000010)"
    )


def _optim(optim: OptimSection, critic: CriticSection) -> OptimSection:
    """The policy's optimizer with the critic's own rate, constant after its own warm-up."""
    return replace(
        optim,
        lr=critic.lr,
        schedule="constant",
        warmup_steps=critic.warmup_steps,
        constant_steps=0,
        clip_grad_norm=critic.clip_grad_norm,
    )


def _targets(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """(returns, old values), both [t]; 0 outside the mask."""
    if batch.returns is None or batch.old_values is None:
        raise ConfigError(
            "the critic was to be updated on a batch without returns or old values; score it with the critic and let "
            "the token credit fill the returns first"
        )
    return torch.where(batch.mask, batch.returns, 0.0), torch.where(batch.mask, batch.old_values, 0.0)
