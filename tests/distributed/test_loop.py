"""The whole loop in several processes is that of one, goes on from its checkpoints bit for bit, and ends as one.

All layouts run in one launch of four processes (`loop_worker.py`); what needs processes of its own is started apart.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
from layout_cases import OF_A_LAYOUT, WIDE
from safetensors.torch import load_file

from moerl.convert.compare import compare_weights
from moerl.convert.places import find

sys.path.insert(0, str(Path(__file__).parent))
from loop_files import METHODS, ROOT, deep_policy, legal_layouts, write_config

LIMIT_SECONDS = 1800
"""Against a hang alone: five times what two cores take that have nothing else to do."""
SLOW_LIMIT_SECONDS = 3600
TOLERANCE = 2e-5
"""Of `1 + |value|`."""
TIMES = ("_seconds", "per_second", "perf/tflops")

LAYOUTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dp4": ("gspo", ()),
    "dp4_few": ("few", ()),
    "pp2_few": ("few", ("parallel.pipeline=2",)),
    "tp2_ep2": ("grpo", ("parallel.tensor=2", "parallel.expert=2")),
    "tp4": ("gspo", ("parallel.tensor=4",)),
    "pp2": ("rspo", ("parallel.pipeline=2",)),
    "tp2_pp2": ("ppo", ("parallel.tensor=2", "parallel.pipeline=2")),
    "pp2_vpp2": ("gspo", ("parallel.pipeline=2", "parallel.virtual_pipeline=2")),
    "ep2": ("ppo", ("parallel.expert=2",)),
    "cp2_pp2": ("rspo", ("parallel.context=2", "parallel.pipeline=2")),
    "cp2_etp2_ep2": ("gspo", ("parallel.context=2", "parallel.expert=2", "parallel.expert_tensor=2")),
}
"""Name -> method and overrides; one line for each layout of four processes."""


def every_layout() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Every layout of four processes that is legal, the methods in turn.

    Without `few`, which is about data ranks, and `grpo`: its KL is part of the reward, so the advantages of a group
    with equal answers are differences of logprobs in their last digits over their own spread, and layouts round those
    differently (2e-4 of the gradient).
    """
    found = {}
    methods = [method for method in METHODS if method not in ("grpo", "few")]
    for method, axes in zip(itertools.cycle(methods), legal_layouts(4), strict=False):
        name = "every." + ("_".join(f"{axis}{size}" for axis, size in axes.items()) or "data4")
        found[name] = (method, tuple(f"parallel.{axis}={size}" for axis, size in axes.items()))
    return found


EVERY = every_layout()


