"""The sandboxed pool: deadlines, recovery, and what hostile answers can do."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import platform
import re
import resource
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from moerl.errors import RewardError
from moerl.rewards.pool import SandboxPool
from moerl.rewards.sandbox import _DENIED_CALLS, _FCNTL, _IOCTL, _OPENAT, _PRCTL, _PRLIMIT

JUDGE = """
import ctypes, os, time

LIBC = ctypes.CDLL(None, use_errno=True)
NAMES = "fork system socket open creat mkdir unlink rename truncate chmod kill ptrace fcntl ioctl syscall".split()
CALLS = {name: getattr(LIBC, name) for name in NAMES}

def warm_up():
    global WARM
    WARM = os.getpid()

def add(a, b):
    return a + b

def nap(seconds):
    time.sleep(seconds)
    return seconds

def evaluate(text):
    return eval(text)

def libc(name, arguments):
    values = [a.encode() if isinstance(a, str) else a for a in arguments]
    return [CALLS[name](*values), ctypes.get_errno()]

def scribble():
    for fd in range(30):
        try:
            os.write(fd, b"????????")
        except OSError:
            pass

seen = []

def remember(item):
    seen.append(item)
    return list(seen)

def is_fork_of_warm_process():
    return WARM == os.getppid()
"""


@pytest.fixture(scope="module")
def judges(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judges")
    (folder / "hostile_judge.py").write_text(JUDGE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield "hostile_judge"


@pytest.fixture(scope="module")
def pool(judges):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("API_SECRET", "hunter2")
        pool = SandboxPool(num_workers=1, timeout_seconds=20.0, memory_bytes=1_000_000_000)
        yield pool
    pool.close()


def evaluate(pool, text, timeout_seconds=None):
    future = pool.submit("hostile_judge:evaluate", {"text": text}, timeout_seconds=timeout_seconds)
    return future.result(timeout=60)


def test_value_comes_back_from_a_fork_of_a_warmed_process(pool):
    assert pool.submit("hostile_judge:add", {"a": [1], "b": ["x"]}).result().value == [1, "x"]
    assert pool.submit("hostile_judge:is_fork_of_warm_process", {}).result().value is True


def test_state_of_a_task_does_not_outlive_it(pool):
    assert [pool.submit("hostile_judge:remember", {"item": i}).result().value for i in (1, 2)] == [[1], [2]]


def test_deadline_does_not_count_the_wait_in_the_queue(pool):
    """verifiers#831: 200 verdicts of 10 ms, one worker, a limit below their sum."""
    naps = [{"seconds": 0.01}] * 200
    futures = [pool.submit("hostile_judge:nap", nap, timeout_seconds=1.9) for nap in naps]
    verdicts = [future.result(timeout=60) for future in futures]
    assert [v.error for v in verdicts if v.error] == []
    assert [v.value for v in verdicts] == [0.01] * 200
    assert sum(v.seconds for v in verdicts) > 1.9


@pytest.mark.parametrize("text", ["10**10**8", "[0 for _ in iter(int, 1)]", "__import__('time').sleep(60)"])
def test_what_does_not_end_is_killed_at_the_deadline(pool, text):
    start = time.monotonic()
    verdict = evaluate(pool, text, timeout_seconds=1.0)
    assert (verdict.value, verdict.error, verdict.text) == (None, "timeout", "no verdict after 1 s")
    assert 0.9 < time.monotonic() - start < 15.0
    assert evaluate(pool, "1 + 1").value == 2


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("[0] * 10**10", "exception", "MemoryError"),
        ("__import__('sys').exit(0)", "exception", "SystemExit"),
        ("__import__('os')._exit(0)", "crash", "exit status 0"),
        ("__import__('os').abort()", "crash", "killed by"),
        ("(lambda f: f(f))(lambda f: f(f))", "exception", "RecursionError"),
        ("1 / 0", "exception", "ZeroDivisionError"),
        ("'x' * 10**7", "crash", "longer than"),
        ("object()", "exception", "JSON"),
    ],
)
def test_failures_are_named_and_the_pool_goes_on(pool, text, error, said):
    verdict = evaluate(pool, text)
    assert (verdict.value, verdict.error) == (None, error)
    assert said in verdict.text
    assert evaluate(pool, "1 + 1").value == 2


