"""tools/setup_sglang.py: what it would run with and without a GPU, and errors that name what is missing."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILES = ROOT / "requirements" / "sglang"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    spec = importlib.util.spec_from_file_location("moerl_setup_sglang", ROOT / "tools" / "setup_sglang.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("setup", None)


@pytest.fixture
def python311(monkeypatch, script):
    """This Python is the servers' own, and the disk has room for them, whatever this machine is."""
    monkeypatch.setattr(script, "PYTHON", sys.version_info[:2])
    monkeypatch.setattr(script, "FREE_BYTES", dict.fromkeys(script.FREE_BYTES, 0))


def test_dry_run_runs_nothing(script, python311, tmp_path, capsys):
    script.set_up(tmp_path / "v", dry_run=True, build="cpu")
    out = capsys.readouterr().out
    assert not (tmp_path / "v").exists()
    torch, libraries, alone = (out.index(text) for text in ("torch==2.13.0+cpu", "cpu.txt", "--no-deps"))
    assert torch < libraries < alone, "torch before what would bring another, sglang alone and last"
    assert out.count(str(FILES / "lock.txt")) == 4
    assert "3.2 GB on disk" in out


def test_a_gpu_takes_what_sglang_names(script, python311, tmp_path, capsys):
    script.set_up(tmp_path / "v", dry_run=True, build="cuda")
    out = capsys.readouterr().out
    assert "cuda.txt" in out
    assert "--no-deps" not in out
    assert "lock.txt" not in out, "the lock is the CPU build's"
    assert "(estimated)" in out


def test_another_python_is_refused(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "PYTHON", (3, 2))
    with pytest.raises(script.SetupError, match=r"are run with 3\.2; install it and name it: make sglang SGLANG_"):
        script.check_machine(tmp_path, "cpu")


def test_a_full_disk_is_named(script, python311, tmp_path, monkeypatch):
    monkeypatch.setitem(script.FREE_BYTES, "cpu", 10**18)
    with pytest.raises(script.SetupError, match="GB free, but the servers' cpu environment needs 1000000000 GB"):
        script.check_machine(tmp_path / "v", "cpu")


def test_a_second_run_does_nothing(script, tmp_path, capsys):
    venv = tmp_path / "v"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch()
    (venv / "moerl-setup.json").write_text(json.dumps({"fingerprint": script.fingerprint("cpu")}))
    script.set_up(venv, dry_run=False, build="cpu")
    assert "is up to date" in capsys.readouterr().out
    assert script.fingerprint("cpu") != script.fingerprint("cuda")


def test_the_command_itself(tmp_path):
    command = [sys.executable, ROOT / "tools" / "setup_sglang.py", "--venv", tmp_path / "v", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == (0 if sys.version_info[:2] == (3, 11) else 1)
    assert "Traceback" not in done.stderr


def pins(name):
    lines = [line for line in (FILES / name).read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+", line) for line in lines), "exact versions alone"
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in (line.split("==") for line in lines)}


def test_every_version_is_exact_and_the_lock_agrees():
    lock = pins("lock.txt")
    for name in ("cpu.txt", "test.txt"):
        assert {package: lock.get(package) for package in pins(name)} == pins(name)
    assert not {"torch", "sglang", "triton"} & set(lock)
    assert pins("cpu-alone.txt")["sglang"] == pins("cuda.txt")["sglang"] == "0.5.23"


def test_nothing_of_cuda_is_in_the_cpu_build():
    assert not [name for name in pins("lock.txt") if re.search("cuda|nvidia-(?!ml-py)|flashinfer|deep-?gemm", name)]
