"""Run a dumped batch through the oracle and the learner and compare their gradients, tensor by tensor.

    python tools/replay_step.py runs/NAME/batches/step_000003.npz --run runs/NAME --step 2

A batch of step s was made by the weights of checkpoint s - 1; without --step the run's own starting policy is taken.
Exit status 1 when a gradient differs by more than --tolerance of its tensor's largest entry.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from moerl.algorithms.objective import build_objective
from moerl.analysis.run_folder import CONFIG_FILE
from moerl.checkpoint import CheckpointStore
from moerl.configure import load
from moerl.data.dump import load_extra, load_step_batch
from moerl.errors import MoerlError
from moerl.mcore.policy import MegatronPolicy
from moerl.reference.model import ReferenceModel
from moerl.replay import compare_gradients, oracle_gradients
from moerl.run_folder import CHECKPOINTS, model_id


def main() -> int:
    """Print one row per tensor, the worst first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batch", type=Path, help="a file of <run>/batches")
    parser.add_argument("--run", type=Path, required=True, help="run folder that it came from")
    parser.add_argument("--step", type=int, help="checkpoint to take the weights of; default: the starting policy")
    parser.add_argument("--minibatch", type=int, default=0, help="which optimizer step of the batch (default 0)")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="allowed relative difference (default 1e-4)")
    parser.add_argument("--rows", type=int, default=12, help="how many tensors to print (default 12)")
    options = parser.parse_args()

    cfg = load(options.run / CONFIG_FILE)
    torch.set_num_threads(cfg.run.num_threads)
    objective = build_objective(cfg.algorithm)
    policy = MegatronPolicy.build(
        model=cfg.model,
        parallel=cfg.parallel,
        precision=cfg.precision,
        optim=cfg.optim,
        routing=cfg.algorithm.routing,
        router_shift=cfg.algorithm.router_shift.enabled,
        needs_reference=False,
        num_steps=cfg.run.num_steps,
        seed=cfg.run.seed,
    )
    if options.step is not None:
        store = CheckpointStore(options.run / CHECKPOINTS, keep=1, model_id=model_id(cfg.model.path))
        policy.load(store.open(options.step).learner)
    reference = ReferenceModel.from_pretrained(cfg.model.path)
    reference.load_weights(policy.export())

    batch = load_step_batch(options.batch)
    minibatch = batch.minibatches[options.minibatch]
    oracle = oracle_gradients(reference, minibatch, objective, routing=cfg.algorithm.routing)
    gaps = compare_gradients(oracle, policy.gradients(minibatch, objective))
    table = Table(
        title=f"{options.batch} ({load_extra(options.batch).get('reason', '')}), minibatch {options.minibatch}"
    )
    for heading in ("tensor", "largest gradient", "difference", "relative"):
        table.add_column(heading, justify="left" if heading == "tensor" else "right", overflow="fold")
    for gap in gaps[: options.rows]:
        table.add_row(gap.name, f"{gap.largest:.3e}", f"{gap.difference:.3e}", f"{gap.relative:.1e}")
    console = Console()
    console.print(table)
    worst = gaps[0].relative
    console.print(f"{len(gaps)} tensors, worst relative difference {worst:.1e}, allowed {options.tolerance:g}")
    return int(not worst <= options.tolerance)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MoerlError as error:
        sys.exit(f"replay_step: {error}")
