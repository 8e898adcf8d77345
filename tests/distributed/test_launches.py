"""A launch of several processes ends as one: a rank that dies, hangs or fails, Ctrl-C, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from loop_files import LIMIT_SECONDS, ROOT, Bench, finish, start


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("launches"))


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
    refused = start(2, "-m", "moerl", "eval", str(bench.configs["gspo"]))
    assert finish(refused).count("moerl: `moerl eval` runs in one process; start it without a launcher") == 1
    refused = bench.train("odd", "parallel.tensor=3")
    output = finish(refused)
    assert output.count("must divide the world size, 2") == 1
