"""One of the processes of the layout tests: trains each case for three steps and writes what came out.

Started by torchrun (or alone) as `learner_worker.py CASES.json OUT`; builds one layout after the other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_samples import LENGTHS, random_samples
from whole_rows import logprobs_and_logits

from moerl.actor_critic import ActorCritic
from moerl.algorithms.aggregation import sequence_weights
from moerl.algorithms.filtering import build_filters
from moerl.algorithms.objective import build_objective
from moerl.algorithms.presets import PRESETS
from moerl.algorithms.types import LossInputs
from moerl.build_credit import build_credit_rules, build_token_rules, credit_state
from moerl.config.load import config_from_dict
from moerl.config.schema import CriticSection, ModelSection, OptimSection, ParallelSection, PrecisionSection
from moerl.data.batch import build_step_batch
from moerl.data.packing import plan_packing
from moerl.mcore.critic import MegatronCritic
from moerl.mcore.parallel import release_parallel
from moerl.mcore.policy import MegatronPolicy
from moerl.mcore.reduce import merge_over_ranks
from moerl.metrics import Metrics, to_floats
from moerl.token_credit import TokenCredit
from moerl.types import MicroBatch, Sample, StepBatch

STEPS = 3


def samples(rng: np.random.Generator, case: dict[str, Any], *, constant: bool) -> list[Sample]:
    """Of a step."""
    return random_samples(rng, case.get("lengths", LENGTHS), case["shape"], constant=constant)


def algorithm(case: dict[str, Any]) -> Any:
    """The algorithm section of one case."""
    return algorithm_of(json.dumps({key: case.get(key) for key in ("preset", "routing", "algorithm", "model")}))


@cache
def algorithm_of(told: str) -> Any:
    """Of what a case says in JSON: many cases say the same, in every layout."""
    case = json.loads(told)
    values = {**PRESETS[case["preset"]].values, "preset": case["preset"], "routing": case["routing"]}
    values |= case["algorithm"] or {}
    if values.get("level") == "seq_geo":  # the papers' bounds clip every sequence of so large an update
        values["trust"] = {"name": "clip", "lo": 0.1, "hi": 0.1}
    return config_from_dict(
        {"run": {"name": "x", "num_steps": 1}, "model": {"path": case["model"]}, "algorithm": values}
    ).algorithm


def build(case: dict[str, Any], layout: dict[str, Any], section: Any, needs: frozenset[str]) -> MegatronPolicy:
    """The learner of one case."""
    return MegatronPolicy.build(
        model=ModelSection(path=case["model"], **case.get("model_options", {})),
        parallel=ParallelSection(**layout),
        precision=PrecisionSection(**case.get("precision", {})),
        optim=OptimSection(name=case["optimizer"], lr=case["lr"], clip_grad_norm=1.0, **case.get("optim", {})),
        routing=case["routing"],
        router_shift=section.router_shift.enabled,
        needs_reference="ref_logprobs" in needs,
        num_steps=10,
        seed=0,
    )


def pack(policy: MegatronPolicy, made: list[Sample], section: Any, case: dict[str, Any], seed: int) -> StepBatch:
    """This rank's share of one step: two micro-batches a minibatch on up to two data ranks."""
    plan = plan_packing(
        [len(s.token_ids) for s in made],
        [s.group_id for s in made],
        [int(s.loss_mask.sum()) for s in made],
        dp_size=policy.parallel.dp.size,
        num_minibatches=2,
        num_epochs=case.get("epochs", 1),
        max_tokens_per_microbatch=case.get("budget", 60 if policy.parallel.dp.size == 1 else 40),
        seed=seed,
        microbatch_multiple=policy.parallel.microbatch_multiple,
    )

    def weigh(lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
        return sequence_weights(section.aggregation, torch.from_numpy(lengths), torch.from_numpy(groups)).numpy()

    return build_step_batch(
        made,
        plan,
        dp_rank=policy.parallel.dp.rank,
        weigh=weigh,
        device=policy.device,
        policy_version=policy.version,
    )


class Learner:
    """The policy of a case, with a critic where its advantages come from one, and the credit between score and update.

    Shaped as the loop has it, so that what is compared is what a run would do.
    """

    def __init__(self, case: dict[str, Any], layout: dict[str, Any]) -> None:
        self.case = case
        self.section = algorithm(case)
        self.objective = build_objective(self.section)
        memory = credit_state(self.section)
        rules = build_credit_rules(self.section, build_filters(self.section.filters), {"r": 1.0}, memory)
        token_rules = build_token_rules(self.section, self.objective, rules)
        self.values = token_rules.values
        needs = self.objective.needs | TokenCredit(token_rules, lambda own: [own]).needs
        self.policy = build(case, layout, self.section, needs)
        self.credit = TokenCredit(token_rules, self.policy.parallel.gather_over_data)
        self.critic: MegatronCritic | None = None
        self.learner: MegatronPolicy | ActorCritic = self.policy
        if self.values is not None:
            self.critic = build_critic(case, layout)
            merge = partial(merge_over_ranks, parallel=self.policy.parallel)
            self.learner = ActorCritic(self.policy, self.critic, pretrain_steps=0, merge=merge)

    def scored(self, step: int) -> tuple[StepBatch, Metrics]:
        """A step's batch, ready for the update."""
        constant = self.objective.constant_advantage or self.values is not None
        draw = [step, self.case["draw"]] if self.case.get("draw") else step
        made = samples(np.random.default_rng(draw), self.case, constant=constant)
        batch = pack(self.policy, made, self.section, self.case, step)
        batch, metrics = self.learner.score(batch, self.objective.needs | self.credit.needs | {"old_logprobs"})
        batch, more = self.credit(batch, made, made)
        return batch, {**metrics, **merge_over_ranks(more, self.policy.parallel)}

    def weights(self) -> dict[str, np.ndarray]:
        """Of both models, by name."""
        named = {f"weight/{name}": tensor for name, tensor in self.policy.export()}
        if self.critic is not None:
            named |= {f"weight/critic/{name}": tensor for name, tensor in self.critic.export().items()}
        return {name: tensor.detach().float().cpu().numpy().copy() for name, tensor in named.items()}


def build_critic(case: dict[str, Any], layout: dict[str, Any]) -> MegatronCritic:
    """The critic of one case, on the policy's weights."""
    return MegatronCritic.build(
        model=ModelSection(path=case["model"]),
        parallel=ParallelSection(**layout),
        precision=PrecisionSection(**case.get("precision", {})),
        optim=OptimSection(name=case["optimizer"], lr=case["lr"]),
        critic=CriticSection(init="policy", lr=10 * case["lr"], warmup_steps=0),
        num_steps=10,
        seed=0,
    )


def routes_of(batch: StepBatch) -> dict[str, np.ndarray]:
    """Sample -> the routers' own experts [s, l, k], in order; none where no score pass ran."""
    found = {}
    for micro in (micro for minibatch in batch.minibatches for micro in minibatch):
        if micro.old_routes is None:
            continue
        bounds = micro.cu_seqlens.tolist()
        for i, sample in enumerate(micro.sample_ids):
            found[str(sample)] = micro.old_routes[bounds[i] : bounds[i + 1]].sort(-1).values.cpu().numpy()
    return found


def likeliest_of(batch: StepBatch) -> dict[str, np.ndarray]:
    """Sample -> the old policy's logprobs of the engine's likeliest tokens [s, k], 0 where there is no such token."""
    found = {}
    for micro in (micro for minibatch in batch.minibatches for micro in minibatch):
        if micro.old_top_logprobs is None or micro.rollout_top_ids is None:
            continue
        values = micro.old_top_logprobs.masked_fill(micro.rollout_top_ids < 0, 0)
        bounds = micro.cu_seqlens.tolist()
        for i, sample in enumerate(micro.sample_ids):
            found[str(sample)] = values[bounds[i] : bounds[i + 1]].cpu().numpy()
    return found


class Nll:
    """Weighted negative log-likelihood."""

    needs: frozenset[str] = frozenset()

    def __call__(self, x: LossInputs) -> tuple[torch.Tensor, Metrics]:
        return -(x.weights.policy * torch.where(x.mask, x.logprobs, 0)).sum(), {}


def for_transformers(
    policy: MegatronPolicy, minibatch: Sequence[MicroBatch]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What a test needs to hold this layout to transformers: tokens, their logprobs and routes by the routers' own
    choice, and the gradient of one NLL step; and sample -> logits [s, v], on the last stage.
    """
    found: dict[str, torch.Tensor] = {}
    rows_of: dict[str, np.ndarray] = {}
    own = [  # nothing is replayed, all of the vocabulary is in the running, logits are the model's
        replace(
            micro,
            has_route=torch.zeros_like(micro.mask),
            temperature=torch.ones_like(micro.temperature),
            support=None,
        )
        for micro in minibatch
    ]
    for micro in own:
        logprobs, logits = logprobs_and_logits(policy, micro)
        chosen = policy.observe([micro])[0].own_routes if policy.num_experts else None
        bounds = micro.cu_seqlens.tolist()
        live = torch.nonzero(micro.mask & (micro.position_ids > 0))[:, 0]
        for i, sample in enumerate(micro.sample_ids):
            rows = slice(bounds[i], bounds[i + 1])
            found |= {f"of/{sample}/token_ids": micro.token_ids[rows], f"of/{sample}/mask": micro.mask[rows]}
            found |= {f"of/{sample}/weights": micro.weights.policy[rows], f"of/{sample}/logprobs": logprobs[rows]}
            if logits is not None:
                rows_of[str(sample)] = logits[rows].cpu().numpy()
            if chosen is not None:
                is_own = (live >= bounds[i]) & (live < bounds[i + 1])
                found[f"of/{sample}/routes"] = chosen[is_own].sort(-1).values
    found |= {f"nll/{name}": grad.float() for name, grad in policy.gradients(own, Nll()).items()}
    return {name: tensor.detach().cpu().numpy() for name, tensor in found.items()}, rows_of


def save_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """By name."""
    np.savez(path, **arrays)  # pyright: ignore[reportArgumentType] names of arrays only


def save_for_transformers(learner: Learner, batch: StepBatch, path: Path) -> dict[str, np.ndarray]:
    """`for_transformers`; the logits go to a file, which the first rank of the last stage writes."""
    parallel = learner.policy.parallel
    found, rows_of = for_transformers(learner.policy, batch.minibatches[0])
    if rows_of and parallel.tp.rank == parallel.cp.rank == parallel.dp.rank == 0:
        save_arrays(path, rows_of)
    return found


def train(case: dict[str, Any], layout: dict[str, Any], out: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gradients of the first minibatch, then three steps."""
    learner = Learner(case, layout)
    parallel = learner.policy.parallel
    record: dict[str, Any] = {"metrics": [], "rank": parallel.rank}
    arrays: dict[str, Any] = {}
    for step in range(case.get("steps", STEPS)):
        batch, metrics = learner.scored(step)
        if step == 0:
            grads = learner.policy.gradients(batch.minibatches[0], learner.objective)
            arrays |= {f"grad/{name}": value.float().cpu().numpy() for name, value in grads.items()}
            is_first = parallel.tp.rank == parallel.cp.rank == parallel.pp.rank == 0
            if is_first and learner.policy.num_experts:
                save_arrays(out / f"{name}.routes.{parallel.dp.rank}.npz", routes_of(batch))
            if is_first and (likeliest := likeliest_of(batch)):
                save_arrays(out / f"{name}.likeliest.{parallel.dp.rank}.npz", likeliest)
            if case.get("for_transformers"):
                arrays |= save_for_transformers(learner, batch, out / f"{name}.logits.npz")
        metrics |= learner.learner.update(batch, learner.objective)
        record["metrics"].append(to_floats(metrics))
    if learner.critic is not None:  # its head has moved by now, so that its backbone has a gradient
        grads = learner.critic.gradients(batch.minibatches[0])
        arrays |= {f"critic_grad/{name}": value.float().cpu().numpy() for name, value in grads.items()}
    return record, arrays | learner.weights()


def main() -> None:
    """Run every case in every layout that it names."""
    torch.set_num_threads(1)
    plan = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    for layout in plan["layouts"]:
        for case in layout["cases"]:
            name = f"{layout['name']}.{case['name']}"
            record, arrays = train(case, layout["sizes"], out, name)
            if record["rank"] == 0:
                save_arrays(out / f"{name}.npz", arrays)
                (out / f"{name}.json").write_text(json.dumps(record))
                print(name, flush=True)
        release_parallel()


if __name__ == "__main__":
    main()
