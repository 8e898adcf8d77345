"""Seconds per step and tokens per second of the demo by phase, beside the same work done with plain transformers.

python tools/bench/demo.py
python tools/bench/demo.py --steps 20 --threads 1 --trl-python /path/to/venv/bin/python

The first row is a real `moerl train` in a process of its own, without evaluation and checkpoints: megatron-core
learner, routes recorded, all metrics. The named baseline runs in the same call on the same model folder, prompts and
batch sizes: `generate` of transformers for all answers, one scoring forward, minibatches of forward, backward and Adam
(tools/bench/demo_plain.py). TRL's GRPOTrainer runs too where `--trl-python` has it. The first step of each is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PHASES = ("rollout", "score", "update", "other", "step")
Steps = list[dict[str, float]]


def run(command: list[str], threads: int) -> str:
    """Standard output of a command; stops here, with its last words, where it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\nended with status {done.returncode}:\n{done.stderr[-1500:]}")
    return done.stdout


def moerl_steps(args: argparse.Namespace) -> Steps:
    """A run of the demo's loop; its own clock, phase by phase."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"run.output_dir={folder}",
            "run.name=bench",
            f"run.num_steps={args.steps + 1}",
            f"run.num_threads={args.threads}",
            "evaluation.sets=[]",
            "evaluation.interval_steps=0",
            "checkpoint.interval_steps=0",
            "telemetry.progress=off",
        ]
        run([sys.executable, "-m", "moerl", "train", args.config, *overrides], args.threads)
        lines = (Path(folder) / "bench" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [
        {
            **{phase: row[f"perf/{phase}_seconds"] for phase in ("rollout", "score", "update", "step")},
            "tokens": row["rollout/tokens"],
        }
        for row in rows
        if row["step"] > 1
    ]


def script_steps(script: str, python: str, args: argparse.Namespace) -> Steps:
    """A script of this folder that prints one line a step."""
    import yaml

    base = yaml.safe_load((ROOT / "configs/demo/base.yaml").read_text())
    command = [python, str(HERE / script), "--steps", str(args.steps + 1), "--threads", str(args.threads)]
    command += ["--model", base["model"]["path"], "--data", base["data"]["train"][0]["source"]["path"]]
    rollout = base["rollout"]
    command += ["--prompts", str(rollout["prompts_per_step"]), "--group-size", str(rollout["group_size"])]
    command += ["--minibatches", str(base["batch"]["num_minibatches"])]
    command += ["--max-new-tokens", str(rollout["max_new_tokens"]), "--lr", str(base["optim"]["lr"])]
    lines = [json.loads(line) for line in run(command, args.threads).splitlines() if line.startswith('{"')]
    steps = [line for line in lines if "tokens" in line][1:]
    return [{key.removesuffix("_seconds"): value for key, value in step.items()} for step in steps]


def figures(steps: Steps) -> dict[str, list[float]]:
    """Phase -> seconds of every step; `other` is what no phase has."""
    result = {name: [step.get(name, 0.0) for step in steps] for name in ("rollout", "score", "update", "step")}
    result["other"] = [s["step"] - sum(s.get(name, 0.0) for name in ("rollout", "score", "update")) for s in steps]
    result["tokens"] = [step["tokens"] for step in steps]
    return result


def table(sides: dict[str, Steps]) -> str:
    """Seconds by phase, tokens per second, and the ratio of the step to the baseline's."""
    head = [
        "",
        *(f"{phase}, s" for phase in PHASES),
        "sampled tokens/s, rollout",
        "sampled tokens/s, step",
        "step / plain",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    plain = statistics.median(figures(sides["plain transformers"])["step"])
    for name, steps in sides.items():
        found = figures(steps)
        cells = [_spread(found[phase]) for phase in PHASES]
        for phase in ("rollout", "step"):
            rates = [tokens / seconds for tokens, seconds in zip(found["tokens"], found[phase], strict=True)]
            cells.append(_spread(rates, ",.0f"))
        cells.append(f"{statistics.median(found['step']) / plain:.2f} x")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: list[float], form: str = ".3f") -> str:
    return f"{statistics.median(values):{form}} [{min(values):{form}}-{max(values):{form}}]"


def main() -> int:
    """Run all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/demo/grpo.yaml", help="of moerl's side (default %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps that count (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of every side (default %(default)s)")
    parser.add_argument("--trl-python", help="interpreter of an environment with trl and datasets")
    args = parser.parse_args()
    sides = {"moerl": moerl_steps(args), "plain transformers": script_steps("demo_plain.py", sys.executable, args)}
    if args.trl_python is None:
        print("TRL: skipped (no --trl-python)")
    else:
        tried = subprocess.run([args.trl_python, "-c", "import trl, datasets"], capture_output=True, check=False)
        if tried.returncode == 0:
            sides["TRL GRPOTrainer"] = script_steps("demo_trl.py", args.trl_python, args)
        else:
            print(f"TRL: skipped ({args.trl_python} cannot import trl and datasets)")
    import torch

    about = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; Python {platform.python_version()}"
    print(f"{about}, torch {torch.__version__}, {args.threads} thread(s); median [min-max] of {args.steps} steps\n")
    print(table(sides))
    return 0


if __name__ == "__main__":
    sys.exit(main())
