"""tools/run_tests.py: counts and skip reasons of real pytest reports; a failure counts however it comes."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MIXED = """
import pytest
def test_good(): pass
def test_bad(): assert False
@pytest.fixture
def broken(): raise RuntimeError
def test_error(broken): pass
@pytest.mark.skip(reason="no GPU here")
def test_skipped(): pass
"""
WHOLE_FILE = "import pytest\npytest.importorskip('no_such_module', reason='needs no_such_module')\n"


@pytest.fixture
def run_tests(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    spec = importlib.util.spec_from_file_location("run_tests", ROOT / "tools" / "run_tests.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_tests"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["run_tests"]
    sys.modules.pop("setup", None)


@pytest.mark.parametrize("group", ["unit", "golden"], ids=["in workers", "in one process"])
def test_counts_and_reasons(run_tests, tmp_path, capfd, group):
    (tmp_path / "test_mixed.py").write_text(MIXED)
    (tmp_path / "test_whole.py").write_text(WHOLE_FILE)
    result = run_tests.run_group(group, [str(tmp_path)], [])
    assert (result.passed, result.failed, len(result.skips)) == (1, 2, 2)
    assert any(skip.endswith("test_skipped: no GPU here") for skip in result.skips)
    assert any(skip.endswith("test_whole: needs no_such_module") for skip in result.skips)
    assert run_tests.print_table([result], 1.0) == 2
    out = capfd.readouterr().out
    assert out.splitlines()[-1] == "1 passed, 2 failed, 2 skipped"
    assert "no GPU here" in out


@pytest.mark.parametrize("group", ["unit", "golden"], ids=["in workers", "in one process"])
def test_a_pytest_that_breaks_counts_as_failed(run_tests, tmp_path, group):
    (tmp_path / "test_dies.py").write_text("import os\ndef test_dies(): os._exit(3)\n")
    assert run_tests.run_group(group, [str(tmp_path)], []).failed == 1


def holders_of(path):
    """Processes whose standard output is `path`."""
    links = Path("/proc").glob("[0-9]*/fd/1")
    return [link for link in links if os.access(link, os.R_OK) and link.resolve() == path]


def test_a_group_over_its_limit_is_ended_with_its_children(run_tests, monkeypatch, tmp_path):
    monkeypatch.setattr(run_tests, "GROUP_LIMIT_SECONDS", 2)
    code = (
        "import subprocess, sys; child = subprocess.Popen(['sleep', '60'], stdout=open(sys.argv[1], 'w')); child.wait()"
    )
    alive = tmp_path / "alive"
    status, seconds = run_tests.run([sys.executable, "-c", code, str(alive)])
    assert status != 0
    assert seconds < 30
    assert alive.exists()
    deadline = time.monotonic() + 20
    while holders_of(alive) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert holders_of(alive) == [], "the child outlived its group"


def test_a_check_that_fails_is_one_failure(run_tests):
    assert run_tests.run_check("x", ["false"]).failed == 1
    assert run_tests.run_check("x", ["true"]).passed == 1


def test_what_runs_beside_others_is_printed_as_a_whole_with_its_errors(run_tests, capfd):
    code = "import sys; print('out'); sys.stdout.flush(); print('err', file=sys.stderr); sys.exit(1)"
    assert run_tests.run_check("x", [sys.executable, "-c", code], is_beside=True).failed == 1
    assert capfd.readouterr().out == "\n== x\nout\nerr\n"
    assert not run_tests.RUNNING


@pytest.fixture
def servers_python(tmp_path, monkeypatch, run_tests):
    """A machine without a GPU, with a Python for the servers that writes down what it is asked for."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path / "asked"}\nexit $(cat {tmp_path / "status"})\n')
    python.chmod(0o755)
    (tmp_path / "status").write_text("0")
    monkeypatch.setenv("SGLANG_PYTHON", str(python))
    monkeypatch.delenv("MOERL_SGLANG_PYTHON", raising=False)
    monkeypatch.setattr(run_tests, "has_gpu", lambda: False)
    return python


def test_the_servers_environment_is_made_before_their_group(run_tests, servers_python, tmp_path):
    assert run_tests.prepare_servers().passed == 1
    assert (tmp_path / "asked").read_text().split() == [str(ROOT / "tools" / "setup_sglang.py")]


def test_the_servers_environment_is_made_beside_the_checks(run_tests, servers_python, tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(run_tests, "CHECKS", {"check": ["true"]})
    monkeypatch.setattr(run_tests, "run_group", lambda name, *rest: order.append(name) or run_tests.Result(name))
    results = run_tests.run_all(["lint", "golden", "sglang"], [])
    assert [result.name for result in results] == ["check", "golden", "sglang's environment", "sglang"]
    assert order == ["golden", "sglang"]


def test_a_failing_set_up_of_the_servers_is_a_failure(run_tests, servers_python, tmp_path):
    (tmp_path / "status").write_text("1")
    assert run_tests.prepare_servers().failed == 1


@pytest.mark.parametrize("why", ["named", "no python", "gpu"])
def test_the_servers_environment_is_left_alone(run_tests, servers_python, tmp_path, monkeypatch, why):
    if why == "named":
        monkeypatch.setenv("MOERL_SGLANG_PYTHON", "/elsewhere/bin/python")
    elif why == "no python":
        monkeypatch.setenv("SGLANG_PYTHON", "no-such-python")
    else:
        monkeypatch.setattr(run_tests, "has_gpu", lambda: True)
    assert run_tests.prepare_servers() is None
    assert not (tmp_path / "asked").exists()
