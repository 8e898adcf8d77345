"""Makes moerl's virtual environment: `python3 tools/setup.py [--venv .venv] [--dry-run]`. Needs nothing but Python.

What it chooses
- torch: without a GPU the CPU build where pip can get it for this Python (set MOERL_TORCH_INDEX_URL to an index that
  has it, such as PyTorch's own), else the CUDA build, its size printed first. Both builds run without a driver.
- megatron-core 0.19.2: the plain wheel on Python 3.12 and 3.13. Its metadata refuses 3.11 although `megatron.core`
  itself runs there, so on 3.11 it is built from its source (half a minute; needs a C++ compiler).
- everything else: the exact versions in requirements/.

A second run does nothing unless a file in requirements/, this script, the Python or the GPU changed.
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

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "lock.txt"
SUPPORTED = ((3, 11), (3, 12), (3, 13))
TORCH_VERSIONS = {(3, 11): "2.13.0", (3, 12): "2.14.1", (3, 13): "2.14.1"}
MEGATRON_VERSION = "0.19.2"
TRITON_VERSION = "3.9.0"
"""`import megatron.core` needs a triton; CUDA builds of torch bring their own, the CPU build brings none."""

CUDA_SIZE = "about 3 GB to download and 5.5 GB on disk"
FREE_BYTES = {"cpu": 4_000_000_000, "cuda": 12_000_000_000}
HEARTBEAT_SECONDS = 15.0
UNAVAILABLE = ("no matching distribution", "conflicting dependencies")
"""What pip says of a build that its index lacks, or that its own constraints leave out."""

VERIFY = """
import importlib, json, sys
names = ("torch", "megatron.core", "transformers", "omegaconf", "math_verify", "reasoning_gym", "pyarrow", "moerl")
versions = {}
for name in names:
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError, RuntimeError, AttributeError, ValueError) as error:
        sys.exit(f"cannot import {name}: {type(error).__name__}: {error}")
    versions[name] = str(getattr(module, "__version__", "?"))
print(json.dumps(versions))
"""


class SetupError(Exception):
    """Something is missing; the message says what and how to get it."""


class Installer:
    """Runs one command after the other inside the environment, with progress, and keeps their output in a log."""

    def __init__(self, venv: Path, *, dry_run: bool) -> None:
        self.venv = venv
        self.python = venv / "bin/python"
        self.log = venv / "moerl-setup.log"
        self.dry_run = dry_run

    def pip(self, title: str, *arguments: str, missing: str = "") -> None:
        """`pip install`, held to the locked versions; `missing` tells what a failure most likely means."""
        pip = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check", "-c", str(LOCK)]
        self.run(title, [*pip, *arguments], missing)

    def run(self, title: str, command: list[str], missing: str = "") -> None:
        """Run `command`, printing a line at its start, a sign of life every few seconds and the time it took."""
        say(f"- {title}")
        if self.dry_run:
            say("    " + " ".join(command))
            return
        start = time.monotonic()
        with self.log.open("ab") as log:
            log.write(f"\n$ {' '.join(command)}\n".encode())
            log.flush()
            begin = log.tell()
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
            try:
                self._wait(process, start)
            finally:
                if process.poll() is None:  # interrupted
                    process.terminate()
                    process.wait()
        if process.returncode:
            raise SetupError(explain(title, self.log.read_bytes()[begin:].decode(errors="replace"), missing, self.log))
        say(f"    done in {time.monotonic() - start:.0f} s")

    def _wait(self, process: subprocess.Popen[bytes], start: float) -> None:
        next_sign = HEARTBEAT_SECONDS
        while True:
            try:
                process.wait(timeout=1.0)
                return
            except subprocess.TimeoutExpired:
                seconds = time.monotonic() - start
                if seconds >= next_sign:
                    next_sign += HEARTBEAT_SECONDS
                    say(f"    ... {seconds:.0f} s (output: {self.log})")


def say(text: str) -> None:
    """One line of progress, at once."""
    print(text, flush=True)


def explain(title: str, output: str, missing: str, log: Path) -> str:
    """Why a step failed: the likely cause first, then the end of its output."""
    lower = output.lower()
    if "no space left" in lower:
        reason = "the disk is full"
    elif any(
        text in lower for text in ("name resolution", "connection refused", "newconnectionerror", "read timed out")
    ):
        reason = "the package index cannot be reached; check the network and pip's settings (pip config list)"
    else:
        reason = missing
    tail = "\n".join(f"    {line}" for line in output.strip().splitlines()[-12:])
    return f"'{title}' failed{': ' + reason if reason else ''}\n{tail}\n  Whole output: {log}"


def has_gpu() -> bool:
    """An NVIDIA device that torch could use."""
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def torch_index() -> list[str]:
    """pip arguments for torch from MOERL_TORCH_INDEX_URL; the exact build in the requirement decides, not the order."""
    url = os.environ.get("MOERL_TORCH_INDEX_URL", "")
    return ["--extra-index-url", url] if url else []


def create_venv(install: Installer, version: tuple[int, int]) -> None:
    """A new environment, or the one that is there if it has the same Python."""
    marker = install.venv / "moerl-venv"
    config = install.venv / "pyvenv.cfg"
    if config.exists():
        if f"version = {version[0]}.{version[1]}." in config.read_text():
            return
        if not marker.exists():
            raise SetupError(
                f"{install.venv} has another Python and was not made here; remove it or choose another --venv"
            )
        say(f"- {install.venv} has another Python: making it anew")
        if not install.dry_run:
            shutil.rmtree(install.venv)
    elif install.venv.exists() and any(install.venv.iterdir()):
        raise SetupError(f"{install.venv} is there but is no virtual environment; remove it or choose another --venv")
    try:
        import ensurepip  # noqa: F401  (only asks whether it is there)
        import venv
    except ImportError as error:
        raise SetupError(f"this Python has no {error.name}; on Debian and Ubuntu: apt install python3-venv") from error
    say(f"- virtual environment {install.venv} (Python {sys.version.split()[0]})")
    if not install.dry_run:
        venv.create(install.venv, with_pip=True, symlinks=True)
        marker.write_text("made by tools/setup.py; safe to delete\n")


def install_torch(install: Installer, version: tuple[int, int], *, gpu: bool) -> None:
    """The CPU build where there is no GPU and pip can get it, else the CUDA build."""
    release = TORCH_VERSIONS[version]
    if not gpu:
        check_disk(install.venv, "cpu")
        try:
            install.pip(f"torch {release}, CPU build", f"torch=={release}+cpu", *torch_index())
        except SetupError as error:
            if not any(text in str(error).lower() for text in UNAVAILABLE):
                raise
            say(f"    pip finds no CPU build of torch {release} for Python {version[0]}.{version[1]}; set")
            say("    MOERL_TORCH_INDEX_URL to an index that has one for a small download")
        else:
            install.pip(f"triton {TRITON_VERSION} (megatron-core imports it)", f"triton=={TRITON_VERSION}")
            return
    check_disk(install.venv, "cuda")
    install.pip(f"torch {release}, CUDA build: {CUDA_SIZE}", f"torch=={release}", *torch_index())


def check_disk(venv: Path, build: str) -> None:
    """Fail before a long download rather than after it."""
    folder = next(parent for parent in (venv, *venv.parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < FREE_BYTES[build] and not torch_is_installed(venv):
        needed = FREE_BYTES[build] / 1e9
        raise SetupError(f"{folder} has {free / 1e9:.1f} GB free, but the {build} build of torch needs {needed:.0f} GB")


def torch_is_installed(venv: Path) -> bool:
    """Whether some torch is in the environment already."""
    return any(venv.glob("lib/python*/site-packages/torch/version.py"))


def install_megatron(install: Installer, version: tuple[int, int]) -> None:
    """The wheel on 3.12 and later; on 3.11 a build from source, against the metadata's word but as tested."""
    requirement = f"megatron-core=={MEGATRON_VERSION}"
    if version >= (3, 12):
        install.pip(f"megatron-core {MEGATRON_VERSION}", requirement)
        return
    if shutil.which("g++") is None and shutil.which("c++") is None:
        raise SetupError(
            "no C++ compiler (g++), which megatron-core needs on Python 3.11; install one (apt install g++), or use "
            "Python 3.12: make PYTHON=python3.12"
        )
    install.pip(
        f"megatron-core {MEGATRON_VERSION}, built from source for Python 3.11",
        *("--no-deps", "--no-build-isolation", "--ignore-requires-python", "--no-binary", "megatron-core", requirement),
        missing="the build needs g++ and Python's headers (apt install g++ python3.11-dev)",
    )


