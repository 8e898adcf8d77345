"""What the loop tests run: a configuration, the demo's policy with twice its layers, so that four stages fit, and the
ways to start it.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ranks
import torch
import yaml
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs" / "demo"
LIMIT_SECONDS = 1800
"""Against a hang alone: five times what two cores take that have nothing else to do."""
TIMES = ("_seconds", "per_second", "perf/tflops")

METHODS: dict[str, dict[str, Any]] = {
    "gspo": {"preset": "gspo", "trust": {"lo": 3.0e-3, "hi": 4.0e-3}, "routing": "R2"},
    "grpo": {"preset": "grpo", "routing": "R3", "kl": {"place": "reward", "estimator": "k1", "coefficient": 0.05}},
    "rspo": {"preset": "rspo", "trust": {"lo": 3.0e-3, "hi": 4.0e-3}},
    "ppo": {
        "preset": "ppo",
        "critic": {"lr": 1.0e-3, "warmup_steps": 5},
        "kl": {"place": "none", "coefficient": 0.0},
    },
    "few": {"preset": "gspo", "trust": {"lo": 3.0e-3, "hi": 4.0e-3}},
}
OTHERWISE: dict[str, dict[str, Any]] = {
    "few": {
        "rollout": {"prompts_per_step": 1, "group_size": 4},
        "batch": {"num_minibatches": 1, "max_tokens_per_microbatch": 512},
        "reward": {"rewards": [{"name": "failing_reward:failing"}], "max_error_fraction": 0.9},
    },
}
"""Other sections of a method's configuration. `few`: so many answers are without a verdict that ranks have none."""

ONWARD = {"pp2": ("parallel.tensor=2", "parallel.expert=2")}
"""Name of a case -> overrides under which its second step is done too."""


def deep_policy(folder: Path) -> Path:
    """Four layers; the new ones add little to the stream, so that it answers much as the demo's does."""
    source = DEMO / "policy"
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    layers = config["num_hidden_layers"]
    config["num_hidden_layers"] = 2 * layers
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(source / "model.safetensors")
    for name, tensor in list(weights.items()):
        if name.startswith("model.layers."):
            number = int(name.split(".")[2])
            scale = 0.05 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            weights[name.replace(f".{number}.", f".{number + layers}.", 1)] = tensor * scale
    save_file({name: tensor.clone() for name, tensor in weights.items()}, folder / "model.safetensors")
    assert torch.isfinite(torch.cat([tensor.flatten() for tensor in weights.values()])).all()
    return folder


def write_config(folder: Path, method: str, model: Path) -> Path:
    """A small run with everything in it: evaluation, probe, checkpoints, export."""
    held = {"name": "heldout", "source": {"name": "file", "path": str(DEMO / "data" / "heldout.jsonl")}, "limit": 8}
    train = {"name": "sum", "source": {"name": "file", "path": str(DEMO / "data" / "train.jsonl")}}
    values = {
        "extends": str(DEMO / "base.yaml"),
        "run": {"name": "x", "output_dir": str(folder / "runs")},
        "model": {"path": str(model)},
        "data": {"train": [train]},
        "algorithm": METHODS[method],
        "rollout": {"prompts_per_step": 4, "group_size": 4},
        "optim": {"name": "sgd", "lr": 0.02} if method == "gspo" else {},
        "batch": {"num_minibatches": 2, "max_tokens_per_microbatch": 512},
        "evaluation": {"sets": [held], "interval_steps": 2, "num_samples": 1, "pass_at": [1]},
        "checkpoint": {"interval_steps": 1, "keep": 3, "export_interval_steps": 2},
        "telemetry": {"report": False, "probe_prompts": 4, "samples_per_step": 4},
        **OTHERWISE.get(method, {}),
    }
    path = folder / f"{method}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def legal_layouts(processes: int, *, layers: int = 4, key_value_heads: int = 2) -> Iterator[dict[str, int]]:
    """Every setting of the parallel axes that fits so many processes and the model, sizes of 1 left out."""
    sizes = [size for size in range(1, processes + 1) if processes % size == 0]
    for tensor, context, pipeline, expert, expert_tensor, virtual in itertools.product(*[sizes] * 5, (1, 2)):
        fits = processes % (tensor * context * pipeline) == processes % (expert * expert_tensor * pipeline) == 0
        fits = fits and not (key_value_heads % tensor and tensor % key_value_heads)
        fits = fits and layers % (pipeline * virtual) == 0
        if fits and (virtual == 1 or pipeline > 1):
            axes = {
                "tensor": tensor,
                "context": context,
                "pipeline": pipeline,
                "expert": expert,
                "expert_tensor": expert_tensor,
                "virtual_pipeline": virtual,
            }
            yield {name: size for name, size in axes.items() if size > 1}


def start(processes: int, *command: str) -> subprocess.Popen[str]:
    """Python with `command` in so many processes, a session of its own."""
    return subprocess.Popen(
        ranks.command(processes, *command),
        cwd=ROOT,
        env=ranks.environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


class Bench:
    """Files, and the ways to start what is tested."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        model = deep_policy(folder / "deep")
        self.configs = {method: write_config(folder, method, model) for method in METHODS}

    def train(self, name: str, *overrides: str) -> subprocess.Popen[str]:
        return start(2, "-m", "moerl", "train", str(self.configs["gspo"]), f"run.name={name}", *overrides)

    def plan(self, cases: dict[str, tuple[str, tuple[str, ...]]], file: str) -> str:
        plan = [
            {
                "name": name,
                "config": str(self.configs[method]),
                "overrides": more,
                "onward": ONWARD.get(name, ()),
                "folder": str(self.runs),
            }
            for name, (method, more) in cases.items()
        ]
        (self.folder / file).write_text(json.dumps(plan))
        return str(self.folder / file)

    def rows(self, name: str) -> list[dict[str, Any]]:
        lines = (self.runs / name / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if not k.endswith(TIMES)} for line in lines]


def finish(process: subprocess.Popen[str], limit_seconds: float = LIMIT_SECONDS) -> str:
    try:
        output, _ = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return output