def test_noise_on_the_pipes_is_no_verdict(pool):
    assert pool.submit("hostile_judge:scribble", {}).result().error == "crash"
    assert evaluate(pool, "1 + 1").value == 2


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "__import__('subprocess').run(['true'])",
        "__import__('os').fork()",
        "__import__('os').execv('/bin/true', ['true'])",
        "__import__('os').kill(1, 9)",
        "__import__('os').mkdir('inside')",
        "__import__('os').remove('/etc/hostname')",
        "__import__('ctypes').CDLL('libc.so.6')",
        "open('/etc/passwd').read()",
        "open(f'/proc/{__import__(chr(111) + chr(115)).getppid()}/environ').read()",
        "__import__('socket').create_connection(('127.0.0.1', 9))",
    ],
)
def test_reaching_out_is_refused(pool, text):
    verdict = evaluate(pool, text)
    assert verdict.error == "exception"
    assert "PermissionError" in verdict.text


def test_fork_bomb_leaves_nothing_behind(pool):
    verdict = evaluate(pool, "[__import__('os').fork() for _ in range(20)]")
    assert verdict.error == "exception"
    assert evaluate(pool, "1 + 1").value == 2


def test_connection_does_not_arrive(pool):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.3)
        verdict = evaluate(pool, f"__import__('_socket').socket().connect(('127.0.0.1', {listener.getsockname()[1]}))")
        assert verdict.error == "exception"
        with pytest.raises(TimeoutError):
            listener.accept()


def test_file_is_not_written(pool, tmp_path):
    target = tmp_path / "stolen"
    for text in (f"open({str(target)!r}, 'w').write('x')", f"__import__('os').open({str(target)!r}, 0o101)"):
        assert evaluate(pool, text).error == "exception"
    assert not target.exists()


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"), reason="no seccomp program"
)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("fork", []),
        ("system", ["touch {target}"]),
        ("socket", [2, 1, 0]),
        ("open", ["{target}", os.O_CREAT | os.O_WRONLY, 0o600]),
        ("creat", ["{target}", 0o600]),
        ("mkdir", ["{target}", 0o700]),
        ("unlink", ["{victim}"]),
        ("rename", ["{victim}", "{target}"]),
        ("truncate", ["{victim}", 0]),
        ("chmod", ["{victim}", 0]),
        ("kill", [1, 0]),
        ("ptrace", [0, 0, 0, 0]),
        ("fcntl", [1, fcntl.F_SETOWN, 1]),
        ("fcntl", [1, 10, 9]),
        ("fcntl", [1, 15, 0]),
        ("fcntl", [1, 1024, 0]),
        ("ioctl", [1, 0x8901, 0]),
        ("ioctl", [1, 0x8902, 0]),
        ("ioctl", [1, 0x5412, 0]),
    ],
)
def test_kernel_refuses_what_python_does_not_see(pool, tmp_path, name, arguments):
    """Straight into libc, past the audit hook, which is only the second wall."""
    victim, target = tmp_path / "victim", tmp_path / "target"
    victim.write_text("kept")
    filled = [a.format(victim=victim, target=target) if isinstance(a, str) else a for a in arguments]
    result, number = pool.submit("hostile_judge:libc", {"name": name, "arguments": filled}).result().value
    assert result != 0
    assert number in (errno.EPERM, errno.EACCES)
    assert victim.read_text() == "kept"
    assert not target.exists()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no seccomp program")
def test_every_call_of_the_table_is_refused(pool):
    """With arguments that could do nothing if it were let through, so that only the filter says EPERM."""
    column = ("x86_64", "aarch64").index(platform.machine())
    for name, numbers in _DENIED_CALLS.items():
        if numbers[column] is not None:
            arguments = {"name": "syscall", "arguments": [numbers[column], -1, -1, -1, -1, -1]}
            assert pool.submit("hostile_judge:libc", arguments).result().value == [-1, errno.EPERM], name
    other, itself = (
        pool.submit("hostile_judge:libc", {"name": "syscall", "arguments": [_PRLIMIT[column], pid, 7, None, None]})
        for pid in (1, 0)
    )
    assert (other.result().value, itself.result().value[0]) == ([-1, errno.EPERM], 0)


HEADERS = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h")


@pytest.mark.parametrize("column", [0, 1])
def test_numbers_of_calls_are_those_of_the_kernels_headers(column):
    """asm-generic is what arm64 has. Calls that are younger than the headers are not compared."""
    if not Path(HEADERS[column]).exists():
        pytest.skip(f"{HEADERS[column]} is not here: the kernel's headers are not installed")
    text = Path(HEADERS[column]).read_text()
    known = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    single = {"fcntl": _FCNTL, "ioctl": _IOCTL, "prlimit64": _PRLIMIT, "prctl": _PRCTL, "openat": _OPENAT}
    compared = {name: numbers[column] for name, numbers in {**_DENIED_CALLS, **single}.items() if name in known}
    assert len(compared) > 80
    assert compared == {name: known[name] for name in compared}


