"""Runs the checks and the test groups one after the other: `.venv/bin/python tools/run_tests.py [GROUP ...]`.

Beside the checks, which keep one core busy, coverage is measured and the environment of the SGLang servers is made.
Prints each group's output as it comes, then a table of seconds and counts, every skip with its reason, and a last line
`N passed, N failed, N skipped`. The exit status is 0 only if nothing failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from setup import has_gpu

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
GROUP_LIMIT_SECONDS = 2400

CHECKS = {
    "ruff check": [str(BIN / "ruff"), "check", "."],
    "ruff format": [str(BIN / "ruff"), "format", "--check", "."],
    "basedpyright": [str(BIN / "basedpyright"), "--pythonpath", sys.executable, "--level", "error"],
    "import-linter": [str(BIN / "lint-imports")],
}
GROUPS = {
    "unit": ["tests/architecture", "tests/unit"],
    "contracts": ["tests/contracts"],
    "distributed": ["tests/distributed"],
    "golden": ["tests/golden"],
    "e2e": ["tests/e2e"],
    "gpu": ["tests/gpu"],
    "sglang": ["tests/sglang"],
}
"""Name -> folders. A folder without tests is left out."""
SERVERS_PYTHON = "python3.11"
"""What runs the SGLang servers; another one by SGLANG_PYTHON, as for `make sglang`."""
COVERED = ("moerl/algorithms", "tests/unit/algorithms")
"""The room whose branches the tests of this folder reach, all of them; part of the group `unit`."""
NOT_FOR_COVERAGE = (
    "*oracle*",
    "*laws*",
    "*invariants*",
    "*outside*",
    "*slopes*",
    "*central_differences*",
    "*peer_differences*",
    "*reported_faults*",
)
"""Tests that draw their cases, train, or go over the presets once more: slow under measurement, and what the drawn ones
reach must not be left to chance."""


@dataclass
class Result:
    """What one check or group did."""

    name: str
    seconds: float = 0.0
    passed: int = 0
    failed: int = 0
    skips: list[str] = field(default_factory=list)


def environment() -> dict[str, str]:
    """One thread per process, and no look at the network."""
    fixed = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **fixed}


MAX_WORKERS = {"unit": 8, "contracts": 8, "distributed": 2, "e2e": 2}
"""Groups whose files are spread over the cores, and over how many at most: the tests of `distributed` start four
processes each, which wait for one another half of the time; those of `e2e` train in one process and score in others."""
WAITING = {"unit": 1}
"""Workers beyond the cores: tests of servers and pools wait for a third of the group's time."""


RUNNING: set[subprocess.Popen[bytes]] = set()
"""What has been started and has not ended."""


def run(command: list[str], output: IO[bytes] | None = None) -> tuple[int, float]:
    """Exit status and seconds; a command over the limit is ended with all that it started."""
    start = time.monotonic()
    errors = None if output is None else subprocess.STDOUT
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), start_new_session=True, stdout=output, stderr=errors
    )
    RUNNING.add(process)
    try:
        status = process.wait(timeout=GROUP_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"stopped after {GROUP_LIMIT_SECONDS} s", flush=True)
        os.killpg(process.pid, signal.SIGKILL)
        status = process.wait() or 1
    finally:
        end(process)
    return status, time.monotonic() - start


