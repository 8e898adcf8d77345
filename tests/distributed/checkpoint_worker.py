"""One of the processes of the checkpoint tests: trains, saves, loads and trains on, as PLAN.json says.

Started by torchrun (or alone) as `checkpoint_worker.py PLAN.json OUT`; builds one layout after the other.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from learner_worker import algorithm, build, pack, samples

from moerl.algorithms.objective import build_objective
from moerl.checkpoint import CheckpointStore
from moerl.config.schema import CriticSection, ModelSection, OptimSection, ParallelSection, PrecisionSection
from moerl.mcore.critic import MegatronCritic
from moerl.mcore.optimizer_state import parameter_states
from moerl.mcore.parallel import release_parallel
from moerl.mcore.policy import MegatronPolicy
from moerl.metrics import to_floats
from moerl.world import Alone


def train(policy: MegatronPolicy, case: dict[str, Any], steps: int) -> list[dict[str, float]]:
    """`steps` more steps; the data of each follows from its number alone."""
    section = algorithm(case)
    objective = build_objective(section)
    seen = []
    for _ in range(steps):
        step = policy.version
        made = samples(np.random.default_rng(step), case, constant=objective.constant_advantage)
        batch = pack(policy, made, section, case, step)
        batch, metrics = policy.score(batch, objective.needs | {"old_logprobs"})
        seen.append(to_floats(metrics | policy.update(batch, objective)))
    return seen


def save(policy: MegatronPolicy | MegatronCritic, folder: Path) -> None:
    """Every rank its part."""
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    policy.save(folder)
    dist.barrier()


class Gloo(Alone):
    """A team of all ranks."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.is_leader = self.rank == 0

    def meet(self) -> None:
        dist.barrier()

    def any(self, flag: bool) -> bool:
        value = torch.tensor(int(flag))
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value)


class Dying:
    """Rank 1 dies while its part is being written, half of its tensors on the disk."""

    def __init__(self, policy: MegatronPolicy) -> None:
        self._policy = policy

    def begin_save(self, folder: Path) -> Callable[[], None]:
        work, rank = self._policy.begin_save(folder), self._policy.parallel.rank

        def write() -> None:
            work()
            if rank == 1:
                path = folder / "rank_00001.safetensors"
                os.truncate(path, path.stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)

        return write


def killed(policy: MegatronPolicy, case: dict[str, Any], folder: Path) -> None:
    """Save in the background, train, save again: one rank is killed in the middle of that, and so the job ends."""
    store = CheckpointStore(folder, keep=1, model_id="m", config_id="c", team=Gloo(), in_background=True)
    store.save(policy.version, policy, {"step": policy.version})
    train(policy, case, 1)
    store.wait()
    print(f"saved {store.steps()}", flush=True)
    store.save(policy.version, Dying(policy), {"step": policy.version})  # pyright: ignore[reportArgumentType] it only saves
    train(policy, case, 100)


def save_critic(case: dict[str, Any], layout: dict[str, Any], out: Path) -> None:
    """A critic with a head that is not zero, or the one that was saved, as it is saved again."""
    critic = MegatronCritic.build(
        model=ModelSection(path=case["model"]),
        parallel=ParallelSection(**layout),
        precision=PrecisionSection(),
        optim=OptimSection(distributed=True),
        critic=CriticSection(init="policy"),
        num_steps=10,
        seed=0,
    )
    if "load" in case:
        critic.load(out / case["load"])
    else:
        for tensor in critic.head.values():
            tensor.data.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1.0)
    save(critic, out / case["save"])


def run(case: dict[str, Any], layout: dict[str, Any], out: Path) -> None:
    """Build, load, train, save, train on; what came out goes to files by the name of the run."""
    section = algorithm(case)
    policy = build(case, layout, section, build_objective(section).needs)
    if "load" in case:
        policy.load(out / case["load"])
    if "killed" in case:
        killed(policy, case, out / case["killed"])
    if "gradients" in case:
        objective = build_objective(section)
        made = samples(np.random.default_rng(0), case, constant=objective.constant_advantage)
        batch, _ = policy.score(pack(policy, made, section, case, 0), objective.needs | {"old_logprobs"})
        grads = policy.gradients(batch.minibatches[0], objective)
        arrays = {name: value.float().cpu().numpy() for name, value in grads.items()}
    record: dict[str, Any] = {"before": train(policy, case, case.get("before", 0))}
    if "save" in case:
        save(policy, out / case["save"])
    record["after"] = train(policy, case, case.get("after", 0))
    record["moments"] = sum(
        state.tensors["exp_avg"].numel()
        for state in parameter_states(policy._optimizer.inner)
        if "exp_avg" in state.tensors
    )
    weights = {name: tensor.detach().float().cpu().numpy().copy() for name, tensor in policy.export()}
    if policy.parallel.rank == 0:
        (out / f"{case['run']}.json").write_text(json.dumps(record))
        np.savez(out / f"{case['run']}.npz", **weights)  # pyright: ignore[reportArgumentType] names of arrays only
        if "gradients" in case:
            np.savez(out / f"{case['run']}.grads.npz", **arrays)  # pyright: ignore[reportArgumentType]
        print(case["run"], flush=True)


def main() -> None:
    """Every run of every layout."""
    torch.set_num_threads(1)
    plan = json.loads(Path(sys.argv[1]).read_text())
    for layout in plan:
        for case in layout["runs"]:
            act = save_critic if "critic" in case else run
            act(case, layout["sizes"], Path(sys.argv[2]))
        release_parallel()


if __name__ == "__main__":
    main()
