"""launch/slurm.sh against stand-ins of Slurm's commands: what a node would run, and how signal and status travel."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "slurm.sh"
SRUN = """#!/usr/bin/env bash
trap 'echo stopped >> "$RECORD"; exit 130' TERM
printf '%s\\n' "$@" > "$RECORD"
echo "threads $OMP_NUM_THREADS" >> "$RECORD"
[ -z "${HANGS:-}" ] || { for _ in $(seq 600); do sleep 0.1; done; }
exit 7
"""
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames node[3-4]" ] && printf 'node3\\nnode4\\n'
"""


@pytest.fixture
def job(tmp_path):
    """(environment of a batch job of two nodes, file that srun writes)."""
    if shutil.which("bash") is None:
        pytest.skip("no bash here")
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(text)
        command.chmod(0o755)
    record = tmp_path / "record"
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "RECORD": str(record),
        "SLURM_SUBMIT_DIR": "/shared/moerl",
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "node[3-4]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_ON_NODE": "96",
    }
    return environment, record


def test_one_torchrun_a_node_meets_at_the_first_one(job):
    environment, record = job
    done = subprocess.run([SCRIPT, "a.yaml", "parallel.tensor=4"], env=environment, check=False, timeout=60)
    assert done.returncode == 7
    assert record.read_text().split() == [
        *("--kill-on-bad-exit=1", "--ntasks-per-node=1", "--cpus-per-task=96"),
        *("/shared/moerl/.venv/bin/python", "-m", "torch.distributed.run"),
        *("--nnodes", "2", "--nproc-per-node", "8", "--max-restarts", "0", "--shutdown-timeout", "540"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "node3:24567", "--rdzv-id", "1234567"),
        *("-m", "moerl", "train", "a.yaml", "parallel.tensor=4", "run.num_threads=12", "threads", "12"),
    ]


def test_devices_can_be_left_to_servers(job):
    environment, record = job
    subprocess.run([SCRIPT, "a.yaml"], env={**environment, "PROCESSES": "4"}, check=False, timeout=60)
    words = record.read_text().split()
    assert words[words.index("--nproc-per-node") + 1] == "4"
    assert "run.num_threads=24" in words


def test_gpus_with_a_kind_are_counted(job):
    environment, record = job
    del environment["SLURM_GPUS_ON_NODE"]
    subprocess.run([SCRIPT, "a.yaml"], env={**environment, "SLURM_GPUS_PER_NODE": "h100:4"}, check=False, timeout=60)
    words = record.read_text().split()
    assert words[words.index("--nproc-per-node") + 1] == "4"


def test_the_signal_before_the_end_of_the_time_reaches_torchrun_and_its_status_comes_back(job):
    environment, record = job
    process = subprocess.Popen([SCRIPT, "a.yaml"], env={**environment, "HANGS": "1"})
    try:
        while not (record.exists() and "threads" in record.read_text()):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
    assert record.read_text().endswith("stopped\n")


def test_outside_of_a_job_or_without_a_configuration_it_says_how_to_be_called(job):
    environment, record = job
    outside = {name: value for name, value in environment.items() if name != "SLURM_JOB_ID"}
    for command, env in (([SCRIPT], environment), ([SCRIPT, "a.yaml"], outside)):
        done = subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert "usage: sbatch" in done.stderr
    assert not record.exists()
