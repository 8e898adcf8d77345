"""Three steps of the demo policy on answers that are written down, in fp32: the metrics are those of a recorded run.

No answer is sampled (one flipped token would change every number after it), so another processor or torch differs by
rounding alone. A change that is meant to change numbers records them anew, and its CHANGELOG line says why:
`python tests/golden/test_recorded_steps.py`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moerl.analysis.compare import IGNORED, compare_rows
from moerl.build import build_run
from moerl.configure import load
from moerl.loop import train
from moerl.rollout.engine import engines
from moerl.rollout.engines.dataset_engine import DatasetEngine, DatasetEngineConfig
from moerl.types import Completion, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
METHODS = {
    "cisco_r2": ("algorithm.preset=cisco", "algorithm.routing=R2"),
    "rspo": ("algorithm.preset=rspo",),
    "reinforce_pp": ("algorithm.preset=reinforce_pp",),
}
SETTINGS = (
    "run.num_steps=3",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.engine=written_down",
    "batch.num_minibatches=2",
    "data.shuffle=false",
    "data.check_disjoint=false",
    "evaluation.sets.0.limit=4",
    "evaluation.interval_steps=0",
    "telemetry.progress=off",
    "telemetry.report=false",
    "telemetry.probe_prompts=0",
    "telemetry.contract_tolerance=1e9",
    "checkpoint.interval_steps=0",
    "checkpoint.export_hf=false",
)
TOLERANCE = 2e-4
"""Of max(1, |value|). Rounding moves what is recorded by less than 1e-5, a wrong weight or mask by far more."""
ROUNDS_AWAY = ("eval/*", "*extreme*", "load/*", "route*")
"""Counts at a threshold that rounding may cross: it takes one near tie of two experts."""


@engines.register("written_down", DatasetEngineConfig, injects=("completions", "policy_version"))
class WrittenDown(DatasetEngine):
    """Right answers at even samples, a neighbour's at odd ones; with made-up logprobs, as an engine that disagrees."""

    def __init__(self, cfg: DatasetEngineConfig, *, completions: Mapping[str, np.ndarray], policy_version: int = 0):
        super().__init__(cfg, completions=completions, policy_version=policy_version)
        self._all = [completions[key] for key in sorted(completions)]
        self._own = completions

    async def generate(self, token_ids: np.ndarray, params: SamplingParams, request_id: str) -> Completion:
        prompt_id, _, index = request_id.rpartition("#")
        other = self._all[zlib.crc32(request_id.encode()) % len(self._all)]
        tokens = np.asarray(self._own.get(prompt_id, other) if int(index) % 2 == 0 else other, dtype=np.int32)
        logprobs = -0.05 - 0.1 * ((tokens + np.arange(len(tokens))) % 5).astype(np.float32)
        return Completion(tokens, logprobs, "stop", self.policy_version)


@dataclass(frozen=True)
class Task:
    """`a+b-c`, worked out."""

    a: int
    b: int
    c: int

    @property
    def row(self) -> dict[str, str]:
        first, last = self.a + self.b, self.a + self.b - self.c
        worked = f"{self.a}+{self.b}={first},{first}-{self.c}={last}"
        return {
            "prompt": f"{self.a}+{self.b}-{self.c}=?",
            "completion": f"{worked}\\boxed{{{last}}}",
            "answer": str(last),
        }


def rows_of(method: str, folder: Path) -> list[dict[str, Any]]:
    """Metrics of the three steps, without times."""
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(Task(a, a - 3, a - 4).row) + "\n" for a in (4, 5, 6, 7, 8, 9)))
    data = f"data.train=[{{name: tasks, source: {{name: file, path: {tasks}}}}}]"
    where = (f"run.output_dir={folder}", "run.name=golden")
    made = build_run(load(ROOT / "configs" / "demo" / "base.yaml", [*SETTINGS, data, *METHODS[method], *where]))
    assert made is not None
    try:
        train(made.rooms, made.schedule, made.resume_from)
    finally:
        made.close()
    rows = [json.loads(line) for line in (folder / "golden" / "metrics.jsonl").read_text().splitlines()]
    left_out = (*IGNORED, *ROUNDS_AWAY)
    return [
        {key: value for key, value in row.items() if not any(fnmatchcase(key, pattern) for pattern in left_out)}
        for row in rows[1:]
    ]


def recorded(method: str) -> Path:
    return Path(__file__).parent / f"{method}.jsonl"


@pytest.mark.parametrize("method", METHODS)
def test_three_steps_are_those_recorded(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    wanted = [json.loads(line) for line in recorded(method).read_text().splitlines()]
    found = compare_rows(wanted, rows_of(method, tmp_path), tolerance=TOLERANCE)
    assert found.is_equal, found.differences
    assert found.num_steps == 3
    assert found.num_values > 100


if __name__ == "__main__":
    for name in sys.argv[1:] or METHODS:
        with tempfile.TemporaryDirectory() as scratch:
            lines = [json.dumps(row) + "\n" for row in rows_of(name, Path(scratch))]
        recorded(name).write_text("".join(lines))
