"""Time per step and use of the engine: synchronous training against training that generates ahead, long-tailed answers.

python tools/bench/asynchronous.py                 every mode, 12 steps each, on the demo's policy
python tools/bench/asynchronous.py --steps 20 --json figures.json --keep runs/bench

The loop, the buffer, the learner and the publishing are the real ones; the engine takes time and no processor
(`timed_engine.py`), as one on hardware of its own, and is the same in every mode: so many slots, so many seconds a
token, lengths by the same law. Seconds a token are chosen so that a synchronous step generates for as long as it does
everything else, measured first, unless `--token-seconds` says so. What the answers say means nothing.

    sync       rollout.max_staleness=0: a step waits for its slowest answer, then the engine waits for the learner
    wait       rollout.max_staleness=1, prompts in order
    resume     rollout.max_staleness=1, steps train on what is finished; answers go on over updates
    drop       the same, but what is late is cut off and counted
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODES: dict[str, tuple[str, ...]] = {
    "sync": ("rollout.max_staleness=0",),
    "wait": ("rollout.max_staleness=1", "rollout.long_tail=wait"),
    "resume": ("rollout.max_staleness=1", "rollout.long_tail=resume"),
    "drop": ("rollout.max_staleness=1", "rollout.long_tail=drop"),
}
SETTINGS = (
    "rollout.group_size=4",
    "rollout.max_new_tokens=256",
    "batch.max_tokens_per_microbatch=4096",
    "reward.rewards=[{name: exact_match}]",
    "evaluation.sets=[]",
    "evaluation.interval_steps=0",
    "checkpoint.interval_steps=0",
    "checkpoint.export_hf=false",
    "run.resume=never",
    "telemetry.progress=off",
    "telemetry.report=false",
    "telemetry.probe_prompts=0",
)
WARM_STEPS = 2
"""Not counted: the first fill of the buffer, and libraries that are loaded."""
Row = dict[str, Any]


def run(name: str, steps: int, overrides: tuple[str, ...], folder: Path) -> Row:
    """Train; figures of the steps that count."""
    from timed_engine import TimedEngine

    from moerl.build import build_run
    from moerl.configure import load
    from moerl.loop import train
    from moerl.mcore.parallel import release_parallel

    where = (f"run.name={name}", f"run.output_dir={folder}", f"run.num_steps={steps}")
    cfg = load(ROOT / "configs" / "demo" / "gspo.yaml", [*SETTINGS, *overrides, *where])
    made = build_run(cfg)
    assert made is not None
    busy, started = TimedEngine.busy_seconds, time.perf_counter()
    try:
        train(made.rooms, made.schedule, made.resume_from)
    finally:
        made.close()
        release_parallel()
    wall = time.perf_counter() - started
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    counted = [row for row in rows if row["step"] > WARM_STEPS]
    slots = cfg.rollout.engine["slots"]

    def mean(metric: str) -> float:
        return statistics.fmean(row.get(metric, 0.0) for row in counted)

    waits = "perf/rollout_seconds"
    return {
        "step_seconds": statistics.median(row["perf/step_seconds"] for row in counted),
        "wait_seconds": statistics.median(row[waits] for row in counted),
        "other_seconds": statistics.median(row["perf/step_seconds"] - row[waits] for row in counted),
        "utilisation": (TimedEngine.busy_seconds - busy) / (slots * wall),
        "overlap": mean("perf/overlap_fraction"),
        "staleness": mean("rollout/staleness_mean"),
        "tokens": mean("rollout/tokens"),
        "dropped": sum(row.get("rollout/dropped_late", 0.0) for row in counted),
    }


def engine(slots: int, token_seconds: float) -> str:
    """The override that names it."""
    return f'rollout.engine={{name: "timed_engine:timed", slots: {slots}, token_seconds: {token_seconds}}}'


def table(rows: dict[str, Row]) -> str:
    """For people."""
    head = "mode      s/step  waits  other  engine used  overlap  staleness  tokens/step  late  speed"
    lines = [head]
    for name, row in rows.items():
        speed = rows["sync"]["step_seconds"] / row["step_seconds"] if "sync" in rows else float("nan")
        lines.append(
            f"{name:8}  {row['step_seconds']:6.2f} {row['wait_seconds']:6.2f} {row['other_seconds']:6.2f}  "
            f"{row['utilisation']:11.2f}  {row['overlap']:7.2f}  {row['staleness']:9.2f}  {row['tokens']:11.0f}  "
            f"{row['dropped']:4.0f}  {speed:5.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="of each mode (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=16, help="groups of 4 answers in a step (default %(default)s)")
    parser.add_argument("--slots", type=int, default=64, help="answers sampled at once (default %(default)s)")
    parser.add_argument("--token-seconds", type=float, help="of one token in one slot; default: as long as learning")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="which to run (default: all)")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--keep", type=Path, help="keep the run folders, with their trace.json, there")
    args = parser.parse_args()
    sys.path.insert(0, str(HERE))
    with tempfile.TemporaryDirectory() as made:
        folder = args.keep or Path(made)
        fixed = (f"rollout.prompts_per_step={args.prompts}",)
        token_seconds = args.token_seconds
        if token_seconds is None:
            first = run("first", WARM_STEPS + 3, (*fixed, *MODES["sync"], engine(args.slots, 0.01)), folder)
            token_seconds = round(0.01 * first["other_seconds"] / first["wait_seconds"], 5)
        print(f"{token_seconds:g} s a token, {args.slots} slots, {args.prompts} groups of 4 a step, {args.steps} steps")
        rows: dict[str, Row] = {}
        for mode in args.modes:
            rows[mode] = run(mode, args.steps, (*fixed, *MODES[mode], engine(args.slots, token_seconds)), folder)
            print(table(rows).splitlines()[-1], flush=True)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps({"token_seconds": token_seconds, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
