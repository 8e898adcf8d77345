"""Programs against tests: what passes, what fails and why, and what hostile programs can do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moerl.errors import ConfigError
from moerl.metrics import to_floats
from moerl.rewards.base import UnscoredError
from moerl.rewards.code import Code, CodeConfig
from moerl.rewards.code_tests import is_printed, is_returned, last_program, read_tests
from moerl.rewards.judges.values import decode, encode
from moerl.rewards.pool import SandboxPool
from moerl.types import Prompt

ADD = "a, b = map(int, input().split())\nprint(a + b)\n"
SUMS = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 -7\n", "output": "-2\n"}]


@pytest.fixture(scope="module")
def pool():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("API_SECRET", "hunter2")
        pool = SandboxPool(num_workers=1, timeout_seconds=20.0, memory_bytes=1_000_000_000)
        yield pool
    pool.close()


def prompt(tests, **metadata):
    return Prompt("c/0", np.array([1], np.int32), None, "c", metadata={"tests": tests, **metadata})


def scored(pool, program, tests, **changes):
    """(value, failed tests by kind)."""
    entry = {"entry_point": changes.pop("entry_point")} if "entry_point" in changes else {}
    reward = Code(CodeConfig(**changes), pool)
    value = asyncio.run(reward.score(prompt(tests, **entry), f"Here:\n```python\n{program}\n```\nDone."))
    metrics = to_floats(reward.take_metrics())
    return value, {name.removeprefix("failed_"): n for name, n in metrics.items() if n and name.startswith("failed_")}


@pytest.mark.parametrize(
    "program",
    [
        ADD,
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
        "print(sum(map(int, open(0).read().split())))",
        "import os\nos.write(1, str(sum(map(int, os.read(0, 99).split()))).encode())",
        "import sys\nsys.stdout.buffer.write(b'%d' % sum(map(int, sys.stdin.buffer.readline().split())))",
        "def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()\n    exit(0)",
    ],
)
def test_every_way_of_reading_and_printing(pool, program):
    assert scored(pool, program, SUMS) == (1.0, {})


def test_credit_and_kinds_of_failure(pool):
    wrong = "a, b = map(int, input().split())\nprint(abs(a) + abs(b))"
    assert scored(pool, wrong, SUMS) == (0.0, {"wrong": 1.0})
    assert scored(pool, wrong, SUMS, credit="fraction") == (0.5, {"wrong": 1.0})
    assert scored(pool, wrong, SUMS, max_tests=1) == (1.0, {})
    for program, kind in (
        ("1/0", "exception"),
        ("print(3", "exception"),
        ("exit(1)", "exception"),
        ("while True: pass", "timeout"),
        ("import time\ntime.sleep(99)", "timeout"),
        ("x = [0] * 10**10", "memory"),
        ("while True: print('x' * 1000)", "output"),
        ("import os\nos._exit(0)", "crash"),
        ("import os\nos.abort()", "crash"),
    ):
        assert scored(pool, program, SUMS, timeout_seconds=1.0) == (0.0, {kind: 1.0}), program
    assert scored(pool, ADD, SUMS) == (1.0, {})


def test_a_text_without_a_program_is_zero_and_counted(pool):
    reward = Code(CodeConfig(), pool)
    assert asyncio.run(reward.score(prompt(SUMS), "I cannot.")) == 0.0
    assert to_floats(reward.take_metrics())["failed_no_program"] == 1.0
    assert to_floats(reward.take_metrics())["failed_no_program"] == 0.0


def test_large_input_and_output_pass_through_pipes(pool):
    data = "7 " * 400_000
    assert scored(pool, "print(len(input().split()))", [{"input": data, "output": "400000"}]) == (1.0, {})
    long = [{"input": "", "output": "x" * 60_000}]
    assert scored(pool, "print('x' * 60000)", long) == (1.0, {})
    assert scored(pool, "print('x' * 60000)", long, max_output_bytes=50_000) == (0.0, {"output": 1.0})


@pytest.mark.parametrize(
    ("program", "test", "entry_point"),
    [
        ("def add(a, b): return a + b", {"function": "add", "arguments": [1, 2], "output": 3}, None),
        ("def pair(a): return (a, [a])", {"function": "pair", "arguments": [1], "output": [1, [1]]}, None),
        (
            "class Solution:\n    def f(self, x): return {x: 1}",
            {"function": "f", "arguments": ["k"], "output": {"k": 1}},
            None,
        ),
        ("def add(a, b): return a + b", "assert add(1, 2) == 3 and add(2, 2) == 4", None),
        ("def both(x): return {x, -x}", "assert both(1) == {1, -1}", None),
        ("def half(x): return x / 2", "import math\nassert math.isclose(half(x=1), 0.5)", None),
        ("def half(x): return x / 2", "def check(candidate):\n    assert candidate(4) == 2\n", "half"),
        (
            "def root(x):\n    if x < 0: raise ValueError('neg')",
            "try:\n    root(-1)\n    assert 0\nexcept ValueError: pass",
            None,
        ),
    ],
)
def test_functions_and_assertions(pool, program, test, entry_point):
    entry = {"entry_point": entry_point} if entry_point else {}
    assert scored(pool, program, [test], **entry) == (1.0, {})
    value, failed = scored(pool, "def unrelated(): pass", [test], **entry)
    assert (value, sum(failed.values())) == (0.0, 1.0)


LIARS = {
    "equal to all": "class E:\n    def __eq__(self, o): return True\ndef add(a, b): return E()",
    "int that lies": "class E(int):\n    def __eq__(self, o): return True\ndef add(a, b): return E()",
    "builtins changed": "import builtins\nbuiltins.abs = lambda x: 3\nimport operator\ndef add(a, b): return 0",
    "assertion gone": "import builtins\nclass A(Exception): pass\nbuiltins.AssertionError=A\ndef add(a, b): return 9",
    "ends well": "import os, sys\ndef add(a, b): sys.exit(0)",
    "ends at once": "import os\ndef add(a, b): os._exit(0)",
    "looks for the answer": (
        "import gc\ndef add(a, b):\n"
        "    for o in gc.get_objects():\n"
        "        if isinstance(o, str) and 'assert add' in o or isinstance(o, dict) and 'expected' in o: return 3\n"
        "    return -1"
    ),
    "looks at frames": (
        "import sys\ndef add(a, b):\n    f = sys._getframe()\n"
        "    while f:\n        if 'source' in f.f_locals or 'expected' in f.f_locals: return 3\n        f = f.f_back\n"
        "    return -1"
    ),
    "writes a verdict": (
        "import os, json\nfor v in (True, 1, {'passed': True}, {'value': True}, {'value': {'passed': True}}):\n"
        "    d = json.dumps({'value': v}).encode()\n"
        "    for fd in range(3, 40):\n"
        "        try: os.write(fd, len(d).to_bytes(4, 'big') + d)\n"
        "        except OSError: pass\n"
        "def add(a, b): return 0"
    ),
    "prints a verdict": "print('{\"passed\": true}', 'OK', '1.0')\ndef add(a, b): return 0",
}


@pytest.mark.parametrize("liar", LIARS)
@pytest.mark.parametrize("test", [{"function": "add", "arguments": [1, 2], "output": 3}, "assert add(1, 2) == 3"])
def test_no_program_can_give_itself_the_verdict(pool, liar, test):
    value, failed = scored(pool, LIARS[liar], [test], timeout_seconds=5.0)
    assert (value, sum(failed.values())) == (0.0, 1.0)


@pytest.mark.parametrize("liar", ["writes a verdict", "ends at once"])
def test_nor_for_what_it_prints(pool, liar):
    assert scored(pool, LIARS[liar], SUMS)[0] == 0.0


def test_what_it_writes_in_place_of_the_reply_is_worth_what_it_prints(pool):
    """A process that was taken over can claim any output; it still has to know the right one."""
    forged = (
        "import os, json\nd = json.dumps({'value': {'stdout': input()}}).encode()\n"
        "for fd in range(3, 40):\n"
        "    try: os.write(fd, len(d).to_bytes(4, 'big') + d)\n"
        "    except OSError: pass\n"
        "os._exit(0)"
    )
    assert scored(pool, forged, [{"input": "echo", "output": "echo"}])[0] == 1.0
    assert scored(pool, forged, SUMS)[0] == 0.0


CALLS = {
    "x86_64": {"fcntl": 72, "prlimit64": 302, "ioprio_set": 251, "move_pages": 279, "kill": 62},
    "aarch64": {"fcntl": 25, "prlimit64": 261, "ioprio_set": 30, "move_pages": 239, "kill": 129},
}.get(platform.machine(), dict.fromkeys(("fcntl", "prlimit64", "ioprio_set", "move_pages", "kill"), -1))
LIBC = "import ctypes, sys\nlibc = sys.modules['moerl.rewards.sandbox']._LIBC\n"


def test_a_lost_worker_is_no_verdict():
    """Killed from outside while a program runs that would have been right."""
    own = SandboxPool(num_workers=1, timeout_seconds=60.0, memory_bytes=1_000_000_000)
    try:
        assert scored(own, ADD, SUMS) == (1.0, {})
        worker = own.submit("os:getppid", {}).result(timeout=60).value
        with ThreadPoolExecutor(1) as thread:
            late = thread.submit(scored, own, f"import time\ntime.sleep(50)\n{ADD}", SUMS)
            while not Path(f"/proc/{worker}/task/{worker}/children").read_text():
                time.sleep(0.05)
            os.kill(worker, 9)
            with pytest.raises(UnscoredError, match="crash: the sandbox itself: the verifier process was lost"):
                late.result(timeout=60)
        assert scored(own, ADD, SUMS) == (1.0, {})
    finally:
        own.close()


def test_what_fails_before_the_program_begins_is_no_verdict(pool, monkeypatch):
    """No pipe of this machine holds the input, which an unprivileged process may not change."""
    largest = int(Path("/proc/sys/fs/pipe-max-size").read_text())
    monkeypatch.setattr("moerl.rewards.code_tests.MAX_INPUT_BYTES", 4 * largest)
    with pytest.raises(UnscoredError, match=r"exception: the sandbox itself: (PermissionError|OSError)"):
        scored(pool, ADD, [{"input": "1" * (2 * largest), "output": ""}])


def test_walls_that_cannot_be_built_are_no_verdict():
    """Without a standard input there is nothing to close, and no task begins."""
    script = (
        "import json, os, sys\nfrom moerl.rewards.worker import TaskRunner\nos.close(0)\n"
        "run = TaskRunner(memory_bytes=1 << 30, filter_calls=None, inherited=())\n"
        "request = {'program': 'print(3)', 'stdin': '', 'max_output_bytes': 9}\n"
        "print(json.dumps(run({'function': sys.argv[1], 'kwargs': request, 'timeout_seconds': 60.0})))"
    )
    function = "moerl.rewards.judges.program:run_script"
    done = subprocess.run([sys.executable, "-c", script, function], capture_output=True, text=True, check=True)
    reply = json.loads(done.stdout)
    assert (reply["error"], reply["in_program"]) == ("exception", False)
    assert "Bad file descriptor" in reply["text"]


EXCUSES = {
    "ends its process": "import os\nos._exit(1)",
    "kills its process": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (0, 0))\nwhile True: pass",
    "says that the sandbox failed": (
        "import os, json\nd = json.dumps({'error': 'exception', 'text': 'x', 'in_program': False}).encode()\n"
        "for fd in range(3, 40):\n"
        "    try: os.write(fd, len(d).to_bytes(4, 'big') + d)\n"
        "    except OSError: pass\n"
        "os._exit(0)"
    ),
    "closes everything": "import os\nos.closerange(0, 64)",
    "breaks what comes after it": "import os\nos.read = None\nos.close = None",
}


@pytest.mark.parametrize("excuse", EXCUSES)
@pytest.mark.parametrize("test", [SUMS[0], {"function": "add", "arguments": [1, 2], "output": 3}])
def test_no_program_can_make_its_failure_one_of_the_sandbox(pool, excuse, test):
    value, failed = scored(pool, EXCUSES[excuse], [test], timeout_seconds=5.0)
    assert (value, sum(failed.values())) == (0.0, 1.0)


HOSTILE = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "threads": "import threading, time\nfor _ in range(10**6): threading.Thread(target=time.sleep, args=(99,)).start()",
    "program": "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo 3'])",
    "shell": "import os\nif os.system('echo 3 > {target}'): raise OSError",
    "subprocess": "import subprocess\nprint(subprocess.check_output(['echo', '3']))",
    "write": "open('{target}', 'w').write('x')",
    "write here": "open('x', 'w').write('x')",
    "huge file": "import os\nos.ftruncate(os.memfd_create('x'), 10**12)",
    "temporary": "import tempfile\ntempfile.NamedTemporaryFile()",
    "remove": "import os\nos.remove('{victim}')",
    "users": "print(open('/etc/passwd').read())",
    "gold answers": "print(open('{victim}').read())",
    "parent's environment": "import os\nprint(open(f'/proc/{{os.getppid()}}/environ').read())",
    "kill the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "kill all": "import os\nos.kill(-1, 9)",
    "socket": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)",
    "raw socket": "import _socket\n_socket.socket().connect(('127.0.0.1', {port}))",
    "ctypes": "import ctypes\nctypes.CDLL(None).system(b'touch {target}')",
    "ctypes that is there": (
        "import sys\nlibc = sys.modules['moerl.rewards.sandbox']._LIBC\n"
        "if libc.syscall(57) or libc.syscall(2, b'{target}', 0o101): raise OSError"
    ),
    "takes the walls off": "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (10**9, 10**9))",
    "owner of a descriptor": (
        "import fcntl, os, time\nr, w = os.pipe()\n"
        "fcntl.fcntl(r, fcntl.F_SETOWN, {process})\nfcntl.fcntl(r, 10, 9)\n"
        "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\nos.write(w, b'x')\ntime.sleep(1)"
    ),
    "owner by libc": LIBC
    + (
        "import os, time\nr, w = os.pipe()\n"
        "if libc.syscall({fcntl}, r, 8, {process}) or libc.syscall({fcntl}, r, 10, 9): raise OSError\n"
        "libc.syscall({fcntl}, r, 4, os.O_ASYNC)\nos.write(w, b'x')\ntime.sleep(1)"
    ),
    "group as owner by libc": LIBC
    + (
        "import os\nr, w = os.pipe()\n"
        "class Owner(ctypes.Structure): _fields_ = (('kind', ctypes.c_int), ('pid', ctypes.c_int))\n"
        "if libc.syscall({fcntl}, r, 15, ctypes.byref(Owner(2, {process}))): raise OSError"
    ),
    "owner by ioctl": "import fcntl, os, struct\nfcntl.ioctl(os.pipe()[0], 0x8901, struct.pack('i', {process}))",
    "lease": "import fcntl, os\nfcntl.fcntl(os.open(os.__file__, 0), 1024, fcntl.F_RDLCK)",
    "limits of another": "import resource\nresource.prlimit({process}, resource.RLIMIT_CPU, (0, 0))",
    "limits by libc": LIBC
    + "if libc.syscall({prlimit64}, {process}, 0, (ctypes.c_long * 2)(0, 0), None): raise OSError",
    "processors of another": "import os\nos.sched_setaffinity({process}, [0])",
    "priority of another": "import os\nos.setpriority(os.PRIO_PROCESS, {process}, 7)",
    "priority of a group": "import os\nos.setpriority(os.PRIO_PGRP, {process}, 7)",
    "scheduler of another": "import os\nos.sched_setscheduler({process}, os.SCHED_IDLE, os.sched_param(0))",
    "scheduler's parameter": "import os\nos.sched_setparam({process}, os.sched_param(0))",
    "disk priority of another": LIBC + "if libc.syscall({ioprio_set}, 1, {process}, 3 << 13): raise OSError",
    "pages of another": LIBC + "if libc.syscall({move_pages}, {process}, 0, None, None, None, 2): raise OSError",
    "signal to another": "import os\nos.kill({process}, 9)",
    "signal to a group": "import os\nos.killpg({process}, 9)",
    "signal by libc": LIBC + "if libc.syscall({kill}, {process}, 9): raise OSError",
    "recursion": "def f(): f()\nf()",
    "memory": "x = ' ' * 10**12",
    "parser": "exec('(' * 10**5)",
}


@pytest.fixture
def process():
    """Another process of this user, as the trainer is one."""
    waits = [sys.executable, "-I", "-S", "-c", "input()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, start_new_session=True) as process:
        yield process
        process.kill()


def state(pid):
    """Everything that another process could change of `pid`."""
    priorities = [os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid), os.sched_getparam(pid)]
    limits = [resource.prlimit(pid, getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    return priorities, os.sched_getaffinity(pid), limits


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_get_nothing(pool, process, tmp_path, name):
    victim, target = tmp_path / "victim", tmp_path / "target"
    victim.write_text("3")
    before = state(process.pid), state(os.getpid())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.1)
        port = listener.getsockname()[1]
        program = HOSTILE[name].format(victim=victim, target=target, port=port, process=process.pid, **CALLS)
        value, failed = scored(pool, program + "\nprint(3)", SUMS, timeout_seconds=3.0)
        with pytest.raises(TimeoutError):
            listener.accept()
    assert process.poll() is None
    assert (state(process.pid), state(os.getpid())) == before
    assert (value, sum(failed.values())) == (0.0, 1.0), failed
    assert "wrong" not in failed, "it came to its end"
    assert victim.read_text() == "3"
    assert not target.exists()
    assert scored(pool, ADD, SUMS) == (1.0, {})


def test_secrets_are_not_there(pool):
    assert os.environ["API_SECRET"] == "hunter2"
    program = "import os\nprint(sorted(os.environ))"
    names = str(["HOME", "LANG", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TMPDIR"])
    assert scored(pool, program, [{"input": "", "output": names}]) == (1.0, {})


def test_a_program_reads_less_than_a_verifier(pool, tmp_path, monkeypatch):
    """A folder on sys.path may hold the gold answers."""
    gold = tmp_path / "gold.txt"
    gold.write_text("3")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = SandboxPool(num_workers=1, timeout_seconds=20.0, memory_bytes=1_000_000_000)
    try:
        value, failed = scored(own, f"print(open({str(gold)!r}).read())", [{"input": "", "output": "3"}])
        assert (value, failed) == (0.0, {"exception": 1.0})
        assert scored(own, "import json, math, heapq\nprint(3)", [{"input": "", "output": "3"}]) == (1.0, {})
    finally:
        own.close()


def test_a_run_without_the_walls_does_not_start():
    class Bare:
        def submit(self, function, kwargs):
            from concurrent.futures import Future

            from moerl.rewards.pool import Verdict

            future = Future()
            future.set_result(Verdict(["limits", "audit"]))
            return future

    with pytest.raises(ConfigError, match=r"lacks seccomp, landlock, and programs .* leave it out of .*`require`"):
        Code(CodeConfig(), Bare()).check([prompt(SUMS)])
    assert Code(CodeConfig(require=["limits"]), Bare()).check([prompt(SUMS)]) == [None]


def test_this_machine_has_the_walls(pool):
    assert Code(CodeConfig(), pool).check([prompt(SUMS)]) == [None]


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([], "a list that is not empty"),
        ([{"input": "1"}], "test 0 has the keys ['input']; give input and output"),
        ([{"input": 1, "output": "1"}], "test 0: input and output must be text"),
        ([{"input": "x" * (2**20 + 1), "output": ""}], "test 0: an input of more than 1048576 bytes"),
        (["assert ("], "test 0 is not Python"),
        (["assert 1 == 1"], "test 0 calls no function of the program"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        (3, "a list that is not empty, not 3"),
    ],
)
def test_tests_that_cannot_be_read_are_found_at_the_start(pool, tests, message):
    (problem,) = Code(CodeConfig(), pool).check([prompt(tests)])
    assert message in problem
    with pytest.raises(UnscoredError, match="exception: "):
        asyncio.run(Code(CodeConfig(), pool).score(prompt(tests), "```\n1\n```"))


def test_a_row_without_tests_names_the_column(pool):
    bare = Prompt("c/0", np.array([1], np.int32), None, "c")
    assert Code(CodeConfig(tests="cases"), pool).check([bare]) == [
        "has no column 'cases' with tests; name it in the reward's `tests`"
    ]


def test_other_forms_of_tests():
    pairs = read_tests(json.dumps({"inputs": ["1", "2"], "outputs": ["3", "4"]}), None)
    assert [(one.stdin, one.expected) for one in pairs] == [("1", "3"), ("2", "4")]
    (call,) = read_tests({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}, None)
    assert (call.function, call.arguments, call.expected) == ("add", (1, 2), 3)
    (code,) = read_tests("import math\nassert math.sqrt(f(1)) == len(g(x=2))", None)
    assert list(code.functions) == ["f", "g"]


def test_tests_that_never_end_are_no_verdict(pool):
    test = "while True: add(1, 2)"
    with pytest.raises(UnscoredError, match="more than 3 times"):
        scored(pool, "def add(a, b): return 3", [test], max_calls=3)
    with pytest.raises(UnscoredError, match="timeout: the test itself"):
        scored(pool, "def add(a, b): return 3", ["add(1, 2)\nwhile True: pass"], timeout_seconds=1.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"credit": "some"}, "credit is 'some'; allowed: all, fraction"),
        ({"compare": "fuzzy"}, "compare is 'fuzzy'; allowed: lines, tokens, exact"),
        ({"require": ["magic"]}, "require is 'magic'; allowed: limits"),
        ({"max_output_bytes": 0}, "max_output_bytes=0 must be between 1 and 131072"),
        ({"max_tests": 0}, "max_tests=0 must be 1 or more"),
        ({"max_calls": 0}, "max_calls=0 must be 1 or more"),
    ],
)
def test_wrong_arguments_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Code(CodeConfig(**wrong), None)


def test_the_last_closed_fence_is_the_program():
    assert last_program("```python\na\n```\ntext\n```py\nb\n```") == "b\n"
    assert last_program("```python\na\n```\n```python\nb") == "a\n"
    assert last_program("```\na = '''x'''\n```") == "a = '''x'''\n"
    assert last_program("no fence ``` here") is None


def test_comparisons():
    assert is_printed("1 \n2\n\n", "1\n2", "lines")
    assert not is_printed("1\n2", "1 2", "lines")
    assert is_printed("1\n2", "1  2", "tokens")
    assert not is_printed("1\n", "1", "exact")
    assert is_returned([1, 2.0], (1, 2))
    assert not is_returned(True, 1)
    assert not is_returned(1, True)
    assert not is_returned([1], [1, 2])
    assert not is_returned(None, 0)
    assert is_returned({"1": "x"}, {1: "x"})


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.sets(st.integers())
        | st.frozensets(st.text())
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_values_come_back_with_their_types(value):
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value
    assert type(back) is type(value)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_whatever_a_program_writes_never_ends_the_reader(value):
    with contextlib.suppress(TypeError, ValueError):
        decode(value)
