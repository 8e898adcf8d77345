"""One of the processes of the layout tests: trains each case for three steps and writes what came out.

Started by torchrun (or alone) as `learner_worker.py CASES.json OUT`; builds one layout after the other.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moerl.algorithms.aggregation import sequence_weights
from moerl.algorithms.objective import build_objective
from moerl.algorithms.presets import PRESETS
from moerl.config.load import config_from_dict
from moerl.config.schema import ModelSection, OptimSection, ParallelSection, PrecisionSection
from moerl.data.batch import build_step_batch
from moerl.data.packing import plan_packing
from moerl.mcore.parallel import release_parallel
from moerl.mcore.policy import MegatronPolicy
from moerl.metrics import to_floats
from moerl.types import LocalArray, Sample, StepBatch

STEPS = 3
LENGTHS = (9, 17, 6, 21, 12, 8, 29, 14, 11, 7, 19, 10)


def samples(rng: np.random.Generator, shape: dict[str, int], *, constant: bool) -> list[Sample]:
    """Random answers with random routes; the engine disagrees with the learner."""
    made = []
    for i, length in enumerate(LENGTHS):
        mask = np.arange(length) >= 4
        advantage = rng.normal(size=1 if constant else length).astype(np.float32)
        routes = np.sort(rng.random((length, shape["layers"], shape["experts"])).argsort(-1)[..., : shape["topk"]], -1)
        made.append(
            Sample(
                sample_id=i,
                group_id=i // 2,
                prompt_id=f"p/{i // 2}",
                token_ids=rng.integers(2, shape["vocab"], length).astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=np.where(mask, rng.normal(-4, 0.4, length), 0).astype(np.float32),
                advantages=np.where(mask, advantage, 0).astype(np.float32),
                reward=float(i % 3),
                temperature=1.0 if i % 2 else 0.8,
                routed_experts=LocalArray(routes.astype(np.uint8)),
                has_route=np.arange(length) < length - 1,
            )
        )
    return made


def algorithm(case: dict[str, Any]) -> Any:
    """The algorithm section of one case."""
    values = {**PRESETS[case["preset"]].values, "preset": case["preset"], "routing": case["routing"]}
    values |= case.get("algorithm", {})
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
    """This rank's share of one step."""
    plan = plan_packing(
        LENGTHS,
        [s.group_id for s in made],
        [int(s.loss_mask.sum()) for s in made],
        dp_size=policy.parallel.dp.size,
        num_minibatches=2,
        num_epochs=1,
        max_tokens_per_microbatch=case.get("budget", 40),
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


def train(case: dict[str, Any], layout: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Gradients of the first minibatch, then three steps."""
    section = algorithm(case)
    objective = build_objective(section)
    policy = build(case, layout, section, objective.needs)
    record: dict[str, Any] = {"metrics": []}
    arrays: dict[str, np.ndarray] = {}
    for step in range(STEPS):
        made = samples(np.random.default_rng(step), case["shape"], constant=objective.constant_advantage)
        batch = pack(policy, made, section, case, step)
        batch, metrics = policy.score(batch, objective.needs | {"old_logprobs"})
        if step == 0:
            grads = policy.gradients(batch.minibatches[0], objective)
            arrays |= {f"grad/{name}": value.float().cpu().numpy() for name, value in grads.items()}
        metrics |= policy.update(batch, objective)
        record["metrics"].append(to_floats(metrics))
    weights = {f"weight/{name}": tensor.detach().float().cpu().numpy().copy() for name, tensor in policy.export()}
    record["rank"] = policy.parallel.rank
    return record, arrays | weights


def main() -> None:
    """Run every case in every layout that it names."""
    torch.set_num_threads(1)
    plan = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    for layout in plan["layouts"]:
        for case in layout["cases"]:
            record, arrays = train(case, layout["sizes"])
            if record["rank"] == 0:
                name = f"{layout['name']}.{case['name']}"
                np.savez(out / f"{name}.npz", **arrays)  # pyright: ignore[reportArgumentType] names of arrays only
                (out / f"{name}.json").write_text(json.dumps(record))
                print(name, flush=True)
        release_parallel()


if __name__ == "__main__":
    main()