def test_secrets_of_the_environment_are_not_there(pool):
    assert os.environ["API_SECRET"] == "hunter2"
    value = evaluate(pool, "dict(__import__('os').environ)").value
    assert set(value) == {"LANG", "HOME", "TMPDIR", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}
    assert value["HOME"] == evaluate(pool, "__import__('os').getcwd()").value


def test_usable_from_threads_and_event_loops(pool):
    found = []

    async def ask(n):
        return (await pool.run("hostile_judge:add", {"a": n, "b": 1})).value

    async def many():
        return await asyncio.gather(*(ask(n) for n in range(20)))

    threads = [threading.Thread(target=lambda: found.append(asyncio.run(many()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == [list(range(1, 21))] * 3


def test_lost_worker_is_replaced(judges):
    pool = SandboxPool(1, 20.0, 1_000_000_000)
    worker = pool.submit("hostile_judge:evaluate", {"text": "__import__('os').getppid()"}).result().value
    os.kill(worker, 9)
    time.sleep(0.2)
    replacement = pool.submit("hostile_judge:evaluate", {"text": "__import__('os').getppid()"}).result().value
    assert replacement != worker
    pool.close()
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(replacement, 0)
    with pytest.raises(RewardError, match="closed"):
        pool.submit("hostile_judge:add", {"a": 1, "b": 1})


def test_a_pool_that_can_start_no_process_says_so_and_works_again_later(judges, tmp_path, monkeypatch):
    pool = SandboxPool(1, 20.0, 1_000_000_000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    for _ in range(2):
        with pytest.raises(RewardError, match=r"cannot start a verifier process .*gone.*; look at the space"):
            pool.submit("hostile_judge:add", {"a": 1, "b": 1}).result(timeout=60)
    monkeypatch.undo()
    assert pool.submit("operator:add", {}).result(timeout=60).error == "exception"
    pool.close()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in /proc")
def test_where_no_file_can_be_opened_nothing_is_left_open(judges, tmp_path, monkeypatch):
    """With every number of descriptors that is too small to start a process."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pool = SandboxPool(1, 20.0, 1_000_000_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(int(one.name) for one in Path("/proc/self/fd").iterdir()) + 40
    held, errors, left = [], [], []
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(7):
            errors.append(pool.submit("hostile_judge:add", {"a": 1, "b": 1}).exception(timeout=60))
            left.append(free(limit))
            os.close(held.pop())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in held:
            os.close(one)
    assert [type(error) for error in errors] == [RewardError] * 7
    assert left == list(range(7))
    assert pool.submit("hostile_judge:add", {"a": 1, "b": 1}).result(timeout=60).value == 2
    pool.close()


def free(limit):
    """Descriptors below `limit` that are not open."""
    count = 0
    for number in range(limit):
        try:
            os.fstat(number)
        except OSError:
            count += 1
    return count


def test_descriptors_above_a_thousand_are_waited_for(judges):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"only {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
    pool = SandboxPool(1, 20.0, 1_000_000_000)
    try:
        assert pool.submit("hostile_judge:add", {"a": 1, "b": 1}).result(timeout=60).value == 2
    finally:
        pool.close()
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="writes into the worker's pipe by /proc")
def test_whatever_breaks_a_reply_is_told_to_who_waits(judges):
    """A worker that is taken over from outside and answers what is no JSON; the next task has another one."""
    pool = SandboxPool(1, 20.0, 1_000_000_000)
    pool.submit("hostile_judge:add", {"a": 1, "b": 1}).result(timeout=60)
    worker = pool.submit("os:getppid", {}).result(timeout=60).value
    outbox = Path(f"/proc/{worker}/cmdline").read_bytes().split(b"\0")[-2].decode()
    with Path(f"/proc/{worker}/fd/{outbox}").open("wb", buffering=0) as pipe:
        pipe.write(b"\0\0\0\1{")
    with pytest.raises(ValueError, match="Expecting property name"):
        pool.submit("hostile_judge:add", {"a": 1, "b": 1}).result(timeout=60)
    assert pool.submit("hostile_judge:add", {"a": 1, "b": 2}).result(timeout=60).value == 3
    pool.close()


def test_verifier_that_cannot_run_is_an_error_of_its_own(pool):
    with pytest.raises(RewardError, match="no_such_judge"):
        pool.submit("no_such_judge:f", {}).result()
    with pytest.raises(RewardError, match="hostile_judge:nope"):
        pool.submit("hostile_judge:nope", {}).result()
    with pytest.raises(RewardError, match="JSON values"):
        pool.submit("hostile_judge:add", {"a": object(), "b": 1})
    with pytest.raises(RewardError, match=r"reward.num_workers=0"):
        SandboxPool(0, 1.0, 2**30)
