"""What tests of conversions share: every layout of up to two on each axis, and the command as a process of its own."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from moerl.checkpoint import CheckpointStore
from moerl.convert.layouts import Layout
from moerl.shards import Shard, ShardReader, write_rank

SIZES = {"tensor": (1, 2), "pipeline": (1, 2), "virtual_pipeline": (1, 2), "expert": (1, 2), "expert_tensor": (1, 2)}
LAYOUTS = [
    Layout(**sizes)
    for sizes in (dict(zip(SIZES, values, strict=True)) for values in itertools.product(*SIZES.values()))
    if sizes["virtual_pipeline"] == 1 or sizes["pipeline"] == 2
]


def convert(*arguments: object, world: tuple[int, int] | None = None, **kwargs: Any) -> subprocess.Popen[str]:
    """Start `moerl convert`; `world`: (rank, size) as a launcher would say."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if world is not None:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        env |= dict(zip(names, map(str, (world[0], world[0], world[1], world[1])), strict=True))
    command = [sys.executable, "-m", "moerl", "convert", *map(str, arguments)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)


class Learner:
    """Saves what an import made, as a learner saves its weights."""

    def __init__(self, shards: Path) -> None:
        """`shards`: the folder that `import` made."""
        self.shards = shards

    def save(self, folder: Path) -> None:
        """As one rank."""
        with ShardReader(self.shards) as reader:
            boxes = []
            for name, entry in reader.entries.items():
                target = torch.empty(entry.shape, dtype=entry.dtype)
                reader.fill(Shard(name, entry.shape, (0,) * len(entry.shape), target))
                boxes.append(Shard(name, entry.shape, (0,) * len(entry.shape), target))
        state = {"world_size": 1, "layout": Layout().described(), "counters": {}, "optimizer_updates": 0}
        write_rank(folder, 0, boxes, state, {})


def save_run(run: Path, shards: Path, model: Path, *, steps: tuple[int, ...] = (2,)) -> Path:
    """A run folder that began from `model`, with checkpoints that hold the weights in `shards`."""
    store = CheckpointStore(run / "checkpoints", keep=len(steps), model_id="m")
    for step in steps:
        store.save(step, Learner(shards), {})  # pyright: ignore[reportArgumentType] it only saves
    (run / "config.yaml").write_text(f"model:\n  path: {model}\n")
    return run
