"""Makes the environment of the SGLang servers: `python3.11 tools/setup_sglang.py [--venv .venv-sglang] [--dry-run]`.

Trainer and servers never share an environment: SGLang pins torch, transformers and tokenizers at other versions.

What it chooses
- Python 3.11, the one that moerl's tests run the servers with.
- with an NVIDIA GPU: `sglang` with all that it names (CUDA builds of torch 2.14.1 and of its kernels).
- without one: torch's CPU build (set MOERL_TORCH_INDEX_URL to an index that has it, such as PyTorch's own; else the
  CUDA build, which runs without a driver), the libraries that serving on a CPU imports, and `sglang` without its
  dependencies, about fifteen of which are CUDA packages. What sglang needs to serve there is in
  `moerl/rollout/sglang/shim/`.

The versions are in requirements/sglang/. A second run does nothing unless they, this script, the Python or the GPU
changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from setup import ROOT, UNAVAILABLE, Installer, SetupError, create_venv, has_gpu, say, torch_index

FILES = ROOT / "requirements" / "sglang"
SHIM = ROOT / "moerl" / "rollout" / "sglang" / "shim"
PYTHON = (3, 11)
TORCH_VERSION = "2.13.0"
"""Of servers on a CPU; with a GPU sglang names its own."""
SIZES = {"cpu": "about 1 GB to download and 3.2 GB on disk", "cuda": "about 9 GB to download and 16 GB on disk"}
FREE_BYTES = {"cpu": 5_000_000_000, "cuda": 25_000_000_000}
MEASURED = frozenset({"cpu"})
"""Builds whose sizes were seen; the others' are estimates."""

VERIFY = """
import importlib, json, sys
versions = {}
for name in ("torch", "transformers", "tokenizers", "fastapi", "sglang"):
    try:
        versions[name] = str(importlib.import_module(name).__version__)
    except (ImportError, OSError, RuntimeError, AttributeError, ValueError) as error:
        sys.exit(f"cannot import {name}: {type(error).__name__}: {error}")
print(json.dumps(versions))
"""


class SglangInstaller(Installer):
    """`pip install` held to the servers' lock, or to nothing where sglang names its own versions."""

    def __init__(self, venv: Path, *, dry_run: bool, build: str) -> None:
        super().__init__(venv, dry_run=dry_run)
        self._constraints = ["-c", str(FILES / "lock.txt")] if build == "cpu" else []

    def pip(self, title: str, *arguments: str, missing: str = "") -> None:
        """One step."""
        pip = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check", *self._constraints]
        self.run(title, [*pip, *arguments], missing)


def check_machine(venv: Path, build: str) -> None:
    """Fail before a long download rather than after it.

    Raises:
        SetupError: another Python, or too little room.
    """
    if sys.version_info[:2] != PYTHON:
        raise SetupError(
            f"this is Python {sys.version.split()[0]}, but the servers are run with {PYTHON[0]}.{PYTHON[1]}; install "
            "it and name it: make sglang SGLANG_PYTHON=/path/to/python3.11"
        )
    folder = next(parent for parent in (venv, *venv.parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < FREE_BYTES[build] and not any(venv.glob("lib/python*/site-packages/sglang/version.py")):
        raise SetupError(
            f"{folder} has {free / 1e9:.1f} GB free, but the servers' {build} environment needs "
            f"{FREE_BYTES[build] / 1e9:.0f} GB; make room, or choose another folder with --venv"
        )


def install_for_cpu(install: Installer) -> None:
    """torch first, so that nothing brings another; sglang last, alone."""
    try:
        install.pip(f"torch {TORCH_VERSION}, CPU build", f"torch=={TORCH_VERSION}+cpu", *torch_index())
    except SetupError as error:
        if not any(text in str(error).lower() for text in UNAVAILABLE):
            raise
        say(f"    pip finds no CPU build of torch {TORCH_VERSION}; set MOERL_TORCH_INDEX_URL to an index that has one")
        say("    for a small download")
        install.pip(f"torch {TORCH_VERSION}, CUDA build: about 3 GB", f"torch=={TORCH_VERSION}", *torch_index())
    install.pip("libraries of the servers", "-r", str(FILES / "cpu.txt"))
    install.pip(
        "sglang, without the CUDA packages that it names",
        *("--no-deps", "-r", str(FILES / "cpu-alone.txt")),
        missing="sglang has wheels for Linux on x86_64 and aarch64 (glibc 2.34 or later) alone",
    )


def fingerprint(build: str) -> str:
    """Changes when a run of this script could change the environment."""
    digest = hashlib.sha256(repr((sys.version_info[:3], build, torch_index())).encode())
    for path in [Path(__file__), *sorted(FILES.glob("*.txt")), *sorted(SHIM.glob("*.py"))]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def verify(install: Installer, build: str) -> dict[str, str]:
    """Import what was installed, as a server would, and return the versions."""
    say("- importing everything once")
    command = [str(install.python), "-c", VERIFY]
    variables = {"PYTHONPATH": str(SHIM), "SGLANG_USE_CPU_ENGINE": "1"} if build == "cpu" else {}
    environment = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, cwd=install.venv, env=environment, check=False)
    if done.returncode:
        raise SetupError(f"the environment does not work: {(done.stderr.strip() or done.stdout).splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def set_up(venv: Path, *, dry_run: bool, build: str) -> None:
    """Everything, in order.

    Raises:
        SetupError: says what is missing.
    """
    stamp = venv / "moerl-setup.json"
    install = SglangInstaller(venv, dry_run=dry_run, build=build)
    wanted = fingerprint(build)
    if stamp.exists() and json.loads(stamp.read_text()).get("fingerprint") == wanted and install.python.exists():
        say(f"{venv} is up to date")
        return
    check_machine(venv, build)
    start = time.monotonic()
    size = f"{SIZES[build]}{'' if build in MEASURED else ' (estimated)'}"
    say(f"Setting up {venv} for SGLang servers, {build} build: {size}")
    create_venv(install, PYTHON)
    if build == "cpu":
        install_for_cpu(install)
    else:
        install.pip("sglang with its CUDA packages", "-r", str(FILES / "cuda.txt"), *torch_index())
    install.pip("what moerl's own tests of the servers need", "-r", str(FILES / "test.txt"))
    if dry_run:
        return
    versions = verify(install, build)
    stamp.write_text(json.dumps({"fingerprint": wanted, "versions": versions}, indent=1) + "\n")
    say("    " + ", ".join(f"{name} {number}" for name, number in versions.items()))
    say(f"Ready in {time.monotonic() - start:.0f} s: {install.python}")


def main() -> int:
    """Exit status 0, or 1 with one message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-sglang", help="its folder (default: .venv-sglang)")
    parser.add_argument("--build", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda with a GPU")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    options = parser.parse_args()
    build = options.build if options.build != "auto" else ("cuda" if has_gpu() else "cpu")
    try:
        set_up(options.venv.absolute(), dry_run=options.dry_run, build=build)
    except SetupError as error:
        print(f"set-up stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up interrupted; run it again to go on where it stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
