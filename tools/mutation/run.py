"""Runs the chosen mutants of a cosmic-ray session: `python tools/mutation/run.py CONFIG SESSION [--seed N]`.

What `cosmic-ray exec` does, faster. The tests are collected once. For each mutant a fork puts the
mutated code into the functions that are there and runs the tests up to the first that fails, those of files that speak
of the module first. No file is changed. A mutant outside of functions (a default, an entry of a table) takes the way of
`cosmic-ray exec`: the file is changed, pytest runs anew, the file is put back. One process computes at a time, an
interrupted run goes on where it was, and `cr-report` reads the results. Slow files can wait: `--skip test_oracle.py`,
then `--survivors` with all of them.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import resource
import shlex
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from cosmic_ray.config import load_config
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult
from sample import lot

PASSED, FAILED, OUTSIDE = 0, 1, 3
"""What the fork of a mutant says; OUTSIDE: no function differs."""


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """All code objects of a module."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def put_in_place(path: Path, source: str) -> int:
    """Gives the functions of the module at `path` the code of `source`; how many of them differ."""
    importlib.import_module(".".join(path.with_suffix("").parts))  # a folder of plugins is read on first use
    name = str(path.resolve())
    found = {(code.co_qualname, code.co_firstlineno): code for code in codes_in(compile(source, name, "exec"))}
    changed = 0
    for function in [each for each in gc.get_objects() if isinstance(each, FunctionType)]:
        old = function.__code__
        new = found.get((old.co_qualname, old.co_firstlineno))
        if new is None or new == old or str(Path(old.co_filename).resolve()) != name:
            continue
        function.__code__ = new
        changed += 1
    return changed


def mutant_of(mutation: MutationSpec) -> tuple[str, str]:
    """The file's text, and that of the mutant."""
    text = Path(mutation.module_path).read_text()
    mutant = mutate_code(text, get_operator(mutation.operator_name)(), mutation.occurrence)
    if mutant is None:
        raise ValueError(f"{mutation.module_path} has changed since `cosmic-ray init`; make a new session")
    return text, mutant


def diff_of(text: str, mutant: str) -> str:
    """The lines that differ."""
    lines = zip(text.splitlines(), mutant.splitlines(), strict=False)
    return "\n".join(line for old, new in lines if old != new for line in (f"-{old}", f"+{new}"))


