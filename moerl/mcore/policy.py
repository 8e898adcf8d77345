"""`MegatronPolicy`: the learner as the loop sees it. Score, update, observe, export, save, load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from moerl.algorithms.load_metrics import load_of_counts
from moerl.algorithms.types import OLD_PASS, LossInputs
from moerl.config.schema import ModelSection, OptimSection, ParallelSection, PrecisionSection, ReferenceSection
from moerl.errors import ConfigError
from moerl.mcore import checkpoint, moe_stats
from moerl.mcore.agreement import rollout_agreement, update_agreement
from moerl.mcore.balancing import check_balancing, check_routers
from moerl.mcore.frozen import REFERENCE, TEACHER, FrozenWeights, chosen
from moerl.mcore.inputs import FILLED, fill_step, loss_inputs
from moerl.mcore.model import ModelSource, build_chunks, read_same_shape, read_source, transformer_config
from moerl.mcore.old_routing import OldRouting
from moerl.mcore.optim import Optimizer, minibatch_of, wrap_chunks
from moerl.mcore.parallel import ParallelState, initialize_parallel
from moerl.mcore.reduce import merge_over_ranks
from moerl.mcore.router_replay import Keep, Observation
from moerl.mcore.step import MicroResult, Routes, StepRunner, TokenScores, own_routes, rollout_routes
from moerl.mcore.weights import WeightMap
from moerl.metrics import Mean, Metrics, Sum, masked_mean, merge_into
from moerl.models.family import refuse_unproven
from moerl.types import MicroBatch, RouterStats, StepBatch

ROUTINGS = ("none", "R2", "R3", "frozen_router", "frozen_router_bias")


class Objective(Protocol):
    """What `update` takes: the scalar of one micro-batch, a plain sum over its tokens."""

    @property
    def needs(self) -> frozenset[str]:
        """Optional fields of `LossInputs` that it reads."""
        ...

    def __call__(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        """(loss, metrics)."""
        ...


class MegatronPolicy:
    """A megatron-core model, its optimizer, and a frozen copy of its first weights where a reference is needed."""

    def __init__(
        self, source: ModelSource, parallel: ParallelState, weights: WeightMap, runner: StepRunner, optimizer: Optimizer
    ) -> None:
        """Wire parts; use `build`."""
        kwargs = source.kwargs
        self.version = 0
        """Completed updates: the step of the learning-rate schedule."""
        self.device = torch.device(torch.cuda.current_device())
        self.num_experts = int(kwargs.get("num_moe_experts") or 0)
        """Of a layer; 0 for a network without experts, which has no routes and no `route/*`."""
        self.topk = int(kwargs.get("moe_router_topk") or 0)
        self.parallel = parallel
        self._weights = weights
        self._runner = runner
        self._optimizer = optimizer
        self._routing = "none"
        self._frozen: dict[str, FrozenWeights] = {}
        """By the field of a micro-batch that their logprobs fill."""
        self._refresh = ReferenceSection()
        self._old_routing = OldRouting(keeps_numbers=parallel.tp.rank == parallel.cp.rank == 0)
        self._gamma_min = 0.8

    @classmethod
    def build(  # noqa: PLR0913 one argument per section, so that no function takes the whole configuration
        cls,
        *,
        model: ModelSection,
        parallel: ParallelSection,
        precision: PrecisionSection,
        optim: OptimSection,
        routing: str,
        router_shift: bool,
        needs_reference: bool,
        num_steps: int,
        seed: int,
        gamma_min: float = 0.8,
        reference: ReferenceSection | None = None,
        teacher: str | None = None,
    ) -> MegatronPolicy:
        """Join the process group, build the model from `model.path`, fill it, wrap it for training.

        Raises:
            ConfigError: a value or combination that cannot run.
            CheckpointError: weights that do not fill the model.
        """
        if routing not in ROUTINGS:
            raise ConfigError(f"algorithm.routing is {routing!r}; allowed: {', '.join(ROUTINGS)}")
        source = read_source(model)
        refuse_unproven(source.family)
        check_routers(source, routing, router_shift=router_shift)
        check_balancing(model.router_bias_update_rate, routing, source)
        layout = initialize_parallel(parallel, seed)
        config = transformer_config(source, section=model, precision=precision, parallel=layout)
        chunks = build_chunks(source, config, layout, head=precision.head)
        weights = WeightMap(source, chunks, layout, routers_as_stored=model.init == "weights")
        frozen = {}
        if teacher is not None:
            weights.load_hf(read_same_shape(model, source, teacher, field="algorithm.teacher.path"))
            frozen[TEACHER] = FrozenWeights(weights.local)
        if model.init == "random":
            weights.initialize(seed)
        elif model.init == "weights":
            weights.load_hf()
        else:
            raise ConfigError(f"model.init is {model.init!r}; allowed: weights, random")
        weights.freeze(model.freeze, routers=routing == "frozen_router")
        wrapped = wrap_chunks(chunks, config, optim, overlap=layout.overlaps_grad_reduce)
        rate = model.router_bias_update_rate
        optimizer = Optimizer(optim, wrapped, layout, num_steps=num_steps, bias_update_rate=rate)
        policy = cls(source, layout, weights, StepRunner(wrapped, layout, source.kwargs), optimizer)
        policy._routing = routing
        policy._gamma_min = gamma_min
        if needs_reference:
            policy._refresh = reference or ReferenceSection()
            frozen[REFERENCE] = FrozenWeights(weights.local, in_float32=policy._refresh.ema > 0)
        policy._frozen = frozen
        return policy

    # Scoring

    def score(self, batch: StepBatch, needs: frozenset[str]) -> tuple[StepBatch, Metrics]:
        """Fill old and reference logprobs and old routing at the weights before the first minibatch.

        The old pass is skipped where nothing needs it: one minibatch, whose old policy is the current one (the pair
        (rollout, old) is then measured by `update`), or neither a ratio nor routes.

        Returns:
            The batch with `old_logprobs`, `old_routes` (and where needed `old_router_logprobs`, `ref_logprobs`) filled
            in every epoch, and `route/*`, `load/*`, `mm/*` of the pair (rollout, old).
        """
        self._old_routing.clear()
        self._runner.take_flops()  # those of probes belong to no step
        first_epoch = [micro for mini in batch.minibatches[: batch.num_score_minibatches] for micro in mini]
        filled: list[dict[str, Tensor]] = [{} for _ in first_epoch]
        metrics: Metrics = {}
        if self._needs_old_pass(batch, needs):
            self._old_routing.expect(batch)
            results = self._runner.forward(first_epoch, self._replay_for_score, keep=self._keep_at_score(needs))
            for fields, result in zip(filled, results, strict=True):
                fields.update(_old_fields(result, needs))
            metrics = self._pair_metrics(first_epoch, results)
        for name in sorted({REFERENCE, TEACHER} & needs):
            with chosen(self._frozen, name).in_place():
                results = self._runner.forward(first_epoch, own_routes)
            for fields, result in zip(filled, results, strict=True):
                fields[name] = result.logprobs
        if flops := self._runner.take_flops():  # a step that pre-trains a critic has no update to count them
            metrics["perf/learn_flops"] = Sum(flops)
        return fill_step(batch, first_epoch, filled), merge_over_ranks(metrics, self.parallel)

    def _needs_old_pass(self, batch: StepBatch, needs: frozenset[str]) -> bool:
        if needs & {"router_shift", "old_entropy", OLD_PASS}:
            return True
        if len(batch.minibatches) == 1:
            return False
        # With rollout routes or sampled tokens both pairs are measured, whatever the loss reads.
        every = [micro for minibatch in batch.minibatches for micro in minibatch]
        mine = any(micro.routes is not None or moe_stats.was_sampled(micro) for micro in every)
        paired = not self.parallel.all_true(torch.tensor(not mine, device=self.device))  # on any rank
        return paired or bool(needs & {"old_logprobs"}) or self._routing == "R2"

    def _replay_for_score(self, batch: MicroBatch) -> Routes:
        return rollout_routes(batch) if self._routing == "R3" else (None, None)

    def _replay_for_update(self, batch: MicroBatch) -> Routes:
        if self._routing == "R3":
            return rollout_routes(batch)
        return (batch.old_routes, None) if self._routing == "R2" else (None, None)

    def _keep_at_score(self, needs: frozenset[str]) -> Keep:
        def keep(batch: MicroBatch, seen: Observation, layers: tuple[int, ...]) -> dict[str, Tensor]:
            self._old_routing.keep(batch, seen, layers)
            kept = moe_stats.keep_choice(batch, seen, layers)
            if "router_shift" in needs:
                kept["log_q"] = moe_stats.log_q_of_shift(
                    batch, seen, layers, old_routes=seen.own_routes, is_replaying=self._routing == "R3"
                )
            return kept

        return keep

    def _pair_metrics(self, batches: Sequence[MicroBatch], results: Sequence[MicroResult]) -> Metrics:
        metrics: Metrics = {}
        kept = [result.kept for result in results]
        if all(kept):
            metrics.update(moe_stats.rollout_pair_metrics(batches, kept))
            counts = moe_stats.own_counts(batches, kept, self.num_experts)
            metrics.update(load_of_counts(self.parallel.sum_over_data(counts)))
        if any(moe_stats.was_sampled(batch) for batch in batches):
            metrics.update(moe_stats.logprob_pair_metrics(batches, [result.logprobs for result in results]))
        if self.version == 0:
            metrics.update(rollout_agreement(batches, results, has_experts=self.num_experts > 0))
        if self._routing in ("R2", "R3"):
            for batch in batches:
                merge_into(metrics, moe_stats.replay_coverage(batch, covers_all=self._routing == "R2"))
        return metrics

    # Updating

    def update(self, batch: StepBatch, objective: Objective) -> Metrics:
        """One optimizer step per minibatch.

        Raises:
            NumericsError: a loss or gradient norm that is not finite; earlier minibatches of the step were applied.
            ConfigError: the objective needs a field that this learner cannot fill.
        """
        unknown = sorted(objective.needs - FILLED)
        if unknown:
            raise ConfigError(
                f"the objective needs {', '.join(unknown)}, which the learner cannot fill without a critic"
            )
        metrics: Metrics = {}
        for index, minibatch in enumerate(batch.minibatches):
            with minibatch_of("policy", index, len(batch.minibatches)):
                new, results = self._update_minibatch(minibatch, objective, is_last=index == len(batch.minibatches) - 1)
            if index == 0:
                metrics.update(update_agreement(minibatch, results, new))
            merge_into(metrics, new)
        self._old_routing.clear()  # the host may need the room while engines sample
        self.version += 1
        every = self._refresh.update_every_steps
        if every and self.version % every == 0:
            self._frozen[REFERENCE].follow(self._refresh.ema)
        merge_into(metrics, {"perf/learn_flops": Sum(self._runner.take_flops())})
        return merge_over_ranks(metrics, self.parallel)

    def _update_minibatch(
        self, minibatch: Sequence[MicroBatch], objective: Objective, *, is_last: bool
    ) -> tuple[Metrics, list[MicroResult]]:
        self._optimizer.zero_grad()
        has_old = self._old_routing.covers(minibatch)
        keep = (self._keep_drift if has_old else moe_stats.keep_choice) if is_last else None
        results, gammas = self._accumulate(minibatch, objective, keep)
        metrics: Metrics = {}
        for micro, result in zip(minibatch, results, strict=True):
            if result.loss is not None:
                merge_into(metrics, result.metrics)
                share = 1.0 / (len(minibatch) * self.parallel.dp.size)
                merge_into(metrics, {"loss": Mean(result.loss, share), "data/padding_fraction": result.padding})
                merge_into(metrics, {"pg/entropy": masked_mean(result.entropy, micro.mask)})
        if gammas:
            metrics.update(moe_stats.shift_metrics(gammas, minibatch, self._gamma_min))
        if is_last:
            metrics.update(self._route_metrics(minibatch, results, has_old=has_old))
        if self._is_empty(minibatch):
            return merge_into(metrics, {"optim/skipped_minibatches": Sum(1.0 / self.parallel.dp.size)}), results
        losses = [result.loss for result in results if result.loss is not None]
        return merge_into(metrics, self._optimizer.step(losses, self.version)), results

    def _is_empty(self, minibatch: Sequence[MicroBatch]) -> bool:
        """No live token on any rank: momentum alone must not move the weights."""
        live = torch.stack([batch.mask.any() for batch in minibatch]).any()
        return self.parallel.all_true(~live)

    def _route_metrics(
        self, minibatch: Sequence[MicroBatch], results: Sequence[MicroResult], *, has_old: bool
    ) -> Metrics:
        """(old, current); and (rollout, old) where the score pass was skipped because old is current."""
        if has_old:
            return moe_stats.update_pair_metrics([result.kept for result in results if result.kept], self.topk)
        has_experts = all(result.kept for result in results)
        if not has_experts and any(batch.old_logprobs is not None for batch in minibatch):
            return {}
        return self._pair_metrics(minibatch, results)  # one minibatch: no update lies between old and current

    def _keep_drift(self, batch: MicroBatch, seen: Observation, layers: tuple[int, ...]) -> dict[str, Tensor]:
        """Nothing on ranks that tell no metrics."""
        old = self._old_routing.of(batch, seen, layers)
        return {} if old is None else moe_stats.keep_drift(batch, seen, old)

    def _accumulate(
        self, minibatch: Sequence[MicroBatch], objective: Objective, keep: Keep | None
    ) -> tuple[list[MicroResult], list[Tensor]]:
        """Gradients of one minibatch into the buffers; results and router-shift factors by micro-batch."""
        has_shift = "router_shift" in objective.needs
        gammas: dict[tuple[int, ...], Tensor] = {}
        if has_shift and self.parallel.pp.size > 1:
            gammas = self._shift_ahead(minibatch)
        elif has_shift:
            keep = self._noting_shift(gammas, keep)

        def loss_function(batch: MicroBatch, scores: TokenScores) -> tuple[Tensor, Metrics]:
            shift = gammas[batch.sample_ids] if has_shift else None
            return objective(loss_inputs(batch, scores, objective.needs, router_shift=shift))

        results = self._runner.forward_backward(minibatch, loss_function, self._replay_for_update, keep=keep)
        return results, [gammas[batch.sample_ids] for batch in minibatch if batch.sample_ids in gammas]

    def _noting_shift(self, gammas: dict[tuple[int, ...], Tensor], keep: Keep | None) -> Keep:
        """`keep` that also puts the router-shift factor of a pack into `gammas`; for a stage that has all layers."""

        def noting(batch: MicroBatch, seen: Observation, layers: tuple[int, ...]) -> dict[str, Tensor]:
            if not batch.is_filler:
                gammas[batch.sample_ids] = moe_stats.router_shift(batch, self._keep_shift(batch, seen, layers)["log_q"])
            return {} if keep is None else keep(batch, seen, layers)

        return noting

    def _keep_shift(self, batch: MicroBatch, seen: Observation, layers: tuple[int, ...]) -> dict[str, Tensor]:
        assert batch.old_routes is not None
        old, replays = moe_stats.of_layers(batch.old_routes, layers), self._routing == "R3"
        return {"log_q": moe_stats.log_q_of_shift(batch, seen, layers, old_routes=old, is_replaying=replays)}

    def _shift_ahead(self, minibatch: Sequence[MicroBatch]) -> dict[tuple[int, ...], Tensor]:
        """Router-shift factors by pack, from a forward of their own: while a pipeline trains, its last stage cannot see
        the routers of the others. The factor has no gradient, so the two forwards need only agree in value.
        """
        results = self._runner.forward(minibatch, self._replay_for_update, keep=self._keep_shift, counts=False)
        return {
            batch.sample_ids: moe_stats.router_shift(batch, result.kept["log_q"])
            for batch, result in zip(minibatch, results, strict=True)
            if not batch.is_filler
        }

    # Looking

    def observe(self, micro_batches: Sequence[MicroBatch]) -> list[RouterStats]:
        """The routers' own top-k and log q at the current weights, on live tokens (index j: the token predicted)."""
        results = self._runner.forward(micro_batches, own_routes, keep=moe_stats.keep_live)
        return [RouterStats(result.kept["own_routes"], result.kept["log_probs"]) for result in results]

    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """[t] float32 of every token at the current weights, own routing; 0 at the first token of a sequence."""
        return self._runner.forward([micro_batch], own_routes)[0].logprobs

    def gradients(self, minibatch: Sequence[MicroBatch], objective: Objective) -> dict[str, Tensor]:
        """Gradient of the objective's sum over `minibatch`, by Hugging Face name, 0 of frozen weights; no step."""
        self._optimizer.zero_grad()
        self._accumulate(minibatch, objective, None)
        self._optimizer.complete_gradients()
        found = {name: grad.clone() for name, grad in self._weights.export(self._weights.gradients())}
        self._optimizer.zero_grad()
        return found

    # State

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name; views of live parameters on one process, so copy what must last."""
        return self._weights.export()

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """Copy weights, optimizer, version and RNGs of this rank; the work writes them into `folder`, later."""
        weights, moving = self._weights.local, self._moving_reference()
        counters = {"version": self.version}
        return checkpoint.begin_save(
            folder, weights=weights, optimizer=self._optimizer, counters=counters, reference=moving
        )

    def save(self, folder: Path) -> None:
        """Write into `folder` (which exists and is empty) at once."""
        self.begin_save(folder)()

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, bit for bit under the same layout.

        Raises:
            CheckpointError: missing, damaged, or written by another model; nothing was changed then.
        """
        weights, moving = self._weights.local, self._moving_reference()
        counters = checkpoint.load_state(folder, weights=weights, optimizer=self._optimizer, reference=moving)
        self.version = int(counters["version"])

    def _moving_reference(self) -> dict[str, Tensor] | None:
        """What a checkpoint must hold of the reference; one that never moves is read from the model's folder again."""
        return self._frozen[REFERENCE].values if self._refresh.update_every_steps else None


def _old_fields(result: MicroResult, needs: frozenset[str]) -> dict[str, Tensor]:
    fields = {"old_logprobs": result.logprobs}
    if result.top_logprobs is not None:
        fields["old_top_logprobs"] = result.top_logprobs
    if "old_entropy" in needs:
        fields["old_entropy"] = result.entropy
    if result.kept:
        fields["old_routes"] = result.kept["own_routes"]
    if "log_q" in result.kept:
        fields["old_router_logprobs"] = result.kept["log_q"]
    return fields