def fingerprint(gpu: bool) -> str:
    """Changes when a run of this script could change the environment."""
    digest = hashlib.sha256(repr((sys.version_info[:3], gpu, torch_index())).encode())
    for path in [Path(__file__), *sorted((ROOT / "requirements").glob("*.txt"))]:
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(project_table().encode())
    return digest.hexdigest()


def project_table() -> str:
    """The part of pyproject.toml that an installation reads."""
    import tomllib

    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return json.dumps([table["project"], table["build-system"], table["tool"].get("setuptools")], sort_keys=True)


def verify(install: Installer) -> dict[str, str]:
    """Import what was installed and return the versions."""
    say("- importing everything once")
    done = subprocess.run([str(install.python), "-c", VERIFY], capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise SetupError(f"the environment does not work: {(done.stderr.strip() or done.stdout).splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def set_up(venv: Path, *, dry_run: bool) -> None:
    """Everything, in order."""
    version = sys.version_info[:2]
    if version not in SUPPORTED:
        words = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise SetupError(
            f"this is Python {sys.version.split()[0]}, but moerl needs one of {words}; "
            "choose one: make PYTHON=python3.12, or python3.12 tools/setup.py"
        )
    gpu = has_gpu()
    stamp = venv / "moerl-setup.json"
    install = Installer(venv, dry_run=dry_run)
    wanted = fingerprint(gpu)
    if stamp.exists() and json.loads(stamp.read_text()).get("fingerprint") == wanted and install.python.exists():
        say(f"{venv} is up to date")
        return
    start = time.monotonic()
    say(f"Setting up {venv} with Python {sys.version.split()[0]}, {'an NVIDIA GPU' if gpu else 'no GPU'}")
    create_venv(install, version)
    files = ROOT / "requirements"
    install.pip("build tools", "-r", str(files / "build.txt"))
    install_torch(install, version, gpu=gpu)
    install_megatron(install, version)
    install.pip("libraries and test tools", "-r", str(files / "base.txt"), "-r", str(files / "dev.txt"))
    install.pip("moerl itself, editable", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    if dry_run:
        return
    versions = verify(install)
    stamp.write_text(json.dumps({"fingerprint": wanted, "versions": versions}, indent=1) + "\n")
    say("    " + ", ".join(f"{name} {number}" for name, number in versions.items()))
    say(f"Ready in {time.monotonic() - start:.0f} s: {install.python}")


def main() -> int:
    """Exit status 0, or 1 with one message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment (default: .venv)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    options = parser.parse_args()
    try:
        set_up(options.venv.absolute(), dry_run=options.dry_run)
    except SetupError as error:
        print(f"set-up stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up interrupted; run it again to go on where it stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