def end(process: subprocess.Popen[bytes]) -> None:
    """With all that it started, if it still runs: this program was interrupted."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
    RUNNING.discard(process)


@contextlib.contextmanager
def told_at_its_end(title: str) -> Iterator[IO[bytes]]:
    """A file for what something that runs beside others prints, which comes as a whole when it has ended."""
    with tempfile.TemporaryFile() as output:
        yield output
        output.seek(0)
        print(f"\n== {title}\n{output.read().decode(errors='replace').rstrip()}", flush=True)


def run_check(name: str, command: list[str], *, is_beside: bool = False) -> Result:
    """One linter counts as one test."""
    if is_beside:
        with told_at_its_end(name) as output:
            status, seconds = run(command, output)
    else:
        print(f"\n== {name}", flush=True)
        status, seconds = run(command)
    return Result(name, seconds, passed=int(status == 0), failed=int(status != 0))


def run_group(name: str, folders: list[str], extra: list[str]) -> Result:
    """One pytest process; counts come from its report file."""
    print(f"\n== {name}: {' '.join(folders)}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        arguments = ["-p", "no:cacheprovider", f"--junitxml={report}", "--durations=5", *extra, *folders]
        if name in MAX_WORKERS:
            workers = min((os.cpu_count() or 1) + WAITING.get(name, 0), MAX_WORKERS[name])
            arguments += ["-n", str(workers), "--dist", "loadfile", "--max-worker-restart=0"]
        status, seconds = run([sys.executable, "-m", "pytest", *arguments])
        result = read_report(name, report) if report.exists() else Result(name, failed=1)
    result.seconds = seconds
    no_tests = 5
    if status not in (0, no_tests) and not result.failed:
        result.failed = 1  # pytest itself broke, or was stopped
    return result


def run_coverage() -> Result:
    """A check of its own, for every line of the room by branch: prints the table, fails below 100 %."""
    room, folder = COVERED
    with told_at_its_end(f"coverage of {room} by {folder}") as output, tempfile.TemporaryDirectory() as scratch:
        coverage, data = [sys.executable, "-m", "coverage"], f"--data-file={Path(scratch) / 'data'}"
        ignored = [f"--ignore-glob={pattern}" for pattern in NOT_FOR_COVERAGE]
        tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *ignored, folder]
        status, seconds = run([*coverage, "run", "--branch", f"--source={room}", data, *tests], output)
        if status == 0:
            report = [*coverage, "report", data, "--show-missing", "--skip-covered", "--fail-under=100"]
            status, more = run(report, output)
            seconds += more
    return Result(f"coverage {room.split('/')[-1]}", seconds, passed=int(status == 0), failed=int(status != 0))


def prepare_servers() -> Result | None:
    """The environment that the group `sglang` needs, as `make sglang` makes it; None where that is left to a person.

    That is where MOERL_SGLANG_PYTHON names one, where there is no Python for it, and where a GPU would make it a
    download of 9 GB. Without an environment the tests of that group skip, and say so.
    """
    python = shutil.which(os.environ.get("SGLANG_PYTHON") or SERVERS_PYTHON)
    if os.environ.get("MOERL_SGLANG_PYTHON") or python is None or has_gpu():
        return None
    return run_check("sglang's environment", [python, str(ROOT / "tools" / "setup_sglang.py")], is_beside=True)


def read_report(name: str, path: Path) -> Result:
    """Counts and skip reasons of a JUnit file."""
    result = Result(name)
    for case in ET.parse(path).getroot().iter("testcase"):
        label = f"{case.get('classname', '')}.{case.get('name', '')}"
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            result.failed += 1
        elif skip is not None:
            result.skips.append(f"{label.strip('.')}: {skip_reason(skip)}")
        else:
            result.passed += 1
    return result


def skip_reason(skip: ET.Element) -> str:
    """The reason given; that of a whole file is in the text: `('<file>', <line>, 'Skipped: <reason>')`."""
    message, text = skip.get("message", ""), skip.text or ""
    if message != "collection skipped" or "Skipped: " not in text:
        return message or "no reason given"
    return text.split("Skipped: ", 1)[1].rstrip("')\"")


def has_tests(folders: list[str]) -> list[str]:
    """Those of the folders that hold a test file."""
    return [folder for folder in folders if any((ROOT / folder).rglob("test_*.py"))]


def print_table(results: list[Result], seconds: float) -> int:
    """The summary, and `seconds` from start to end; returns the number of failures."""
    print(f"\n{'group':<20}{'seconds':>9}{'passed':>9}{'failed':>9}{'skipped':>9}")
    for result in results:
        counts = f"{result.passed:>9}{result.failed:>9}{len(result.skips):>9}"
        print(f"{result.name:<20}{result.seconds:>9.1f}{counts}")
    print(f"{'from start to end':<20}{seconds:>9.1f}")
    skips = [skip for result in results for skip in result.skips]
    if skips:
        print("\nskipped:")
        for skip in skips:
            print(f"  {skip}")
    failed = sum(result.failed for result in results)
    print(f"\n{sum(result.passed for result in results)} passed, {failed} failed, {len(skips)} skipped", flush=True)
    return failed


def run_all(wanted: list[str], extra: list[str]) -> list[Result]:
    """The checks and groups of these names, in their order; `extra` arguments of pytest."""
    results: list[Result] = []
    present = {name: found for name, folders in GROUPS.items() if name in wanted and (found := has_tests(folders))}
    beside = ThreadPoolExecutor(2)
    servers = beside.submit(prepare_servers) if "sglang" in present else None
    coverage = beside.submit(run_coverage) if "unit" in present else None
    if "lint" in wanted:
        results += [run_check(name, command) for name, command in CHECKS.items()]
    if coverage is not None:
        results.append(coverage.result())
    for name, folders in present.items():
        if name == "sglang" and servers is not None and (prepared := servers.result()):
            results.append(prepared)
        results.append(run_group(name, folders, extra))
    beside.shutdown()
    return results


def main() -> int:
    """Exit status 0 only if nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"lint, {', '.join(GROUPS)} (default: all)")
    parser.add_argument("--slow", action="store_true", help="also the tests marked slow")
    options = parser.parse_args()
    unknown = set(options.groups) - {"lint", *GROUPS}
    if unknown:
        parser.error(f"no group {', '.join(sorted(unknown))}; there are lint, {', '.join(GROUPS)}")
    start = time.monotonic()
    try:
        results = run_all(options.groups or ["lint", *GROUPS], ["-m", ""] if options.slow else [])
    finally:
        for process in list(RUNNING):
            end(process)
    return int(print_table(results, time.monotonic() - start) > 0)


if __name__ == "__main__":
    sys.exit(main())