class Bench:
    """Files, and the ways to start what is tested."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        model = deep_policy(folder / "deep")
        self.configs = {method: write_config(folder, method, model) for method in METHODS}

    def start(self, processes: int, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ranks.command(processes, *command),
            cwd=ROOT,
            env=ranks.environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def train(self, name: str, *overrides: str) -> subprocess.Popen[str]:
        return self.start(2, "-m", "moerl", "train", str(self.configs["gspo"]), f"run.name={name}", *overrides)

    def plan(self, cases: dict[str, tuple[str, tuple[str, ...]]], file: str) -> str:
        plan = [
            {"name": name, "config": str(self.configs[method]), "overrides": list(more), "folder": str(self.runs)}
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


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Rank -> process id of what the launcher started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    found = {}
    for child in children:
        words = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found |= {int(word[5:]): int(child) for word in words if word.startswith(b"RANK=")}
    return found


def wait_for(process: subprocess.Popen[str], is_reached: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not is_reached():
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < end
        time.sleep(0.05)


def has_step(folder: Path, step: int) -> bool:
    return (folder / "checkpoints" / f"step_{step:06d}" / "manifest.json").is_file()


def are_gone(pids: dict[int, int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("loop"))


WORKER = str(Path(__file__).with_name("loop_worker.py"))


def run_plan(bench: Bench, processes: int, cases: dict[str, tuple[str, tuple[str, ...]]], file: str) -> None:
    process = bench.start(processes, WORKER, bench.plan(cases, file))
    output = finish(process, SLOW_LIMIT_SECONDS if cases is EVERY else LIMIT_SECONDS)
    assert process.returncode == 0, output[-4000:]


@pytest.fixture(scope="module")
def alone(bench) -> Bench:
    run_plan(bench, 1, {f"alone.{method}": (method, ()) for method in METHODS}, "alone.json")
    return bench


@pytest.fixture(scope="module")
def layouts(alone) -> Bench:
    run_plan(alone, 4, LAYOUTS, "four.json")
    return alone


@pytest.fixture(scope="module")
def every(alone) -> Bench:
    run_plan(alone, 4, EVERY, "every.json")
    return alone


@pytest.fixture
def done(request, name: str) -> Bench:
    """Where the run of that layout is; the whole set runs when the first of it is asked for."""
    return request.getfixturevalue("every" if name in EVERY else "layouts")


NAMES = [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in EVERY)]


@pytest.mark.parametrize("name", NAMES)
def test_the_first_step_is_that_of_one_process(done, name):
    method = {**LAYOUTS, **EVERY}[name][0]
    alone, together = done.rows(f"alone.{method}.parts")[:2], done.rows(name)[:1]
    together += done.rows(f"{name}.parts")[1:2]
    for a, b in zip(alone, together, strict=True):
        assert a.keys() == b.keys()
        for metric in a.keys() - OF_A_LAYOUT:
            value = a[metric]
            assert abs(b[metric] - value) <= WIDE.get(metric, TOLERANCE) * (1 + abs(value)), (metric, value, b[metric])
    first = [(done.runs / one / "samples.jsonl").read_text().splitlines()[:4] for one in (name, f"{name}.parts")]
    assert first[0] == first[1]
    assert len(alone[1]) > 150


def test_answers_without_a_verdict_leave_ranks_without_a_sample(layouts):
    """What the runs called few are for."""
    errors = [row["rollout/errors"] for row in layouts.rows("dp4_few")[1:]]
    assert len(errors) == 2
    assert {1.0, 2.0, 3.0}.issuperset(errors), "of four answers to four data ranks"


@pytest.mark.parametrize("name", [name for name, (method, _) in LAYOUTS.items() if method == "gspo"])
def test_weights_after_the_first_step_are_those_of_one_process(layouts, name):
    """With plain SGD: Adam turns a gradient of rounding size into a whole step."""
    alone = load_file(layouts.runs / "alone.gspo.after_1" / "model.safetensors")
    together = load_file(layouts.runs / f"{name}.after_1" / "model.safetensors")
    assert alone.keys() == together.keys()
    assert max(float((together[key] - alone[key]).abs().max()) for key in alone) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_one_step_and_one_are_two_steps_to_the_bit(done, name):
    assert done.rows(f"{name}.parts")[2:] == done.rows(name)[2:]
    assert [row["step"] for row in done.rows(name)] == [0, 1, 2]
    for file in ("hf/model.safetensors", "exports/step_000002/model.safetensors", "samples.jsonl", "load.jsonl"):
        assert (done.runs / name / file).read_bytes() == (done.runs / f"{name}.parts" / file).read_bytes(), file


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_of_a_layout_hold_the_weights_that_its_ranks_export(done, name):
    """Converted without a process group; the layout of the run does not matter."""
    run = done.runs / name
    assert not compare_weights(find(run), find(run / "hf")).differences
    second = find(run / "checkpoints" / "step_000002"), find(run / "exports" / "step_000002")
    assert not compare_weights(*second).differences


@pytest.fixture(scope="module")
def interrupted(bench) -> tuple[int, str]:
    """Status and output of a run that Ctrl-C ended after its third step."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    script, config = ROOT / "launch" / "local.sh", bench.configs["gspo"]
    command = [str(script), "2", str(config), "run.name=ctrl_c", "run.num_steps=40"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    wait_for(process, lambda: has_step(bench.runs / "ctrl_c", 3))
    process.send_signal(signal.SIGINT)
    output = finish(process)
    return process.returncode, output


def test_a_rank_that_is_killed_ends_all_with_one_message_and_the_run_goes_on(bench, interrupted):
    """Every row is that of a run that nobody killed, to the bit."""
    process = bench.train("killed", "run.num_steps=40", "checkpoint.export_hf=false")
    wait_for(process, lambda: has_step(bench.runs / "killed", 1))
    pids = ranks_of(process)
    assert sorted(pids) == [0, 1]
    os.kill(pids[1], signal.SIGKILL)
    started = time.monotonic()
    output = finish(process)
    assert process.returncode != 0
    assert time.monotonic() - started < 60
    lines = [line for line in output.splitlines() if line.startswith("moerl: ")]
    assert len(lines) == 1, output[-4000:]
    assert lines[0].startswith("moerl: rank 1 died in phase ")
    assert "start the same command to go on" in lines[0]
    assert are_gone(pids)
    done = max(step for step in range(1, 41) if has_step(bench.runs / "killed", step))
    again = bench.train("killed", f"run.num_steps={done + 1}", "checkpoint.export_hf=false")
    output = finish(again)
    assert again.returncode == 0, output[-4000:]
    assert f"going on from step {done} " in output
    rows, unkilled = bench.rows("killed"), bench.rows("ctrl_c")
    assert [row["step"] for row in rows] == list(range(done + 2))
    assert len(rows) <= len(unkilled)
    for row, wanted in zip(rows, unkilled, strict=False):
        assert len(wanted) > 100 or not wanted["step"]
        assert {key: row.get(key) for key in wanted} == wanted, "the last row has an evaluation more"


def test_a_rank_that_is_stopped_ends_all_within_a_bound(bench):
    process = bench.train("stopped", "run.num_steps=40", "parallel.silence_seconds=15")
    wait_for(process, lambda: has_step(bench.runs / "stopped", 1))
    pids = ranks_of(process)
    os.kill(pids[1], signal.SIGSTOP)
    started = time.monotonic()
    output = finish(process)
    assert process.returncode != 0
    assert time.monotonic() - started < 120
    lines = [line for line in output.splitlines() if line.startswith("moerl: ")]
    assert len(lines) == 1, output[-4000:]
    assert lines[0].startswith("moerl: rank 1 gave no sign of life for ")
    assert "it was last seen in phase " in lines[0]
    assert are_gone(pids)


def test_ctrl_c_saves_on_all_ranks_and_ends_with_130(interrupted):
    status, output = interrupted
    assert status == 130, output[-4000:]
    lines = [line for line in output.splitlines() if line.startswith("moerl: ")]
    assert len(lines) == 1, output[-4000:]
    assert "its state is saved; go on with: torchrun --standalone --nproc-per-node 2 -m moerl train" in lines[0]


def test_a_failed_evaluation_ends_all_ranks_with_one_message_and_the_step_saved(bench):
    """At the last step, after which ranks that did not hear of it would go on to the export."""
    down = bench.folder / "the judge is down"
    reward = f"reward.rewards=[{{name: 'judge_that_fails:judge', down: '{down}'}}]"

    def run(num_steps: int) -> tuple[int, str]:
        process = bench.train("judge_down", reward, "checkpoint.interval_steps=0", f"run.num_steps={num_steps}")
        output = finish(process)
        return process.returncode, output

    status, output = run(1)
    assert status == 0, output[-4000:]
    down.touch()
    for _ in range(2):  # in the step, and when the run goes on
        status, output = run(2)
        assert status != 0
        lines = [line for line in output.splitlines() if line.startswith("moerl: ")]
        assert len(lines) == 1, output[-4000:]
        assert "8 of 8 greedy answers to heldout have no verdict" in lines[0]
        assert "Step 2 is trained and saved, and lacks its evaluation alone" in lines[0]
        assert has_step(bench.runs / "judge_down", 2)
    down.unlink()
    status, output = run(2)
    assert status == 0, output[-4000:]
    assert "going on from step 2 " in output
    assert [row["step"] for row in bench.rows("judge_down") if "eval/accuracy_greedy" in row] == [0, 1, 2]


def test_an_error_of_one_rank_is_told_once_with_its_status(bench):
    process = bench.train("wrong", "data.max_prompt_tokens=1", "data.on_long_prompt=refuse")
    output = finish(process)
    assert process.returncode != 0
    lines = [line for line in output.splitlines() if line.startswith("moerl: ")]
    assert len(lines) == 1, output[-4000:]
    assert "exitcode  : 2" in output


def test_other_commands_and_impossible_layouts_are_refused_once(bench):
    refused = bench.start(2, "-m", "moerl", "eval", str(bench.configs["gspo"]))
    assert finish(refused).count("moerl: `moerl eval` runs in one process; start it without a launcher") == 1
    refused = bench.train("odd", "parallel.tensor=3")
    output = finish(refused)
    assert output.count("must divide the world size, 2") == 1