@dataclass
class Loop:
    """Stands in the place of pytest's loop over the tests: the tests without a mutant, then once for every mutant."""

    work_db: WorkDB
    items: list[WorkItem]
    arguments: list[str]
    seconds: int
    """Of the processor, for one mutant: a busy machine kills none."""
    status: int = 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Refuses to begin where the tests fail without a mutant."""
        if session.testsfailed:
            raise session.Interrupted("the tests cannot be collected")
        start = time.monotonic()
        self.status, said = self._in_fork(list(session.items), None, "")
        print(f"without a mutant: {len(session.items)} tests, {time.monotonic() - start:.0f} s {said}", flush=True)
        if self.status == PASSED:
            for number, item in enumerate(self.items, 1):
                print(f"{number}/{len(self.items)} ", end="")
                self._run(session, item)
        return True

    def _run(self, session: pytest.Session, item: WorkItem) -> None:
        (mutation,), start = item.mutations, time.monotonic()
        path = Path(mutation.module_path)
        text, mutant = mutant_of(mutation)
        tests = sorted(session.items, key=lambda test: not speaks_of(path.stem, test.path))
        status, said = self._in_fork(tests, path, mutant)
        if status == OUTSIDE:
            status, said = self._anew(path, text, mutant)
        outcome = TestOutcome.SURVIVED if status == PASSED else TestOutcome.KILLED
        diff = diff_of(text, mutant)
        self.work_db.set_result(item.job_id, WorkResult(WorkerOutcome.NORMAL, said, outcome, diff))
        where = f"{path}:{mutation.start_pos[0]} {mutation.operator_name}"
        print(f"{outcome.value} {time.monotonic() - start:.0f} s {where}\n{diff}\n{said}", flush=True)

    def _in_fork(self, tests: list[pytest.Item], path: Path | None, mutant: str) -> tuple[int, str]:
        readable, writable = os.pipe()
        child = os.fork()
        if not child:
            resource.setrlimit(resource.RLIMIT_CPU, (self.seconds, self.seconds))
            said = "" if path is None or put_in_place(path, mutant) else "outside"
            status = OUTSIDE if said else PASSED
            for test in tests if status == PASSED else ():
                said = first_failure(test)
                if said:
                    status = FAILED
                    break
            os.write(writable, said.encode()[:4000])
            os._exit(status)
        os.close(writable)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with os.fdopen(readable) as pipe:
            return status, pipe.read() or ("" if status in (PASSED, OUTSIDE) else f"ended with status {status}")

    def _anew(self, path: Path, text: str, mutant: str) -> tuple[int, str]:
        near = [argument for argument in self.arguments if speaks_of(path.stem, Path(argument))]
        far = [argument for argument in self.arguments if argument not in near]
        options = [argument for argument in far if not argument.endswith(".py")]
        stat = path.stat()
        try:
            path.write_text(mutant)
            status, said = pytest_alone([*options, *near]) if near else (PASSED, "")
            return (status, said) if status else pytest_alone(far)
        finally:
            path.write_text(text)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def pytest_alone(arguments: list[str]) -> tuple[int, str]:
    """pytest's status in a process of its own, and the first test that failed.

    Raises:
        RuntimeError: something else than a test failed, which says nothing about a mutant.
    """
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # a mutant's must not outlive it
    command = [sys.executable, "-m", "pytest", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    failed = re.search(r"^(?:FAILED|ERROR) .*$", done.stdout, re.MULTILINE)
    if done.returncode and not failed:
        raise RuntimeError(f"pytest could not run the tests:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode, failed.group() if failed else ""


def first_failure(test: pytest.Item) -> str:
    """What went wrong in the test, empty if nothing."""
    for report in runtestprotocol(test, log=False, nextitem=None):
        if report.failed:
            crash: Any = getattr(report.longrepr, "reprcrash", None)
            return f"{report.nodeid} - {crash.message if crash else report.longreprtext[-300:]}"
    return ""


def speaks_of(module: str, file: Path) -> bool:
    """Whether the test file has the module's name in it."""
    return file.suffix == ".py" and re.search(rf"\b{module}\b", file.read_text()) is not None


def chosen_items(work_db: WorkDB, args: Namespace) -> list[WorkItem]:
    """Those without a result, or those that survived, in the order of the draw: a run cut short is a smaller sample."""
    items = work_db.pending_work_items
    if args.survivors:
        done = work_db.completed_work_items
        items = [item for item, result in done if result.test_outcome == TestOutcome.SURVIVED]
    return sorted(items, key=lambda item: lot(item, args.seed))


def main() -> int:
    """0 when every mutant has a result."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("config", help="tools/mutation/losses.toml")
    parser.add_argument("session", help="made by `cosmic-ray init`, cut down by tools/mutation/sample.py")
    parser.add_argument("--seed", default="", help="that of the sample")
    parser.add_argument("--survivors", action="store_true", help="run those again that survived")
    parser.add_argument("--skip", action="append", default=[], help="a test file that is left out")
    args = parser.parse_args()
    config = load_config(args.config)
    arguments = shlex.split(config["test-command"])[3:]  # after `python -m pytest`
    arguments = [argument for argument in arguments if Path(argument).name not in args.skip]
    with use_db(args.session, WorkDB.Mode.open) as work_db:
        loop = Loop(work_db, chosen_items(work_db, args), arguments, int(config["timeout"]))
        pytest.main([*arguments, "-s"], plugins=[loop])
    return loop.status


if __name__ == "__main__":
    sys.exit(main())
