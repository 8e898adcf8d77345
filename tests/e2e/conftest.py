"""Real runs of `moerl` in processes of their own, shared between tests.

Runs that no test disturbs are listed in `CATALOGUE`. A test names those it reads, `@pytest.mark.runs("gspo", "grpo")`;
all that the selected tests name are started in the background, two at a time, and `runs["gspo"]` waits for one.
A story of several commands is a function of a `Stage`, named in the same way.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import forked
import pyarrow
import pyarrow.parquet
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs" / "demo"
SLOWEST_SECONDS = 240
"""Far above what any run takes, for a machine that does other things beside."""

IN_AN_INTERPRETER_OF_ITS_OWN = "gspo20"
"""The run of the catalogue that imports everything itself; the others are forks (`forked.py`)."""

SMALL = (
    "rollout.prompts_per_step=4",
    "batch.num_minibatches=2",
    "evaluation.sets.0.limit=16",
    "telemetry.report=false",
    "checkpoint.export_hf=false",
)
DEMOS = ("grpo", "grpo_r2", "grpo_r3", "gmpo", "rspo")
SFT = (str(DEMO / "sft.yaml"), "optim.schedule=constant", "optim.constant_steps=0", "evaluation.sets.0.limit=8")


@dataclass(frozen=True)
class Outcome:
    """A finished command and the run folder that it was given."""

    status: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "metrics.jsonl")

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def values(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]

    def expect(self, status: int = 0) -> Outcome:
        assert self.status == status, f"exit status {self.status}:\n{self.output[-4000:]}"
        return self


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Moerl:
    """Starts `python -m moerl` from the repository's root."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, *arguments: str, path: Path | None = None) -> subprocess.Popen[str]:
        """`python -m moerl`, a process group of its own; `path` goes on the module search path (a plugin's folder)."""
        names = [str(ROOT), *([str(path)] if path else [])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(names)}
        return subprocess.Popen(
            [sys.executable, "-m", "moerl", *arguments],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def finish(self, process: subprocess.Popen[str], folder: Path) -> Outcome:
        try:
            stdout, stderr = process.communicate(timeout=SLOWEST_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return Outcome(process.returncode, stdout, stderr, folder)

    def train(self, config: str | Path, *overrides: str, name: str, path: Path | None = None) -> Outcome:
        """Run it to its end, in `<folder>/<name>`."""
        return self._forked(self.arguments(config, *overrides, name=name), self.folder / name, path)

    def arguments(self, config: str | Path, *overrides: str, name: str) -> list[str]:
        return ["train", str(config), *overrides, f"run.output_dir={self.folder}", f"run.name={name}"]

    def train_anew(self, config: str | Path, *overrides: str, name: str) -> Outcome:
        """The same with `python -m moerl`."""
        return self.finish(self.start(*self.arguments(config, *overrides, name=name)), self.folder / name)

    def call(self, *arguments: str) -> Outcome:
        """Any command, to its end."""
        return self._forked(arguments, self.folder)

    def _forked(self, arguments: Sequence[str], folder: Path, path: Path | None = None) -> Outcome:
        with TemporaryDirectory() as scratch:
            stdout, stderr = Path(scratch, "stdout"), Path(scratch, "stderr")
            status = forked.run([*arguments], path, stdout, stderr, limit_seconds=SLOWEST_SECONDS)
            return Outcome(status, stdout.read_text(), stderr.read_text(), folder)


@dataclass(frozen=True)
class Prepared:
    """Files that runs of the catalogue read."""

    tiny: Path
    """A run of six small steps over ten prompts: epochs end in the middle of steps; it evaluates, probes and saves."""
    many: Path
    """JSONL and parquet in a weighted mixture, each with its own reward, and two evaluation sets."""
    gym: Path
    """One step on a reasoning-gym generator with its own score."""


def write_yaml(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(folder: Path) -> Prepared:
    train = read_lines(DEMO / "data" / "train.jsonl")
    ten = write_rows(folder / "ten.jsonl", train[:10])
    file = {"name": "file", "path": str(ten)}
    held = {"name": "heldout", "source": {"name": "file", "path": str(DEMO / "data" / "heldout.jsonl")}, "limit": 16}
    tiny = {
        "extends": str(DEMO / "gspo.yaml"),
        "run": {"num_steps": 6},
        "data": {"train": [{"name": "ten", "source": file}]},
        "rollout": {"prompts_per_step": 4, "group_size": 4},
        "batch": {"num_minibatches": 2},
        "evaluation": {"sets": [held], "interval_steps": 2, "num_samples": 1, "pass_at": [1]},
        "checkpoint": {"interval_steps": 1, "keep": 3},
        "telemetry": {"report": False, "probe_prompts": 4},
    }
    return Prepared(write_yaml(folder / "tiny.yaml", tiny), _many(folder, train, held), _gym(folder))


def _many(folder: Path, train: list[dict[str, Any]], held: dict[str, Any]) -> Path:
    lines = write_rows(folder / "lines.jsonl", train[100:140])
    table = folder / "table.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(train[200:240]), table)
    sources = {"lines": (lines, 3.0), "table": (table, 1.0)}
    values = {
        "extends": str(DEMO / "gspo.yaml"),
        "run": {"num_steps": 2},
        "data": {
            "train": [
                {"name": name, "source": {"name": "file", "path": str(path)}, "weight": weight}
                for name, (path, weight) in sources.items()
            ]
        },
        "rollout": {"prompts_per_step": 8, "group_size": 4},
        "reward": {
            "rewards": [
                {"name": "math_verify", "datasets": ["lines", "first"]},
                {"name": "exact_match", "datasets": ["table", "second"]},
            ]
        },
        "batch": {"num_minibatches": 2},
        "evaluation": {
            "sets": [{**held, "name": "first"}, {**held, "name": "second", "limit": 8}],
            "interval_steps": 0,
        },
        "telemetry": {"report": False, "probe_prompts": 4},
    }
    return write_yaml(folder / "many.yaml", values)


def _gym(folder: Path) -> Path:
    """A model of fresh weights whose tokenizer knows every printable character, for reasoning-gym's English."""
    model = folder / "ascii"
    shutil.copytree(DEMO / "policy_init", model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    words = [*tokenizer["model"]["vocab"], *map(chr, range(32, 127)), "\n"]
    tokenizer["model"]["vocab"] = {word: i for i, word in enumerate(dict.fromkeys(words))}
    tokenizer["pre_tokenizer"]["pattern"]["Regex"] += "|\\n"
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((model / "config.json").read_text())
    config["vocab_size"] = len(tokenizer["model"]["vocab"])
    (model / "config.json").write_text(json.dumps(config))
    task = {"name": "reasoning_gym", "task": "chain_sum", "config": {"max_terms": 4, "max_digits": 2}}
    values = {
        "extends": str(DEMO / "grpo.yaml"),
        "run": {"num_steps": 1},
        "model": {"path": str(model), "init": "random"},
        "data": {"train": [{"name": "gym", "source": {**task, "size": 20, "seed": 1}}], "max_prompt_tokens": 100},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 12},
        "reward": {"rewards": [{"name": "reasoning_gym", "extract": "all"}]},
        "batch": {"num_minibatches": 1},
        "evaluation": {"sets": [{"name": "gym_held", "source": {**task, "size": 6, "seed": 1000}}], "num_samples": 2},
        "telemetry": {"report": False},
    }
    return write_yaml(folder / "gym.yaml", values)


def catalogue(files: Prepared) -> dict[str, list[str]]:
    """Name -> configuration and overrides."""
    base = str(DEMO / "base.yaml")
    demo = {name: [str(DEMO / f"{name}.yaml"), "run.num_steps=2", *SMALL] for name in DEMOS}
    tiny = str(files.tiny)
    return {
        "gspo20": [
            str(DEMO / "gspo.yaml"),
            "run.num_steps=20",
            "checkpoint.interval_steps=10",
            "checkpoint.keep=3",
            "checkpoint.export_interval_steps=10",
        ],
        "tiny": [tiny],
        **demo,
        "grpo_r3_recompute": [*demo["grpo_r3"], "precision.recompute=full"],
        "cispo": [base, "algorithm.preset=cispo", "run.num_steps=2", *SMALL],
        "dapo": [base, "algorithm.preset=dapo", "run.num_steps=3", *SMALL, "rollout.group_size=4"],
        "support": [tiny, "run.num_steps=2", "rollout.top_p=0.9", "rollout.top_k=20", "rollout.temperature=0.8"],
        "many": [str(files.many)],
        "gym": [str(files.gym)],
        "sft40": [*SFT, "run.num_steps=40"],
        "sft10": [*SFT, "run.num_steps=10"],
        "sft10_again": [*SFT, "run.num_steps=10"],
    }


@dataclass(frozen=True)
class Stage:
    """What a scenario has to work with."""

    moerl: Moerl
    files: Prepared
    runs: Runs


Scenario = Callable[[Stage], Any]
"""A story of several commands; it is started in the background like a run, and `runs[scenario]` is what it returns."""


class Runs:
    """The runs and scenarios that the session needs. Runs start first, so that a scenario may wait for one."""

    def __init__(self, moerl: Moerl, files: Prepared, needed: Iterable[str | Scenario]) -> None:
        known = catalogue(files)
        stage = Stage(moerl, files, self)
        self._pool = ThreadPoolExecutor(2)
        self._running: dict[str | Scenario, Future[Any]] = {}
        for name in sorted(set(needed), key=lambda one: (not isinstance(one, str), str(one))):
            if isinstance(name, str):
                config, *overrides = known[name]
                train = moerl.train_anew if name == IN_AN_INTERPRETER_OF_ITS_OWN else moerl.train
                self._running[name] = self._pool.submit(train, config, *overrides, name=name)
        for scenario in dict.fromkeys(needed):
            if not isinstance(scenario, str):
                self._running[scenario] = self._pool.submit(scenario, stage)

    def __getitem__(self, name: str | Scenario) -> Any:
        found = self._running[name].result()
        return found.expect(0) if isinstance(name, str) else found

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "runs(*names): runs of the catalogue, and scenarios, that the test reads")


@pytest.fixture(scope="session")
def moerl(tmp_path_factory: pytest.TempPathFactory) -> Moerl:
    return Moerl(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="session", autouse=True)
def runs(request: pytest.FixtureRequest, moerl: Moerl, files: Prepared) -> Iterator[Runs]:
    needed = [name for item in request.session.items for mark in item.iter_markers("runs") for name in mark.args]
    started = Runs(moerl, files, needed)
    yield started
    started.close()
