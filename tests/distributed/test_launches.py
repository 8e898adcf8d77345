"""A launch of several processes ends as one: a rank that dies, hangs or fails, a launcher that dies, Ctrl-C, and what
is refused.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from loop_files import LIMIT_SECONDS, ROOT, Bench, finish, start


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("launches"))


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Rank -> process id of what the launcher started."""
    found = {}
    for child in children_of(process.pid):
        words = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found |= {int(word[5:]): child for word in words if word.startswith(b"RANK=")}
    return found


def children_of(pid: int) -> list[int]:
    """Of any of its threads."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended in between
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def descendants_of(pid: int) -> set[int]:
    """Ranks, verifier workers, and what these have forked."""
    children = children_of(pid)
    return {*children, *(one for child in children for one in descendants_of(child))}


def wait_for(process: subprocess.Popen[str], is_reached: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not is_reached():
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < end
        time.sleep(0.05)


def has_step(folder: Path, step: int) -> bool:
    return (folder / "checkpoints" / f"step_{step:06d}" / "manifest.json").is_file()


def has_settled(pid: int, count: int) -> bool:
    """Whether it has so many descendants, and still the same a moment later."""
    found = descendants_of(pid)
    time.sleep(0.5)
    return len(found) == count and descendants_of(pid) == found


def is_running(pid: int) -> bool:
    """Not where it has ended, though nobody has asked for its status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def are_gone(pids: Iterable[int]) -> bool:
    """All of them, or within a few seconds."""
    end = time.monotonic() + 10
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    return not left


@pytest.fixture(scope="module")
def asleep(bench) -> Iterator[subprocess.Popen[str]]:
    """A run whose rank 1 falls asleep before its first update, while its watch goes on. Its end is awaited later."""
    sleepy = ("algorithm.aggregation={name: 'asleep:equally'}", "telemetry.probe_prompts=0")  # the probe is packed too
    process = bench.train("asleep", *sleepy, "parallel.timeout_seconds=20")
    yield process
    process.kill()  # where no test awaited it


@pytest.fixture(scope="module")
def interrupted(bench, asleep) -> tuple[int, str]:
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
    """Rank 0, which the others watch (`test_asynchronous.py` kills another). Every row is that of a run that nobody
    killed, to the bit.
    """
    process = bench.train("killed", "run.num_steps=40", "checkpoint.export_hf=false")
    wait_for(process, lambda: has_step(bench.runs / "killed", 1))
    pids, everybody = ranks_of(process), descendants_of(process.pid)
    assert sorted(pids) == [0, 1]
    os.kill(pids[0], signal.SIGKILL)
    started = time.monotonic()
    output = finish(process)
    assert process.returncode != 0
    assert time.monotonic() - started < 60
    lines = [line for line in output.splitlines() if line.startswith("moerl: ")]
    assert len(lines) == 1, output[-4000:]
    assert lines[0].startswith("moerl: rank 0 died in phase ")
    assert "start the same command to go on" in lines[0]
    assert are_gone(everybody)
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
    pids, everybody = ranks_of(process), descendants_of(process.pid)
    os.kill(pids[1], signal.SIGSTOP)
    started = time.monotonic()
    output = finish(process)
    assert process.returncode != 0
    assert time.monotonic() - started < 120
    lines = [line for line in output.splitlines() if line.startswith("moerl: ")]
    assert len(lines) == 1, output[-4000:]
    assert lines[0].startswith("moerl: rank 1 gave no sign of life for ")
    assert "it was last seen in phase " in lines[0]
    assert are_gone(everybody)


def test_a_launcher_that_is_killed_leaves_no_process_behind(bench):
    """Not even a verifier's task, which is in a session of its own and would sleep on."""
    process = bench.train("orphans", "reward.rewards=[{name: 'asleep:judge'}]", "reward.timeout_seconds=600")
    wait_for(process, lambda: has_settled(process.pid, 4))
    everybody = descendants_of(process.pid)
    process.kill()
    started = time.monotonic()
    output = finish(process)  # once nobody holds its pipe
    assert time.monotonic() - started < 60
    lines = [line for line in output.splitlines() if line.startswith("moerl: ")]
    assert len(lines) == 1, output[-4000:]
    assert re.match(r"moerl: rank 0 lost its launcher in phase '\w+' and ends; start the same command", lines[0])
    assert are_gone(everybody)


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


def test_a_rank_that_hangs_while_its_watch_goes_on_is_told_with_its_phase(asleep):
    """In the time of an exchange, and in that in which another rank may own up to the fault."""
    output = finish(asleep)  # once nobody holds its pipe
    assert asleep.returncode != 0
    lines = [line for line in output.splitlines() if line.startswith("moerl: ")]
    assert len(lines) == 1, output[-4000:]
    told = re.match(r"moerl: the others waited in vain for rank 1 in phase 'pack' of step 1, for (\d+) s", lines[0])
    assert told is not None, lines[0]
    assert 20 <= int(told[1]) < 120
